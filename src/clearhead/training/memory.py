"""Memory that a step gives back is kept for the next step.

glibc hands large blocks back to the system as soon as they are free, and the system clears every page of them when
they are taken again. A training step frees and takes the same hundreds of megabytes each time: a run of `mnist` had ten
times as many page faults. No number changes. What it gains in time is in docs/lab-notes.md.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""names of mallopt(3)"""
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
USUAL = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20, M_TOP_PAD: 128 << 10}
"""where glibc's own thresholds end up in a process that frees large blocks; once set, they no longer move"""


@contextmanager
def kept_memory() -> Iterator[bool]:
    """For the time of the block, freed memory stays with the process; afterwards what is free goes back. Says whether
    it is so: not where malloc is not glibc's, nor where the environment has settled it."""
    if sys.platform != "linux" or is_settled() or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        yield False
        return
    for name, value in KEPT.items():
        libc.mallopt(name, value)
    try:
        yield True
    finally:
        for name, value in USUAL.items():
            libc.mallopt(name, value)
        libc.malloc_trim(0)


def is_settled() -> bool:
    """Whether who started this process chose how malloc works: what was chosen cannot be read back."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
