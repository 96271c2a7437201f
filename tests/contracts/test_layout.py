"""The size of the code base, and how much of it a reader has to follow for one task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/clearhead").rglob("*.py"))

TRACE = """
import json, os, sys, tempfile, threading
import clearhead

ROOT = os.path.dirname(clearhead.__file__) + os.sep
FUNCTION = 1  # the flag CO_OPTIMIZED: class bodies and modules do not have it
called = set()

def is_importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(ROOT):
            return True
        frame = frame.f_back
    return False

def trace(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_flags & FUNCTION and code.co_filename.startswith(ROOT):
        name = code.co_filename.removeprefix(ROOT)
        if name not in called and not is_importing(frame.f_back):
            called.add(name)

def traced(task):
    threading.setprofile(trace)
    sys.setprofile(trace)
    task()
    sys.setprofile(None)
    print("called", json.dumps(sorted(called)))

os.chdir(tempfile.mkdtemp())
"""
TASKS = {
    "train": """
from clearhead.cli.main import main
traced(lambda: main(["train", "mnist", "--training.steps", "3", "--data.limit", "600"]))
""",
    "vit": """
import torch
model = clearhead.VisionTransformer(image_size=28, patch_size=7, num_classes=10, width=16, depth=2, num_heads=2,
                                    in_channels=1)
images = torch.randn(2, 1, 28, 28)
traced(lambda: model(images))
""",
    "look": """
import torch
layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(1, 5, 16)
clearhead.look
traced(lambda: clearhead.look(model, x)["layers.1.self_attn"].weights(head=1))
""",
    "doctor": """
import torch
layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
clearhead.examine
traced(lambda: clearhead.examine(layer))
""",
}
LIMITS = {"train": 34, "vit": 8, "look": 7, "doctor": 19}


@pytest.mark.parametrize("task", TASKS)
def test_common_operations_execute_few_files(task):
    done = subprocess.run([sys.executable, "-c", TRACE + TASKS[task]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.split("called ")[-1])
    assert 0 < len(files) <= LIMITS[task], files


def test_the_number_of_source_files():
    assert 110 <= len(SOURCES) <= 155


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src/clearhead")))
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400
