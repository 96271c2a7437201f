"""Ctrl-C and SIGTERM end a run at the next step, with a checkpoint, and so does the death of its launcher; and what a
run's exit code means."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

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

    wanted = False
    since = 0.0
    is_met_at_once = False

    @contextmanager
    def met_at_once(self) -> Iterator[None]:
        """Inside, where no step will end, a request is a StoppedError; so is one from before."""
        self.is_met_at_once = True
        try:
            if self.wanted:
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
        if not request.wanted:
            request.wanted, request.since = True, now
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
