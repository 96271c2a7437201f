import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from clearhead.cli.main import main
from clearhead.training import checkpoint, progress
from clearhead.training.loop import train
from clearhead.training.progress import (
    DIVERGED,
    FINISHED,
    STOPPED,
    Display,
    SilentDisplay,
    oversubscription_hint,
    stopping_on_signals,
    stopping_with_launcher,
)

RECORD = {"kind": "train", "step": 10, "loss": 0.5, "accuracy": 0.75}


def shown(work, *, terminal, quiet=False, width=120):
    out = io.StringIO()
    display = Display(quiet=quiet, console=Console(file=out, force_terminal=terminal, width=width, highlight=False))
    with display.training(100, 0, 32):
        work(display)
    return out.getvalue()


def test_file_output_is_rate_limited_and_includes_the_last_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def work(display):
        for step in range(10, 101, 10):
            now[0] += 2
            display.show_training(RECORD | {"step": step})

    lines = shown(work, terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["10/100", "40/100", "70/100", "100/100"]
    assert lines[0] == "step 10/100  loss 0.5000  accuracy 75.00%  160 examples/s  18 s left"


def test_terminal_output_is_a_bar_with_the_metrics():
    out = shown(lambda display: display.show_training(RECORD), terminal=True)
    assert "10/100" in out
    assert "accuracy 75.00%" in out
    assert "examples/s" in out
    assert "\x1b" in out


def test_bar_of_slow_steps_shows_the_remaining_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def work(display):
        for step in (10, 20):
            now[0] += 85
            display.show_training(RECORD | {"step": step})

    out = shown(work, terminal=True, width=80)  # in a narrow terminal the bar shrinks, not the numbers
    assert " 20/100" in out
    assert "loss 0.5000  accuracy 75.00%  4 examples/s  11 min left\n" in out
    assert "-:--:--" not in out


def test_evaluations_are_printed_and_a_quiet_display_prints_nothing():
    record = RECORD | {"kind": "validation", "exact_match": 0.5}

    def work(display):
        display.show_evaluation(record, "  best so far")
        display.show_training(RECORD)

    out = shown(work, terminal=False)
    assert "validation at step 10  loss 0.5000  accuracy 75.00%  exact_match 50.00%  best so far\n" in out
    assert shown(work, terminal=True, quiet=True) == ""


def test_warnings_are_printed_by_the_main_rank_only(capsys):
    Display(quiet=True).warn("the sky falls")
    SilentDisplay().warn("here too")
    assert capsys.readouterr().err == "warning: the sky falls\n"


def test_closed_pipe_does_not_stop_training():
    code = "from clearhead.training.progress import Display; d = Display(); [d.info('x' * 999) for _ in range(999)]"
    ends = "import sys; print(d.quiet, file=sys.stderr)"
    child = subprocess.Popen([sys.executable, "-c", f"{code}; {ends}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    warning = "warning: the output cannot be written (Broken pipe); training continues without it\n"
    assert (child.wait(60), errors) == (0, f"{warning}True\n")


class Broken(io.StringIO):
    """A stream whose writes fail after a while, as on a full disk or a closed terminal."""

    def __init__(self, number=errno.ENOSPC, good=0):
        super().__init__()
        self.number, self.good = number, good

    def write(self, text):
        if self.good <= 0:
            raise OSError(self.number, os.strerror(self.number))
        self.good -= 1
        return super().write(text)

    def flush(self):
        self.write("")


@pytest.mark.parametrize("good", [0, 5])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_training_continues_if_output_fails(config, tmp_path, capsys, monkeypatch, number, good):
    monkeypatch.setattr(sys, "stdout", Broken(number, good))
    assert train(config, tmp_path / "run").exit_code == 0
    assert checkpoint.saved_steps(tmp_path / "run")[-1] == 12
    warning = f"warning: the output cannot be written ({os.strerror(number)}); training continues without it\n"
    assert capsys.readouterr().err == warning


def test_closed_terminal_does_not_stop_training(capsys):
    out = Broken(errno.EIO, good=4)
    display = Display(console=Console(file=out, force_terminal=True, width=80))
    with display.training(100, 0, 32):
        for step in range(1, 50):
            display.show_training(RECORD | {"step": step})
            display.info("a line")
    assert display.quiet
    assert capsys.readouterr().err.count("training continues without it") == 1


def test_warning_falls_back_to_stdout_if_stderr_fails(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Broken())
    display = Display()
    display.warn("the sky falls")
    assert capsys.readouterr().out == "warning: the sky falls\n"
    Display(console=Console(file=Broken())).info("unseen")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("is_stderr_full", [False, True])
def test_full_disk_for_output_changes_neither_exit_code_nor_checkpoints(tmp_path, capsys, monkeypatch, is_stderr_full):
    monkeypatch.chdir(tmp_path)
    few = "--training.steps 3 --data.limit 300 --data.validation 50 --training.threads 1 --training.precision float32"
    with open("/dev/full", "w") as full, open("/dev/full", "w") as other:
        monkeypatch.setattr(sys, "stdout", full)
        if is_stderr_full:
            monkeypatch.setattr(sys, "stderr", other)
        assert main(["train", "reverse", "--name", "mine", *few.split()]) == 0
        full.flush()  # no buffered output fails when Python exits
    assert checkpoint.saved_steps(Path("runs/mine"))[-1] == 3
    assert capsys.readouterr().err.count("\n") == (0 if is_stderr_full else 1)


def test_control_characters_and_markup_are_escaped(capsys):
    display = Display()
    display.info("[red]\x1b]0;t\x07\nforged")
    display.warn("\x1b[2J\nforged")
    assert capsys.readouterr() == ("[red]\\x1b]0;t\\x07\\nforged\n", "warning: \\x1b[2J\\nforged\n")


@pytest.mark.parametrize(
    ("cores", "load", "threads", "processes", "hint"),
    [
        (2, 0.1, 2, 1, None),
        (2, 0.1, 1, 2, None),
        (2, 5.0, 1, 1, None),  # a single thread waits for no other
        (2, 1.2, 2, 1, "busy (load average 1.2 on 2 cores), .* try --training.threads 1"),
        (8, 5.0, 8, 1, "busy (load average 5.0 on 8 cores), .* try --training.threads 3"),
        (2, 0.0, 4, 1, "4 threads on 2 cores .*; try --training.threads 2"),
        (2, 0.0, 2, 2, "4 threads on 2 cores .*; try --training.threads 1"),
    ],
)
def test_oversubscription_hint(monkeypatch, cores, load, threads, processes, hint):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = oversubscription_hint(threads, processes)
    assert found == "" if hint is None else re.search(hint.replace("(", r"\(").replace(")", r"\)"), found)


def test_header_describes_data_model_device_and_training(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.training.context.faster_precision", lambda step, device: ("float32", "it is faster"))
    train(replace(config, training=replace(config.training, precision="auto")), tmp_path / "run")
    said = capsys.readouterr().out
    assert re.search(r"^data +mnist: 57 training, 13 validation, 17 test examples$", said, re.MULTILINE)
    assert re.search(r"^model +VisionTransformer, [\d,]+ parameters$", said, re.MULTILINE)
    assert re.search(r"^device +cpu, 1 thread, float32 \(auto: it is faster\)$", said, re.MULTILINE)
    assert re.search(r"^training +12 steps \(2\.4 epochs\), batch size 10$", said, re.MULTILINE)
    assert said.index("batch size 10") < said.index("validation at step 4")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_requests_a_stop_and_handlers_are_restored(number, capfd):
    before = signal.getsignal(number)
    with stopping_on_signals() as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        assert request.requested
    assert signal.getsignal(number) is before
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err


def test_signal_requests_a_stop_even_if_stderr_fails(monkeypatch):
    def fail(number, data):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", fail)
    with stopping_on_signals() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested


def test_dead_launcher_requests_a_stop_even_if_stderr_is_closed(monkeypatch):
    """The launcher was reading the stderr of this process, so that the pipe is broken."""
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


def test_second_signal_terminates_the_process():
    code = """
import os, signal
from clearhead.training import progress
with progress.stopping_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)  # a duplicate signal
    print("still here", flush=True)
    progress.DEBOUNCE_SECONDS = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    print("never")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n")


def test_training_in_a_thread_installs_no_handlers():
    found = []

    def work():
        with stopping_on_signals() as request:
            found.append(request.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_exit_codes_are_distinct():
    assert len({FINISHED, STOPPED, DIVERGED, 1, 2, 130}) == 6
