"""An imitation of Windows: `install(locks)` makes this process see what Python offers there.

Unix-only modules cannot be imported, Unix-only attributes of os and signal are gone, folders cannot be opened, files
that are open can neither be renamed nor deleted, a rename never replaces anything, and `msvcrt.locking` locks bytes.
Paths are still those of Unix.
"""

import fcntl
import os
import shutil
import signal
import sys
import types
from pathlib import Path

MODULES = (
    *("fcntl", "resource", "termios", "pwd", "grp", "posix", "tty", "pty", "syslog", "readline", "curses"),
    *("spwd", "crypt", "nis", "_posixshmem"),
)
"""modules of the standard library that Windows lacks"""
OS_ATTRIBUTES = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_DSYNC", "O_NDELAY", "O_NOATIME", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK"),
    *("O_PATH", "O_SYNC", "O_TMPFILE", "chown", "chroot", "confstr", "copy_file_range", "ctermid", "eventfd"),
    *("fchdir", "fchmod", "fchown", "fdatasync", "fork", "forkpty", "fpathconf", "fstatvfs", "getegid", "geteuid"),
    *("getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getrandom", "getresuid", "getsid"),
    *("getuid", "getxattr", "initgroups", "killpg", "lchown", "listxattr", "lockf", "major", "makedev", "memfd_create"),
    *("minor", "mkfifo", "mknod", "nice", "openpty", "pathconf", "pidfd_open", "pipe2", "posix_fadvise"),
    *("posix_fallocate", "posix_spawn", "posix_spawnp", "pread", "preadv", "pwrite", "pwritev", "readv"),
    *("register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile", "setegid", "seteuid"),
    *("setgid", "setpgid", "setpriority", "setsid", "setuid", "splice", "statvfs", "sync", "sysconf", "tcgetpgrp"),
    *("tcsetpgrp", "ttyname", "uname", "wait", "wait3", "wait4", "waitid", "writev"),
)
"""attributes of os that Windows lacks"""
SIGNALS = ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
"""attributes of signal that Windows lacks, and these functions"""
SIGNAL_FUNCTIONS = ("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigwait")


class LockedBytes:
    """msvcrt: exclusive locks on bytes, held by a descriptor. A real lock on another file stands for each of them."""

    LK_UNLCK, LK_LOCK, LK_NBLCK, LK_RLCK, LK_NBRLCK = range(5)

    def __init__(self, folder: Path):
        self.folder, self.flock, self.exclusive = folder, fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB
        self.close, self.held = os.close, {}

    def locking(self, file: int, mode: int, n_bytes: int) -> None:
        found, offset = os.fstat(file), os.lseek(file, 0, os.SEEK_CUR)
        assert offset >= found.st_size, "others could not read the process id"
        assert n_bytes == 1
        if mode == self.LK_UNLCK:
            if (file, offset) not in self.held:
                raise PermissionError(13, "Permission denied")
            self.close(self.held.pop((file, offset)))
            return
        assert mode == self.LK_NBLCK, "the others wait for ten seconds"
        other = os.open(self.folder / f"{found.st_ino}-{offset}", os.O_RDWR | os.O_CREAT)
        try:
            self.flock(other, self.exclusive)
        except BlockingIOError:
            self.close(other)
            raise PermissionError(13, "Permission denied") from None
        self.held[file, offset] = other

    def closing(self, file: int) -> None:
        assert all(file != locked for locked, _ in self.held), "unlock a file before it is closed"
        self.close(file)


def install(locks: Path) -> None:
    """The imitation begins. Third-party modules must have been imported before."""
    msvcrt = LockedBytes(locks)
    module = types.ModuleType("msvcrt")
    for name in ("LK_UNLCK", "LK_LOCK", "LK_NBLCK", "LK_RLCK", "LK_NBRLCK", "locking"):
        setattr(module, name, getattr(msvcrt, name))
    sys.modules["msvcrt"] = module
    os.close = msvcrt.closing
    patch_calls()
    for owner, names in ((os, OS_ATTRIBUTES), (signal, (*SIGNALS, *SIGNAL_FUNCTIONS))):
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)
    for name in MODULES:
        sys.modules[name] = None
    os.O_BINARY = 0
    os.supports_dir_fd.clear()
    os.supports_fd.clear()
    os.supports_follow_symlinks.clear()
    shutil._use_fd_functions = False
    sys.platform = "win32"


def patch_calls() -> None:
    """Folders cannot be opened; what is open cannot be renamed or deleted; a rename does not replace anything."""
    real = {name: getattr(os, name) for name in ("open", "rename", "replace", "unlink", "rmdir")}

    def open_file(path, flags, mode=0o777, *, dir_fd=None):
        assert dir_fd is None
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real["open"](path, flags, mode)

    def check_closed(path):
        inside = os.path.realpath(path)
        for number in os.listdir("/proc/self/fd"):
            try:
                used = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if used == inside or used.startswith(inside + os.sep):
                raise PermissionError(13, "The process cannot access the file because it is in use", os.fspath(path))

    def rename(source, target):
        check_closed(source)
        if os.path.lexists(target):
            raise FileExistsError(17, "Cannot create a file when that file already exists", os.fspath(target))
        real["rename"](source, target)

    def replace(source, target):
        check_closed(source)
        check_closed(target)
        if os.path.isdir(target):
            raise PermissionError(13, "Access is denied", os.fspath(target))
        real["replace"](source, target)

    def deleting(name):
        def delete(path, *, dir_fd=None):
            assert dir_fd is None
            check_closed(path)
            real[name](path)

        return delete

    os.open, os.rename, os.replace = open_file, rename, replace
    os.unlink = os.remove = deleting("unlink")
    os.rmdir = deleting("rmdir")
