"""Check the files of a run: missing, changed, surplus, leftover or unsafe. It only reads, and does not import torch.

Checkpoints are compared with their manifest, metrics.jsonl and config.json with what the latest intact checkpoint
stores about them, best.json with the existing checkpoints, attention snapshots with the digest in their header. Figures
cannot be compared with anything.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from clearhead.files import (
    MAX_JSON_BYTES,
    TEMP_SUFFIX,
    UnsafeFileError,
    from_json,
    opened_regular,
    read_regular,
    unsafe_type,
    walk,
)
from clearhead.training import metrics_log
from clearhead.training.checkpoint import (
    CHECKPOINTS,
    DAMAGED,
    DELETING,
    FILES,
    MANIFEST,
    REPLACED,
    SAVING,
    STATE,
    checkpoint_path,
    disagreements,
    parse_step,
    saved_steps,
)
from clearhead.training.config import CHANGED_BY_RESUME, RunConfig, changes_since_saved
from clearhead.training.metrics_log import Digest, RecordsDigest
from clearhead.training.run_directory import (
    BEST,
    CONFIG,
    FIGURES,
    LOCK,
    METRICS,
    SNAPSHOTS,
    is_locked,
    parse_best,
)
from clearhead.training.snapshots import SUFFIX, matches_digest, read_snapshot_bytes, safetensors_header, snapshot_files

Kind = Literal["missing", "changed", "surplus", "leftover", "unsafe", "unreadable"]
UNFINISHED = (SAVING, REPLACED, DELETING)
TOP = (CONFIG, METRICS, LOCK, BEST, CHECKPOINTS, SNAPSHOTS)


@dataclass(frozen=True)
class Finding:
    path: str
    """relative to the run directory"""
    kind: Kind
    problem: str


@dataclass(frozen=True)
class Audit:
    """The result of an audit. A run is intact if there are no findings."""

    run: str
    is_running: bool
    """whether a process is training the run; its unfinished files are not leftovers"""
    checkpoints: list[int]
    """the steps of intact checkpoints"""
    records: int
    files: int
    findings: list[Finding]

    @property
    def is_intact(self) -> bool:
        return not self.findings


def audit(folder: Path) -> Audit:
    """Check every file of a run."""
    is_running = is_locked(folder)
    findings, n_files = entries(folder, is_running)
    intact: dict[int, dict[str, Any]] = {}
    for step in saved_steps(folder) if is_folder(folder / CHECKPOINTS) else []:
        problems = list(checkpoint_problems(folder, step))
        if not problems and (state := parsed(checkpoint_path(folder, step) / STATE)):
            intact[step] = state
        elif os.path.lexists(checkpoint_path(folder, step)):  # otherwise deleted by its owner during the audit
            findings += problems
    newest = intact[max(intact)] if intact else {}
    findings += config_problems(folder, newest)
    n_records, problems = record_problems(folder, newest, is_running)
    findings += [*problems, *best_problems(folder, newest, is_running), *map_problems(folder)]
    unsafe = {one.path: one for one in reversed(findings) if one.kind == "unsafe"}  # the first one of each path
    findings = [one for one in findings if unsafe.get(one.path, one) == one]
    ordered = sorted(set(findings), key=lambda one: (one.path, one.kind, one.problem))
    return Audit(str(folder), is_running, list(intact), n_records, n_files, ordered)


def entries(folder: Path, is_running: bool) -> tuple[list[Finding], int]:
    """Findings about files that do not belong in a run, and the number of regular files."""
    findings: list[Finding] = []
    n_files, reported = 0, ""
    try:
        for path, found in walk(folder):
            name = os.path.relpath(path, folder)
            n_files += stat.S_ISREG(found.st_mode)
            if problem := unsafe_type(found, for_writing=True):
                findings.append(Finding(name, "unsafe", f"it is {problem}"))
            elif (surplus := unexpected(name)) and not (reported and name.startswith(reported + os.sep)):
                reported = name  # the contents of a surplus folder are not listed
                if not (is_running and surplus[0] == "leftover"):
                    findings.append(Finding(name, *surplus))
    except UnsafeFileError as error:
        findings.append(Finding(os.path.relpath(error.filename, folder), "unsafe", str(error.strerror)))
    except OSError as error:
        findings.append(Finding(os.path.relpath(error.filename or folder, folder), "unreadable", reason(error)))
    return findings, n_files


def unexpected(name: str) -> tuple[Kind, str] | None:
    """Why a path does not belong in a run; None if it does."""
    home, *rest = Path(name).parts
    last = rest[-1] if rest else home
    if last.startswith(".") and last.endswith(TEMP_SUFFIX):
        return "leftover", "an unfinished file; `clearhead resume` removes it"
    match [home, *rest]:
        case [only] if only in TOP:
            return None
        case [top, *_] if top == FIGURES:
            return None
        case ["snapshots", maps] if maps.endswith(SUFFIX) and parse_step(maps.removesuffix(SUFFIX)) is not None:
            return None
        case ["checkpoints", step, *files] if parse_step(step) is not None:
            if not files or (len(files) == 1 and files[0] in (*FILES, MANIFEST)):
                return None
        case ["checkpoints", step, *_] if step.startswith(DAMAGED):
            return "surplus", "a checkpoint that was set aside because it could not be used; nothing reads it"
        case ["checkpoints", step, *_] if any(
            parse_step(step.removeprefix(prefix)) is not None for prefix in UNFINISHED
        ):
            return "leftover", "of a process that was killed; `clearhead resume` removes it"
    return "surplus", "not part of a run"


def checkpoint_problems(folder: Path, step: int) -> Iterator[Finding]:
    """Compare the files of a checkpoint with its manifest."""
    place, found = checkpoint_path(folder, step), {}
    for name in FILES:
        try:
            found[name] = size_and_digest(place / name)
        except OSError as error:
            yield failure(folder, place / name, error)
    try:
        written = read_regular(place / MANIFEST, MAX_JSON_BYTES)
    except OSError as error:
        yield failure(folder, place / MANIFEST, error)
        return
    if len(found) < len(FILES) or not is_folder(place):
        return
    problems = disagreements(found, written)
    for name, problem in problems.items():
        yield Finding(os.path.relpath(place / name, folder), "changed", problem)
    if not problems and not holds_state(parsed(place / STATE), step):
        problem = f"it is not the state of step {step} that this version of Clearhead writes"
        yield Finding(os.path.relpath(place / STATE, folder), "changed", problem)


def holds_state(state: Mapping[str, Any], step: int) -> bool:
    try:
        RecordsDigest.from_json(state.get("records", {"count": 0, "sha256": ""}))
    except ValueError:
        return False
    return state.get("step") == step and isinstance(state.get("state"), dict)


def config_problems(folder: Path, newest: Mapping[str, Any]) -> Iterator[Finding]:
    """A config that is invalid, or that differs from the one of the latest checkpoint."""
    try:
        config = RunConfig.from_dict(from_json(read_regular(folder / CONFIG, MAX_JSON_BYTES)))
        changes = changes_since_saved(newest["state"].get("config") if newest else None, config)
    except OSError as error:
        yield failure(folder, folder / CONFIG, error)
        return
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        yield Finding(CONFIG, "changed", f"it cannot be used: {error!s:.200}")
        return
    for name, (then, now) in changes.items():
        if name not in CHANGED_BY_RESUME:
            yield Finding(CONFIG, "changed", f"{name} is {now!r:.40}, was {then!r:.40} at step {newest['step']}")


def record_problems(folder: Path, newest: Mapping[str, Any], is_running: bool) -> tuple[int, list[Finding]]:
    """The number of records, and findings.

    These are invalid lines, records that are missing or changed since the latest checkpoint, and test results that do
    not match their own digest.
    """
    path, findings = folder / METRICS, []
    known = RecordsDigest.from_json(newest["records"]) if "records" in newest else None
    digest, end, wrong, unsealed = Digest(), 0, array("q"), array("q")
    problem = ""
    try:
        for number, (offset, line) in enumerate(metrics_log.scan(path), 1):
            end = offset
            if not metrics_log.is_record(line):
                wrong.append(number)
                continue
            digest.add(line)
            if known and digest.count == known.count:
                problem = "" if digest.value() == known else known.changed
            elif known and digest.count > known.count and not metrics_log.is_covered(line):
                unsealed.append(number)
        has_rest = os.path.lexists(path) and end < os.lstat(path).st_size
    except OSError as error:
        return 0, [failure(folder, path, error)]
    if has_rest and not is_running:
        findings.append(Finding(METRICS, "leftover", "half a line at its end; `clearhead resume` removes it"))
    for numbers, what in ((wrong, "is not a JSON object"), (unsealed, "does not match its SHA-256 digest")):
        if numbers:
            more = f", and {len(numbers) - 1:,} more lines" if len(numbers) > 1 else ""
            findings.append(Finding(METRICS, "changed", f"line {numbers[0]:,} {what}{more}"))
    if known and digest.count < known.count:
        problem = known.missing(digest.count)
    if problem:
        kind: Kind = "missing" if "missing" in problem else "changed"
        findings.append(Finding(METRICS, kind, f"{problem} since step {newest['step']} was saved"))
    return digest.count, findings


def best_problems(folder: Path, newest: Mapping[str, Any], is_running: bool) -> Iterator[Finding]:
    """A best.json that is invalid, names no existing checkpoint, or is missing although there is a best checkpoint."""
    state = newest["state"].get("train_state") if newest else None
    known = state.get("best_step") if isinstance(state, dict) else None
    try:
        best = parse_best(read_regular(folder / BEST, MAX_JSON_BYTES))
    except FileNotFoundError:
        if known and not is_running:
            yield Finding(
                BEST, "missing", f"the best step is {known!r:.20}, by the checkpoint of step {newest['step']}"
            )
    except OSError as error:
        yield failure(folder, folder / BEST, error)
    except ValueError as error:
        yield Finding(BEST, "changed", f"it cannot be used: {error!s:.200}")
    else:
        if is_folder(folder / CHECKPOINTS) and best not in saved_steps(folder) and not is_running:
            yield Finding(BEST, "changed", f"it names step {best}, which has no checkpoint")


def map_problems(folder: Path) -> Iterator[Finding]:
    """Attention snapshots that cannot be read, do not match their digest, or differ in layers or shapes."""
    first: dict[str, Any] | None = None
    for path in snapshot_files(folder).values() if is_folder(folder / SNAPSHOTS) else []:
        try:
            shapes = safetensors_header(path)
            is_intact = matches_digest(read_snapshot_bytes(path))
        except OSError as error:
            yield failure(folder, path, error)
            continue
        except (SafetensorError, ValueError) as error:
            yield Finding(os.path.relpath(path, folder), "changed", f"it cannot be used: {error!s:.200}")
            continue
        if not is_intact:
            problem = "its contents do not match the digest in its header"
            yield Finding(os.path.relpath(path, folder), "changed", problem)
        first = first or shapes
        if shapes != first:
            yield Finding(os.path.relpath(path, folder), "changed", "its layers or shapes are not those of the others")


def size_and_digest(path: Path) -> tuple[int, str]:
    """The size and SHA-256 digest of a regular file, which is read in chunks."""
    with opened_regular(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as content:
        return os.fstat(file).st_size, hashlib.file_digest(content, "sha256").hexdigest()


def parsed(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        value = from_json(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def failure(folder: Path, path: Path, error: OSError) -> Finding:
    """The finding for a file that cannot be read: missing, unsafe or unreadable."""
    name = os.path.relpath(path, folder)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Finding(name, "missing", "there is no such file")
    if isinstance(error, IsADirectoryError):
        return Finding(name, "changed", "it is a folder")
    return Finding(name, "unsafe" if isinstance(error, UnsafeFileError) else "unreadable", reason(error))


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()
