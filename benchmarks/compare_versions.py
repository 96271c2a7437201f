"""Compare two checkouts of Clearhead: seeded losses must be bit-identical, steps and saves no slower.

    git worktree add ../before v0.1
    python benchmarks/compare_versions.py ../before .                       # losses and times of every offline recipe
    python benchmarks/compare_versions.py ../before . --recipes mnist whole=digits --steps 5

Each recipe is trained for a few steps in either checkout, in float32, with one thread and the same seed. OLD=NEW names
a recipe that was renamed. Times are medians over processes that alternate between the two checkouts, so that a noisy
machine slows both; `save` is a step followed by a checkpoint. Exit code 1 if a loss differs, or if a median is slower
by more than --tolerance. Losses of different processors are not comparable: run both checkouts on the same machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

OFFLINE = (
    "reverse",
    "reverse-uva",
    "digits",
    "odd-one-out",
    "mnist",
    "mnist-plain",
    "pronounce",
    "pronounce-fast",
    "words",
)
OWN_DATA = {"text": ("--data.file", "text.txt"), "folder": ("--data.folder", "images")}
"""recipes that train on the user's own data, which this script makes"""


def make_data(folder: Path) -> None:
    """A text and a folder of images, always the same."""
    words = [f"{a}{b}{c} " for a in "bcdfgl" for b in "aeiou" for c in "nrst"]
    (folder / "text.txt").write_text("".join(words[i * 7 % len(words)] for i in range(4000)))
    noise = np.random.default_rng(0)
    for label in ("red", "green"):
        (folder / "images" / label).mkdir(parents=True)
        for i in range(40):
            pixels = noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / label / f"{i}.png")


def train(checkout: Path, recipe: str, folder: Path, name: str, steps: int, every: int) -> list[dict[str, float]]:
    """The training records of a short run, one per step; a checkpoint is saved every `every` steps."""
    settings = {"steps": steps, "log-every": 1, "threads": 1, "checkpoint-every": every, "evaluate-every": steps}
    options = [text for name, value in settings.items() for text in (f"--training.{name}", str(value))]
    options += ["--training.precision", "float32", "--seed", "0", *OWN_DATA.get(recipe, ())]
    command = [sys.executable, "-P", "-m", "clearhead", "train", recipe, "--name", name, *options]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    metrics = folder / "runs" / name / "metrics.jsonl"
    if not metrics.exists():
        raise SystemExit(f"{checkout}: {' '.join(command)} failed: {done.stderr.strip()}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [record for record in records if record["kind"] == "train"]
    if len(found) < steps:
        raise SystemExit(f"{checkout}: {recipe} logged {len(found)} of {steps} steps: {done.stderr.strip()}")
    return found


def compare_losses(
    before: Path, after: Path, recipes: Sequence[tuple[str, str]], steps: int, folder: Path
) -> list[str]:
    """The recipes whose losses differ."""
    differ = []
    for old, new in recipes:
        losses = [
            [record["loss"] for record in train(checkout, recipe, folder, f"{side}-{new}", steps, steps)]
            for side, checkout, recipe in (("before", before, old), ("after", after, new))
        ]
        first = next((i for i, (a, b) in enumerate(zip(*losses, strict=True)) if a != b), None)
        if first is not None:
            differ.append(new)
        verdict = "identical" if first is None else f"DIFFERENT from step {first + 1}"
        print(f"{new:16} {steps} losses {verdict}; the last is {losses[1][-1]!r}", flush=True)
    return differ


def compare_times(before: Path, after: Path, recipe: tuple[str, str], rounds: int, folder: Path) -> dict[str, float]:
    """Median time after over median time before, of a step and of a step with a save."""
    steps, ratios = 12, {}
    for what, every in (("step", steps), ("save", 1)):
        times: dict[str, list[float]] = {"before": [], "after": []}
        for i in range(rounds):
            sides = [("before", before, recipe[0]), ("after", after, recipe[1])]
            for side, checkout, name in sides if i % 2 else reversed(sides):
                records = train(checkout, name, folder, f"{what}-{side}-{i}", steps, every)
                seconds = [record["seconds"] for record in records]
                times[side] += [b - a for a, b in pairwise(seconds[1:])]  # the first step warms up
        medians = {side: statistics.median(found) for side, found in times.items()}
        ratios[what] = medians["after"] / medians["before"]
        print(
            f"{what}: {1000 * medians['before']:.1f} ms before, {1000 * medians['after']:.1f} ms after, "
            f"ratio {ratios[what]:.3f} (medians of {len(times['after'])})",
            flush=True,
        )
    return ratios


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout to compare with")
    parser.add_argument("after", type=Path, help="checkout to examine")
    parser.add_argument("--recipes", nargs="*", default=[*OFFLINE, *OWN_DATA], help="names, or OLD=NEW")
    parser.add_argument("--steps", type=int, default=20, help="steps of each recipe whose losses are compared")
    parser.add_argument("--rounds", type=int, default=6, help="processes per checkout and measurement; 0 for no times")
    parser.add_argument("--timed", default="mnist", help="recipe that is timed, or OLD=NEW")
    parser.add_argument("--tolerance", type=float, default=0.05, help="how much slower a median may be")
    args = parser.parse_args(argv)

    pairs = [(name.partition("=")[0], name.rpartition("=")[2]) for name in [*args.recipes, args.timed]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        differ = compare_losses(args.before, args.after, pairs[:-1], args.steps, folder)
        ratios = compare_times(args.before, args.after, pairs[-1], args.rounds, folder) if args.rounds else {}
    slower = [what for what, ratio in ratios.items() if ratio > 1 + args.tolerance]
    print(f"losses differ: {', '.join(differ) or 'none'}; slower: {', '.join(slower) or 'none'}")
    return 1 if differ or slower else 0


if __name__ == "__main__":
    sys.exit(main())
