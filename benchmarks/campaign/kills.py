"""SIGKILL at random moments and inside a save; SIGTERM and SIGINT; several processes that claim the same run."""

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Child, ChildResult, Prepare, Report, intercept, run
from benchmarks.campaign.runs import HANG_SECONDS, KINDS, Workspace, check_exit, last_line, resume_and_compare
from benchmarks.campaign.shards import Failure, Shard

MAX_ATTEMPTS = 8
"""a random moment after the end of the process is replaced by an earlier one"""


class Kills(Shard):
    """Random moments lie anywhere between the start and the end of the process. Kills inside a save happen at a chosen
    file call: before it, after it, or in the middle of a write."""

    name = "kills"
    what = "kill -9 of a training process"
    counts: ClassVar[Mapping[str, int]] = {
        f"{kind}{where}": n for kind in KINDS for where, n in (("", 200), (" in a save", 60))
    }

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.calls: dict[str, int] = {}
        """number of file calls inside saves, in a reference run of each kind"""

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = kind.removesuffix(" in a save")
        self.workspace.reference_run(model)
        if kind.endswith(" in a save"):
            killed = self.kill_in_save(model, rng, folder)
        else:
            killed = self.kill_at_random(model, rng, folder)
        if killed.code != -signal.SIGKILL:
            return [Failure("case not finished", f"the process ended with code {killed.code}: {last_line(killed.err)}")]
        found = [Failure("write outside", line) for line in killed.outside]
        return found + resume_and_compare(self.workspace, model, folder, killed.saved)

    def kill_at_random(self, model: str, rng: random.Random, folder: Path) -> ChildResult:
        """In half of the cases, the killed process is itself resuming a killed run."""
        longest = self.workspace.seconds[model]
        saved = 0
        if rng.random() < 0.5:
            first = Child(self.workspace.train(model), folder, may_write=[self.workspace.cache])
            saved = first.kill_after(longest * rng.uniform(0.3, 0.8)).saved
        for _ in range(MAX_ATTEMPTS):
            is_there = (folder / "runs" / "run").exists()
            argv = ["resume", "runs/run"] if is_there else self.workspace.train(model)
            ended = Child(argv, folder, may_write=[self.workspace.cache]).kill_after(rng.uniform(0, longest))
            saved = max(saved, ended.saved)
            if ended.code == -signal.SIGKILL:
                break
            longest *= 0.7
        ended.lines.append(f"saved {saved}")
        return ended

    def kill_in_save(self, model: str, rng: random.Random, folder: Path) -> ChildResult:
        if model not in self.calls:
            counting = self.workspace.new("counting")
            ended = run(
                self.workspace.train(model),
                counting,
                HANG_SECONDS,
                prepare=count_calls,
                may_write=[self.workspace.cache],
            )
            self.calls[model] = int(ended.lines[-1].split()[1])
        for attempt in range(MAX_ATTEMPTS):  # a run may make fewer calls than the one in which they were counted
            at, how = rng.randrange(self.calls[model]), rng.choice(("before", "after", "within"))
            home = folder if attempt == 0 else self.workspace.new("again")
            ended = run(
                self.workspace.train(model),
                home,
                HANG_SECONDS,
                prepare=kill_at_call(at, how),
                may_write=[self.workspace.cache],
            )
            if ended.code == -signal.SIGKILL:
                break
        if home != folder:
            shutil.rmtree(folder)
            home.rename(folder)
        return ended


