"""Mutated inputs for all parsers of untrusted files, with limits on memory and time.

A parser may raise only errors with a message for the user: ValueError, LookupError and OSError, but not KeyError,
IndexError and UnicodeError, which Python itself raises. Input `number` of a parser is determined by the seed, the
parser and the number.
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
from benchmarks.campaign.runs import HANG_SECONDS, Workspace
from benchmarks.campaign.shards import Failure, Shard

MAX_MEMORY = 512 * 2**20
"""bytes above the baseline after imports"""
MAX_ADDRESS_SPACE = 2 * 2**30
"""bytes of address space above the baseline; allocations beyond it fail, instead of exhausting the machine"""
MAX_SECONDS = 20.0
"""of CPU time, or without progress, for one input"""
REFUSALS = (ValueError, LookupError, OSError)
BUGS = (KeyError, IndexError, UnicodeError)
"""subclasses of REFUSALS that are bugs nevertheless: `clearhead` ends with code 5"""

Parse = Callable[[Path], Any]
"""reads a file that exists"""


class Fuzz(Shard):
    """Each case is one input. A batch of them is read in one child process."""

    batch = 500

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        """The mutated file and its parser, for each kind."""
        raise NotImplementedError

    def input(self, kind: str, rng: random.Random) -> bytes:
        raise NotImplementedError

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        name, parse = self.parsers()[kind]
        at = mmap.mmap(-1, 8)  # shared with the child: the index of its current input
        self.prepare(kind, folder)
        child = Child([], folder, job=lambda: self.read_all(kind, number, folder / name, parse, at))
        ended = child.wait(max(HANG_SECONDS, self.size * 0.5))
        found = [
            Failure(*line.removeprefix("failure ").split(": ", 1))
            for line in ended.out.splitlines()
            if line.startswith("failure ")
        ]
        found += [Failure("write outside", line) for line in ended.outside]
        peaks = [float(line.split()[1]) for line in ended.out.splitlines() if line.startswith("peak_mb ")]
        self.peak_mb = max([self.peak_mb or 0.0, *peaks])
        where = f"{kind} {number + struct.unpack('q', at[:])[0]}"
        if ended.hang:
            found.append(Failure("hang", f"{where}: {ended.hang}"))
        elif ended.code != 0:
            found.append(Failure("process died", f"{where}: code {ended.code}: {ended.err.strip()[-200:]}"))
        return found

    def prepare(self, kind: str, folder: Path) -> None:
        """Create the other files that the parser needs."""

    def read_all(self, kind: str, first: int, path: Path, parse: Parse, at: mmap.mmap) -> int:
        """Runs in the child."""
        first_baseline = baseline = peak_memory()
        limit = address_space() + MAX_ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for i in range(self.size):
            at[:] = struct.pack("q", i)
            data = self.input(kind, random.Random(f"{self.seed} {self.name} {kind} {first + i}"))
            path.write_bytes(data)
            if (problem := read_one(parse, path)) is not None:
                os.write(1, f"failure {problem.kind}: {kind} {first + i}: {problem.what}\n".encode(errors="replace"))
            if (used := peak_memory() - baseline) > MAX_MEMORY:
                what = f"{kind} {first + i}: {used / 2**20:,.0f} MB for {len(data):,} bytes"
                os.write(1, f"failure memory: {what}\n".encode())
                baseline += used  # report further inputs only if they need even more
        os.write(1, f"peak_mb {(peak_memory() - first_baseline) / 2**20:.1f}\n".encode())
        return 0


def read_one(parse: Parse, path: Path, seconds: float = MAX_SECONDS) -> Failure | None:
    """None if the parser reads its input, or refuses it with a proper error."""
    try:
        with time_limit(seconds):
            parse(path)
    except TooLongError as error:
        return Failure("hang", str(error))
    except REFUSALS as error:
        if isinstance(error, BUGS):
            return Failure("exit 5", one_line(error))
        if not str(error).strip():
            return Failure("no single line", f"{type(error).__name__} without a message")
    except MemoryError:
        return Failure("memory", f"more than {MAX_ADDRESS_SPACE / 2**30:g} GB of address space")
    except Exception as error:
        return Failure("exit 5", one_line(error))
    return None


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def peak_memory() -> int:
    """The peak resident size of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
