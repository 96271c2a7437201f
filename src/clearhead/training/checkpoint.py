"""Checkpoints: saved atomically, verified byte by byte when they are loaded. Importing this does not import torch.

    checkpoints/step-00000120/      model.safetensors, optimizer.safetensors, state.json,
                                    and manifest.json with the size and SHA-256 digest of these three
    checkpoints/saving-step-...     being written; renamed when every byte is durable
    checkpoints/replaced-step-...   kept while another checkpoint of the same step takes its place
    checkpoints/deleting-step-...   being deleted
    checkpoints/damaged-step-...    set aside because it cannot be used; never read, never deleted

Only `step-...` is ever read, and only if all of it agrees with its manifest. Nothing is unpickled. A step has exactly
one name, padded with zeros to eight digits: step-000000099 is not a checkpoint.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.files import (
    MAX_JSON_BYTES,
    UnsafeFileError,
    check_folder,
    check_stored,
    from_json,
    fsync_folder,
    make_folder,
    read_regular,
    sha256,
    to_json,
    write_durable,
)
from clearhead.training.config import MAX_STEPS
from clearhead.training.metrics_log import RecordsDigest

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINTS = "checkpoints"
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
FORMAT = 2
"""of the manifest; format 1 had other names of weights and settings"""
SAVING, REPLACED, DELETING, DAMAGED = "saving-", "replaced-", "deleting-", "damaged-"
SMALL = 64 * 2**20
"""bytes of tensors that are read without comparing their header with the model first"""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs in order to continue as if it had never stopped."""

    step: int
    model: "dict[str, Tensor]"
    optimizer: "dict[str, Tensor]"
    """all other tensors: moments, averaged weights, random states (such as `random.rank0`)"""
    state: dict[str, Any]
    """the rest; it must survive a round trip through JSON unchanged"""
    records: RecordsDigest | None = None
    """of metrics.jsonl when the checkpoint was saved"""


class DamagedCheckpointError(ValueError):
    """A checkpoint that does not agree with its manifest."""


class NoIntactCheckpointError(OSError):
    """All checkpoints of a run are damaged or missing. Starting again at step 0 would discard what may be recovered."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other name."""
    if not re.fullmatch(r"step-\d{8,12}", name, re.ASCII):
        return None
    step = int(name[5:])
    return step if name == step_name(step) else None


def is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_STEPS


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / step_name(step)


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint in a run directory, intact or damaged, in order."""
    home = folder / CHECKPOINTS
    check_folder(home)
    steps = map(parse_step, os.listdir(home) if home.is_dir() else [])
    return sorted(step for step in steps if step is not None)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write folder/checkpoints/step-...; when this returns, the checkpoint survives a power failure.

    On failure it raises an OSError, and earlier checkpoints are untouched. One of the same step is replaced.
    """
    contents = pack(checkpoint)
    home, path = folder / CHECKPOINTS, checkpoint_path(folder, checkpoint.step)
    saving = home / (SAVING + path.name)
    try:
        make_folder(home)
        if saving.exists():
            shutil.rmtree(saving)
        os.mkdir(saving)
        try:
            for name, content in contents.items():
                write_durable(saving / name, content)
            fsync_folder(saving)
            move_into_place(saving, path)
        except BaseException:
            shutil.rmtree(saving, ignore_errors=True)
            raise
        fsync_folder(home)
    except OSError as error:
        message = f"the checkpoint of step {checkpoint.step} was not saved: {error.strerror or error}"
        raise OSError(error.errno, message, os.fspath(path)) from error
    with suppress(OSError):  # the checkpoint is saved; `clean` will try again
        remove(home / (REPLACED + path.name))
    return path