def inside_saves(hook: Any, root: Path) -> None:
    """Intercept file calls, but only while a checkpoint is saved or marked as the best."""
    from clearhead.training.run_directory import RunDirectory

    depth = 0

    def during(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                depth -= 1

        return counted

    RunDirectory.save = during(RunDirectory.save)  # type: ignore[method-assign]
    RunDirectory.mark_best = during(RunDirectory.mark_best)  # type: ignore[method-assign]
    intercept(root, lambda name, call, args, kw: hook(name, call, args, kw) if depth else call(*args, **kw))


def count_calls(report: Report) -> None:
    n = 0

    def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
        nonlocal n
        n += 1
        report(f"calls {n}")
        return call(*args, **kwargs)

    inside_saves(hook, Path.cwd())


def kill_at_call(at: int, how: str) -> Prepare:
    """The process sends SIGKILL to itself at one file call."""

    def prepare(report: Report) -> None:
        n = -1

        def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal n
            n += 1
            if n != at:
                return call(*args, **kwargs)
            if how == "within" and name == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            elif how == "after":
                call(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("unreachable")

        inside_saves(hook, Path.cwd())

    return prepare


class Signals(Shard):
    name = "signals"
    what = "SIGTERM or SIGINT while training"
    counts: ClassVar[Mapping[str, int]] = {"SIGTERM": 50, "SIGINT": 50}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = KINDS[number % len(KINDS)]
        self.workspace.reference_run(model)
        longest = self.workspace.seconds[model]
        saved = 0
        for _ in range(MAX_ATTEMPTS):
            is_there = (folder / "runs" / "run").exists()
            argv = ["resume", "runs/run"] if is_there else self.workspace.train(model)
            child = Child(argv, folder, prepare=report_training, may_write=[self.workspace.cache])
            child.wait_for("training", HANG_SECONDS)
            time.sleep(rng.uniform(0, longest))
            child.send(getattr(signal, kind))
            ended = child.wait(HANG_SECONDS)
            saved = max(saved, ended.saved)
            if ended.code == 3:
                break
            if ended.code != 0 and ended.code != -getattr(signal, kind) and ended.code != 130:
                return check_exit(
                    ended, [3], kind
                )  # after training, the default handler of a signal may end the process
            longest *= 0.5
            if (folder / "runs" / "run").exists() and ended.code == 0:  # too late: start again
                os.rename(folder / "runs", folder / f"too-late-{longest}")
                saved = 0
        found = check_exit(ended, [3], kind)
        if ended.code == 3 and not ended.saved and not saved:
            found.append(Failure("lost save", f"{kind} ended with code 3 without a checkpoint"))
        return found + resume_and_compare(self.workspace, model, folder, saved)


def report_training(report: Report) -> None:
    """Report `training` when the training loop has begun to handle signals."""
    from clearhead.training import loop

    train_loop = loop.train_loop

    def reported(*args: Any, **kwargs: Any) -> Any:
        report("training")
        return train_loop(*args, **kwargs)

    loop.train_loop = reported


class Races(Shard):
    """Two to four processes start at the same moment."""

    name = "races"
    what = "several processes claim the same run"
    counts: ClassVar[Mapping[str, int]] = {"resume": 80, "train": 20}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = KINDS[number % len(KINDS)]
        self.workspace.reference_run(model)
        saved = 0
        if kind == "resume":
            first = Child(self.workspace.train(model), folder, may_write=[self.workspace.cache], prepare=stop_at(8))
            saved = first.wait(HANG_SECONDS).saved
        argv = ["resume", "runs/run"] if kind == "resume" else self.workspace.train(model)
        starts, begin = os.pipe()
        rivals = [
            Child(
                argv, folder, prepare=wait_then_own(starts, begin), may_write=[self.workspace.cache], name=f"rival-{i}"
            )
            for i in range(rng.randint(2, 4))
        ]
        os.close(starts)
        os.close(begin)  # all rivals that read from the pipe see its end, and start
        ended = [rival.wait(HANG_SECONDS) for rival in rivals]
        found = overlapping_owners(ended)
        for one in ended:
            found += check_exit(one, [0, 1, 2], f"one of {len(ended)} processes")
            if one.code in (1, 2) and len(one.err.strip().splitlines()) != 1:
                found.append(Failure("no single line", f"the refusal was {one.err!r:.200}"))
        if not any(one.code == 0 for one in ended):
            found.append(Failure("no owner", f"{len(ended)} processes ended with {[one.code for one in ended]}"))
        saved = max([saved, *(one.saved for one in ended)])
        return found + resume_and_compare(self.workspace, model, folder, saved)


def stop_at(step: int) -> Prepare:
    """The process sends SIGTERM to itself at this step, and stops there with a checkpoint."""

    def prepare(report: Report) -> None:
        from clearhead.training import loop

        train_step = loop.train_step

        def stopped(ctx: Any, state: Any, request: Any) -> Any:
            if state.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(ctx, state, request)

        loop.train_step = stopped

    return prepare


def wait_then_own(starts: int, begin: int) -> Prepare:
    """Wait for the signal to start. Report `owns T` and `owned T` when the process locks and unlocks the run."""

    def prepare(report: Report) -> None:
        from contextlib import contextmanager

        from clearhead.training.run_directory import RunDirectory

        lock = RunDirectory.lock

        @contextmanager
        def reported(self: Any) -> Any:
            with lock(self) as owned:
                report(f"owns {time.monotonic_ns()}")
                try:
                    yield owned
                finally:
                    report(f"owned {time.monotonic_ns()}")

        RunDirectory.lock = reported  # type: ignore[method-assign]
        os.close(begin)  # the copy of the child: the pipe ends when that of the parent is closed, too
        os.read(starts, 1)

    return prepare


def overlapping_owners(ended: list[ChildResult]) -> list[Failure]:
    """Two processes that owned the run at the same time."""
    spans = []
    for one in ended:
        begins = [int(line.split()[1]) for line in one.lines if line.startswith("owns ")]
        ends = [int(line.split()[1]) for line in one.lines if line.startswith("owned ")]
        spans += list(zip(begins, ends, strict=False))
    spans.sort()
    overlaps = [(before, after) for before, after in pairwise(spans) if after[0] < before[1]]
    return [Failure("two owners", f"{before} and {after} (ns)") for before, after in overlaps]
