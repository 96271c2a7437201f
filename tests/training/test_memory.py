import platform
import resource

import pytest
import torch

from clearhead.training.memory import kept_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")


@pytest.fixture(autouse=True)
def unsettled(monkeypatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


def faults_of_taking_again(mebibytes: int = 48, times: int = 5) -> int:
    """Pages that the system had to bring, after a first time."""
    torch.ones(mebibytes << 18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(mebibytes << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@glibc
def test_what_is_free_is_taken_again_without_the_system():
    usual = faults_of_taking_again()
    with kept_memory() as is_kept:
        assert is_kept
        kept = faults_of_taking_again()
    assert usual > 10_000 > 500 > kept
    assert faults_of_taking_again() > 10_000  # and it is as before


@glibc
@pytest.mark.parametrize(
    ("name", "value"), [("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1"), ("MALLOC_ARENA_MAX", "1")]
)
def test_what_the_environment_says_of_malloc_holds(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with kept_memory() as is_kept:
        assert not is_kept
        assert faults_of_taking_again() > 10_000


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with kept_memory() as is_kept:
        assert not is_kept
