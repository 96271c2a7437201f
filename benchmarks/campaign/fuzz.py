"""Mutated inputs for everything that reads somebody else's bytes, under limits of memory and time.

Only what a user can be told in one line may come out of a parser: ValueError, LookupError and OSError, but neither
KeyError nor IndexError nor UnicodeError, which nobody has written for a reader. Input `number` of a parser is
determined by the seed, the parser and the number.
"""

import contextlib
import gzip
import io
import json
import mmap
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from benchmarks.campaign.hangs import TooLongError, time_limit
from benchmarks.campaign.processes import Child
from benchmarks.campaign.runs import PATIENCE, Stage
from benchmarks.campaign.shards import Failure, Shard

MOST_MEMORY = 512 * 2**20
"""bytes above the baseline after imports"""
ROOM = 2 * 2**30
"""of address space beyond the baseline: what would take more is refused by the system, not by the machine's collapse"""
MOST_SECONDS = 20.0
"""of CPU time, or without progress, for one input"""
REFUSALS = (ValueError, LookupError, OSError)
MISTAKES = (KeyError, IndexError, UnicodeError)
"""are refusals by their type, and mistakes all the same: `clearhead` ends with code 5"""

Parse = Callable[[Path], Any]
"""reads a file that exists"""


class Fuzz(Shard):
    """Cases are inputs; a batch of them is read in one child."""

    batch = 500

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        """By kind: the name of the file that is mutated, and what reads it."""
        raise NotImplementedError

    def input(self, kind: str, rng: random.Random) -> bytes:
        raise NotImplementedError

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        name, parse = self.parsers()[kind]
        at = mmap.mmap(-1, 8)  # shared with the child: which input it was at when it died
        self.prepare(kind, folder)
        child = Child([], folder, job=lambda: self.read_all(kind, number, folder / name, parse, at))
        ended = child.wait(max(PATIENCE, self.size * 0.5))
        found = [
            Failure(*line.removeprefix("failure ").split(": ", 1))
            for line in ended.out.splitlines()
            if line.startswith("failure ")
        ]
        found += [Failure("write outside", line) for line in ended.outside]
        where = f"{kind} {number + struct.unpack('q', at[:])[0]}"
        if ended.hang:
            found.append(Failure("hang", f"{where}: {ended.hang}"))
        elif ended.code != 0:
            found.append(Failure("process died", f"{where}: code {ended.code}: {ended.err.strip()[-200:]}"))
        return found

    def prepare(self, kind: str, folder: Path) -> None:
        """Puts what the parser needs beside the mutated file into the folder."""

    def read_all(self, kind: str, first: int, path: Path, parse: Parse, at: mmap.mmap) -> int:
        """In the child."""
        baseline, limit = peak_memory(), address_space() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for i in range(self.size):
            at[:] = struct.pack("q", i)
            data = self.input(kind, random.Random(f"{self.seed} {self.name} {kind} {first + i}"))
            path.write_bytes(data)
            if (problem := read_one(parse, path)) is not None:
                os.write(1, f"failure {problem.kind}: {kind} {first + i}: {problem.what}\n".encode(errors="replace"))
            if (used := peak_memory() - baseline) > MOST_MEMORY:
                what = f"{kind} {first + i}: {used / 2**20:,.0f} MB for {len(data):,} bytes"
                os.write(1, f"failure memory: {what}\n".encode())
                baseline += used  # of further inputs only those that need even more are reported
        return 0


