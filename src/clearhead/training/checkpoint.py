"""Checkpoints: a whole one, or none.

    checkpoints/step-00000120/      model.safetensors, optimizer.safetensors, state.json,
                                    and manifest.json: size and sha256 of these three
    checkpoints/saving-step-...     being written; renamed when every byte is durable
    checkpoints/replaced-step-...   stands by while another of the same step takes its place
    checkpoints/deleting-step-...   being deleted
    checkpoints/damaged-step-...    did not agree with its manifest; nothing reads it, nothing deletes it

Only `step-...` is ever read, and only if all of it agrees with its manifest. Nothing is unpickled.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from clearhead.files import from_json, fsync_folder, sha256, to_json, write_durable

MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
SAVING, REPLACED, DELETING, DAMAGED = "saving-", "replaced-", "deleting-", "damaged-"


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on as if it had never stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """moments, averaged weights and random states too (such as `random.rank0`): whatever is a tensor"""
    state: dict[str, Any]
    """the rest: what JSON gives back as it was"""


class DamagedCheckpointError(ValueError):
    """A checkpoint that does not agree with its manifest."""


class NoWholeCheckpointError(OSError):
    """A run whose checkpoints are all damaged, or gone: to begin again at step 0 would lose what may still be saved."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """The steps with a checkpoint in a run's folder, whole or damaged, in order."""
    home = folder / "checkpoints"
    names = os.listdir(home) if home.is_dir() else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name, re.ASCII))


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Writes folder/checkpoints/step-...; when it returns, the checkpoint outlives a power failure.

    A failure is an OSError that says so; what was saved before is still there. One of the same step is replaced.
    """
    contents = pack(snapshot)
    home = folder / "checkpoints"
    saving, place = home / (SAVING + name_of(snapshot.step)), home / name_of(snapshot.step)
    try:
        home.mkdir(exist_ok=True)
        if saving.exists():
            shutil.rmtree(saving)
        saving.mkdir()
        try:
            for name, content in contents.items():
                write_durable(saving / name, content)
            fsync_folder(saving)
            put(saving, place)
        except BaseException:
            shutil.rmtree(saving, ignore_errors=True)
            raise
        fsync_folder(home)
    except OSError as error:
        message = f"the checkpoint of step {snapshot.step} is not saved: {error.strerror or error}"
        raise OSError(error.errno, message, os.fspath(place)) from error
    with suppress(OSError):  # saved it is; `clean` will try again
        remove(home / (REPLACED + place.name))
    return place


def put(saving: Path, place: Path) -> None:
    """Renames a finished checkpoint into its place. An older one there steps aside and returns if that fails."""
    replaced = place.with_name(REPLACED + place.name)
    if not place.exists():
        os.rename(saving, place)
        return
    remove(replaced)
    os.rename(place, replaced)
    try:
        os.rename(saving, place)
    except BaseException:
        os.rename(replaced, place)
        raise


def load(place: Path) -> Snapshot:
    """Reads one checkpoint; DamagedCheckpointError unless every byte is as it was saved."""
    try:
        # each file is read once: the bytes that are checked are the bytes that are used
        contents = {name: (place / name).read_bytes() for name in (MODEL, OPTIMIZER, STATE)}
        written = (place / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpointError(f"{Path(error.filename).name} is missing") from error
    if written != manifest(contents):
        raise DamagedCheckpointError(disagreement(contents, written))
    try:
        state = from_json(contents[STATE])
        model, optimizer = (safetensors.torch.load(contents[name]) for name in (MODEL, OPTIMIZER))
        return Snapshot(state["step"], model, optimizer, state["state"])
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise DamagedCheckpointError(f"it was not written by this version of Clearhead ({error})") from error


def newest(folder: Path, report: Callable[[str], None], *, set_aside: bool = True) -> Snapshot | None:
    """The whole checkpoint of the highest step, None before the first. Damaged ones are reported and passed over.

    They are renamed too, so that the run can save that step again, unless `set_aside` is False: only the owner of a
    run changes it. Where none is whole, nothing is renamed: NoWholeCheckpointError.
    """
    damaged: dict[int, str] = {}
    for step in reversed(steps(folder)):
        try:
            found = load(at(folder, step))
            if found.step != step:
                raise DamagedCheckpointError(f"it holds step {found.step}")
        except DamagedCheckpointError as error:
            if not at(folder, step).exists():  # deleted by its owner while we read: there is a newer one
                return newest(folder, report, set_aside=set_aside)
            damaged[step] = str(error)
            continue
        for other, why in damaged.items():
            where = move_aside(at(folder, other)) if set_aside else at(folder, other)
            report(f"the checkpoint of step {other} is damaged and passed over: {why}; it is left in {where}")
        return found
    if damaged:
        told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        message = f"no checkpoint is whole ({told}); put a good copy back, or train anew under another name"
        raise NoWholeCheckpointError(errno.EIO, message, str(folder))
    return None


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / name_of(step)


def remove(place: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that half of one is never taken for whole."""
    if not place.exists():
        return
    deleting = place.with_name(DELETING + name_without_prefix(place))
    shutil.rmtree(deleting, ignore_errors=True)
    os.rename(place, deleting)
    fsync_folder(place.parent)
    shutil.rmtree(deleting)


