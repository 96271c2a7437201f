"""The user's own matrices from a .json or .npz file, read without ever running what is in it."""

import difflib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.models.steps import GIVEN, PROJECTED, brief

KEYS = (*PROJECTED, *GIVEN, "beta", "mask")


def read_steps_file(path: str | Path) -> dict[str, Any]:
    """What `five_steps` takes, by name."""
    path = Path(path)
    readers = {".json": read_json, ".npz": read_npz}
    if path.suffix not in readers:
        raise ValueError(f"a file of matrices must end in .json or .npz, got {path.name!r}; save it as one of them")
    try:
        content = readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"the file must be readable, got {path}: {error.strerror or error}; check its path") from None
    for key in content:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "rename or remove it"
            raise ValueError(f"a file of matrices has the keys {', '.join(KEYS)}, got {key!r} in {path.name}; {hint}")
    mask = content.pop("mask", None)
    if mask not in (None, "causal"):
        raise ValueError(f'mask must be "causal" or left out, got {brief(mask)}; every token sees every other without')
    beta = content.pop("beta", None)
    return {**content, "beta": None if beta is None else to_beta(beta), "causal": mask == "causal"}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} must be JSON, got an error: {error}; correct it there") from None
    except RecursionError:
        raise ValueError(f"{path.name} must be lists of rows, got lists far too deep; correct it there") from None
    if not isinstance(content, dict):
        raise ValueError(f'{path.name} must name its matrices, got {brief(content)}; write {{"x": ..., "w_q": ...}}')
    return content


def read_npz(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name].tolist() for name in arrays.files}
    except OSError:
        raise
    except Exception as error:  # what a damaged file makes zipfile, zlib and numpy say is of many kinds
        raise ValueError(
            f"{path.name} must be arrays of numbers saved by numpy.savez, got an error: {error}; save it again"
        ) from None


def to_beta(value: Any) -> float:
    """A number, or "inf" and "-inf", which JSON has no number for."""
    try:
        beta = float(value)
    except (TypeError, ValueError, OverflowError):
        beta = math.nan
    if isinstance(value, bool) or math.isnan(beta):
        raise ValueError(f"beta must be a number or inf, got {brief(value)}; leave it out for 1/sqrt(query width)")
    return beta
