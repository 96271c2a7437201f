"""Hangs, detected by CPU time and progress instead of wall time, so that a busy machine causes no false alarms.

A process hangs when it has used its limit of CPU time, or when it and its descendants have made no progress for as
long: they wrote nothing, used almost no CPU time, and none of them was waiting for a processor or a disk. Wall time
alone counts only after many times the limit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

IDLE = 0.05
"""CPU seconds per second; a process that uses less is idle, because polling for an event takes some, too"""
BACKSTOP = 20
"""multiples of the limit after which wall time alone is a hang"""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """What a process has done so far."""

    cpu: float
    """seconds, of all its threads"""
    written: int
    """bytes, to files, pipes and terminals"""
    is_waiting: bool
    """whether a thread is waiting for a processor (or has one), or for a disk"""


def usage_of(pid: int) -> Usage | None:
    """None if there is no such process any more."""
    folder, written = Path("/proc") / str(pid), 0
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        tasks = [path.read_text() for path in folder.glob("task/*/stat")]
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):  # of another user, or just ended
        written = int((folder / "io").read_text().split()[3])
    states = {text.rpartition(")")[2].split()[0] for text in tasks}
    return Usage((int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND, written, bool(states & {"R", "D"}))


class HangDetector:
    """`check`, called again and again, says why some processes hang, or "" while they do not.

    `seconds` limits the CPU time of each process, and `idle_seconds` (default: the same) the time without progress of
    all of them together.
    """

    def __init__(self, seconds: float, idle_seconds: float | None = None):
        self.seconds, self.idle_seconds = seconds, seconds if idle_seconds is None else idle_seconds
        self.interval = min(1.0, self.idle_seconds / 10)
        self.first: dict[int, Usage] = {}
        self.last: dict[int, Usage] = {}
        self.began = self.progressed = self.checked = time.monotonic()
        self.done: tuple[float, int] = 0.0, 0
        """CPU time and bytes written at the last progress"""

    def is_due(self) -> bool:
        """Whether a check is worth its cost again."""
        return time.monotonic() - self.checked >= self.interval

    def check(self, pids: Collection[int]) -> str:
        if not self.is_due():
            return ""
        self.checked = now = time.monotonic()
        is_waiting = self.measure(pids)
        cpu = {pid: usage.cpu - self.first[pid].cpu for pid, usage in self.last.items()}
        done = sum(cpu.values()), sum(usage.written for usage in self.last.values())
        if is_waiting or done[1] != self.done[1] or done[0] - self.done[0] > IDLE * self.idle_seconds:
            self.progressed, self.done = now, done
        if max(cpu.values(), default=0.0) > self.seconds:
            return f"it used more than {self.seconds:g} s of CPU time"
        if now - self.progressed > self.idle_seconds:
            return f"it made no progress for {self.idle_seconds:g} s"
        if now - self.began > BACKSTOP * self.seconds:
            return f"it took more than {BACKSTOP * self.seconds:g} s"
        return ""

    def measure(self, pids: Collection[int]) -> bool:
        """Whether one of the processes is waiting for a processor or a disk."""
        is_waiting = False
        for pid in pids:
            if usage := usage_of(pid):
                self.first.setdefault(pid, usage)
                self.last[pid] = usage
                is_waiting = is_waiting or usage.is_waiting
        return is_waiting


class TooLongError(BaseException):
    """Not an Exception: the code under test must not catch it."""


class CpuLimitError(TooLongError):
    """The code was still working."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """CpuLimitError after so many seconds of CPU time in this process, TooLongError after as many without progress.

    Time in which the process was ready to run and had no processor counts as progress.
    """
    began, progressed = time.process_time(), time.monotonic()
    done = began + queued_seconds()

    def check(number: int, frame: Any) -> None:
        nonlocal done, progressed
        now, cpu = time.monotonic(), time.process_time()
        if cpu - began > seconds:
            raise CpuLimitError(f"it used more than {seconds:g} s of CPU time")
        if (ready := cpu + queued_seconds()) - done > IDLE * seconds:
            done, progressed = ready, now
        elif now - progressed > seconds:
            raise TooLongError(f"it made no progress for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, seconds / 10, seconds / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def queued_seconds() -> float:
    """How long this process was ready to run and had no processor; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def descendants(pids: Collection[int]) -> set[int]:
    """These processes and all that they have started, as far as they are alive."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = {pid for pid in pids if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def is_alive(pid: int) -> bool:
    """Not gone, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
