"""A run directory loses no saved checkpoint or record when its owner is killed at any moment."""

import subprocess
import sys

import pytest

KILLS = '''
"""Forks a child that logs and saves in a loop, kills it at a random moment, and checks what is left; repeated."""
import os, random, signal, sys, time, traceback
import torch
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.run_directory import RunDirectory

path, n_kills, moments = sys.argv[1], int(sys.argv[2]), random.Random(1)

def record(step):
    return {"kind": "train", "step": step, "loss": 1 / step}

def train(writer):
    with RunDirectory.open(path).lock() as run:
        found = run.latest_checkpoint()
        step = found.step if found else 0
        run.drop_after(step)
        while True:
            step += 1
            run.log(record(step))
            run.save(Checkpoint(step, {"w": torch.full((500,), float(step))}, {"m": torch.tensor(step)}, {}), keep=2)
            if step % 5 == 0:
                run.mark_best(step)
            os.write(writer, b"%d\\n" % step)

RunDirectory.create(path, {})
saved, in_a_save = 0, 0
for kill in range(n_kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(writer)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writer)
    progress = os.fdopen(reader)
    for _ in range(moments.choice((0, 1, 2, 3))):  # counted in saves: on a slow disk a fixed time might pass before any
        saved = int(progress.readline())
    time.sleep(moments.uniform(0, 0.02))
    while kill % 3 == 0 and not any(name.startswith("saving-") for name in os.listdir(path + "/checkpoints")):
        pass
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
    in_a_save += any(name.startswith("saving-") for name in os.listdir(path + "/checkpoints"))
    with progress:
        saved = max([saved, *map(int, progress.read().split())])
    reports = []
    with RunDirectory.open(path, reports.append).lock() as run:
        found = run.latest_checkpoint()
        step = found.step if found else 0
        assert not reports, reports
        assert step in (saved, saved + 1), f"step {saved} was reported as saved, found step {step}"
        assert step == 0 or (found.model["w"] == step).all() and found.optimizer["m"] == step
        assert [r["step"] for r in run.records()] in ([*range(1, step + 1)], [*range(1, step + 2)])
        assert run.best_step() is None or run.best_checkpoint().step == run.best_step()
        saved = step
print(saved, in_a_save)
'''


@pytest.mark.slow
def test_thirty_sigkills_lose_no_saved_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLS, str(tmp_path / "run"), "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    saved, in_a_save = map(int, done.stdout.split())
    assert saved >= 30
    assert in_a_save >= 5, "too few of the kills came in the middle of a save to prove anything"
