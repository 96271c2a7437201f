"""What `clearhead.fit` costs per step beside a hand-written PyTorch loop, with the same model, optimizer and data.

    python benchmarks/fit.py                          # 40 rounds: some minutes on one CPU core
    python benchmarks/fit.py --check 1.03             # exit code 1 if fit takes more than 1.03 times as long
    python benchmarks/fit.py --rounds 2 --batch 4     # smoke test: a few seconds

A single run of `fit` trains `vit_tiny` on a pair of tensors. After every block of steps, its callback makes the same
number of steps of the hand-written loop, so that both are timed alternately in the same process, with the same
allocator, and other load slows both. A block of `fit` includes all that it does: the order of the data, the norm of the
gradient, the metrics, the check for finite numbers, the record in metrics.jsonl and the callback itself. The loop
shuffles, computes cross-entropy, clips the gradient and updates with fused AdamW. Times are those of the processor,
which do not count waiting for it, and of the clock; ratios are medians over the rounds of fit / loop.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead.models.config import build_model
from clearhead.models.presets import vit_tiny
from clearhead.training.evaluation import Progress

EXAMPLES = 1024


def plain_loop(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Callable[[int], None]:
    """A function that makes n steps of the hand-written loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    order, first = torch.randperm(len(images)), 0

    def train(n: int) -> None:
        nonlocal order, first
        for _ in range(n):
            if first + batch > len(images):
                order, first = torch.randperm(len(images)), 0
            indices, first = order[first : first + batch], first + batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return train


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def measure(rounds: int, steps: int, batch: int, threads: int) -> dict[str, list[tuple[float, float]]]:
    """(processor, wall) seconds per step of each round, for fit and for the loop. The first round is left out."""
    config = vit_tiny()
    random = torch.Generator().manual_seed(0)
    size = (max(EXAMPLES, batch), config.in_channels, 32, 32)
    images = torch.randn(size, generator=random)
    labels = torch.randint(config.num_classes, size[:1], generator=random)
    torch.manual_seed(0)
    train = plain_loop(build_model(config).train(), images, labels, batch)
    times: dict[str, list[tuple[float, float]]] = {"fit": [], "loop": []}
    start = clocks()

    def callback(progress: Progress) -> None:
        nonlocal start
        middle = clocks()
        with torch.enable_grad():
            train(steps)
        end = clocks()
        if progress.step > steps:
            times["fit"].append(((middle[0] - start[0]) / steps, (middle[1] - start[1]) / steps))
            times["loop"].append(((end[0] - middle[0]) / steps, (end[1] - middle[1]) / steps))
        start = clocks()

    with tempfile.TemporaryDirectory() as folder:
        clearhead.fit(
            lambda: build_model(config),
            (images, labels),
            steps=(rounds + 1) * steps,
            batch_size=batch,
            log_every=steps,
            checkpoint_every=10**9,
            callbacks=[callback],
            threads=threads,
            dir=Path(folder) / "run",
            quiet=True,
        )
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="steps per block (default: 3)")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", type=float, metavar="RATIO", help="exit code 1 if fit takes more than this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times")
    args = parser.parse_args()
    times = measure(args.rounds, args.steps, args.batch, args.threads)
    if args.json:
        args.json.write_text(json.dumps(times))
    ratios = {}
    for i, clock in enumerate(("processor", "clock")):
        fit, loop = ([1e3 * values[i] for values in times[name]] for name in ("fit", "loop"))
        ratios[clock] = median(a / b for a, b in zip(fit, loop, strict=True))
        print(
            f"{clock:9}  fit {median(fit):8.2f} ms   loop {median(loop):8.2f} ms   "
            f"ratio of medians {median(fit) / median(loop):.4f}   paired {ratios[clock]:.4f}   "
            f"fastest {min(fit) / min(loop):.4f}"
        )
    return int(args.check is not None and ratios["processor"] > args.check)


if __name__ == "__main__":
    sys.exit(main())
