"""Power failures: the file calls of a run are recorded, and the disk is rebuilt as a failure might have left it."""

import base64
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.disk import MODEL
from benchmarks.campaign.processes import Prepare, Report, intercept, path_of, run
from benchmarks.campaign.runs import HANG_SECONDS, Workspace, check_saved, resume_and_compare
from benchmarks.campaign.shards import Failure, Shard


class PowerFailures(Shard):
    """The file calls of a training run are recorded. For each case a moment is chosen, and the folder is rebuilt from
    what was synced until then and a random part of what was not: see `survivors`."""

    name = "power"
    what = "power failure: unsynced writes are lost"
    counts: ClassVar[Mapping[str, int]] = {"moment": 300}
    small = 8

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        workspace.reference_run(MODEL)
        folder = workspace.new("recorded")
        record = folder.with_suffix(".jsonl")
        ended = run(
            workspace.train(MODEL), folder, HANG_SECONDS, prepare=record_to(record), may_write=[workspace.folder]
        )
        if ended.code:
            raise RuntimeError(f"the recorded run ended with code {ended.code}: {ended.err.strip()[-200:]}")
        self.operations = [json.loads(line) for line in record.read_text().splitlines()]

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        moment = rng.randrange(1, len(self.operations) + 1)
        done = self.operations[:moment]
        saved = max([op["step"] for op in done if op["do"] == "saved"], default=0)
        survivors(done, rng).build(folder)
        found = check_saved(folder / "runs" / "run", saved)
        at = f"operation {moment} of {len(self.operations)}"
        if not (folder / "runs" / "run" / "config.json").exists():
            shutil.rmtree(
                folder / "runs", ignore_errors=True
            )  # nothing was saved yet; a lost save has been found above
        return [Failure(f.kind, f"{at}: {f.what}") for f in
                found + resume_and_compare(self.workspace, MODEL, folder, 0)]  # fmt: skip


def record_to(path: Path) -> Prepare:
    """Record each operation that changes the folder, and each completed save, as a line of JSON."""

    def prepare(report: Report) -> None:
        from clearhead.training.run_directory import RunDirectory

        root = Path.cwd()
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        write = os.write

        def note(**operation: Any) -> None:
            write(log, json.dumps(operation).encode() + b"\n")

        def relative(target: Any, kwargs: dict[str, Any]) -> str:
            return os.path.relpath(path_of(target, kwargs), root)

        def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
            if name in ("rename", "replace"):
                source, target = relative(args[0], {}), relative(args[1], {})
                result = call(*args, **kwargs)
                note(do="rename", path=source, to=target)
                return result
            where = relative(args[0], kwargs)
            is_new = name == "open" and args[1] & os.O_CREAT and not os.path.lexists(root / where)
            result = call(*args, **kwargs)
            if name == "write":
                note(do="write", path=where, data=base64.b64encode(bytes(args[1])[:result]).decode())
            elif name == "ftruncate":
                note(do="truncate", path=where, size=args[1])
            elif name in ("mkdir", "unlink", "rmdir", "fsync"):
                note(do=name, path=where)
            elif is_new:
                note(do="create", path=where)
            elif name == "open" and args[1] & os.O_TRUNC:
                note(do="truncate", path=where, size=0)
            elif name == "read" and set(args[1] if len(args) > 1 else kwargs.get("mode", "r")) & set("wax+"):
                raise AssertionError(f"{where} is written by a call that the recorder does not see")
            return result

        save = RunDirectory.save

        def saved(self: Any, snapshot: Any, *args: Any, **kwargs: Any) -> Any:
            saved_path = save(self, snapshot, *args, **kwargs)
            note(do="saved", step=snapshot.step)
            return saved_path

        RunDirectory.save = saved  # type: ignore[method-assign]
        intercept(root / "runs", hook)

    return prepare


@dataclass
class Node:
    """A file or a folder, whatever its names are."""

    is_folder: bool
    writes: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    """time, offset, and bytes; None for a truncation"""
    synced: int = -1
    """time of the last fsync"""
    length: int = 0
    entries: "dict[str, Node]" = field(default_factory=dict)

    def content(self, rng: random.Random) -> bytes:
        """What was synced, followed by a prefix of later writes. The last of them may be zeros: a file whose new length
        reached the disk before its data."""
        later = [write for write in self.writes if write[0] > self.synced]
        kept = later[: rng.randint(0, len(later))]
        data = bytearray()
        for when, offset, new in self.writes:
            if when > self.synced and (when, offset, new) not in kept:
                break
            if new is None:
                del data[offset:]
                continue
            is_last = bool(kept) and (when, offset, new) == kept[-1]
            if is_last and rng.random() < 0.5:
                new = new[: rng.randint(0, len(new))] if rng.random() < 0.5 else bytes(len(new))
            data[offset : offset + len(new)] = new
        return bytes(data)


