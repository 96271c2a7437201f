"""A run of `fit` with the user's own dataset is killed (SIGKILL) again and again: every resume is exact."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from clearhead.recipes.trial import compare
from clearhead.training.run_directory import RunDirectory

SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import clearhead
from conftest import Augmented, Net

def train(folder, steps):
    clearhead.fit(
        Net, Augmented(), Augmented(20, seed=1), dir=folder, resume=True, steps=steps, batch_size=10, ema=0.9,
        optimizer="muon", warmup=5, log_every=1, checkpoint_every=3, evaluate_every=7, threads=1, quiet=True,
    )

clearhead.fit  # loads torch, once for all children
for line in sys.stdin:
    folder, steps = line.split()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(folder, int(steps))
            code = 0
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""trains, in a process for each line: dropout, batch norm, random augmentation, averaged weights and two optimizers"""


class Trainer:
    def __init__(self):
        command = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, folder, steps):
        """The process id of a new training process."""
        self.server.stdin.write(f"{folder} {steps}\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def wait(self):
        return int(self.server.stdout.readline())


@pytest.fixture
def trainer():
    found = Trainer()
    yield found
    found.server.stdin.close()
    found.server.wait()
    found.server.stdout.close()


def last_step(folder):
    try:
        return max((record["step"] for record in RunDirectory.open(folder).records()), default=0)
    except (LookupError, OSError, ValueError):
        return 0


def kill_until_finished(trainer, folder, steps, kills, draw):
    """Kill the run `kills` times, each time after it has made some progress, then let it finish."""
    n_killed = 0
    while n_killed < kills:
        target = min(last_step(folder) + draw.randint(0, max(1, steps // kills)), steps - 1)
        child, deadline = trainer.start(folder, steps), time.monotonic() + 60
        while last_step(folder) < target and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)  # also inside a save, an evaluation or the start
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(child, signal.SIGKILL)
        if (code := trainer.wait()) == 0:
            break
        assert code == -signal.SIGKILL
        n_killed += 1
    trainer.start(folder, steps)
    assert trainer.wait() == 0
    return n_killed


def check_kills(trainer, folder, steps, kills, seed):
    folder.mkdir(exist_ok=True)
    trainer.start(folder / "uninterrupted", steps)
    assert trainer.wait() == 0
    n_killed = kill_until_finished(trainer, folder / "killed", steps, kills, random.Random(seed))
    assert compare(folder / "uninterrupted", folder / "killed") == []
    return n_killed


@pytest.mark.slow
def test_three_kills(trainer, folder):
    assert check_kills(trainer, folder, steps=24, kills=3, seed=0) > 0


@pytest.mark.soak
def test_a_hundred_kills(trainer, folder):
    n_killed = rounds = 0
    while n_killed < 100:
        n_killed += check_kills(trainer, folder / str(rounds), steps=60, kills=10, seed=rounds)
        rounds += 1
    print(f"{n_killed} kills in {rounds} runs, every resume exact")