def move_into_place(saving: Path, path: Path) -> None:
    """Rename a finished checkpoint. An older one at this path is moved aside, and restored if that fails."""
    replaced = path.with_name(REPLACED + path.name)
    if not path.exists():
        os.rename(saving, path)
        return
    remove(replaced)
    os.rename(path, replaced)
    try:
        os.rename(saving, path)
    except BaseException:
        os.rename(replaced, path)
        raise


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; DamagedCheckpointError unless every byte is as it was saved."""
    check_folder(path.parent)
    check_folder(path)
    try:
        written = read_regular(path / MANIFEST, MAX_JSON_BYTES)
        sizes = {name: os.lstat(path / name).st_size for name in FILES}
        if wrong := wrong_sizes(sizes, written):  # before a file that is too large is read
            raise DamagedCheckpointError(next(iter(wrong.values())))
        contents = {STATE: read_regular(path / STATE, MAX_JSON_BYTES)}
        if sizes[MODEL] + sizes[OPTIMIZER] > SMALL:
            check_tensors(path, contents[STATE], sizes[MODEL] + sizes[OPTIMIZER])
        # each file is read once, so that the bytes that are verified are the bytes that are used
        contents = {name: contents.get(name) or read_regular(path / name) for name in FILES}
    except UnsafeFileError:
        raise
    except IsADirectoryError as error:
        raise DamagedCheckpointError(f"{Path(error.filename).name} is a folder") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise DamagedCheckpointError("it does not fit into memory") from error
    if wrong := disagreements({name: (len(content), sha256(content)) for name, content in contents.items()}, written):
        raise DamagedCheckpointError(next(iter(wrong.values())))
    return unpack(contents)


def check_tensors(path: Path, state: bytes, size: int) -> None:
    """DamagedCheckpointError if the files of tensors are mostly holes, do not match the model that the state describes,
    or exceed memory."""
    from clearhead.training.state import check_tensor_files

    if size > max_tensor_bytes():
        raise DamagedCheckpointError(
            f"its tensors have {size:,} bytes, more than half of this machine's memory ({max_tensor_bytes():,} bytes)"
        )
    try:
        check_stored([path / MODEL, path / OPTIMIZER])
        value = from_json(state)
        config = value["state"].get("config") if isinstance(value, dict) and isinstance(value["state"], dict) else None
        check_tensor_files(path / MODEL, path / OPTIMIZER, config)
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedCheckpointError(f"{MODEL} is not read: {error}") from error


def max_tensor_bytes() -> int:
    """Half of the machine's memory, because loading holds the file and its tensors; unlimited where it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return 2**62


def load_finite(path: Path) -> Checkpoint:
    """`load`, and DamagedCheckpointError too if a tensor contains NaN or infinity."""
    found = load(path)
    for name, tensors in ((MODEL, found.model), (OPTIMIZER, found.optimizer)):
        for key, tensor in tensors.items():
            if not is_finite(tensor) and not (name == MODEL and key in infinite_buffers(found.state)):
                raise DamagedCheckpointError(f"{key!r:.100} in {name} is not finite")
    return found


def infinite_buffers(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Buffers of a user's own model that were infinite from the start, such as additive masks."""
    match state:
        case {"config": {"model": {"infinite": list(names)}}}:
            return tuple(names)
    return ()


def is_finite(tensor: "Tensor") -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all())  # float8


def latest(folder: Path, report: Callable[[str], None], *, set_aside: bool = True) -> Checkpoint | None:
    """The usable checkpoint of the highest step; None before the first. Checkpoints that are damaged, unreadable or
    not finite are skipped and reported.

    With `set_aside`, which is for the owner of a run, they are also renamed, so that the run can save their step again.
    If none is usable, nothing is renamed, and it raises NoIntactCheckpointError.
    """
    skipped: dict[int, str] = {}
    for step in reversed(saved_steps(folder)):
        path = checkpoint_path(folder, step)
        try:
            found = load_finite(path)
            if found.step != step:
                raise DamagedCheckpointError(f"it holds step {found.step}")
        except DamagedCheckpointError as error:
            if not path.exists():  # deleted by its owner in the meantime: there is a newer one
                return latest(folder, report, set_aside=set_aside)
            skipped[step] = str(error)
            continue
        for other, reason in skipped.items():
            damaged = checkpoint_path(folder, other)
            where = move_aside(damaged) if set_aside else damaged
            report(f"the checkpoint of step {other} is skipped: {reason}; it is kept in {where}")
        return found
    if skipped:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in skipped.items())
        message = f"no checkpoint can be used ({reasons}); restore one from a copy, or train a new run"
        raise NoIntactCheckpointError(errno.EIO, message, str(folder))
    return None


def remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted one is never read."""
    if not path.exists():
        return
    check_folder(path.parent)
    deleting = path.with_name(DELETING + without_prefix(path))
    shutil.rmtree(deleting, ignore_errors=True)
    os.rename(path, deleting)
    fsync_folder(path.parent)
    shutil.rmtree(deleting)


def clean(folder: Path) -> None:
    """Clean up after a process that was killed while saving or deleting. Only the owner of a run may call this."""
    home = folder / CHECKPOINTS
    check_folder(home)
    if not home.is_dir():
        return
    for path in unfinished(home, REPLACED):
        if not (home / without_prefix(path)).exists():
            os.rename(path, home / without_prefix(path))
    for prefix in (REPLACED, SAVING, DELETING):
        for path in unfinished(home, prefix):
            shutil.rmtree(path)
    fsync_folder(home)


def unfinished(home: Path, prefix: str) -> Iterator[Path]:
    """Checkpoints with this prefix; rmtree and rename do not follow links."""
    for name in sorted(os.listdir(home)):
        if name.startswith(prefix) and parse_step(name.removeprefix(prefix)) is not None:
            yield home / name


def move_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used. It stays where it is if the file system refuses."""
    n, aside = 1, path.with_name(DAMAGED + path.name)
    while aside.exists():
        n += 1
        aside = path.with_name(f"{DAMAGED}{path.name}-{n}")
    try:
        os.rename(path, aside)
        fsync_folder(path.parent)
    except OSError:
        return aside if aside.exists() else path
    return aside


