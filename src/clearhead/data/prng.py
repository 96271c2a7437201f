"""Random numbers without a state: the number at place i of a stream is a hash of the stream's key and i (splitmix64).

Any part of a stream can be had alone, in any order, on any machine and by any number of processes, and is the same.
"""

import zlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
ALL = (1 << 64) - 1


def fold_in(*parts: int | str) -> int:
    """One stream for each different sequence of parts, such as (seed, "crop", epoch, step)."""
    key = 0
    for part in parts:
        number = part if isinstance(part, int) else zlib.crc32(part.encode(errors="surrogateescape")) << 32
        key = mix_one(key + GOLDEN + mix_one(number & ALL))
    return key


def mix_one(x: int) -> int:
    """splitmix64's mixing of one number, as `mix` does it to a tensor."""
    x &= ALL
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & ALL
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & ALL
    return x ^ (x >> 31)


def random_bits(key: int, places: Tensor) -> Tensor:
    """64 random bits, as int64, for each place of the stream."""
    return mix(places * signed(GOLDEN) + signed(key))


def random_below(n: int | Tensor, key: int, places: Tensor) -> Tensor:
    """A whole number from 0 to n - 1 for each place of the stream; n may differ from place to place."""
    return shifted(random_bits(key, places), 1) % n


def permutation(key: int, n: int) -> Tensor:
    """A random order of 0 to n - 1."""
    return random_bits(key, torch.arange(n)).argsort(stable=True)


def mix(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ shifted(x, 27)) * signed(MULTIPLIERS[1])
    return x ^ shifted(x, 31)


def shifted(x: Tensor, places: int) -> Tensor:
    """To the right, with zeros moving in at the left: torch's own shift repeats the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def signed(x: int) -> int:
    """The same 64 bits, read as torch reads them."""
    return x - (1 << 64) if x >> 63 else x
