"""A command of Clearhead in a child process, observed by its parent.

The child is a fork of this process, which has imported torch already: a case costs milliseconds instead of seconds. It
reports through a pipe which checkpoints it has saved and whether it wrote outside its folder; a parent that kills it
knows from these lines what must not be lost.
"""

import builtins
import ctypes
import io
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign.hangs import HangDetector, descendants

Report = Callable[[str], None]
Prepare = Callable[[Report], None]
"""runs in the child before the command, and installs faults"""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}
"""audit events of calls that change a file system, besides some of "open" """
PR_SET_PDEATHSIG = 1
"""of prctl(2)"""
HARMLESS = ("/dev/", "/proc/")


@dataclass
class ChildResult:
    """What a child process leaves when it ends."""

    code: int
    """its exit code, or minus the number of the signal that ended it"""
    lines: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""
    hang: str = ""
    """why it was killed as a hang, if it was"""

    @property
    def saved(self) -> int:
        """The last step that was reported as saved, 0 if there was none."""
        return max([int(line.split()[1]) for line in self.lines if line.startswith("saved ")], default=0)

    @property
    def outside(self) -> list[str]:
        return [line for line in self.lines if line.startswith("outside ")]


class Child:
    """`clearhead ARGV` with `folder` as its current directory, in a session of its own."""

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        prepare: Prepare = lambda report: None,
        may_write: Sequence[Path] = (),
        name: str = "log",
        job: Callable[[], int] | None = None,
    ):
        self.folder, self.name = folder, name
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        listens, tells = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads; ours wait for nothing
            self.pid = os.fork()
        if self.pid == 0:
            os.close(listens)
            roots = [folder, *may_write]
            become(folder, self.out, self.err)
            say(tells, "started")
            run_in_child(argv, lambda line: say(tells, line), prepare, roots, job)
        os.close(tells)
        self.listens = listens
        self.text = b""
        self.code: int | None = None
        self.wait_for("started", 60)  # before that it has no process group, and cannot be signaled
        self.began = time.monotonic()

    def is_alive(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def lines(self) -> list[str]:
        """The lines that it has reported so far."""
        os.set_blocking(self.listens, False)
        try:
            while data := os.read(self.listens, 65536):
                self.text += data
        except BlockingIOError:
            pass
        return self.text.decode(errors="replace").splitlines()

    def wait_for(self, line: str, seconds: float) -> bool:
        """Wait until it reports a line with this prefix. False if it ends before that, or hangs."""
        detector = HangDetector(seconds)
        while not self.check(detector):
            if any(found.startswith(line) for found in self.lines()):
                return True
            if not self.is_alive():
                return any(found.startswith(line) for found in self.lines())
            time.sleep(0.001)
        return False

    def send(self, number: int) -> None:
        """Send a signal to the process and to all processes that it has started."""
        if self.is_alive():
            os.killpg(self.pid, number)

    def check(self, detector: HangDetector) -> str:
        """Why it hangs; "" while it does not."""
        return detector.check(descendants([self.pid])) if detector.is_due() else ""

    def wait(self, seconds: float) -> ChildResult:
        """Wait until it ends. It is killed if it hangs: see HangDetector."""
        detector, hang = HangDetector(seconds), ""
        while self.is_alive():
            if not hang and (hang := self.check(detector)):
                self.send(signal.SIGKILL)
            time.sleep(0.002)
        lines = self.lines()
        os.close(self.listens)
        assert self.code is not None
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in (self.out, self.err))
        return ChildResult(self.code, lines, out, err, hang)

    def kill_after(self, seconds: float) -> ChildResult:
        """Send SIGKILL so many seconds after its start, unless it ends before that."""
        while self.is_alive() and time.monotonic() - self.began < seconds:
            time.sleep(0.0005)
        self.send(signal.SIGKILL)
        return self.wait(600)