def without_prefix(path: Path) -> str:
    return path.name[path.name.index("step-") :]


def pack(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint."""
    import safetensors.torch

    counted = {} if checkpoint.records is None else {"records": checkpoint.records.to_json()}
    state = to_json({"step": checkpoint.step, **counted, "state": checkpoint.state}, indent=1)
    if (back := from_json(state)["state"]) != checkpoint.state:
        changed = [key for key, value in checkpoint.state.items() if back.get(key) != value]
        raise ValueError(
            f"state must survive JSON unchanged, got a change in {changed}; use lists instead of tuples, and strings "
            "as keys"
        )
    contents = {
        MODEL: safetensors.torch.save(unshared(checkpoint.model)),
        OPTIMIZER: safetensors.torch.save(unshared(checkpoint.optimizer)),
        STATE: state,
    }
    return {**contents, MANIFEST: manifest(contents)}


def unpack(contents: dict[str, bytes]) -> Checkpoint:
    """The inverse of `pack`; DamagedCheckpointError for anything else."""
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        state = from_json(contents[STATE])
        if not isinstance(state, dict) or not is_step(state["step"]) or not isinstance(state["state"], dict):
            raise ValueError(f"{STATE} must contain a step and a state")
        model, optimizer = (safetensors.torch.load(contents[name]) for name in (MODEL, OPTIMIZER))
        records = RecordsDigest.from_json(state["records"]) if "records" in state else None
        return Checkpoint(state["step"], model, optimizer, state["state"], records)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise DamagedCheckpointError(f"it was not written by this version of Clearhead ({error})") from error


def unshared(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """The same values, each contiguous, on the CPU and in its own memory, as safetensors requires."""
    found, used = {}, set()
    for name, tensor in tensors.items():
        packed = tensor.detach().cpu().contiguous()
        memory = packed.untyped_storage().data_ptr()
        found[name] = packed.clone() if memory in used else packed
        used.add(memory)
    return found


def manifest(contents: Mapping[str, bytes]) -> bytes:
    """Has one canonical form and is compared as bytes, so that a single flipped bit is noticed."""
    return manifest_of({name: (len(content), sha256(content)) for name, content in contents.items()})


def manifest_of(files: Mapping[str, tuple[int, str]]) -> bytes:
    """From the size and SHA-256 digest of each file."""
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return to_json({"format": FORMAT, "files": entries}, indent=1)


def declared(written: bytes) -> dict[str, tuple[int, str]]:
    """The size and digest of each file according to the manifest; {} if that is damaged."""
    with suppress(ValueError, LookupError, TypeError):
        entries = from_json(written)["files"]
        found = {name: (entries[name]["size"], entries[name]["sha256"]) for name in FILES}
        if all(type(size) is int and type(digest) is str for size, digest in found.values()):
            return found
    return {}


def wrong_sizes(sizes: Mapping[str, int], written: bytes) -> dict[str, str]:
    """Files whose size differs from the one in the manifest."""
    return {
        name: f"{name} has {sizes[name]} bytes instead of {size}"
        for name, (size, _) in declared(written).items()
        if name in sizes and sizes[name] != size
    }


def disagreements(files: Mapping[str, tuple[int, str]], written: bytes) -> dict[str, str]:
    """By name, how files, given by size and digest, differ from the manifest; {} if all agree."""
    if written == manifest_of(files):
        return {}
    with suppress(ValueError, LookupError, TypeError):
        if from_json(written)["format"] == 1:
            return {MANIFEST: "it was made by an earlier version of Clearhead, with other names of weights"}
    known = declared(written)
    found = wrong_sizes({name: size for name, (size, _) in files.items()}, written)
    changed = {
        name: f"{name} has changed since it was saved" for name in known if name in files and files[name] != known[name]
    }
    return changed | found or {MANIFEST: f"{MANIFEST} has changed since it was saved"}
