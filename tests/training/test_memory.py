import json
import os
import platform
import subprocess
import sys

import pytest

from clearhead.training.context import malloc_tuning

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

IN_A_NEW_PROCESS = """
import json, resource, torch
from clearhead.training.context import malloc_tuning

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_taking_again(mebibytes=48):
    for i in range(60):
        if i == 50:  # the heap has its place for it by now
            start = faults()
        torch.ones(mebibytes << 18)
    return faults() - start

def resident():
    return int(open("/proc/self/statm").read().split()[1])

before = faults_of_taking_again()
with malloc_tuning() as is_kept:
    inside, most = faults_of_taking_again(), resident()
back = most - resident()
print(json.dumps([is_kept, before, inside, back, faults_of_taking_again(24)]))
"""
"""Whether memory is kept; pages that the system brought before and inside; those that it got back after, and those that
it brings from then on for blocks that glibc itself would keep. What other tests have left in this process would be
taken again in any case."""


def told(**settled: str) -> tuple[bool, int, int, int, int]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], env=ours | settled, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


@glibc
def test_what_is_free_is_taken_again_without_the_system():
    is_kept, before, inside, back, after = told()
    assert is_kept
    assert before > 100_000  # ten times 48 MiB in pages of 4 KiB
    assert inside < before / 4
    assert back > 10_000
    assert after < 10_000


@glibc
@pytest.mark.parametrize(
    "settled", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_ARENA_MAX": "1"}]
)
def test_what_the_environment_says_of_malloc_holds(settled):
    is_kept, _, inside, _, _ = told(**settled)
    assert not is_kept
    assert inside > 100_000


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with malloc_tuning() as is_kept:
        assert not is_kept
