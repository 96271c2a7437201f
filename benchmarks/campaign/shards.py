"""A shard runs cases of a few kinds one by one. Its results are a JSON file, from which it can be continued."""

import datetime
import hashlib
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from benchmarks.campaign.runs import Workspace

import clearhead

MAX_FAILURES = 50
"""failures that a result lists; further ones are only counted"""


class Failure(NamedTuple):
    kind: str
    """one of the four that must never happen ("lost save", "silent difference", "write outside", "exit 5"), or
    another, such as "hang" or "wrong exit code" """
    what: str


class Shard(ABC):
    """One kind of fault. Subclasses are final."""

    name: str
    what: str
    """a noun phrase for the table: "kill -9 at random moments" """
    counts: ClassVar[Mapping[str, int]]
    """cases of each kind in the full campaign"""
    small: int = 2
    """cases of each kind with --small"""
    batch: int = 1
    """cases that one call of `case` runs"""
    size: int = 1
    """cases of the current batch; the last one may have fewer than `batch`"""
    seed: int = 1
    """from which each input of a batch is drawn"""
    note: str = ""
    """which fallback was used, if any"""
    peak_mb: float | None = None
    """peak memory of a child process above the baseline after imports, where it is measured"""

    def begin(self, workspace: Workspace) -> None:
        """Prepare what all cases share. May set `counts` and `note`."""
        self.workspace = workspace

    @abstractmethod
    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        """Run case `number` of a kind, or the batch that begins with it, in an empty folder."""

    def end(self) -> None:  # noqa: B027 (most shards have nothing to restore)
        """Undo what `begin` has changed outside of the workspace."""

    def limits(self, small: bool, count: int | None) -> dict[str, int]:
        """The number of cases of each kind to run."""
        most = count if count is not None else self.small if small else None
        return {kind: n if most is None else min(n, most) for kind, n in self.counts.items()}


def run_shard(
    shard: Shard,
    results: Path,
    seed: int,
    *,
    small: bool = False,
    count: int | None = None,
    until: float = float("inf"),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the cases that have not been run yet. Returns the result, which is also stored in the shard's file."""
    path = results / f"{shard.name}.json"
    with tempfile.TemporaryDirectory(prefix=f"campaign-{shard.name}-") as work:
        try:
            shard.begin(Workspace(Path(work)))
            result = load_or_start(path, shard, seed)
            limits = shard.limits(small, count)
            while (kind := next_kind(result["done"], limits)) is not None and time.monotonic() < until:
                began = time.monotonic()
                number = result["done"][kind]
                size = min(shard.batch, limits[kind] - number)
                found = run_case(shard, kind, number, seed, Path(work) / "case", size)
                result["done"][kind] = number + size
                result["n_failures"] += len(found)
                for failure in found:
                    result["kinds"][failure.kind] = result["kinds"].get(failure.kind, 0) + 1
                command = f'python -m benchmarks.campaign {shard.name} --seed {seed} --only "{kind} {number}"'
                entries = [{"kind": f.kind, "what": f.what[:400], "reproduce": command} for f in found]
                result["failures"] = (result["failures"] + entries)[:MAX_FAILURES]
                result["seconds"] = round(result["seconds"] + time.monotonic() - began, 1)
                result |= {"note": shard.note, "date": datetime.date.today().isoformat()}
                if shard.peak_mb is not None:
                    result["peak_mb"] = round(max(result.get("peak_mb", 0.0), shard.peak_mb), 1)
                save_result(path, result)
                for failure in found:
                    say(f"{shard.name} {kind} {number}: {failure.kind}: {failure.what}")
            save_result(path, result)
        finally:
            shard.end()
    done, wanted = sum(result["done"].values()), sum(shard.counts.values())
    say(f"{shard.name}: {done:,} of {wanted:,} cases, {result['n_failures']} failures, {result['seconds']:.0f} s")
    return result


def run_case(shard: Shard, kind: str, number: int, seed: int, folder: Path, size: int = 1) -> list[Failure]:
    """Run one case, or one batch of `size` cases."""
    make_empty(folder)
    shard.size, shard.seed = size, seed
    try:
        return shard.case(kind, number, random.Random(f"{seed} {shard.name} {kind} {number}"), folder)
    except Exception as error:  # one broken case must neither stop the campaign nor go unnoticed
        return [Failure("case not finished", f"{type(error).__name__}: {error}")]


def make_empty(folder: Path) -> None:
    """Replace the folder of the previous case; a killed process may still be writing to it for a moment."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.1)
    folder.mkdir()


def next_kind(done: Mapping[str, int], limits: Mapping[str, int]) -> str | None:
    """The kind with the smallest completed fraction, so that an interrupted shard has run some of each."""
    left = {kind: done.get(kind, 0) / limit for kind, limit in limits.items() if done.get(kind, 0) < limit}
    return min(left, key=lambda kind: left[kind]) if left else None


def load_or_start(path: Path, shard: Shard, seed: int) -> dict[str, Any]:
    """The stored result, if its seed, sources and software are the same; otherwise an empty one."""
    same = {"shard": shard.name, "seed": seed, **environment()}
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if all(stored.get(name) == value for name, value in same.items()):
            done = {kind: stored["done"].get(kind, 0) for kind in shard.counts}
            return stored | {"wanted": dict(shard.counts), "done": done}
    return same | {
        "what": shard.what,
        "wanted": dict(shard.counts),
        "done": dict.fromkeys(shard.counts, 0),
        "n_failures": 0,
        "kinds": {},
        "failures": [],
        "note": shard.note,
        "date": datetime.date.today().isoformat(),
        "seconds": 0.0,
    }


def save_result(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)


def environment() -> dict[str, str]:
    """What a result depends on besides its seed."""
    return {
        "source": source_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def source_digest() -> str:
    """A digest of all source files of the package: results of another version are not continued."""
    root = Path(clearhead.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """The kind of processor, which determines the last bits of a result."""
    return f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def unsupported_reason() -> str:
    """Why the campaign cannot run on this system; "" where it can."""
    return "" if sys.platform == "linux" else f"the campaign needs Linux (it reads /proc and forks), got {sys.platform}"
