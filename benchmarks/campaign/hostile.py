"""Run directories with links and special files: nothing outside may change, and nothing may hang."""

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.campaign.processes import run
from benchmarks.campaign.runs import Workspace, check_exit
from benchmarks.campaign.shards import Failure, Shard

MODEL = "vit"
PATHS = (
    "lock", "metrics.jsonl", "config.json", "best.json", "checkpoints", "snapshots", "figures", "NEWEST",
    "NEWEST/model.safetensors", "NEWEST/manifest.json", "checkpoints/saving-step-00000028",
    "checkpoints/step-00000099", "snapshots/step-00000024.safetensors", ".config.json.00000000.part",
)  # fmt: skip
"""in a run directory; NEWEST is its newest checkpoint"""
COMMANDS = (
    ["resume", "runs/run", "--steps", "30"],
    ["predict", "runs/run", "picture.png"],
    ["curves", "runs/run"],
    ["look", "runs/run", "--training-dynamics"],
    ["runs"],
)
SECONDS = 40.0
"""of CPU time, or without progress, for one command"""


class Links(Shard):
    """One path in the run is a link or a special file, and then the commands that read and write it are run."""

    name = "links"
    what = "symbolic link, hard link or FIFO in a run directory"
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("link to its own content", "link to a file", "link to a folder", "hard link", "FIFO"), len(PATHS)
    )
    small = 1

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.run = workspace.reference_run(MODEL, "-snapshots", snapshots__inputs=2, snapshots__every=4)

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        name = random.Random(kind).sample(PATHS, len(PATHS))[number]
        outside = self.workspace.new("outside")
        (outside / "victim.txt").write_text("precious\n")
        (outside / "victims").mkdir()
        (outside / "victims" / "step-00000001").write_text("precious\n")
        (folder / "picture.png").write_bytes((self.workspace.data / "pictures" / "red" / "0.png").read_bytes())
        found = []
        for command in COMMANDS:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            copy = self.workspace.copy(self.run, folder)
            newest = max(copy.glob("checkpoints/step-*")).relative_to(copy)
            plant(kind, copy / name.replace("NEWEST", str(newest)), outside)
            before = tree_state(outside)
            what = f"{command[0]} with {name} as a {kind}"
            ended = run(command, folder, SECONDS, may_write=[self.workspace.cache])
            found += check_exit(ended, [0, 1, 2], what)
            if lines := changes(before, tree_state(outside)):
                found.append(Failure("write outside", f"{what}: {'; '.join(lines[:3])} ({len(lines)} changes)"))
        return found


def plant(kind: str, path: Path, outside: Path) -> None:
    """Replace a path of the run by a link or a special file. A link to its own content moves the content outside."""
    path.parent.mkdir(exist_ok=True)
    if kind == "link to its own content" and os.path.lexists(path):
        moved = outside / "moved"
        remove(moved)
        os.rename(path, moved)
        os.symlink(moved, path)
        return
    remove(path)
    match kind:
        case "link to a folder":
            os.symlink(outside / "victims", path)
        case "hard link":
            os.link(outside / "victim.txt", path)
        case "FIFO":
            os.mkfifo(path)
        case _:
            os.symlink(outside / "victim.txt", path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def tree_state(folder: Path) -> dict[str, str]:
    """Mode, time of modification and digest of each path below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else "-"
        found[str(path.relative_to(folder))] = f"{status.st_mode} {status.st_mtime_ns} {content}"
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {'changed' if name in before and name in after else 'deleted' if name in before else 'created'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
