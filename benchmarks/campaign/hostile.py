"""Run directories of strangers, with links and special files: nothing outside may change, and nothing may hang."""

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.campaign.processes import run
from benchmarks.campaign.runs import Stage, check_ended
from benchmarks.campaign.shards import Failure, Shard

MODEL = "vit"
PLACES = (
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
"""for one command, on a busy machine"""


class Links(Shard):
    """One place in the run is a link or a special file; then the commands that read and write it are run."""

    name = "links"
    what = "symbolic link, hard link or FIFO in a run directory"
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("link to its own content", "link to a file", "link to a folder", "hard link", "FIFO"), len(PLACES)
    )
    small = 1

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.run = stage.undisturbed(MODEL, "-probed", snapshots__inputs=2, snapshots__every=4)

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        place = random.Random(kind).sample(PLACES, len(PLACES))[number]
        outside = self.stage.new("outside")
        (outside / "victim.txt").write_text("precious\n")
        (outside / "victims").mkdir()
        (outside / "victims" / "step-00000001").write_text("precious\n")
        (folder / "picture.png").write_bytes((self.stage.data / "pictures" / "red" / "0.png").read_bytes())
        found = []
        for command in COMMANDS:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            copy = self.stage.copy(self.run, folder)
            newest = max(copy.glob("checkpoints/step-*")).relative_to(copy)
            plant(kind, copy / place.replace("NEWEST", str(newest)), outside)
            before = state_of(outside)
            what = f"{command[0]} with {place} as a {kind}"
            ended = run(command, folder, SECONDS, may_write=[self.stage.cache])
            found += check_ended(ended, [0, 1, 2], what)
            if lines := changes(before, state_of(outside)):
                found.append(Failure("write outside", f"{what}: {'; '.join(lines[:3])} ({len(lines)} changes)"))
        return found


def plant(kind: str, place: Path, outside: Path) -> None:
    """Puts a link or a special file in a place of the run; of its own content, the content moves outside."""
    place.parent.mkdir(exist_ok=True)
    if kind == "link to its own content" and os.path.lexists(place):
        moved = outside / "moved"
        remove(moved)
        os.rename(place, moved)
        os.symlink(moved, place)
        return
    remove(place)
    match kind:
        case "link to a folder":
            os.symlink(outside / "victims", place)
        case "hard link":
            os.link(outside / "victim.txt", place)
        case "FIFO":
            os.mkfifo(place)
        case _:
            os.symlink(outside / "victim.txt", place)


def remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def state_of(folder: Path) -> dict[str, str]:
    """Names and contents below a folder, and when each was changed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else "-"
        found[str(path.relative_to(folder))] = f"{status.st_mode} {status.st_mtime_ns} {content}"
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {'changed' if name in before and name in after else 'deleted' if name in before else 'made'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
