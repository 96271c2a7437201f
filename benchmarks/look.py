"""What looking costs: a forward pass under `look` beside the plain one, and beside Hugging Face's way to the weights.

    python benchmarks/look.py                         # 40 rounds: under a minute on two CPU cores
    python benchmarks/look.py --check 1.15            # exit code 1 if looking costs more than that
    python benchmarks/look.py --rounds 1 --batch 2    # does it run at all
    pip install 'clearhead[oracles]'                  # Hugging Face, for the comparison

A vision transformer of width 192, depth 6 and 65 tokens, without gradients, no weights asked for. One round times every
way once, each round beginning with another; times are medians, ratios are medians of the rounds' ratios to the plain
pass of the same model. And the memory that one row of one head takes at 16,384 tokens.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.insight.trace import look
from clearhead.models.presets import vit_tiny
from clearhead.models.vit import VisionTransformer
from peers import HuggingFaceVit, torchvision_or_stand_in

Way = tuple[str, Callable[[], object]]
"""the way whose time it is compared with, and what to do"""
LONG = 16_384


def ways(batch: int) -> dict[str, Way]:
    config = vit_tiny()
    images = torch.randn(batch, config.in_channels, *config.image_shape)
    ours = VisionTransformer.from_config(config).eval()
    result: dict[str, Way] = {
        "ours": ("ours", lambda: ours(images)),
        "ours, look": ("ours", lambda: look(ours, images)),
    }
    torchvision_or_stand_in()
    try:
        theirs = HuggingFaceVit(config).eval()
        eager = HuggingFaceVit(config).eval()
    except ImportError as error:
        print(f"Hugging Face is left out: {error}; pip install 'clearhead[oracles]'")
        return result
    eager.model.set_attn_implementation("eager")
    return result | {
        "Hugging Face": ("Hugging Face", lambda: theirs(images)),
        "Hugging Face, look": ("Hugging Face", lambda: look(theirs, images)),
        "Hugging Face, eager with output_attentions": (
            "Hugging Face",
            lambda: eager.model(images, output_attentions=True),
        ),
    }


def time_rounds(jobs: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for round_ in range(-1, rounds):  # round -1 warms up
        start_at = round_ % len(names)
        for name in names[start_at:] + names[:start_at]:
            start = time.perf_counter()
            jobs[name][1]()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def row_memory() -> float:
    """By how many megabytes the most that this process ever held grows, when one row of one head is asked for."""
    q, k, v = torch.randn(3, 1, 1, LONG, 64)
    seen = look(Kernel(), q, k, v)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen["Kernel"].weights(head=0, rows=[LONG // 2])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="counted rounds")
    parser.add_argument("--batch", type=int, default=32, help="images per pass")
    parser.add_argument("--check", type=float, help="exit code 1 if looking at ours takes more times the plain pass")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    memory = row_memory()  # first, before anything else has held more
    jobs = ways(options.batch)
    seconds = time_rounds(jobs, options.rounds)
    print(f"torch {torch.__version__}, threads {torch.get_num_threads()}, batch {options.batch}")
    print(f"{'forward pass':<44}{'ms':>8}{'times plain':>13}")
    ratios = {}
    for name, (plain, _) in jobs.items():
        ratios[name] = median(s / p for s, p in zip(seconds[name], seconds[plain], strict=True))
        print(f"{name:<44}{1000 * median(seconds[name]):>8.1f}{ratios[name]:>13.3f}")
    print(f"one row of one head at {LONG:,} tokens: {memory:.1f} MB")
    if options.check is not None and ratios["ours, look"] > options.check:
        print(f"look takes {ratios['ours, look']:.3f} times the plain pass, wanted {options.check}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