def run(argv: Sequence[str], folder: Path, seconds: float = 600, **options: Any) -> ChildResult:
    return Child(argv, folder, **options).wait(seconds)


def become(folder: Path, out: Path, err: Path) -> None:
    """Give the child its own session, current directory, streams and signal handlers."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a campaign that is killed leaves no process behind
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_in_child(
    argv: Sequence[str], report: Report, prepare: Prepare, roots: Sequence[Path], job: Callable[[], int] | None
) -> None:
    """Never returns."""
    try:
        from clearhead.cli.main import main

        watch_writes([root.resolve() for root in roots], report)
        report_saves(report)
        prepare(report)
        code = main(list(argv)) if job is None else job()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 99
    os._exit(code)


def say(file: int, line: str) -> None:
    os.write(file, f"{line}\n".encode(errors="replace"))


def report_saves(report: Report) -> None:
    """Report `saved STEP` as soon as a caller of `save` may rely on it."""
    from clearhead.training.run_directory import RunDirectory

    save = RunDirectory.save

    def reported(self: Any, snapshot: Any, *args: Any, **kwargs: Any) -> Any:
        path = save(self, snapshot, *args, **kwargs)
        report(f"saved {snapshot.step}")
        return path

    RunDirectory.save = reported  # type: ignore[method-assign]


def watch_writes(roots: Sequence[Path], report: Report) -> None:
    """Report `outside EVENT PATH` for each call that changes a file outside of all roots; links are resolved. Files
    that native code opens by itself are not seen; Clearhead writes none that way."""
    inside = tuple(f"{root}{os.sep}" for root in roots)
    is_busy = False

    def check(event: str, path: Any, dir_fd: Any = -1, *, follow: bool = False) -> None:
        if isinstance(path, int) or path is None:
            return
        path = os.fsdecode(path)
        if isinstance(dir_fd, int) and dir_fd >= 0 and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        full = os.path.abspath(path)
        folder, name = os.path.split(full)
        real = os.path.realpath(full) if follow else os.path.join(os.path.realpath(folder), name)
        if not f"{real}{os.sep}".startswith((*inside, *HARMLESS)):
            report(f"outside {event} {real}")

    def audit(event: str, args: tuple[Any, ...]) -> None:
        nonlocal is_busy
        if is_busy or (event != "open" and event not in CHANGES):
            return
        is_busy = True
        try:
            if event == "open":
                path, mode, flags = args
                if flags & WRITING or (isinstance(mode, str) and set(mode) & set("wax+")):
                    check(event, path, follow=not flags & os.O_NOFOLLOW)
            elif event in ("os.rename", "os.link"):
                check(event, args[0], args[2])
                check(event, args[1], args[3])
            elif event == "os.symlink":
                check(event, args[1], args[2])
            elif event == "os.mkdir":
                check(event, args[0], args[2])
            elif event == "os.truncate":
                check(event, args[0], follow=True)
            else:
                check(event, args[0], args[-1])
        finally:
            is_busy = False

    sys.addaudithook(audit)


CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate", "listdir", "scandir")
"""functions of `os` with which the package reads and changes folders; files are read with `open`"""
Hook = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def intercept(root: Path, hook: Hook) -> None:
    """Replace each file call on a path below `root` by hook(name, call, args, kwargs). Only for child processes."""
    prefix = str(root.resolve())

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            if args and path_of(args[0], kwargs).startswith(prefix):
                return hook(name, call, args, kwargs)
            return call(*args, **kwargs)

        return intercepted

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    io.open = builtins.open = wrapped("read", io.open)


def path_of(target: Any, kwargs: dict[str, Any]) -> str:
    """The path that a call acts on, given as a path, a name in an open folder, or an open file."""
    try:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        path = os.fsdecode(target)
        if kwargs.get("dir_fd") is not None and not os.path.isabs(path):
            return os.path.join(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"), path)
        return os.path.abspath(path)
    except (OSError, TypeError):
        return ""
