"""Malformed command lines, and a long run that is checked for leaks."""

import contextlib
import io
import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.hangs import CpuLimitError, HangDetector, TooLongError, time_limit
from benchmarks.campaign.processes import Child
from benchmarks.campaign.runs import HANG_SECONDS, Workspace, check_exit, last_line
from benchmarks.campaign.shards import Failure, Shard

MAX_COMMAND_SECONDS = 20.0
"""seconds of CPU time after which a command is interrupted: it was valid after all"""
MAX_SOAK_SECONDS = 48 * 3600.0
"""seconds of CPU time"""
VALID_COMMANDS = """\
recipes
recipes reverse
train reverse --name new --training.steps 2 --training.threads 1 --data.limit 300 --data.validation 20
train words --name new --data.file words.txt --training.steps 2 --training.threads 1 --data.validation 10
train folder --name new --data.folder pictures --data.image-size 16 --training.steps 2 --training.threads 1
train reverse --dry-run --training.steps 2 --training.threads 1 --data.limit 300
resume runs/run --steps 30
resume run --threads 1
runs
runs runs --json
curves runs/run --csv -
curves runs/run --epochs 1 --out curves.png
confusion runs/run
predictions runs/run
predict runs/run picture.png --json
predict runs/run --ids 1 2 3
evaluate runs/run --part validation
sample runs/run --prompt ab
look runs/run --sample 3
look runs/run --training-dynamics
data list
data show folder --data.folder pictures
shapes bert_cifar10
shapes vit_tiny --width 32 --heads 2
steps --causal
steps --file steps.json --heads 2
mask causal --tokens 5
mask --file mask.csv --form additive
mask causal padding --lengths 3 5 --figure mask.png
lab scaled-key --alpha 10
doctor module.py:Block
"""
"""fast valid commands; their first word is never changed, so that no command trains for hours or downloads"""
VALUES = (
    "", " ", "-1", "0", "1e999", "nan", "inf", "-inf", "1e30", "999999999999999999999", "0x10", "1_000", "½", "none",
    "true", "x" * 5000, "\x1b[31mred", "\x1b]0;t\x07", "a\nb", "%s%n", "{}", "[1]", "🙂", "\udcff", "..", ".",
    "missing", "./missing/file", "pictures", "picture.png", "mask.csv", "runs", "runs/run", "runs/run/config.json",
    "3x", "x3", "3x4x5", "--", "-", "-x", "--x", "--help", "--name=", "--training.steps", "=", "1 2", "1,2", "'", '"',
    "$HOME", "`id`",
)  # fmt: skip


class CommandLines(Shard):
    name = "commands"
    what = "malformed command line"
    counts: ClassVar[Mapping[str, int]] = {"command": 1000}
    small = 60
    batch = 20

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.run = workspace.reference_run("vit")

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        self.workspace.copy(self.run, folder)
        for name in ("pictures", "words.txt"):
            os.symlink(self.workspace.data / name, folder / name)
        (folder / "picture.png").write_bytes((self.workspace.data / "pictures" / "red" / "0.png").read_bytes())
        (folder / "mask.csv").write_text("0,-inf\n0,0\n")
        (folder / "steps.json").write_text('{"x": [[1, 0], [0, 1]], "w_q": [[1, 0], [0, 1]]}')
        (folder / "module.py").write_text("import torch\nclass Block(torch.nn.Linear):\n    pass\n")
        lines = [malformed(random.Random(f"{self.seed} command {number + i}")) for i in range(self.size)]
        child = Child([], folder, job=lambda: run_all(lines), may_write=[self.workspace.cache])
        ended = child.wait(HANG_SECONDS + 2 * MAX_COMMAND_SECONDS * len(lines))
        found = [
            Failure(*line.removeprefix("failure ").split(": ", 1))
            for line in ended.out.splitlines()
            if line.startswith("failure ")
        ]
        return found + check_exit(ended, [0], f"commands from {number}")


def malformed(rng: random.Random) -> list[str]:
    """A valid command with one to three mistakes."""
    words = rng.choice(VALID_COMMANDS.splitlines()).split()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(words) + 1)
        match rng.randrange(6):
            case 0 if at < len(words):
                words[at] = rng.choice(VALUES)
            case 1 if at < len(words) and words[at] != "--training.steps":
                del words[at]
            case 2:
                words.insert(at, rng.choice(VALUES))
            case 3 if at < len(words) and words[at].startswith("--"):
                words[at] = words[at][:-1] if rng.random() < 0.5 else words[at] + "s"
            case 4 if at < len(words):
                words.insert(at, words[at])
            case _ if at < len(words):
                words[at] = words[at][: rng.randint(0, len(words[at]))] + rng.choice(VALUES)[:40]
            case _:
                words.append(rng.choice(VALUES))
    return words


