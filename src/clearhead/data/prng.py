"""Counter-based (stateless) pseudo-random numbers: number i of a stream is splitmix64(key, i).

Any part of a stream can be computed alone, in any order, on any machine and by any number of processes.
"""

import zlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
ALL = (1 << 64) - 1


def fold_in(*parts: int | str) -> int:
    """A key derived from parts such as (seed, "crop", epoch, step); different parts give independent streams."""
    key = 0
    for part in parts:
        number = part if isinstance(part, int) else zlib.crc32(part.encode(errors="surrogateescape")) << 32
        key = mix_one(key + GOLDEN + mix_one(number & ALL))
    return key


def mix_one(x: int) -> int:
    """The finalizer of splitmix64; `mix` does the same to a tensor."""
    x &= ALL
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & ALL
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & ALL
    return x ^ (x >> 31)


def random_bits(key: int, counters: Tensor) -> Tensor:
    """64 random bits per counter, as int64."""
    return mix(counters * signed(GOLDEN) + signed(key))


def random_below(n: int | Tensor, key: int, counters: Tensor) -> Tensor:
    """An integer from 0 to n - 1 per counter; n may be a tensor."""
    return shifted(random_bits(key, counters), 1) % n


def permutation(key: int, n: int) -> Tensor:
    """A random permutation of 0 to n - 1."""
    return random_bits(key, torch.arange(n)).argsort(stable=True)


def mix(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ shifted(x, 27)) * signed(MULTIPLIERS[1])
    return x ^ shifted(x, 31)


def shifted(x: Tensor, n: int) -> Tensor:
    """Logical right shift by n bits; torch's >> is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >> 63 else x
