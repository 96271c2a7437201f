"""Time to validation loss: the recipe `text` beside nanoGPT's published laptop-CPU setting, in one run.

python benchmarks/text.py --file tinyshakespeare.txt

Both train a model of the same size (4 layers, 4 heads, width 128, context of 64 characters) on the first 90% of the
text. They alternate every few steps, the one with less training time next, so that other load on the machine slows
both. Only training is timed, not the evaluation on the last 10%. nanoGPT's setting trains to its end, ours until both
have reached the loss that nanoGPT publishes, 1.88.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from clearhead.data.user_files import MAX_EXAMPLES
from clearhead.recipes import config_of
from clearhead.training.config import RunConfig
from clearhead.training.context import TrainContext, build_context, isolated_torch_state
from clearhead.training.distributed import Ranks
from clearhead.training.evaluation import evaluate
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState

TARGET = 1.88
"""validation loss in nats per character that nanoGPT publishes for its setting after 2,000 steps"""
NANOGPT = {
    "model.pos_embed": "learned",
    "training.steps": 2000,
    "training.batch_size": 12,
    "training.ema": 0.0,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.final_lr_fraction": 0.1,
    "optimizer.schedule": "cosine",
    "optimizer.warmup": 100,
    "optimizer.beta2": 0.99,
    "optimizer.weight_decay": 0.1,
    "optimizer.grad_clip": 1.0,
}


@dataclass
class Entry:
    """A run in progress."""

    name: str
    ctx: TrainContext
    every: int
    """steps per turn, after which the loss is measured"""
    to_the_end: bool
    state: TrainState = field(default_factory=TrainState)
    seconds: float = 0.0
    losses: dict[int, float] = field(default_factory=dict)
    reached: tuple[int, float] | None = None
    """steps and seconds to the target"""

    @property
    def is_done(self) -> bool:
        return self.state.step >= self.ctx.n_steps

    def turn(self, target: float) -> None:
        self.ctx.model.train()
        start = time.perf_counter()
        for _ in range(min(self.every, self.ctx.n_steps - self.state.step)):
            train_step(self.ctx, self.state, StopRequest())
        self.seconds += time.perf_counter() - start
        with self.ctx.ema.average_parameters() if self.ctx.ema else nullcontext():
            loss = evaluate(self.ctx.model, self.ctx.objective, self.ctx.data.validation, None)["loss"]
        self.losses[self.state.step] = loss
        if loss <= target and self.reached is None:
            self.reached = self.state.step, self.seconds
        print(f"  {self.name}: step {self.state.step}, {self.seconds:.1f} s, loss {loss:.4f}", flush=True)


def entries(file: str, seed: int, changes: dict[str, object], every: int) -> list[Entry]:
    common = {"data.file": file, "data.validation": MAX_EXAMPLES, "seed": seed}
    configs: dict[str, RunConfig] = {
        "clearhead text": config_of("text", common | changes),
        "nanoGPT's setting": config_of("text", common | NANOGPT | changes),
    }
    return [
        Entry(
            name,
            build_context(config, Ranks(), shard=False, report=print),
            every,
            to_the_end=name != "clearhead text",
        )
        for name, config in configs.items()
    ]


def race(found: list[Entry], target: float) -> None:
    while waiting := [entry for entry in found if not entry.is_done and (entry.to_the_end or not all_reached(found))]:
        min(waiting, key=lambda entry: entry.seconds).turn(target)


def all_reached(found: list[Entry]) -> bool:
    return all(entry.reached for entry in found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps per turn, after which the loss is measured")
    parser.add_argument("--steps", type=int, help="number of steps of both runs (default: their own)")
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--check", type=float, help="exit code 1 unless ours is at least this many times faster")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    changes: dict[str, object] = {} if options.steps is None else {"training.steps": options.steps}
    with isolated_torch_state(threads=0):
        found = entries(options.file, options.seed, changes, options.every)
        race(found, options.target)
    print(f"\ntorch {torch.__version__}, threads {torch.get_num_threads()}, seed {options.seed}")
    print(f"{'recipe':<20}{'steps to ' + str(options.target):>16}{'seconds':>9}{'last loss':>11}{'after steps':>13}")
    for entry in found:
        steps, seconds = (f"{entry.reached[0]}", f"{entry.reached[1]:.1f}") if entry.reached else ("not reached", "")
        last = entry.losses[entry.state.step]
        print(f"{entry.name:<20}{steps:>16}{seconds:>9}{last:>11.4f}{entry.state.step:>13}")
    if options.json:
        rows = [{"name": e.name, "seconds": e.seconds, "reached": e.reached, "losses": e.losses} for e in found]
        rows.append({"optimizer": asdict(found[0].ctx.config.optimizer), "model": asdict(found[0].ctx.config.model)})
        options.json.write_text(json.dumps(rows, indent=2))
    return verdict(found, options.check)


def verdict(found: list[Entry], wanted: float | None) -> int:
    ours, theirs = found
    if ours.reached is None or theirs.reached is None:
        return 0 if wanted is None else 1
    ratio = theirs.reached[1] / ours.reached[1]
    print(f"ours is {ratio:.2f} times faster")
    return int(wanted is not None and ratio < wanted)


if __name__ == "__main__":
    sys.exit(main())
