import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from clearhead.training import progress
from clearhead.training.loop import train
from clearhead.training.progress import Display, Silence, busy_hint

RECORD = {"kind": "train", "step": 10, "loss": 0.5, "accuracy": 0.75}


def shown(work, *, terminal, quiet=False, width=120):
    out = io.StringIO()
    display = Display(quiet=quiet, console=Console(file=out, force_terminal=terminal, width=width, highlight=False))
    with display.training(100, 0, 32):
        work(display)
    return out.getvalue()


def test_a_file_gets_lines_a_few_seconds_apart_and_the_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def work(display):
        for step in range(10, 101, 10):
            now[0] += 2
            display.trained(RECORD | {"step": step})

    lines = shown(work, terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["10/100", "40/100", "70/100", "100/100"]
    assert lines[0] == "step 10/100  loss 0.5000  accuracy 75.00%  160 examples/s  18 s left"


def test_a_terminal_gets_a_bar_with_the_same_numbers():
    out = shown(lambda display: display.trained(RECORD), terminal=True)
    assert "10/100" in out
    assert "accuracy 75.00%" in out
    assert "examples/s" in out
    assert "\x1b" in out


def test_the_bar_of_slow_steps_says_how_long_they_will_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def work(display):
        for step in (10, 20):
            now[0] += 85
            display.trained(RECORD | {"step": step})

    out = shown(work, terminal=True, width=80)  # a narrow terminal shortens the bar, not the numbers
    assert " 20/100" in out
    assert "loss 0.5000  accuracy 75.00%  4 examples/s  11 min left\n" in out
    assert "-:--:--" not in out


def test_evaluations_stay_and_a_quiet_display_shows_nothing():
    record = RECORD | {"kind": "validation", "whole": 0.5}

    def work(display):
        display.evaluated(record, "  best so far")
        display.trained(RECORD)

    out = shown(work, terminal=False)
    assert "validation at step 10  loss 0.5000  accuracy 75.00%  whole 50.00%  best so far\n" in out
    assert shown(work, terminal=True, quiet=True) == ""


def test_warnings_are_heard_unless_another_process_speaks(capsys):
    Display(quiet=True).warn("the sky falls")
    Silence().warn("here too")
    assert capsys.readouterr().err == "warning: the sky falls\n"


def test_a_reader_who_leaves_does_not_end_the_training():
    code = "from clearhead.training.progress import Display; d = Display(); [d.say('x' * 999) for _ in range(999)]"
    ends = "import sys; print(d.quiet, file=sys.stderr)"
    child = subprocess.Popen([sys.executable, "-c", f"{code}; {ends}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    assert (child.wait(60), errors) == (0, "True\n")


@pytest.mark.parametrize(
    ("cores", "load", "threads", "processes", "hint"),
    [
        (2, 0.1, 2, 1, None),
        (2, 0.1, 1, 2, None),
        (2, 5.0, 1, 1, None),  # one thread waits for no other
        (2, 1.2, 2, 1, "busy (load average 1.2 on 2 cores), and threads .* try --training.threads 1"),
        (8, 5.0, 8, 1, "busy (load average 5.0 on 8 cores), .* try --training.threads 3"),
        (2, 0.0, 4, 1, "4 threads on 2 cores wait for each other; try --training.threads 2"),
        (2, 0.0, 2, 2, "4 threads on 2 cores wait for each other; try --training.threads 1"),
    ],
)
def test_a_hint_where_threads_would_wait_for_each_other(monkeypatch, cores, load, threads, processes, hint):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = busy_hint(threads, processes)
    assert found == "" if hint is None else re.search(hint.replace("(", r"\(").replace(")", r"\)"), found)


def test_the_header_says_what_is_trained_on_what_and_how(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.training.setup.faster_precision", lambda step, device: ("float32", "it is faster"))
    train(replace(config, training=replace(config.training, precision="auto")), tmp_path / "run")
    said = capsys.readouterr().out
    assert re.search(r"^data +mnist: 57 training, 13 validation, 17 test examples$", said, re.MULTILINE)
    assert re.search(r"^model +VisionTransformer, [\d,]+ parameters$", said, re.MULTILINE)
    assert re.search(r"^device +cpu, 1 thread, float32 \(auto: it is faster\)$", said, re.MULTILINE)
    assert re.search(r"^training +12 steps \(2\.4 epochs\), batch size 10$", said, re.MULTILINE)
    assert said.index("batch size 10") < said.index("validation at step 4")