@dataclass
class Disk:
    """The state of a disk after a power failure."""

    root: Node
    rng: random.Random

    def build(self, folder: Path) -> None:
        self.build_node(self.root, folder)

    def build_node(self, node: Node, path: Path) -> None:
        if not node.is_folder:
            path.write_bytes(node.content(self.rng))
            return
        path.mkdir(exist_ok=True)
        for name, inner in node.entries.items():
            self.build_node(inner, path / name)


def survivors(operations: list[dict[str, Any]], rng: random.Random) -> Disk:
    """What a power failure after these operations leaves.

    A file keeps its bytes as of its last fsync. The names in a folder are those of its last fsync, too, followed by a
    prefix of its later changes: of none (nothing beyond what was synced), of all folders together up to one moment (a
    journal), or of each folder for itself. A rename is atomic. The fsync of a folder covers its own name as well, as
    on ext4, XFS and Btrfs.
    """
    now, live, changes, synced_names = 0, Node(True), [], {}  # type: ignore[var-annotated]
    last_sync: dict[int, int] = {}

    def find(path: str) -> Node:
        node = live
        for part in Path(path).parts:
            node = node.entries[part]
        return node

    def change(folder: Node, name: str, node: Node | None, group: int) -> None:
        changes.append((now, folder, name, node, group))
        if node is None:
            folder.entries.pop(name, None)
        else:
            folder.entries[name] = node

    for now, op in enumerate(operations):
        if op["do"] == "saved":
            continue
        path = Path(op["path"])
        parent = find(str(path.parent))
        match op["do"]:
            case "mkdir" | "create":
                change(parent, path.name, Node(op["do"] == "mkdir"), now)
            case "unlink" | "rmdir":
                change(parent, path.name, None, now)
            case "rename":
                to = Path(op["to"])
                node = find(op["path"])
                change(find(str(to.parent)), to.name, node, now)
                change(parent, path.name, None, now)
            case "write":
                node, data = find(op["path"]), base64.b64decode(op["data"])
                node.writes.append((now, node.length, data))
                node.length += len(data)
            case "truncate":
                node = find(op["path"])
                node.writes.append((now, op["size"], None))
                node.length = op["size"]
            case "fsync":
                node = find(op["path"])
                node.synced = now
                last_sync[id(node)] = now
                if node.is_folder and parent is not node:
                    synced_names[id(parent), path.name] = now
    return replayed(changes, last_sync, synced_names, len(operations), rng)


def replayed(
    changes: list[tuple[int, Node, str, Node | None, int]],
    last_sync: dict[int, int],
    synced_names: dict[tuple[int, str], int],
    end: int,
    rng: random.Random,
) -> Disk:
    """Rebuild the folders from the changes that reached the disk."""
    way = rng.choice(("nothing more", "a journal", "each for itself"))
    journal = rng.randint(0, end)
    until: dict[int, int] = {}
    root = Node(True)
    copies: dict[int, Node] = {}

    def copy_of(node: Node) -> Node:
        if id(node) not in copies:
            copies[id(node)] = Node(node.is_folder, node.writes, node.synced)
        return copies[id(node)]

    def survives(when: int, folder: Node, name: str) -> bool:
        if when <= last_sync.get(id(folder), -1) or when <= synced_names.get((id(folder), name), -1):
            return True
        if way == "a journal":
            return when <= journal
        if way == "each for itself":
            if id(folder) not in until:
                until[id(folder)] = rng.randint(0, end)
            return when <= until[id(folder)]
        return False

    groups: dict[int, bool] = {}
    for when, folder, name, _, group in changes:
        groups[group] = groups.get(group, False) or survives(when, folder, name)
    live_root = changes[0][1] if changes else root
    copies[id(live_root)] = root
    for _, folder, name, node, group in changes:
        if not groups[group]:
            continue
        if node is None:
            copy_of(folder).entries.pop(name, None)
        else:
            copy_of(folder).entries[name] = copy_of(node)
    return Disk(root, rng)
