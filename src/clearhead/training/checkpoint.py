"""Checkpoints: a whole one, or none. `layout` has the names of their files.

Only `step-...` is ever read, and only if all of it agrees with its manifest. Nothing is unpickled. A run continues from
one whose numbers are all finite: see `newest`.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from clearhead.files import (
    UnsafeFileError,
    check_folder,
    from_json,
    fsync_folder,
    make_folder,
    read_regular,
    sha256,
    to_json,
    write_durable,
)
from clearhead.training import tensor_headers
from clearhead.training.layout import (
    CHECKPOINTS,
    DAMAGED,
    DELETING,
    FILES,
    LARGEST_JSON,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    REPLACED,
    SAVING,
    STATE,
    checkpoint_path,
    disagreements,
    is_step,
    manifest,
    parse_step,
    step_name,
    steps,
    wrong_sizes,
)
from clearhead.training.metrics_log import RecordsDigest


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """moments, averaged weights and random states too (such as `random.rank0`): whatever is a tensor"""
    state: dict[str, Any]
    """the rest: what JSON gives back as it was"""
    records: RecordsDigest | None = None
    """the records of metrics.jsonl when it was saved; None in checkpoints of versions that did not count them"""


class DamagedCheckpointError(ValueError):
    """A checkpoint that does not agree with its manifest."""


class NoIntactCheckpointError(OSError):
    """A run whose checkpoints are all damaged, or gone: to begin again at step 0 would lose what may still be saved."""


def save(folder: Path, snapshot: Checkpoint) -> Path:
    """Writes folder/checkpoints/step-...; when it returns, the checkpoint outlives a power failure.

    A failure is an OSError that says so; what was saved before is still there. One of the same step is replaced.
    """
    contents = pack(snapshot)
    home = folder / CHECKPOINTS
    saving, place = home / (SAVING + step_name(snapshot.step)), home / step_name(snapshot.step)
    try:
        make_folder(home)
        if saving.exists():
            shutil.rmtree(saving)
        os.mkdir(saving)
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


def load(place: Path) -> Checkpoint:
    """Reads one checkpoint; DamagedCheckpointError unless every byte is as it was saved."""
    check_folder(place.parent)
    check_folder(place)
    try:
        written = read_regular(place / MANIFEST, LARGEST_JSON)
        sizes = {name: os.lstat(place / name).st_size for name in FILES}
        if wrong := wrong_sizes(sizes, written):  # known before a file that is too large is read
            raise DamagedCheckpointError(next(iter(wrong.values())))
        contents = {STATE: read_regular(place / STATE, LARGEST_JSON)}
        if sizes[MODEL] + sizes[OPTIMIZER] > tensor_headers.SMALL:
            check_declared(place, contents[STATE])
        # each file is read once: the bytes that are checked are the bytes that are used
        contents = {name: contents.get(name) or read_regular(place / name) for name in FILES}
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
    try:
        return unpack(contents)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise DamagedCheckpointError(f"it was not written by this version of Clearhead ({error})") from error


def check_declared(place: Path, state: bytes) -> None:
    """DamagedCheckpointError if the tensors are not those of the model that the state describes."""
    try:
        value = from_json(state)
        config = value["state"].get("config") if isinstance(value, dict) and isinstance(value["state"], dict) else None
        tensor_headers.check_tensor_files(place / MODEL, place / OPTIMIZER, config)
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedCheckpointError(f"{MODEL} is not read: {error}") from error


def unpack(contents: dict[str, bytes]) -> Checkpoint:
    """What `pack` has packed; some kind of error if it was not `pack`."""
    state = from_json(contents[STATE])
    if not isinstance(state, dict) or not is_step(state["step"]) or not isinstance(state["state"], dict):
        raise ValueError(f"{STATE} must hold a step and a state")
    model, optimizer = (safetensors.torch.load(contents[name]) for name in (MODEL, OPTIMIZER))
    records = RecordsDigest.from_json(state["records"]) if "records" in state else None
    return Checkpoint(state["step"], model, optimizer, state["state"], records)


def load_finite(place: Path) -> Checkpoint:
    """`load`, and DamagedCheckpointError too if a number in it is NaN or infinite: nothing can be computed with it."""
    found = load(place)
    for name, tensors in ((MODEL, found.model), (OPTIMIZER, found.optimizer)):
        for key, tensor in tensors.items():
            if not is_finite(tensor):
                raise DamagedCheckpointError(f"{key!r:.100} in {name} is not finite")
    return found


def is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())  # float8


def newest(folder: Path, report: Callable[[str], None], *, set_aside: bool = True) -> Checkpoint | None:
    """The highest step's checkpoint that can be used, None before the first. The others are reported and passed over:
    those that are damaged, that cannot be read, and that hold numbers which are not finite.

    They are renamed too, so that the run can save that step again, unless `set_aside` is False: only the owner of a
    run changes it. Where none can be used, nothing is renamed: NoWholeCheckpointError.
    """
    passed_over: dict[int, str] = {}
    for step in reversed(steps(folder)):
        try:
            found = load_finite(checkpoint_path(folder, step))
            if found.step != step:
                raise DamagedCheckpointError(f"it holds step {found.step}")
        except DamagedCheckpointError as error:
            if not checkpoint_path(folder, step).exists():  # deleted by its owner while we read: there is a newer one
                return newest(folder, report, set_aside=set_aside)
            passed_over[step] = str(error)
            continue
        for other, why in passed_over.items():
            where = move_aside(checkpoint_path(folder, other)) if set_aside else checkpoint_path(folder, other)
            report(f"the checkpoint of step {other} is passed over: {why}; it is left in {where}")
        return found
    if passed_over:
        reasons = "; ".join(f"step {step}: {why}" for step, why in passed_over.items())
        message = f"no checkpoint can be used ({reasons}); put a good copy back, or train anew under another name"
        raise NoIntactCheckpointError(errno.EIO, message, str(folder))
    return None


def remove(place: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that half of one is never taken for whole."""
    if not place.exists():
        return
    check_folder(place.parent)
    deleting = place.with_name(DELETING + name_without_prefix(place))
    shutil.rmtree(deleting, ignore_errors=True)
    os.rename(place, deleting)
    fsync_folder(place.parent)
    shutil.rmtree(deleting)


