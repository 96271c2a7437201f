"""Progress of a training run (a bar in a terminal or notebook, lines in a file), and requests to stop it (SIGTERM).

The first signal ends a run after the current step, with a checkpoint; so does the death of its launcher.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from clearhead.messages import (
    FaultTolerantStream,
    NotebookBar,
    duration,
    html_table,
    is_notebook,
    printable,
    safe_console,
)

FINISHED = 0
"""exit code: training has finished, or stopped early, and the test set was evaluated"""
STOPPED = 3
"""exit code: stopped by a signal; a checkpoint of the current step was saved, and `resume` continues after it"""
DIVERGED = 4
"""exit code: the loss, the gradient or a weight is not finite; this step is in no checkpoint"""

Reason = Literal["finished", "patience", "stopped"]

SECONDS_BETWEEN_LINES = 5.0
DEBOUNCE_SECONDS = 1.0
"""signals within this time of the first one are ignored: torchrun forwards a Ctrl-C that its processes also receive"""
LAUNCHER_INTERVAL = 1.0
"""seconds between checks that the launcher is alive"""
TRAINING_THREADS_HINT = "try --training.threads {0}"
OMP_THREADS_HINT = "try again with the environment variable OMP_NUM_THREADS={0}"


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended; its test metrics are those of the best checkpoint."""

    reason: Reason
    """why training ended: all steps are done, early stopping, or a request to stop"""
    step: int
    best_step: int | None
    """the step of the best evaluation, whose checkpoint is kept; None if there was no evaluation yet"""
    test: dict[str, Any] | None
    """the best checkpoint's metrics on the test set; None if the run was stopped or has no test set"""

    def _repr_html_(self) -> str:
        metrics = {name: value for name, value in (self.test or {}).items() if name not in ("epoch", "seconds")}
        scores = [(f"test {name}", f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float)]
        best = [] if self.best_step is None else [("best step", f"{self.best_step:,}")]
        rows = [("training", self.reason), ("step", f"{self.step:,}"), *best, *scores]
        return html_table([], rows)

    @property
    def exit_code(self) -> int:
        return STOPPED if self.reason == "stopped" else FINISHED


class Display:
    """Shows the progress of training. A quiet display shows warnings only. Only rank 0 should have a display.

    If the output cannot be written (full disk, closed pipe), training continues without it.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        self.quiet = quiet
        self.console = console or safe_console()
        stream = FaultTolerantStream(self.console.file, self.on_output_failure)  # type: ignore[arg-type]
        self.console.file = stream  # type: ignore[assignment]
        self.bar: tuple[Progress, TaskID] | None = None
        self.notebook_bar: NotebookBar | None = None
        self.n_steps = self.start = self.batch_size = 0
        self.start_time, self.last_line_time = 0.0, -SECONDS_BETWEEN_LINES

    @contextmanager
    def training(self, n_steps: int, start: int, batch_size: int) -> Iterator[None]:
        """Show a progress bar in a terminal or notebook during the steps from `start` to `n_steps`."""
        self.n_steps, self.start, self.batch_size, self.start_time = n_steps, start, batch_size, time.monotonic()
        if not self.quiet and is_notebook():
            self.notebook_bar = NotebookBar(n_steps, start)
            try:
                yield
            finally:
                self.notebook_bar.update(self.notebook_bar.completed, force=True)
                self.notebook_bar = None
            return
        if self.quiet or not self.console.is_terminal:
            yield
            return
        # rich's own estimate of the time left expires within seconds, and a step may take longer
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"))
        with Progress(*columns, console=self.console, transient=True) as progress:
            self.bar = progress, progress.add_task("", total=n_steps, completed=start, metrics="")
            try:
                yield
            finally:
                self.bar = None

    def info(self, message: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self.quiet:
            self.console.print(printable(message), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print a line to stderr, or to stdout if stderr cannot be written."""
        line, stderr = f"warning: {printable(message)}", sys.stderr
        if getattr(self.console.file, "has_failed", False):  # bypass rich, which would print it above the bar
            stderr = getattr(stderr, "rich_proxied_file", stderr)
        stream = FaultTolerantStream(stderr)
        print(line, file=stream, flush=True)
        if stream.has_failed or getattr(stderr, "has_failed", False):
            self.info(line)

    def on_output_failure(self, reason: str) -> None:
        self.quiet = True
        self.warn(f"the output cannot be written ({reason}); training continues without it")

    def advance(self, step: int) -> None:
        """Move the progress bar. Its metrics change with the next training record."""
        if self.bar is not None:
            progress, task = self.bar
            progress.update(task, completed=step)
        elif self.notebook_bar is not None:
            self.notebook_bar.update(step)

    def show_training(self, record: dict[str, Any]) -> None:
        """Update the progress bar; without one, print a line every few seconds."""
        if self.quiet:
            return
        step, now = record["step"], time.monotonic()
        speed = (step - self.start) * self.batch_size / max(now - self.start_time, 1e-9)
        metrics = f"{loss_and_accuracy(record)}  {speed:,.0f} examples/s"
        if step < self.n_steps:
            metrics += f"  {duration((self.n_steps - step) * self.batch_size / max(speed, 1e-9))} left"
        if self.bar is not None:
            progress, task = self.bar
            progress.update(task, completed=step, metrics=metrics)
        elif self.notebook_bar is not None:
            self.notebook_bar.update(step, metrics)
        elif now - self.last_line_time >= SECONDS_BETWEEN_LINES or step == self.n_steps:
            self.info(f"step {step}/{self.n_steps}  {metrics}")
            self.last_line_time = now

    def show_evaluation(self, record: dict[str, Any], note: str = "", title: str = "") -> None:
        """Print the metrics of an evaluation. The default title names the data and the step."""
        exact = f"  exact_match {record['exact_match']:.2%}" if "exact_match" in record else ""
        title = title or f"{record['kind']} at step {record['step']}"
        self.info(f"{title}  {loss_and_accuracy(record)}{exact}{note}")


