"""Names inside a run directory, and the manifest of a checkpoint: what can be said of a run without torch.

    checkpoints/step-00000120/      model.safetensors, optimizer.safetensors, state.json,
                                    and manifest.json: size and sha256 of these three
    checkpoints/saving-step-...     being written; renamed when every byte is durable
    checkpoints/replaced-step-...   stands by while another of the same step takes its place
    checkpoints/deleting-step-...   being deleted
    checkpoints/damaged-step-...    cannot be used: nothing reads it, nothing deletes it

A step has exactly one name, with as many zeros as make eight digits: step-000000099 is no checkpoint.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import deserialize

from clearhead.files import check_folder, from_json, sha256, to_json
from clearhead.training.config import MOST_STEPS

CHECKPOINTS, BEST, SNAPSHOTS, FIGURES = "checkpoints", "best.json", "snapshots", "figures"
MAPS = ".safetensors"
"""how the name of a file of attention maps ends"""
DIGEST = "sha256"
"""key of `maps_digest` in the header of such a file"""
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
SAVING, REPLACED, DELETING, DAMAGED = "saving-", "replaced-", "deleting-", "damaged-"
LARGEST_JSON = 16 * 2**20
"""bytes of a config, a state or a manifest. The largest one is the state of a run that was trained with `skip_invalid`
and lists hundreds of thousands of skipped images"""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's name, None for any other name."""
    if not re.fullmatch(r"step-\d{8,12}", name, re.ASCII):
        return None
    step = int(name[5:])
    return step if name == step_name(step) else None


def is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_STEPS


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / step_name(step)


def steps(folder: Path) -> list[int]:
    """The steps with a checkpoint in a run's folder, whole or damaged, in order."""
    home = folder / CHECKPOINTS
    check_folder(home)
    found = map(parse_step, os.listdir(home) if home.is_dir() else [])
    return sorted(step for step in found if step is not None)


def snapshot_files(folder: Path) -> dict[int, Path]:
    """By step, in order: the attention maps that a run has kept."""
    home = folder / SNAPSHOTS
    check_folder(home)
    names = sorted(os.listdir(home)) if home.is_dir() else []
    found = {parse_step(name.removesuffix(MAPS)): home / name for name in names if name.endswith(MAPS)}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def maps_digest(content: bytes) -> str:
    """The sha256 of the names, types, shapes and values in a file of attention maps; SafetensorError if it is none."""
    digest = hashlib.sha256()
    for name, maps in sorted(deserialize(content), key=lambda entry: entry[0]):
        digest.update(f"{name} {maps['dtype']} {maps['shape']}\n".encode())
        digest.update(maps["data"])
    return digest.hexdigest()


def maps_are_intact(content: bytes) -> bool:
    """Whether the maps in a file have the digest that its header records. Files of earlier versions record none."""
    header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return (header.get("__metadata__") or {}).get(DIGEST) in (None, maps_digest(content))


def best_in(content: bytes) -> int:
    """The step that a best.json names; ValueError if it is damaged."""
    value = from_json(content)
    step: Any = value.get("step") if isinstance(value, dict) else None
    if not is_step(step):
        raise ValueError(f'expected {{"step": N}}, got {content[:60]!r}')
    return step


def manifest(contents: Mapping[str, bytes]) -> bytes:
    """Written once this way and compared as bytes: a manifest that differs in a single bit says that it is damaged."""
    return manifest_of({name: (len(content), sha256(content)) for name, content in contents.items()})


def manifest_of(files: Mapping[str, tuple[int, str]]) -> bytes:
    """From the size and sha256 of each file."""
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return to_json({"format": 1, "files": entries}, indent=1)


def declared(written: bytes) -> dict[str, tuple[int, str]]:
    """The size and sha256 of each file of a checkpoint by its manifest, {} if that is damaged."""
    with suppress(ValueError, LookupError, TypeError):
        entries = from_json(written)["files"]
        found = {name: (entries[name]["size"], entries[name]["sha256"]) for name in FILES}
        if all(type(size) is int and type(digest) is str for size, digest in found.values()):
            return found
    return {}


def wrong_sizes(sizes: Mapping[str, int], written: bytes) -> dict[str, str]:
    """The files whose size differs from the one in the manifest: sizes are known before a file is read."""
    return {
        name: f"{name} has {sizes[name]} bytes instead of {size}"
        for name, (size, _) in declared(written).items()
        if name in sizes and sizes[name] != size
    }


def disagreements(files: Mapping[str, tuple[int, str]], written: bytes) -> dict[str, str]:
    """Which files, given by size and sha256, are not what the manifest says, and how; {} if all agree."""
    if written == manifest_of(files):
        return {}
    known = declared(written)
    found = wrong_sizes({name: size for name, (size, _) in files.items()}, written)
    changed = {name: f"{name} is not what was saved" for name in known if name in files and files[name] != known[name]}
    return changed | found or {MANIFEST: f"{MANIFEST} is not what was saved"}
