"""One thread for each test process: several that share two cores only get in each other's way."""

import errno
import os
from collections.abc import Callable

import pytest
import torch

torch.set_num_threads(1)


class Killed(BaseException):
    """The process ends here: nothing that it would have done afterwards happens."""


class Faults:
    """A system whose calls fail at will: what full disks, permissions and kills do, at every place one by one."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")
    """every call by which the package changes a disk"""
    NEVER = 10**9
    FULL = staticmethod(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    KILLED = Killed

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, self.trace = 0, []
        self.at: int | None = None
        self.once = True
        self.error: Callable[[], BaseException] = self.FULL
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, call):
        def counted_call(*args, **kwargs):
            if self.at is None:
                return call(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            if number == self.at or (number > self.at and not self.once):
                raise self.error()
            self.trace.append((name, *args))
            return call(*args, **kwargs)

        return counted_call

    def during(self, job, at: int, once: bool = True, error: Callable[[], BaseException] = FULL):
        """Runs a job whose call number `at` fails, and all after it unless `once`; what it raised, or None, and whether
        the job came as far as that call."""
        self.count, self.trace, self.at, self.once, self.error = 0, [], at, once, error
        try:
            job()
            return None, self.count > at
        except (OSError, Killed) as failure:
            return failure, self.count > at
        finally:
            self.at = None


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)
