"""Forward pass and training step of our vision transformer beside its peers, at equal size, in one interleaved run.

    python benchmarks/step.py                         # 25 rounds: about 3 minutes on two CPU cores
    python benchmarks/step.py --check 0.97            # exit code 1 if our speed is below 0.97 of the fastest peer
    python benchmarks/step.py --rounds 1 --batch 2    # smoke test: a few seconds
    pip install 'clearhead[bench]'                    # the peers

Each round times every model and a large matrix product once, in a balanced order; a first round warms up and is not
counted. A machine that slows down affects all models of that round, so the table has the ratio of the medians and the
median of the ratios per round (paired), which `--check` uses.
forward: eval mode, no gradients. train: zero_grad, forward, cross-entropy, backward, fused AdamW.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import VisionConfig
from clearhead.models.presets import vit_tiny
from peers import OURS, build_all, n_parameters

MATMUL = "matmul peak"
MATMUL_SIZE = 2048
Job = Callable[[], object]


def multiply_adds(config: VisionConfig) -> int:
    """Multiply-adds of the forward pass of one image: patches, four projections, scores and values, MLP, head."""
    rows, columns = config.grid
    patches, width = rows * columns, config.width
    length = patches + 1
    block = 4 * length * width**2 + 2 * length**2 * width + 2 * length * width * config.mlp_width
    return (
        patches * config.in_channels * config.patch_size**2 * width + config.depth * block + width * config.num_classes
    )


def forward_job(model: nn.Module, images: Tensor) -> Job:
    @torch.no_grad()
    def job() -> None:
        model(images)

    return job


def train_job(model: nn.Module, images: Tensor, labels: Tensor) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def job() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return job


def order(names: list[str], round_: int) -> list[str]:
    """One order per round. In 2n rounds every name follows every other equally often (a Williams design)."""
    n = len(names)
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]  # 0, n-1, 1, n-2, ...
    ordered = [names[(i + round_) % n] for i in zigzag]
    return ordered if round_ // n % 2 == 0 else ordered[::-1]


def time_rounds(
    models: dict[str, nn.Module], images: Tensor, labels: Tensor, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by mode ("forward", "train") and name, one for each round."""
    square = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    peak: dict[str, Job] = {MATMUL: lambda: square @ square}
    jobs: dict[str, dict[str, Job]] = {
        "forward": {name: forward_job(model, images) for name, model in models.items()} | peak,
        "train": {name: train_job(model, images, labels) for name, model in models.items()} | peak,
    }
    seconds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in jobs[mode]} for mode in jobs}
    gc.freeze()  # otherwise a collection over the imported objects would delay some model at random
    for round_ in range(-1, rounds):  # round -1 warms up
        for mode, mode_jobs in jobs.items():
            for model in models.values():
                model.train(mode == "train")
            for name in order(list(mode_jobs), round_):
                start = time.perf_counter()
                mode_jobs[name]()
                if round_ >= 0:
                    seconds[mode][name].append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model in one mode. `ratio` is the fastest peer's median over this model's: above 1 is faster than it."""

    name: str
    parameters: int
    milliseconds: float
    images_per_second: float
    ratio: float
    paired_ratio: float
    """the median of the same ratio, taken round by round"""
    fraction_of_peak: float
    """FLOP/s as a fraction of those of a large matrix product"""


def matmul_peak(seconds: dict[str, list[float]]) -> float:
    """FLOP/s of the matrix product, the peak of this machine."""
    return 2 * MATMUL_SIZE**3 / median(seconds[MATMUL])


def rows(
    models: dict[str, nn.Module], seconds: dict[str, list[float]], operations: float, batch: int
) -> tuple[str, list[Row]]:
    """The name of the fastest peer, and a row for each model, fastest first."""
    fastest = min((name for name in models if name != OURS), key=lambda name: median(seconds[name]))
    table = []
    for name, model in models.items():
        typical = median(seconds[name])
        table.append(
            Row(
                name=name,
                parameters=n_parameters(model),
                milliseconds=1000 * typical,
                images_per_second=batch / typical,
                ratio=median(seconds[fastest]) / typical,
                paired_ratio=median(f / s for f, s in zip(seconds[fastest], seconds[name], strict=True)),
                fraction_of_peak=operations * batch / typical / matmul_peak(seconds),
            )
        )
    return fastest, sorted(table, key=lambda row: row.milliseconds)


def show(mode: str, fastest: str, table: list[Row], seconds: dict[str, list[float]]) -> None:
    print(f"\n{mode} (fastest peer: {fastest}; matmul peak {matmul_peak(seconds) / 1e9:.0f} GFLOP/s)")
    print(f"{'model':<14}{'parameters':>12}{'ms':>9}{'images/s':>10}{'ratio':>8}{'paired':>8}{'of peak':>9}")
    for row in table:
        print(
            f"{row.name:<14}{row.parameters:>12,}{row.milliseconds:>9.1f}{row.images_per_second:>10.0f}"
            f"{row.ratio:>8.3f}{row.paired_ratio:>8.3f}{row.fraction_of_peak:>9.1%}"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25, help="counted rounds")
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--json", type=Path, help="write every time and the tables to this file")
    parser.add_argument("--check", type=float, help="exit code 1 if our paired ratio is below this in any mode")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.batch) < 1:
        parser.error(f"--rounds and --batch must be at least 1, got {options.rounds} and {options.batch}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    config = vit_tiny()
    torch.manual_seed(0)
    models, missing = build_all(config)
    images = torch.randn(options.batch, config.in_channels, *config.image_shape)
    labels = torch.randint(config.num_classes, (options.batch,))
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads(), "batch": options.batch}
    print(", ".join(f"{name} {value}" for name, value in {**setting, "rounds": options.rounds}.items()))
    print(f"{multiply_adds(config) / 1e6:.0f} million multiply-adds per image, three times that in training")
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}; pip install 'clearhead[bench]'")

    seconds = time_rounds(models, images, labels, options.rounds)
    report, too_slow = {}, []
    for mode, passes in {"forward": 1, "train": 3}.items():  # backward: one product for the input, one for the weight
        operations = 2 * passes * multiply_adds(config)
        fastest, table = rows(models, seconds[mode], operations, options.batch)
        show(mode, fastest, table, seconds[mode])
        report[mode] = {"fastest_peer": fastest, "rows": [asdict(row) for row in table], "seconds": seconds[mode]}
        ours = next(row.paired_ratio for row in table if row.name == OURS)
        if options.check is not None and ours < options.check:
            too_slow.append(f"{mode}: {ours:.3f} of {fastest}, wanted {options.check}")
    if options.json:
        options.json.write_text(json.dumps({**setting, "missing": missing, **report}, indent=2) + "\n")
    for line in too_slow:
        print(line, file=sys.stderr)
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
