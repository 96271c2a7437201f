"""Overhead of `look`: a traced forward pass beside a plain one and beside output_attentions of Hugging Face.

    python benchmarks/look.py                         # 40 rounds: under a minute on two CPU cores
    python benchmarks/look.py --check 1.15            # exit code 1 if look takes more than 1.15 times the plain pass
    python benchmarks/look.py --rounds 1 --batch 2    # smoke test
    pip install 'clearhead[oracles]'                  # Hugging Face, for the comparison

A vision transformer of width 192, depth 6 and 65 tokens, without gradients, computing no weights. Each round
times every method once, starting with a different one; times are medians, and ratios are medians over the rounds of the
ratio to the plain pass of the same model. Also measures the memory of one attention row of one head at 16,384 tokens.
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

Method = tuple[str, Callable[[], object]]
"""the method that it is compared with, and the function to time"""
LONG = 16_384


def methods(batch: int) -> dict[str, Method]:
    config = vit_tiny()
    images = torch.randn(batch, config.in_channels, *config.image_shape)
    ours = VisionTransformer.from_config(config).eval()
    result: dict[str, Method] = {
        "ours": ("ours", lambda: ours(images)),
        "ours, look": ("ours", lambda: look(ours, images)),
        "ours, look with count=True": ("ours", lambda: look(ours, images, count=True)),
    }
    tiny = VisionTransformer(
        image_size=16, patch_size=4, num_classes=5, width=32, depth=2, num_heads=2, in_channels=1
    ).eval()
    digits = torch.randn(2, 1, 16, 16)
    result |= {
        "tiny (width 32, depth 2, 16 tokens)": ("tiny (width 32, depth 2, 16 tokens)", lambda: tiny(digits)),
        "tiny, look": ("tiny (width 32, depth 2, 16 tokens)", lambda: look(tiny, digits)),
        "tiny, look with count=True": ("tiny (width 32, depth 2, 16 tokens)", lambda: look(tiny, digits, count=True)),
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


def time_rounds(
    jobs: dict[str, Method], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for round_ in range(-1, rounds):  # round -1 warms up
        start_at = round_ % len(names)
        for name in names[start_at:] + names[:start_at]:
            start = clock()
            jobs[name][1]()
            if round_ >= 0:
                seconds[name].append(clock() - start)
    return seconds


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def row_memory() -> float:
    """The increase of the peak resident memory in MB when one row of one head is computed."""
    q, k, v = torch.randn(3, 1, 1, LONG, 64)
    trace = look(Kernel(), q, k, v)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace["Kernel"].weights(head=0, rows=[LONG // 2])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="counted rounds")
    parser.add_argument("--batch", type=int, default=32, help="images per pass")
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time, for a busy machine")
    parser.add_argument("--check", type=float, help="exit code 1 if look takes more than this times the plain pass")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    memory = row_memory()  # first, while the peak memory is still low
    jobs = methods(options.batch)
    seconds = time_rounds(jobs, options.rounds, time.process_time if options.cpu_time else time.perf_counter)
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