def clean(folder: Path) -> None:
    """Tidies up after a process that was killed while it saved or deleted; only for the owner of the run."""
    home = folder / CHECKPOINTS
    check_folder(home)
    if not home.is_dir():
        return
    for place in unfinished(home, REPLACED):
        if not (home / name_without_prefix(place)).exists():
            os.rename(place, home / name_without_prefix(place))
    for prefix in (REPLACED, SAVING, DELETING):
        for place in unfinished(home, prefix):
            shutil.rmtree(place)
    fsync_folder(home)


def unfinished(home: Path, prefix: str) -> Iterator[Path]:
    """What a process that was killed has left; rmtree and rename do not follow links."""
    for name in sorted(os.listdir(home)):
        if name.startswith(prefix) and parse_step(name.removeprefix(prefix)) is not None:
            yield home / name


def pack(snapshot: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint, as bytes."""
    counted = {} if snapshot.records is None else {"records": snapshot.records.to_json()}
    state = to_json({"step": snapshot.step, **counted, "state": snapshot.state}, indent=1)
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


def move_aside(place: Path) -> Path:
    """Renames a checkpoint that cannot be used; where the disk does not even let it be renamed, it stays."""
    n, aside = 1, place.with_name(DAMAGED + place.name)
    while aside.exists():
        n += 1
        aside = place.with_name(f"{DAMAGED}{place.name}-{n}")
    try:
        os.rename(place, aside)
        fsync_folder(place.parent)
    except OSError:
        return aside if aside.exists() else place
    return aside


def name_without_prefix(place: Path) -> str:
    return place.name[place.name.index("step-") :]
