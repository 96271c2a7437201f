import json
import os
import platform
import subprocess
import sys

import pytest

from clearhead.training.memory import kept_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

IN_A_NEW_PROCESS = """
import json, resource, sys, torch
from clearhead.training.memory import kept_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_taking_again(mebibytes=48, times=5):
    for i in range(4 * times):
        if i == 3 * times:  # the heap has its place for it by now
            before = faults()
        torch.ones(mebibytes << 18)
    return faults() - before

found = [faults_of_taking_again()]
with kept_memory() as is_kept:
    found.append(faults_of_taking_again())
print(json.dumps([is_kept, *found, faults_of_taking_again()]))
"""
"""Whether memory is kept; pages that the system brought before, inside and after. What other tests have left in this
process would be taken again in any case."""


def told(**settled: str) -> tuple[bool, int, int, int]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
    told = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], env=ours | settled, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(told.stdout))


@glibc
def test_what_is_free_is_taken_again_without_the_system():
    is_kept, before, inside, after = told()
    assert is_kept
    assert before > 10_000 > 500 > inside
    assert after > 10_000


@glibc
@pytest.mark.parametrize(
    "settled", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_ARENA_MAX": "1"}]
)
def test_what_the_environment_says_of_malloc_holds(settled):
    is_kept, _, inside, _ = told(**settled)
    assert not is_kept
    assert inside > 10_000


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with kept_memory() as is_kept:
        assert not is_kept