def read_one(parse: Parse, path: Path, seconds: float = MOST_SECONDS) -> Failure | None:
    """None if the parser reads its input or refuses it as it should."""
    try:
        with time_limit(seconds):
            parse(path)
    except TooLongError as error:
        return Failure("hang", str(error))
    except REFUSALS as error:
        if isinstance(error, MISTAKES):
            return Failure("exit 5", in_a_line(error))
        if not str(error).strip():
            return Failure("no single line", f"{type(error).__name__} without a message")
    except MemoryError:
        return Failure("memory", f"more than {ROOM / 2**30:g} GB of address space")
    except Exception as error:
        return Failure("exit 5", in_a_line(error))
    return None


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def peak_memory() -> int:
    """The largest resident size that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
TOKENS = (b"NaN", b"1e999", b"-1", b"9" * 400, b"\x00", b"\xff\xfe", b"\r", b"[" * 2000, b"{}", b'"', b"\\ud800", b"..")
LEAVES = (None, True, -1, 0, 1e308, 10**30, "", "x" * 5000, "\x1b]0;t\x07", "\ud800", [], {}, [[]], [None], 0.5)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few changes of bytes, wherever they are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1) if rng.random() < 0.7 else rng.randrange(min(64, len(changed)) + 1)
        match rng.randrange(8):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del changed[at : at + rng.choice((1, 2, 8, 100))]
            case 3:
                del changed[at:]
            case 4:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) & (1 << 8 * size) - 1
                changed[at : at + size] = number.to_bytes(size, rng.choice(("big", "little")))
            case 5:
                other = rng.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + rng.choice((4, 40, 400))]
            case 6:
                changed[at:at] = rng.choice(TOKENS)
            case _:
                changed[at : at + 4] = rng.randbytes(4)
    return bytes(changed)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """One value or name of a JSON file is another; in a third of the cases bytes are changed instead."""
    if rng.random() < 0.33:
        return mutated(data, rng)
    value = json.loads(data)
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in list(pairs):
            spots.append((node, key))
            walk(inner)

    walk(value)
    for _ in range(rng.choice((1, 1, 2, 5))):
        node, key = rng.choice(spots)
        match rng.randrange(4):
            case 0 if isinstance(node, dict):
                node.pop(key, None)
            case 1 if isinstance(node, dict) and key in node:
                node[rng.choice(("", "x", "kind", key + "s"))] = node.pop(key)
            case _ if isinstance(node, dict) or key < len(node):
                old = node.get(key) if isinstance(node, dict) else node[key]
                near = [old * 2, old + 1, -old, old * 10**9] if isinstance(old, int | float) else []
                node[key] = rng.choice([*LEAVES, *near])
    if rng.random() < 0.02:
        value = rng.choice(LEAVES)
    return json.dumps(value).encode()


class Parsers(Fuzz):
    name = "parsers"
    what = "mutated parser input"
    small = 500
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(
        (
            "config", "metrics", "best", "state", "manifest", "checkpoint tensors", "snapshots", "picture cache",
            "dictionary", "word list", "text", "idx", "gzipped idx", "cifar", "cifar labels",
            "mask txt", "mask csv", "mask npy", "steps json", "steps npz",
        ),
        100_000,
    )  # fmt: skip
    in_runs: ClassVar[set[str]] = {"config", "metrics", "best", "state", "manifest", "checkpoint tensors", "snapshots"}

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.run = stage.undisturbed("language-model", "-probed", snapshots__inputs=2, snapshots__every=12)
        self.place = max(self.run.glob("checkpoints/step-*")).relative_to(self.run)
        self.originals = {kind: self.original(kind) for kind in self.counts}

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        from clearhead.data import cifar10, folder, mnist, vocab
        from clearhead.data.text import load_text as load_text
        from clearhead.models.mask_view import read_mask
        from clearhead.models.steps import five_steps, read_steps_file
        from clearhead.training import checkpoint, metrics_log
        from clearhead.training.config import RunConfig
        from clearhead.training.run_directory import RunDirectory
        from clearhead.training.snapshots import read_snapshots

        def config(path: Path) -> None:
            RunConfig.from_dict(RunDirectory.open(path.parent, ignore).config).to_dict()

        def best(path: Path) -> None:
            RunDirectory.open(path.parent, ignore).best_checkpoint()

        def forged(path: Path) -> None:
            """A checkpoint whose manifest agrees with what was changed in it."""
            contents = {n: (path.parent / n).read_bytes() for n in checkpoint_files()}
            (path.parent / checkpoint.MANIFEST).write_bytes(checkpoint.manifest(contents))
            session(path.parents[2])

        def tensors(path: Path) -> None:
            forged(path)

        def text(path: Path) -> None:
            load_text(str(path), "character", length=8, validation=2, limit=0)

        place, name = str(self.place), checkpoint.MODEL
        return {
            "config": ("run/config.json", config),
            "metrics": ("run/metrics.jsonl", lambda path: metrics_log.read(path)),
            "best": ("run/best.json", best),
            "state": (f"run/{place}/{checkpoint.STATE}", forged),
            "manifest": (f"run/{place}/{checkpoint.MANIFEST}", lambda path: checkpoint.load(path.parent)),
            "checkpoint tensors": (f"run/{place}/{name}", tensors),
            "snapshots": (self.snapshot(), lambda path: read_snapshots(path.parents[1])),
            "picture cache": ("cache.safetensors", lambda path: folder.read_cache(path, n=2, size=4)),
            "dictionary": ("words.dict", lambda path: vocab.read_dictionary(path, stress=True)),
            "word list": ("words.txt", lambda path: vocab.read_words(str(path))),
            "text": ("text.txt", text),
            "idx": ("images.idx", lambda path: mnist.parse(path.read_bytes(), path.name)),
            "gzipped idx": ("images.gz", lambda path: mnist.parse(mnist.gunzip(path.read_bytes(), "x", 10**7), "x")),
            "cifar": ("batch.bin", lambda path: cifar10.parse(path.read_bytes(), path.name)),
            "cifar labels": ("labels.json", lambda path: cifar10.parse_labels(path.read_bytes(), path.name)),
            "mask txt": ("mask.txt", read_mask),
            "mask csv": ("mask.csv", read_mask),
            "mask npy": ("mask.npy", read_mask),
            "steps json": ("steps.json", lambda path: five_steps(**read_steps_file(path))),
            "steps npz": ("steps.npz", lambda path: five_steps(**read_steps_file(path))),
        }

    def prepare(self, kind: str, folder: Path) -> None:
        if kind in self.in_runs:
            shutil.copytree(self.run, folder / "run")

    def snapshot(self) -> str:
        return f"run/{min(self.run.glob('snapshots/*')).relative_to(self.run)}"

    def input(self, kind: str, rng: random.Random) -> bytes:
        is_json = kind in ("config", "best", "state", "manifest", "cifar labels", "steps json")
        data = self.originals[kind]
        changed = mutated_json(data, rng) if is_json else mutated(data, rng)
        return repaired(kind, changed, rng)

    def original(self, kind: str) -> bytes:
        """A valid input of this kind."""
        if kind in self.in_runs:
            name = self.parsers()[kind][0].removeprefix("run/")
            return (self.run / name).read_bytes()
        numbers = np.arange(12, dtype=np.float64).reshape(3, 4)
        images = b"\0\0\x08\x03" + struct.pack(">3I", 4, 3, 3) + bytes(range(36))
        steps = {
            "x": [[1, 0], [0, 1], [1, 1]],
            "w_q": [[1, 0], [0, 1]],
            "w_k": [[1, 2], [0, 1]],
            "w_v": [[1, 0], [3, 1]],
        }
        made: dict[str, bytes] = {
            "picture cache": picture_cache(),
            "dictionary": b"cab K AE1 B\ncab(2) K AE D # a remark\nbad\tB AE D\n",
            "word list": "cab\nbad\r\nélan\n".encode(),
            "text": b"To be, or not to be: that is the question.\n" * 8,
            "idx": images,
            "gzipped idx": gzip.compress(images, mtime=0),
            "cifar": bytes(range(10)) + bytes(3 * (1 + 3 * 32 * 32) - 10),
            "cifar labels": json.dumps([1, 2, 3, 9, 0]).encode(),
            "mask txt": b"1 0 0\n1 1 0\n1 1 1\n",
            "mask csv": b"0,-inf,-10000\n0,0,-inf\n0,0,0\n",
            "mask npy": saved_array(np.tril(np.ones((4, 4), dtype=bool))),
            "steps json": json.dumps(steps | {"mask": "causal", "beta": 0.5, "heads": 1}).encode(),
            "steps npz": saved_arrays(x=numbers, w_q=np.eye(4), w_k=np.eye(4), w_v=np.eye(4)),
        }
        return made[kind]


def ignore(message: str) -> None:
    """A report that a user would see on stderr."""


def checkpoint_files() -> tuple[str, ...]:
    from clearhead.training import checkpoint

    return checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE


def session(run: Path) -> None:
    """What `predict`, `sample` and `look` do first with a run."""
    from clearhead.inference.run import Run

    with contextlib.redirect_stderr(io.StringIO()):
        Run(run)


def repaired(kind: str, data: bytes, rng: random.Random) -> bytes:
    """In half of the cases the length or sum that would give the change away is made right again."""
    if kind == "picture cache" and rng.random() < 0.5:
        import hashlib

        return hashlib.sha256(data[32:]).digest() + data[32:]
    return data


def picture_cache() -> bytes:
    import hashlib

    import torch
    from safetensors.torch import save

    data = save({"pixels": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "sizes": torch.ones(2, 2, dtype=torch.int32)})
    return hashlib.sha256(data).digest() + data


def saved_array(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def saved_arrays(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
