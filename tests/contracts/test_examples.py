"""Every file in examples/ runs, in a process and a folder of its own, and is short enough to be read at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXPECTED = {
    "augmented_dataset": "all weights are identical",
    "bert": "bert.encoder.layer.1.attention",
    "edit_a_head": "attention    reversed  copied",
    "fine_tune_on_a_folder": "runs/from-scratch: test accuracy",
    "generate_text": "Twinkle, twinkle, little star",
    "gpt": "the cat sat on the mat",
    "look_into_timm": "saved attention.png",
    "own_module": "encoder.layers.1.self_attn",
    "reverse": "100.00% of 10,000",
    "train_on_a_folder": "attention maps, mistakes and curves: shapes.html",
    "timm_vit": "blocks.1.attn",
}
RUN = """
import runpy, sys
try:
    import torchvision
except RuntimeError:  # its compiled operators do not load beside every build of torch; none is called
    import torch
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
del sys.argv[0]  # as if the example had been started directly
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_at_least_five_examples_have_at_most_60_lines():
    assert sum(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES) >= 5
    assert {path.stem for path in EXAMPLES} == EXPECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode and "this example needs" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.stem] in done.stdout
