"""Training by several processes under torchrun: a rank or the launcher is killed, or one of two nodes is lost.

Two nodes are two network namespaces of this machine, joined by a pair of virtual Ethernet devices, with a torchrun in
each; the run directory is in the current directory of the first node only.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.hangs import HangDetector, descendants, is_alive
from benchmarks.campaign.runs import HANG_SECONDS, Workspace, check_saved, last_line
from benchmarks.campaign.shards import Failure, Shard
from benchmarks.soak import differences

import clearhead

MODEL = "language-model"
STEPS = 240
"""enough for a kill before the end"""
LONGER = {"training__steps": STEPS, "training__checkpoint_every": 20, "training__evaluate_every": 80}
ORPHANS_MAY_LIVE = 15.0
"""seconds of CPU time, or without progress, after the death of their launcher: one step and 10 s, and a margin"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class TorchrunJob:
    """One torchrun, or one per node, and all processes that they have started."""

    def __init__(self, launches: Sequence[tuple[list[str], Path, dict[str, str]]]):
        self.logs = [folder / f"torchrun-{i}.log" for i, (_, folder, _) in enumerate(launches)]
        self.launchers = []
        for (command, folder, extra), log in zip(launches, self.logs, strict=True):
            with log.open("wb") as file:
                self.launchers.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()} | extra,
                    )
                )
        self.seen: set[int] = set()

    def processes(self) -> set[int]:
        """All that are alive, including those whose parent has died since they were first seen."""
        self.seen |= descendants([launcher.pid for launcher in self.launchers])
        return {pid for pid in self.seen if is_alive(pid)}

    def wait(self, seconds: float) -> list[int] | None:
        """Wait for the exit codes of the launchers. None if they hang: see HangDetector."""
        detector = HangDetector(seconds)
        while not detector.check(self.processes()):
            if all(launcher.poll() is not None for launcher in self.launchers):
                return [launcher.returncode for launcher in self.launchers]
            time.sleep(0.05)
        return None

    def wait_for_all(self, seconds: float) -> set[int]:
        """Wait until no process is alive. Returns those that hang."""
        detector = HangDetector(seconds)
        while left := self.processes():
            if detector.check(left):
                return left
            time.sleep(0.05)
        return set()

    def wait_for_step(self, run: Path, step: int, seconds: float) -> bool:
        detector = HangDetector(seconds)
        while any(launcher.poll() is None for launcher in self.launchers):
            if detector.check(self.processes()):
                break
            if last_step(run) >= step:
                return True
            time.sleep(0.005)
        return False

    def end(self) -> None:
        """Kill the processes that are still alive, by their ids."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()

    def last_lines(self) -> str:
        return "; ".join(last_line(log.read_text(errors="replace")) for log in self.logs)


class Ranks(Shard):
    """Two ranks on this machine. One of them, or the launcher, is killed with SIGKILL at a random step."""

    name = "ranks"
    what = "kill -9 of a rank or of the launcher under torchrun"
    counts: ClassVar[Mapping[str, int]] = {"rank 0": 15, "rank 1": 15, "launcher": 20}
    small = 1

    def launch(self, argv: Sequence[str], folder: Path) -> TorchrunJob:
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "clearhead", *argv]
        return TorchrunJob([(command, folder, {})])

    def reference_run(self) -> Path:
        return reference_run(self, self.workspace)

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        reference, run = self.reference_run(), folder / "runs" / "run"
        job = self.launch(self.workspace.train(MODEL, **LONGER), folder)
        try:
            if not job.wait_for_step(run, rng.randrange(1, STEPS * 2 // 3), HANG_SECONDS):
                return [Failure("case not finished", f"no step was reached: {job.last_lines()}")]
            saved = max(saved_steps(run), default=0)
            victims = [pid for pid in job.processes() if rank_of(pid) == kind.removeprefix("rank ")]
            os.kill(job.launchers[0].pid if kind == "launcher" else victims[0], signal.SIGKILL)
            found = self.after_the_kill(kind, job, run)
        finally:
            job.end()
        found += check_saved(run, saved)
        return found + self.resume_and_compare(folder, reference)

    def after_the_kill(self, kind: str, job: TorchrunJob, run: Path) -> list[Failure]:
        """No rank may continue without its launcher, and the launcher must not wait for a dead rank."""
        limit = ORPHANS_MAY_LIVE if kind == "launcher" else 120.0
        if left := job.wait_for_all(limit):
            return [
                Failure(
                    "process left", f"{len(left)} processes did not end within {limit:g} s after the {kind} was killed"
                )
            ]
        if kind == "launcher" and max(saved_steps(run), default=0) < last_step(run):
            newest = max(saved_steps(run), default=0)
            return [Failure("no checkpoint", f"ranks without a launcher ended after step {last_step(run)}, {newest=}")]
        return []

    def resume_and_compare(self, folder: Path, reference: Path) -> list[Failure]:
        job = self.launch(["resume", "runs/run"], folder)
        try:
            codes = job.wait(HANG_SECONDS)
        finally:
            job.end()
        if codes is None or any(codes):
            return [Failure("wrong exit code", f"the resume ended with {codes}: {job.last_lines()}")]
        return [Failure("silent difference", line) for line in differences(folder / "runs" / "run", reference)]


class TwoNodes(Shard):
    """The second node is lost with all its processes at a random step. The first one must end by itself."""

    name = "nodes"
    what = "one of two nodes is lost, then both resume"
    counts: ClassVar[Mapping[str, int]] = {"node lost": 5}
    small = 1

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.network = Network()
        self.note = self.network.reason

    def end(self) -> None:
        if hasattr(self, "network"):
            self.network.remove()

    def launch(self, argv: Sequence[str], folder: Path) -> TorchrunJob:
        port, launches = free_port(), []
        for node, home in enumerate((folder, folder / "second")):
            home.mkdir(exist_ok=True)
            where = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
            meet = ["--master-addr", self.network.address, "--master-port", str(port)]
            command = [*self.network.prefix(node), *TORCHRUN, *where, *meet, "-m", "clearhead", *argv]
            launches.append((command, home, {"GLOO_SOCKET_IFNAME": self.network.device(node)}))
        return TorchrunJob(launches)

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        before, run = reference_run(self, self.workspace), folder / "runs" / "run"
        job = self.launch(self.workspace.train(MODEL, **LONGER), folder)
        try:
            if not job.wait_for_step(run, rng.randrange(1, STEPS * 2 // 3), HANG_SECONDS):
                return [Failure("case not finished", f"no step was reached: {job.last_lines()}")]
            saved = max(saved_steps(run), default=0)
            for pid in descendants([job.launchers[1].pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            codes = job.wait(120)
            left = job.processes() if codes is None else set()
        finally:
            job.end()
        found = (
            [Failure("process left", f"{len(left)} processes of the first node did not end within 120 s")]
            if left
            else []
        )
        if codes and codes[0] == 0:
            found.append(Failure("wrong exit code", "the first node ended with code 0 after the second was lost"))
        if (folder / "second" / "runs").exists():
            found.append(Failure("write outside", "the second node, which has no run directory, wrote one"))
        found += check_saved(run, saved)
        return found + Ranks.resume_and_compare(self, folder, before)  # type: ignore[arg-type]


def reference_run(shard: Any, workspace: Workspace) -> Path:
    """A run by the same processes without faults, trained once."""
    home = workspace.folder / f"reference-{shard.name}"
    if not home.exists():
        home.mkdir()
        job = shard.launch(workspace.train(MODEL, **LONGER), home)
        try:
            codes = job.wait(HANG_SECONDS)
        finally:
            job.end()
        if codes is None or any(codes):
            shutil.rmtree(home)
            raise RuntimeError(f"the reference run ended with {codes}: {job.last_lines()}")
    return home / "runs" / "run"


class Network:
    """Two connected network namespaces; both nodes on 127.0.0.1 where they are not permitted."""

    def __init__(self) -> None:
        number = os.getpid()
        self.names = [f"clearhead-{number}-{node}" for node in (0, 1)]
        self.devices = [f"ch{number % 100000}{end}" for end in "ab"]
        self.reason = ""
        try:
            self.make()
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip() or str(error)
            self.reason = f"no network namespaces ({why}): both nodes were on 127.0.0.1"
            self.remove()

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for node, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("link", "del", self.devices[0])  # unless it was deleted with its namespace

    @property
    def address(self) -> str:
        return "127.0.0.1" if self.reason else "10.77.0.1"

    def prefix(self, node: int) -> list[str]:
        return [] if self.reason else ["ip", "netns", "exec", self.names[node]]

    def device(self, node: int) -> str:
        return "lo" if self.reason else self.devices[node]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(Path(clearhead.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def rank_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if pair.startswith(b"RANK="):
                return pair.partition(b"=")[2].decode()
    return None


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


def last_step(run: Path) -> int:
    """The step of the last complete record."""
    import json

    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return max((json.loads(line).get("step", 0) for line in lines[-3:]), default=0)
    except (OSError, ValueError):
        return 0