def run_all(lines: Sequence[Sequence[str]]) -> int:
    """Runs in the child. No command may use the network."""

    def no_network(*args: Any, **kwargs: Any) -> Any:
        os.write(1, b"failure write outside: a connection to the network\n")
        raise OSError("no network in the campaign")

    socket.socket.connect = no_network  # type: ignore[method-assign]
    socket.create_connection = no_network
    for words in lines:
        for failure in check_command(words):
            os.write(1, f"failure {failure.kind}: {failure.what}\n".encode(errors="replace"))
    return 0


def check_command(words: Sequence[str]) -> list[Failure]:
    """The exit code must be 0, 1 or 2. If it is not 0, there must be one line on stderr, and never a traceback."""
    from clearhead.cli.main import main

    out, err, shown = io.StringIO(), io.StringIO(), " ".join(repr(word[:60]) for word in words)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), time_limit(MAX_COMMAND_SECONDS):
            code = main(list(words))
    except CpuLimitError:
        return []  # valid after all, and still working
    except TooLongError as error:
        return [Failure("hang", f"{shown}: {error}")]
    except BaseException as error:
        return [Failure("exit 5", f"{shown}: {type(error).__name__} came out of main: {str(error)[:200]!r}")]
    said = [line for line in err.getvalue().splitlines() if line.strip()]
    complaints = [line for line in said if not line.startswith("warning:")]
    if code not in (0, 1, 2, 4) or "Traceback" in err.getvalue():  # 4: steps with a learning rate of 1e30 diverge
        return [Failure("exit 5", f"{shown}: code {code}: {last_line(err.getvalue())[:200]!r}")]
    if code in (1, 2) and len(complaints) != 1 and words[0] not in ("doctor", "lab"):
        return [Failure("no single line", f"{shown}: code {code}, {len(complaints)} lines on stderr")]
    if any("\x1b" in line for line in complaints):
        return [Failure("escape sequence", f"{shown}: {complaints[0][:200]!r}")]
    return []


class Soak(Shard):
    """One process trains for many steps, evaluates and saves. Its memory and its open files must not grow."""

    name = "soak"
    what = "training steps in one process, checked for leaks"
    counts: ClassVar[Mapping[str, int]] = {"steps": 100_000}
    small = 1_000
    batch = 100_000
    max_growth = 16 * 2**20
    """bytes of resident memory between the second fifth of the run and its last"""

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        n = self.size
        every = max(10, n // 100)
        changes = {"training__checkpoint_every": every, "training__evaluate_every": every, "training__log_every": 10}
        argv = self.workspace.train("language-model", training__steps=n, **changes)
        child = Child(argv, folder, may_write=[self.workspace.cache])
        child.wait_for("saved ", HANG_SECONDS)
        memory: list[int] = []
        files: list[int] = []
        detector, hang = HangDetector(MAX_SOAK_SECONDS, HANG_SECONDS), ""
        while child.is_alive():
            with contextlib.suppress(OSError, ValueError, IndexError):
                resident = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                n_files = len(os.listdir(f"/proc/{child.pid}/fd"))
                if resident:  # 0 when it has just ended
                    memory.append(resident)
                    files.append(n_files)
            if not hang and (hang := child.check(detector)):
                child.send(signal.SIGKILL)
            time.sleep(min(1.0, n / 20_000))
        ended = replace(child.wait(HANG_SECONDS), hang=hang)
        found = check_exit(ended, [0], f"{n} steps") + find_leaks(memory, files, self.max_growth)
        if memory:
            span = f"{min(memory) / 2**20:.0f} to {max(memory) / 2**20:.0f} MB"
            self.note = f"resident memory {span}, at most {max(files)} open files, {len(memory)} samples"
        return found


def find_leaks(memory: Sequence[int], files: Sequence[int], most: int) -> list[Failure]:
    """Compare the second fifth of the samples with the last: the first one is still warming up.

    Of the open files the minimum is compared: a file that is open during a save comes and goes, a leaked one stays.
    """
    if len(memory) < 10:
        return [Failure("case not finished", f"{len(memory)} samples are too few")]
    fifth, found = len(memory) // 5, []
    before, after = (statistics.median(part) for part in (memory[fifth : 2 * fifth], memory[-fifth:]))
    if after - before > most:
        found.append(Failure("leak", f"resident memory grew from {before / 2**20:.1f} to {after / 2**20:.1f} MB"))
    fewest_before, fewest_after = min(files[fifth : 2 * fifth]), min(files[-fifth:])
    if fewest_after > fewest_before:
        found.append(Failure("leak", f"open files grew from {fewest_before} to {fewest_after}"))
    return found