TOKENS = (b"NaN", b"1e999", b"-1", b"9" * 400, b"\x00", b"\xff\xfe", b"\r", b"[" * 2000, b"{}", b'"', b"\\ud800", b"..")
LEAVES = (None, True, -1, 0, 1e308, 10**30, "", "x" * 5000, "\x1b]0;t\x07", "\ud800", [], {}, [[]], [None], 0.5)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data with a few random changes of bytes."""
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
    """A JSON file with a few changed values or names; in a third of the cases, with changed bytes instead."""
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
    batch = 5_000  # starting a child takes longer than reading 500 inputs
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(
        (
            "config", "metrics", "best", "state", "manifest", "checkpoint tensors", "snapshots", "picture cache",
            "dictionary", "word list", "text", "idx", "gzipped idx", "cifar", "cifar labels",
            "mask txt", "mask csv", "mask npy", "steps json", "steps npz",
        ),
        100_000,
    )  # fmt: skip
    in_runs: ClassVar[set[str]] = {"config", "metrics", "best", "state", "manifest", "checkpoint tensors", "snapshots"}

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.run = workspace.reference_run("language-model", "-snapshots", snapshots__inputs=2, snapshots__every=12)
        self.checkpoint = max(self.run.glob("checkpoints/step-*")).relative_to(self.run)
        self.originals = {kind: self.original(kind) for kind in self.counts}

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        from clearhead.data import folder, image_datasets, vocab
        from clearhead.data.sequences import load_text as load_text
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
            """Load a checkpoint after updating its manifest, so that the digests match the mutated file."""
            contents = {n: (path.parent / n).read_bytes() for n in checkpoint_files()}
            (path.parent / checkpoint.MANIFEST).write_bytes(checkpoint.manifest(contents))
            open_run(path.parents[2])

        def tensors(path: Path) -> None:
            forged(path)

        def text(path: Path) -> None:
            load_text(str(path), "character", length=8, validation=2, limit=0)

        folder_name, name = str(self.checkpoint), checkpoint.MODEL
        return {
            "config": ("run/config.json", config),
            "metrics": ("run/metrics.jsonl", lambda path: metrics_log.read(path)),
            "best": ("run/best.json", best),
            "state": (f"run/{folder_name}/{checkpoint.STATE}", forged),
            "manifest": (f"run/{folder_name}/{checkpoint.MANIFEST}", lambda path: checkpoint.load(path.parent)),
            "checkpoint tensors": (f"run/{folder_name}/{name}", tensors),
            "snapshots": (self.snapshot(), lambda path: read_snapshots(path.parents[1])),
            "picture cache": ("cache.safetensors", lambda path: folder.read_cache(path, n=2, size=4)),
            "dictionary": ("words.dict", lambda path: vocab.read_dictionary(path, stress=True)),
            "word list": ("words.txt", lambda path: vocab.read_words(str(path))),
            "text": ("text.txt", text),
            "idx": ("images.idx", lambda path: image_datasets.parse_idx(path.read_bytes(), path.name)),
            "gzipped idx": (
                "images.gz",
                lambda path: image_datasets.parse_idx(image_datasets.gunzip(path.read_bytes(), "x", 10**7), "x"),
            ),
            "cifar": ("batch.bin", lambda path: image_datasets.parse_cifar10(path.read_bytes(), path.name)),
            "cifar labels": ("labels.json", lambda path: image_datasets.parse_labels(path.read_bytes(), path.name)),
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
        return with_valid_digest(kind, changed, rng)

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
    """In place of a report on stderr."""


def checkpoint_files() -> tuple[str, ...]:
    from clearhead.training import checkpoint

    return checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE


def open_run(run: Path) -> None:
    """What `predict`, `sample` and `look` begin with."""
    from clearhead.inference.run import Run

    with contextlib.redirect_stderr(io.StringIO()):
        Run(run)


def with_valid_digest(kind: str, data: bytes, rng: random.Random) -> bytes:
    """In half of the cases, update the digest, so that the change is not detected by it alone."""
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
