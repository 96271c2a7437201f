"""kill -9 at random moments and inside a save; SIGTERM and Ctrl-C; several processes that want the same run."""

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Child, Ended, Prepare, Tell, intercept, run
from benchmarks.campaign.runs import KINDS, PATIENCE, Stage, check_ended, finish_and_compare, last_line
from benchmarks.campaign.shards import Failure, Shard

TRIES = 8
"""a moment that came after the end is drawn again, earlier"""


class Kills(Shard):
    """Random moments are moments in time, anywhere between the start and the end of the process. Kills in a save come
    at a chosen file call: before it, after it, or in the middle of a write."""

    name = "kills"
    what = "kill -9 of a training process"
    counts: ClassVar[Mapping[str, int]] = {
        f"{kind}{where}": n for kind in KINDS for where, n in (("", 200), (" in a save", 60))
    }

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.calls: dict[str, int] = {}
        """file calls inside saves, in an undisturbed run of each kind"""

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = kind.removesuffix(" in a save")
        undisturbed = self.stage.undisturbed(model)
        if kind.endswith(" in a save"):
            killed = self.kill_in_save(model, rng, folder)
        else:
            killed = self.kill_at_random(model, rng, folder, undisturbed)
        if killed.code != -signal.SIGKILL:
            return [Failure("case not finished", f"the process ended with code {killed.code}: {last_line(killed.err)}")]
        found = [Failure("write outside", line) for line in killed.outside]
        return found + finish_and_compare(self.stage, model, folder, killed.saved)

    def kill_at_random(self, model: str, rng: random.Random, folder: Path, undisturbed: Path) -> Ended:
        """In half of the cases the process that is killed is one that resumes a killed run."""
        longest = self.stage.seconds[model]
        saved = 0
        if rng.random() < 0.5:
            first = Child(self.stage.train(model), folder, may_write=[self.stage.cache])
            saved = first.kill_after(longest * rng.uniform(0.3, 0.8)).saved
        for _ in range(TRIES):
            is_there = (folder / "runs" / "run").exists()
            argv = ["resume", "runs/run"] if is_there else self.stage.train(model)
            ended = Child(argv, folder, may_write=[self.stage.cache]).kill_after(rng.uniform(0, longest))
            saved = max(saved, ended.saved)
            if ended.code == -signal.SIGKILL:
                break
            longest *= 0.7
        ended.lines.append(f"saved {saved}")
        return ended

    def kill_in_save(self, model: str, rng: random.Random, folder: Path) -> Ended:
        if model not in self.calls:
            counting = self.stage.new("counting")
            ended = run(self.stage.train(model), counting, PATIENCE, prepare=count_calls, may_write=[self.stage.cache])
            self.calls[model] = int(ended.lines[-1].split()[1])
        for attempt in range(TRIES):  # a run may make a call fewer than the one in which they were counted
            at, how = rng.randrange(self.calls[model]), rng.choice(("before", "after", "within"))
            home = folder if attempt == 0 else self.stage.new("again")
            ended = run(
                self.stage.train(model), home, PATIENCE, prepare=kill_at_call(at, how), may_write=[self.stage.cache]
            )
            if ended.code == -signal.SIGKILL:
                break
        if home != folder:
            shutil.rmtree(folder)
            home.rename(folder)
        return ended


def inside_saves(hook: Any, root: Path) -> None:
    """File calls reach the hook while a checkpoint is saved or marked as the best."""
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


def count_calls(tell: Tell) -> None:
    n = 0

    def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
        nonlocal n
        n += 1
        tell(f"calls {n}")
        return call(*args, **kwargs)

    inside_saves(hook, Path.cwd())


