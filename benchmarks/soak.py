"""Kills training at random moments with SIGKILL, resumes it, and compares it with a run that nothing disturbed.

    python benchmarks/soak.py reverse                                         # 50 kills: some minutes
    python benchmarks/soak.py mnist --kills 50 --steps 120 -- --data.limit 4000 --training.batch-size 32
    python benchmarks/soak.py reverse --kills 3                               # smoke test

A third of the kills come while a checkpoint is being saved, when its temporary folder is there. After each kill the
newest checkpoint must be intact; at the end weights, optimizer, averages, RNG states and every logged value must equal
the undisturbed run bit for bit. Arguments after `--` go to `clearhead train`. Exit code 1 if anything differs.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.files import from_json
from clearhead.training import checkpoint
from clearhead.training.checkpoint import MODEL, OPTIMIZER, SAVING, STATE
from clearhead.training.run_directory import RunDirectory

UNDISTURBED = "undisturbed"


class SoakError(Exception):
    """A violated guarantee."""


@dataclass
class Soak:
    """The commands of a soak and its counters."""

    train: list[str]
    """without --name"""
    resume: list[str]
    """without the run's folder"""
    folder: Path
    patience: float
    moments: random.Random
    kills: int = 0
    in_saves: int = 0
    resumable: int = 0
    """kills between the first and the last checkpoint; the others do not test resuming"""
    longest_wait: float = 0.01
    """maximal seconds from the start of a save to the kill; reduced whenever the save had already finished"""
    first_checkpoint: float = 0.0
    """seconds from the start of the undisturbed run to its first checkpoint"""
    end: float = 0.0
    """seconds from the start of the undisturbed run to its end"""

    def is_enough(self, n_kills: int) -> bool:
        return self.resumable >= n_kills and 3 * self.in_saves >= self.kills

    def account(self) -> str:
        return f"{self.kills} kills, {self.in_saves} in a save, {self.resumable} in the midst of training"

    def run_of(self, name: str) -> Path:
        return self.folder / "runs" / name

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """Trains, or resumes if the run exists."""
        is_there = self.run_of(name).exists()
        command = [*self.resume, str(self.run_of(name))] if is_there else [*self.train, "--name", name]
        log = (self.folder / f"{name}.log").open("ab")
        with log:  # its own session, so that a kill includes its children
            return subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, name: str) -> None:
        """Runs it to the end, and records the time of its first checkpoint."""
        began, process = time.monotonic(), self.start(name)
        try:
            while process.poll() is None:
                self.check_patience(began, name)
                if not self.first_checkpoint and checkpoint.saved_steps(self.run_of(name)):
                    self.first_checkpoint = time.monotonic() - began
                time.sleep(0.01)
        finally:
            stop(process)
        self.check_end(process, name)
        self.end = self.end or time.monotonic() - began
        if not self.first_checkpoint:
            raise SoakError(f"{name} saved no checkpoint; more --steps or a smaller --checkpoint-every is needed")

    def kill_once(self, name: str, in_save: bool) -> bool:
        """Starts it and kills it at a random moment; False if it had already made its last step."""
        left, began, process = saves(self.run_of(name)), time.monotonic(), self.start(name)
        try:
            if in_save:
                self.wait_for_a_save(process, name, began, left)
            else:
                sleep_beside(process, self.moment())
        finally:
            stop(process)
        if process.returncode != -signal.SIGKILL:
            self.check_end(process, name)
            return False
        self.kills += 1
        was_in_save = bool(saves(self.run_of(name)) - left)  # leftovers of the previous kill do not count
        self.in_saves += was_in_save
        newest, last = self.newest_step(name), self.newest_step(UNDISTURBED)
        self.resumable += 0 < newest < last
        print(self.account(), flush=True)
        return newest < last

    def moment(self) -> float:
        """Seconds from the start of a process to the kill: one in four before training, the others during it."""
        start = self.first_checkpoint
        before, after = (0.0, start), (start, min(self.end, 3 * start))
        return self.moments.uniform(*self.moments.choice((before, after, after, after)))

    def wait_for_a_save(
        self, process: "subprocess.Popen[bytes]", name: str, began: float, left: set[tuple[str, int]]
    ) -> None:
        """Waits until the process is suspended in a save: the first, second or third that is seen, or a later one. The
        process is suspended shortly after the save has begun, and continued if the save had already finished."""
        n_passed, passed = self.moments.randint(0, 2), set[str]()
        while process.poll() is None:
            self.check_patience(began, name)
            now = {folder for folder, _ in saves(self.run_of(name)) - left} - passed
            if not now:
                time.sleep(0.0002)
            elif len(passed) < n_passed:
                passed |= now
            else:
                time.sleep(self.moments.uniform(0, self.longest_wait))
                halt(process)
                if saves(self.run_of(name)) - left:
                    return
                self.longest_wait *= 0.8
                os.killpg(process.pid, signal.SIGCONT)

    def newest_step(self, name: str) -> int:
        """The step of the newest checkpoint, 0 if there is none; a damaged one is an error."""
        if not self.run_of(name).exists():
            return 0
        reports: list[str] = []
        newest = RunDirectory.open(self.run_of(name), reports.append).latest_checkpoint()
        if reports:
            raise SoakError(f"kill {self.kills} damaged a checkpoint: {'; '.join(reports)}")
        return newest.step if newest else 0

    def check_end(self, process: "subprocess.Popen[bytes]", name: str) -> None:
        if process.returncode != 0:
            tail = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
            raise SoakError(f"{name} ended with code {process.returncode}:\n" + "\n".join(tail))

    def check_patience(self, began: float, name: str) -> None:
        if time.monotonic() - began > self.patience:
            raise SoakError(f"{name} did not reach the expected state within {self.patience:g} s")


def stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def halt(process: "subprocess.Popen[bytes]") -> None:
    """Suspends the process; returns when it has stopped or ended."""
    os.killpg(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def sleep_beside(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


def saves(run: Path) -> set[tuple[str, int]]:
    """The temporary folders of checkpoints that are being saved, and when each was last changed."""
    try:
        found = [entry for entry in os.scandir(run / "checkpoints") if entry.name.startswith(SAVING)]
        return {(entry.name, entry.stat().st_mtime_ns) for entry in found}
    except FileNotFoundError:
        return set()


def differences(ours: Path, theirs: Path) -> list[str]:
    """The differences between two runs, times excluded."""
    found = []
    a, b = checkpoint.saved_steps(ours), checkpoint.saved_steps(theirs)
    if not a or not b or a[-1] != b[-1]:
        found.append(f"the last checkpoints are those of steps {a[-1:]} and {b[-1:]}")
    for step in sorted(set(a) & set(b)):
        here, there = (run / "checkpoints" / checkpoint.step_name(step) for run in (ours, theirs))
        found += [f"{name} of step {step}" for name in (MODEL, OPTIMIZER) if not same_bytes(here / name, there / name)]
        if timeless(from_json((here / STATE).read_bytes())) != timeless(from_json((there / STATE).read_bytes())):
            found.append(f"{STATE} of step {step}")
    one, other = RunDirectory.open(ours), RunDirectory.open(theirs)
    if one.best_step() != other.best_step():
        found.append(f"the best steps are {one.best_step()} and {other.best_step()}")
    records = [[timeless(record) for record in run.records()] for run in (one, other)]
    if len(records[0]) != len(records[1]):
        found.append(f"there are {len(records[0])} and {len(records[1])} records")
    found += [f"records {x} and {y}" for x, y in zip(*records, strict=False) if x != y][:3]
    return found


def same_bytes(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def timeless(value: Any) -> Any:
    """The value without measured times, which differ between any two runs."""
    if isinstance(value, dict):
        # the digest of the records, which are compared one by one, covers their seconds too
        return {key: timeless(inner) for key, inner in value.items() if "second" not in key and key != "sha256"}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def soak(job: Soak, n_kills: int) -> int:
    """Kills and resumes runs until there were enough kills, comparing each at its end; returns their number."""
    print("an undisturbed run ...", flush=True)
    job.finish(UNDISTURBED)
    n_runs = 0
    while not job.is_enough(n_kills):
        n_runs += 1
        name = f"killed-{n_runs}"
        while not job.is_enough(n_kills) and job.kill_once(name, in_save=3 * job.in_saves <= job.kills):
            pass
        job.finish(name)
        if found := differences(job.run_of(UNDISTURBED), job.run_of(name)):
            raise SoakError(f"{name} differs from the undisturbed run: " + "; ".join(found))
    return n_runs


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument(
        "--kills", type=int, default=50, help="kills between the first and the last checkpoint; others do not count"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="seed of training and of the moments of the kills")
    parser.add_argument("--patience", type=float, default=600, help="maximal seconds for a run, or until a save begins")
    parser.add_argument(
        "--command", default=f"{shlex.quote(sys.executable)} -P -m clearhead", help="command that starts clearhead"
    )
    args = parser.parse_args(argv[:cut])
    start = shlex.split(args.command)
    numbers = {
        "--seed": args.seed,
        "--training.steps": args.steps,
        "--training.checkpoint-every": args.checkpoint_every,
    }
    train = [*start, "train", args.recipe, *(str(x) for pair in numbers.items() for x in pair), *argv[cut + 1 :]]

    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    job = Soak(train, [*start, "resume"], folder, args.patience, random.Random(args.seed))
    try:
        n_runs = soak(job, args.kills)
    except SoakError as error:
        print(f"soak: {error}\nthe runs are kept in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    print(f"{job.account()}: {n_runs} runs equal the undisturbed one, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
