"""Time to accuracy: our recipes beside published ones, measured in the same run.

python benchmarks/learning.py reverse     our recipe and that of the UvA notebook, one after the other
python benchmarks/learning.py mnist       ours with two training lengths, and a plain transformer (50 minutes)
python benchmarks/learning.py cifar10     ours; requires clearhead data get cifar10

Only training is timed; evaluations on the test set are not, and do not influence training. The seconds times the matmul
peak measured in the same run (TFLOP at peak) are comparable between machines.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from clearhead.recipes import config_of
from clearhead.training.config import RunConfig
from clearhead.training.context import build_context, isolated_torch_state
from clearhead.training.distributed import SINGLE_PROCESS
from clearhead.training.evaluation import evaluate
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState


@dataclass(frozen=True)
class Entry:
    name: str
    config: RunConfig
    targets: tuple[float, ...]
    every: int
    """steps between evaluations"""
    measure: str = "accuracy"


TASKS = {
    "reverse": lambda: [
        Entry("clearhead", config_of("reverse"), (1.0,), 10, "exact_match"),
        Entry("UvA recipe", config_of("reverse-uva"), (1.0,), 50, "exact_match"),
    ],
    "mnist": lambda: [
        Entry("340 steps", config_of("mnist", {"training.steps": 340}), (0.9461, 0.987), 20),
        Entry("700 steps", config_of("mnist", {"training.steps": 700}), (0.9461, 0.991), 50),
        Entry("plain", config_of("mnist-plain", {"training.epochs": 1000}), (0.9461,), 500),
    ],
    "cifar10": lambda: [Entry("clearhead", config_of("cifar10-fast"), (0.80, 0.90), 400)],
}


@dataclass(frozen=True)
class Reached:
    name: str
    seed: int
    target: float
    best: float
    """best score so far; below the target if training ended before reaching it"""
    steps: int
    seconds: float

    @property
    def is_reached(self) -> bool:
        return self.best >= self.target


def reach(entry: Entry, seed: int) -> Iterator[Reached]:
    """Trains until the last target is reached or the recipe ends."""
    config = entry.config
    with isolated_torch_state(config.training.threads):
        ctx = build_context(config_with_seed(config, seed), SINGLE_PROCESS, shard=False, report=print)
        state, seconds, best, waiting = TrainState(), 0.0, 0.0, list(entry.targets)
        ctx.model.train()
        while waiting and state.step < ctx.n_steps:
            start = time.perf_counter()
            train_step(ctx, state, StopRequest())
            seconds += time.perf_counter() - start
            if state.step % entry.every == 0 or state.step == ctx.n_steps:
                with ctx.ema.average_parameters() if ctx.ema else nullcontext():
                    score = evaluate(
                        ctx.model,
                        ctx.objective,
                        ctx.data.test,
                        ctx.data.normalize,
                        tta=config.training.tta,
                    )[entry.measure]
                print(f"  {entry.name}: step {state.step}, {seconds:.1f} s, {score:.2%}", flush=True)
                best = max(best, score)
                while waiting and best >= waiting[0]:
                    yield Reached(entry.name, seed, waiting.pop(0), best, state.step, seconds)
    for target in waiting:
        yield Reached(entry.name, seed, target, best, state.step, seconds)


def config_with_seed(config: RunConfig, seed: int) -> RunConfig:
    return RunConfig.from_dict(config.to_dict() | {"seed": seed})


def matmul_peak(size: int = 1024, tries: int = 10) -> float:
    """FLOP/s of a matrix product, the best of several tries."""
    a, best = torch.randn(size, size), 0.0
    for _ in range(tries):
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("task", choices=TASKS)
    options.add_argument("--rounds", type=int, default=1, help="repetitions, each with another seed")
    options.add_argument("--json", type=Path, metavar="FILE")
    args = options.parse_args()
    peak = matmul_peak()
    found = [reached for seed in range(args.rounds) for entry in TASKS[args.task]() for reached in reach(entry, seed)]
    peak = max(peak, matmul_peak())
    print(f"\nmatmul peak {peak / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads")
    print(f"{'recipe':<14}{'seed':>5}{'target':>9}{'steps':>8}{'seconds':>10}{'TFLOP at peak':>15}")
    for row in found:
        work = row.seconds * peak / 1e12
        end = "" if row.is_reached else f"   not reached, at best {row.best:.2%}"
        print(f"{row.name:<14}{row.seed:>5}{row.target:>9.2%}{row.steps:>8}{row.seconds:>10.1f}{work:>15.1f}{end}")
    if args.json:
        args.json.write_text(json.dumps({"peak": peak, "reached": [asdict(row) for row in found]}, indent=2))


if __name__ == "__main__":
    main()