def kill_at_call(at: int, how: str) -> Prepare:
    """The process kills itself with SIGKILL at one file call: nothing that it would have done afterwards happens."""

    def prepare(tell: Tell) -> None:
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
        self.stage.undisturbed(model)
        longest = self.stage.seconds[model]
        saved = 0
        for _ in range(TRIES):
            is_there = (folder / "runs" / "run").exists()
            argv = ["resume", "runs/run"] if is_there else self.stage.train(model)
            child = Child(argv, folder, prepare=report_training, may_write=[self.stage.cache])
            child.wait_for("training", PATIENCE)
            time.sleep(rng.uniform(0, longest))
            child.send(getattr(signal, kind))
            ended = child.wait(PATIENCE)
            saved = max(saved, ended.saved)
            if ended.code == 3:
                break
            if ended.code != 0 and ended.code != -getattr(signal, kind) and ended.code != 130:
                return check_ended(ended, [3], kind)  # after the end of training, a signal may end the process itself
            longest *= 0.5
            if (folder / "runs" / "run").exists() and ended.code == 0:  # too late: once more, from the beginning
                os.rename(folder / "runs", folder / f"too-late-{longest}")
                saved = 0
        found = check_ended(ended, [3], kind)
        if ended.code == 3 and not ended.saved and not saved:
            found.append(Failure("lost save", f"{kind} ended with code 3 and there is no checkpoint"))
        return found + finish_and_compare(self.stage, model, folder, saved)


def report_training(tell: Tell) -> None:
    """`training` when a signal is handled by the training loop from now on."""
    from clearhead.training import loop

    train_loop = loop.train_loop

    def reported(*args: Any, **kwargs: Any) -> Any:
        tell("training")
        return train_loop(*args, **kwargs)

    loop.train_loop = reported


class Races(Shard):
    """Two to four processes start at the same moment."""

    name = "races"
    what = "several processes claim the same run"
    counts: ClassVar[Mapping[str, int]] = {"resume": 80, "train": 20}

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        model = KINDS[number % len(KINDS)]
        self.stage.undisturbed(model)
        saved = 0
        if kind == "resume":
            first = Child(self.stage.train(model), folder, may_write=[self.stage.cache], prepare=stop_at(8))
            saved = first.wait(PATIENCE).saved
        argv = ["resume", "runs/run"] if kind == "resume" else self.stage.train(model)
        starts, begin = os.pipe()
        rivals = [
            Child(argv, folder, prepare=wait_then_own(starts, begin), may_write=[self.stage.cache], name=f"rival-{i}")
            for i in range(rng.randint(2, 4))
        ]
        os.close(starts)
        os.close(begin)  # the end of the file is the sign to start for all that read from it
        ended = [rival.wait(PATIENCE) for rival in rivals]
        found = two_owners(ended)
        for one in ended:
            found += check_ended(one, [0, 1, 2], f"one of {len(ended)} processes")
            if one.code in (1, 2) and len(one.err.strip().splitlines()) != 1:
                found.append(Failure("no single line", f"the refusal was {one.err!r:.200}"))
        if not any(one.code == 0 for one in ended):
            found.append(Failure("no owner", f"{len(ended)} processes ended with {[one.code for one in ended]}"))
        saved = max([saved, *(one.saved for one in ended)])
        return found + finish_and_compare(self.stage, model, folder, saved)


def stop_at(step: int) -> Prepare:
    """A signal to itself at this step: the run stops there, with a checkpoint."""

    def prepare(tell: Tell) -> None:
        from clearhead.training import loop

        train_step = loop.train_step

        def stopped(ctx: Any, state: Any, request: Any) -> Any:
            if state.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(ctx, state, request)

        loop.train_step = stopped

    return prepare


def wait_then_own(starts: int, begin: int) -> Prepare:
    """Waits for the sign to start; `owns T` and `owned T` when the process takes the run and lets go of it."""

    def prepare(tell: Tell) -> None:
        from contextlib import contextmanager

        from clearhead.training.run_directory import RunDirectory

        lock = RunDirectory.lock

        @contextmanager
        def reported(self: Any) -> Any:
            with lock(self) as owned:
                tell(f"owns {time.monotonic_ns()}")
                try:
                    yield owned
                finally:
                    tell(f"owned {time.monotonic_ns()}")

        RunDirectory.lock = reported  # type: ignore[method-assign]
        os.close(begin)  # the child's copy: the pipe ends when the parent's is closed
        os.read(starts, 1)

    return prepare


def two_owners(ended: list[Ended]) -> list[Failure]:
    """Whether two processes owned the run at the same time, which one alone may do."""
    spans = []
    for one in ended:
        begins = [int(line.split()[1]) for line in one.lines if line.startswith("owns ")]
        ends = [int(line.split()[1]) for line in one.lines if line.startswith("owned ")]
        spans += list(zip(begins, ends, strict=False))
    spans.sort()
    overlaps = [(before, after) for before, after in pairwise(spans) if after[0] < before[1]]
    return [Failure("two owners", f"{before} and {after} (ns)") for before, after in overlaps]