def clean(folder: Path) -> None:
    """Tidies up after a process that was killed while it saved or deleted; only for the owner of the run."""
    home = folder / "checkpoints"
    if not home.is_dir():
        return
    for place in sorted(home.glob(f"{REPLACED}step-*")):
        if not (home / name_without_prefix(place)).exists():
            os.rename(place, home / name_without_prefix(place))
    for prefix in (REPLACED, SAVING, DELETING):
        for place in home.glob(f"{prefix}step-*"):
            shutil.rmtree(place)
    fsync_folder(home)


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a checkpoint, as bytes."""
    state = to_json({"step": snapshot.step, "state": snapshot.state}, indent=1)
    if (back := from_json(state)["state"]) != snapshot.state:
        changed = [key for key, value in snapshot.state.items() if back.get(key) != value]
        raise ValueError(
            f"state must be what JSON gives back as it was, got a change in {changed}; "
            "use lists instead of tuples, and text for the keys of dicts"
        )
    contents = {
        MODEL: safetensors.torch.save(alone(snapshot.model)),
        OPTIMIZER: safetensors.torch.save(alone(snapshot.optimizer)),
        STATE: state,
    }
    return {**contents, MANIFEST: manifest(contents)}


def alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values, each contiguous, on the CPU and in memory of its own, as safetensors wants them."""
    found, used = {}, set()
    for name, tensor in tensors.items():
        packed = tensor.detach().cpu().contiguous()
        memory = packed.untyped_storage().data_ptr()
        found[name] = packed.clone() if memory in used else packed
        used.add(memory)
    return found


def manifest(contents: dict[str, bytes]) -> bytes:
    """Written once this way and compared as bytes: a manifest that differs in a single bit says that it is damaged."""
    files = {name: {"size": len(content), "sha256": sha256(content)} for name, content in contents.items()}
    return to_json({"format": 1, "files": files}, indent=1)


def disagreement(contents: dict[str, bytes], written: bytes) -> str:
    """Which file is not what the manifest says."""
    with suppress(ValueError, LookupError, TypeError):
        files = from_json(written)["files"]
        for name, content in contents.items():
            if files[name]["size"] != len(content):
                return f"{name} has {len(content)} bytes instead of {files[name]['size']}"
            if files[name]["sha256"] != sha256(content):
                return f"{name} is not what was saved"
    return f"{MANIFEST} is not what was saved"


def move_aside(place: Path) -> Path:
    n, aside = 1, place.with_name(DAMAGED + place.name)
    while aside.exists():
        n += 1
        aside = place.with_name(f"{DAMAGED}{place.name}-{n}")
    os.rename(place, aside)
    fsync_folder(place.parent)
    return aside


def name_without_prefix(place: Path) -> str:
    return place.name[place.name.index("step-") :]