class SilentDisplay(Display):
    """For all ranks but 0: shows nothing, not even warnings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def warn(self, message: str) -> None:
        pass


def loss_and_accuracy(record: dict[str, Any]) -> str:
    """With `clearhead.fit`, a run may have no accuracy."""
    accuracy = f"  accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
    return f"loss {record['loss']:.4f}{accuracy}"


def padding_summary(fraction: float, unsorted: float) -> str:
    """The fraction of padding in batches sorted by length, and in unsorted ones."""
    return f"{fraction:.1%} of all tokens; {unsorted:.1%} without sorting by length"


def count(n: float, unit: str) -> str:
    """1 step, 2,000 steps, 0.5 epochs"""
    return f"{n:,g} {unit}{'' if n == 1 else 's'}" if n != int(n) else f"{int(n):,} {unit}{'' if n == 1 else 's'}"


def oversubscription_hint(threads: int, processes: int = 1, remedy: str = TRAINING_THREADS_HINT) -> str:
    """A hint if threads outnumber the cores, or the free cores of a busy machine; otherwise "".

    `remedy` says how to set the number of threads, which replaces {0}.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = threads * processes
    if total > cores:
        return (
            f"hint: {count(total, 'thread')} on {count(cores, 'core')} slow each other down; "
            f"{remedy.format(max(1, cores // processes))}"
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = max(1, math.ceil(cores - load))
    if threads > 1 and free < total:
        return (
            f"hint: the machine is busy (load average {load:.1f} on {count(cores, 'core')}), and threads without a "
            f"free core slow the others down; {remedy.format(max(1, free // processes))}"
        )
    return ""


class StoppedError(Exception):
    """A signal arrived inside `StopRequest.raising`."""


class StopRequest:
    """Whether a stop was requested, and when."""

    requested = False
    time = 0.0
    is_raising = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside this context, which contains no training steps, a request raises StoppedError, even an earlier one."""
        self.is_raising = True
        try:
            if self.requested:
                raise StoppedError
            yield
        finally:
            self.is_raising = False


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop; a second one ends the process immediately.

    The second signal loses only the steps since the latest checkpoint, because checkpoints are written atomically. The
    previous signal handlers are restored on exit.
    """
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not request.requested:
            request.requested, request.time = True, now
            action = "stopping" if request.is_raising else "stopping after this step, with a checkpoint"
            # print is not reentrant: the signal may have interrupted a print
            with suppress(OSError):  # the request holds even if nobody can read the message
                os.write(2, f"\n{name}: {action} (repeat to stop immediately, without a checkpoint)\n".encode())
            if request.is_raising:
                raise StoppedError
        elif now - request.time > DEBOUNCE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stopping_with_launcher() -> Iterator[None]:
    """Treat the death of the parent process as a SIGTERM.

    A torchrun that is killed with SIGKILL cannot stop its processes, which would otherwise train unsupervised.
    """
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
