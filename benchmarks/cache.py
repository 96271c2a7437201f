"""Speedup of generation by the key/value cache: seconds with and without it, by number of tokens.

python benchmarks/cache.py

Without a cache, the model processes the whole sequence for every new token; with it, only the last token. Both
generate the same tokens greedily, and alternate in each round.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from clearhead.models.config import LanguageConfig
from clearhead.models.language import LanguageModel

LENGTHS = (16, 32, 64, 128, 256, 512)


def seconds_of(model: LanguageModel, n_tokens: int, use_cache: bool) -> tuple[float, torch.Tensor]:
    prompt = torch.zeros(1, 1, dtype=torch.long)
    start = time.perf_counter()
    ids = model.generate(prompt, max_new_tokens=n_tokens, use_cache=use_cache).ids
    return time.perf_counter() - start, ids


def measure(model: LanguageModel, n_tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds over the rounds; both must generate the same tokens."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(-1, rounds):  # round -1 warms up
        texts = []
        for use_cache in (True, False):
            seconds, ids = seconds_of(model, n_tokens, use_cache)
            texts.append(ids)
            if round_ >= 0:
                times[use_cache].append(seconds)
        if not torch.equal(*texts):
            raise ValueError(
                f"generation with and without cache must agree, got different sequences of {n_tokens} tokens"
            )
    cached, plain = median(times[True]), median(times[False])
    return {"tokens": n_tokens, "with": cached, "without": plain, "times": plain / cached}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="numbers of new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = LanguageConfig(
        width=options.width,
        depth=options.depth,
        num_heads=4,
        vocab_size=65,
        pos_embed="rotary",
        context_length=max(options.lengths),
    )
    model = LanguageModel.from_config(config).eval()
    print(f"torch {torch.__version__}, threads {torch.get_num_threads()}, width {options.width}, depth {options.depth}")
    print(f"{'tokens':>8}{'with cache, s':>16}{'without, s':>13}{'times faster':>15}")
    rows = []
    for n_tokens in options.lengths:
        rows.append(measure(model, n_tokens, options.rounds))
        row = rows[-1]
        print(f"{n_tokens:>8}{row['with']:>16.3f}{row['without']:>13.3f}{row['times']:>15.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
