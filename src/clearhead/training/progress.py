"""What a user sees while training: a bar in a terminal, plain lines in a file."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from clearhead.console import Console
from clearhead.messages import Tolerant, duration, printable

SECONDS_BETWEEN_LINES = 5.0


class Display:
    """Shows how far training is, unless quiet; `warn` is heard always. Only the first process should have one.

    Training does not depend on it: when its output cannot be written (full disk, closed pipe), training continues.
    """

    def __init__(self, *, quiet: bool = False, console: rich.console.Console | None = None):
        self.quiet = quiet
        self.console = console or Console()
        self.console.file = Tolerant(self.console.file, self.lose_output)  # type: ignore[arg-type, assignment]
        self.bar: tuple[Progress, TaskID] | None = None
        self.n_steps = self.start = self.batch_size = 0
        self.began, self.last_line = 0.0, -SECONDS_BETWEEN_LINES

    @contextmanager
    def training(self, n_steps: int, start: int, batch_size: int) -> Iterator[None]:
        """Around the steps from `start` to n_steps."""
        self.n_steps, self.start, self.batch_size, self.began = n_steps, start, batch_size, time.monotonic()
        if self.quiet or not self.console.is_terminal:
            yield
            return
        # rich's own time left is forgotten within seconds, and a step may take longer
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        with Progress(*columns, console=self.console, transient=True) as progress:
            self.bar = progress, progress.add_task("", total=n_steps, completed=start, numbers="")
            try:
                yield
            finally:
                self.bar = None

    def say(self, message: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(printable(message), soft_wrap=True)

    def warn(self, message: str) -> None:
        """A line on stderr; on stdout, if stderr cannot be written."""
        line, errors = f"warning: {printable(message)}", sys.stderr
        if getattr(self.console.file, "is_lost", False):  # then not above the bar, where rich shows it otherwise
            errors = getattr(errors, "rich_proxied_file", errors)
        stream = Tolerant(errors)
        print(line, file=stream, flush=True)
        if stream.is_lost or getattr(errors, "is_lost", False):
            self.say(line)

    def lose_output(self, reason: str) -> None:
        self.quiet = True
        self.warn(f"the output cannot be written ({reason}); training continues without it")

    def advance(self, step: int) -> None:
        """Moves the bar; its numbers change with the next record."""
        if self.bar is not None:
            progress, task = self.bar
            progress.update(task, completed=step)

    def trained(self, record: dict[str, Any]) -> None:
        """Moves the bar, or writes a line every few seconds."""
        if self.quiet:
            return
        step, now = record["step"], time.monotonic()
        speed = (step - self.start) * self.batch_size / max(now - self.began, 1e-9)
        numbers = f"loss {record['loss']:.4f}  accuracy {record['accuracy']:.2%}  {speed:,.0f} examples/s"
        if step < self.n_steps:
            numbers += f"  {duration((self.n_steps - step) * self.batch_size / max(speed, 1e-9))} left"
        if self.bar is not None:
            progress, task = self.bar
            progress.update(task, completed=step, numbers=numbers)
        elif now - self.last_line >= SECONDS_BETWEEN_LINES or step == self.n_steps:
            self.say(f"step {step}/{self.n_steps}  {numbers}")
            self.last_line = now

    def evaluated(self, record: dict[str, Any], note: str = "", what: str = "") -> None:
        """A line that stays; it begins with what was evaluated, which is the model as it is at this step by default."""
        exact = f"  exact_match {record['exact_match']:.2%}" if "exact_match" in record else ""
        what = what or f"{record['kind']} at step {record['step']}"
        self.say(f"{what}  loss {record['loss']:.4f}  accuracy {record['accuracy']:.2%}{exact}{note}")


class Silence(Display):
    """For the other processes: the first one speaks for all."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def warn(self, message: str) -> None:
        pass


def padding_line(share: float, unsorted: float) -> str:
    return f"{share:.1%} of all tokens; {unsorted:.1%} without sorting by length"


def count(n: float, unit: str) -> str:
    """1 step, 2,000 steps, 0.5 epochs"""
    return f"{n:,g} {unit}{'' if n == 1 else 's'}" if n != int(n) else f"{int(n):,} {unit}{'' if n == 1 else 's'}"


FEWER_IN_TRAINING = "try --training.threads {0} (with resume: --threads {0})"
FEWER_ELSEWHERE = "try again with the environment variable OMP_NUM_THREADS={0}"


def busy_hint(threads: int, processes: int = 1, fewer: str = FEWER_IN_TRAINING) -> str:
    """A hint where threads would wait for each other, because they outnumber the cores or the cores are busy; `fewer`
    says how to ask for {0} of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = threads * processes
    if wanted > cores:
        return (
            f"hint: {count(wanted, 'thread')} on {count(cores, 'core')} wait for each other; "
            f"{fewer.format(max(1, cores // processes))}"
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = max(1, math.ceil(cores - load))
    if threads > 1 and free < wanted:
        return (
            f"hint: the machine is busy (load average {load:.1f} on {count(cores, 'core')}), and threads that wait for "
            f"each other are slow; {fewer.format(max(1, free // processes))}"
        )
    return ""


# Ctrl-C and SIGTERM end a run at the next step, with a checkpoint, and so does the death of its launcher; and what a
# run's exit code means.


FINISHED = 0
"""trained to the end, or until patience ran out, and tested"""
STOPPED = 3
"""a signal came: there is a checkpoint of the step that was under way, and `resume` continues after it"""
DIVERGED = 4
"""the loss, the gradient or a weight was no longer a finite number: stopped at that step, which is in no checkpoint"""


SAME_REQUEST = 1.0
"""seconds in which one more signal is an echo of the first: torchrun passes on a Ctrl-C that its processes got too"""


LAUNCHER_INTERVAL = 1.0
"""seconds between two checks that the launcher is alive"""


class StoppedError(Exception):
    """A signal came while nothing was under way that a step could end."""


class StopRequest:
    """Whether somebody wants the run to stop, and since when."""

    requested = False
    since = 0.0
    is_met_at_once = False

    @contextmanager
    def met_at_once(self) -> Iterator[None]:
        """Inside, where no step will end, a request is a StoppedError; so is one from before."""
        self.is_met_at_once = True
        try:
            if self.requested:
                raise StoppedError
            yield
        finally:
            self.is_met_at_once = False


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """The first signal asks for a stop; one more ends the process at once, which loses only the steps since the
    last checkpoint, for a checkpoint is complete or not there. Old handlers are back afterwards."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not request.requested:
            request.requested, request.since = True, now
            how = "stopping" if request.is_met_at_once else "stopping after this step, with a checkpoint"
            # print is not allowed here: the signal may have come in the middle of a print
            with suppress(OSError):  # without anybody to read it, the request is met all the same
                os.write(2, f"\n{name}: {how} (again: at once, without)\n".encode())
            if request.is_met_at_once:
                raise StoppedError
        elif now - request.since > SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread have handlers
        yield request
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopping_with_launcher() -> Iterator[None]:
    """Inside, the death of the process that started this one acts as SIGTERM does. A torchrun that is killed with
    SIGKILL cannot stop its processes, which would otherwise train on with nobody to supervise them."""
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(LAUNCHER_INTERVAL):
            if os.getppid() != launcher:  # an orphan is adopted by another process
                with suppress(OSError):  # the launcher may have been the reader of stderr
                    os.write(2, b"the launcher has ended\n")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
