import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from clearhead.training import progress
from clearhead.training.progress import DIVERGED, FINISHED, STOPPED, stopping_on_signals, stopping_with_launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_a_stop_and_nothing_else(number, capfd):
    before = signal.getsignal(number)
    with stopping_on_signals() as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        assert request.requested
    assert signal.getsignal(number) is before
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err


def test_a_stop_is_asked_for_without_anybody_to_hear_of_it(monkeypatch):
    def fail(number, data):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", fail)
    with stopping_on_signals() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested


def test_a_dead_launcher_asks_for_a_stop_without_anybody_to_hear_of_it(monkeypatch):
    """The launcher read this process's stderr: the pipe is broken."""
    monkeypatch.setattr(progress, "LAUNCHER_INTERVAL", 0.01)
    read, write = os.pipe()
    os.close(read)
    stderr = os.dup(2)
    try:
        with stopping_on_signals() as request, stopping_with_launcher():
            os.dup2(write, 2)
            monkeypatch.setattr(os, "getppid", lambda: -1)
            end = time.monotonic() + 5
            while not request.requested and time.monotonic() < end:
                time.sleep(0.01)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write)
    assert request.requested


def test_the_second_signal_ends_the_process():
    code = """
import os, signal
from clearhead.training import progress
with progress.stopping_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)  # an echo
    print("still here", flush=True)
    progress.DEBOUNCE_SECONDS = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    print("never")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n")


def test_a_thread_of_its_own_trains_without_handlers():
    found = []

    def work():
        with stopping_on_signals() as request:
            found.append(request.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_exit_codes_differ_from_each_other_and_from_those_of_the_command_line():
    assert len({FINISHED, STOPPED, DIVERGED, 1, 2, 130}) == 6
