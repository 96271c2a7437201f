"""Check the files of a run for missing, changed, unexpected, leftover and unsafe ones, without writing anything.

Checkpoints are compared with their manifests, metrics.jsonl and config.json with the latest intact checkpoint,
best.json with the existing checkpoints, and attention snapshots with the digest in their header. Figures are not
checked. Importing this module does not import torch.
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

Kind = Literal["missing", "changed", "unexpected", "leftover", "unsafe", "unreadable"]
UNFINISHED_PREFIXES = (SAVING, REPLACED, DELETING)
TOP_LEVEL = (CONFIG, METRICS, LOCK, BEST, CHECKPOINTS, SNAPSHOTS)


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
    findings, n_files = check_entries(folder, is_running)
    intact: dict[int, dict[str, Any]] = {}
    for step in saved_steps(folder) if is_folder(folder / CHECKPOINTS) else []:
        problems = list(checkpoint_problems(folder, step))
        if not problems and (state := read_json_object(checkpoint_path(folder, step) / STATE)):
            intact[step] = state
        elif os.path.lexists(checkpoint_path(folder, step)):  # otherwise training has deleted it during the audit
            findings += problems
    latest = intact[max(intact)] if intact else {}
    findings += config_problems(folder, latest)
    n_records, problems = record_problems(folder, latest, is_running)
    findings += [*problems, *best_problems(folder, latest, is_running), *snapshot_problems(folder)]
    unsafe = {finding.path: finding for finding in reversed(findings) if finding.kind == "unsafe"}
    findings = [finding for finding in findings if unsafe.get(finding.path, finding) == finding]  # it hides the others
    ordered = sorted(set(findings), key=lambda finding: (finding.path, finding.kind, finding.problem))
    return Audit(str(folder), is_running, list(intact), n_records, n_files, ordered)


def check_entries(folder: Path, is_running: bool) -> tuple[list[Finding], int]:
    """Findings about files that do not belong in a run, and the number of regular files."""
    findings: list[Finding] = []
    n_files, reported = 0, ""
    try:
        for path, status in walk(folder):
            name = os.path.relpath(path, folder)
            n_files += stat.S_ISREG(status.st_mode)
            if problem := unsafe_type(status, for_writing=True):
                findings.append(Finding(name, "unsafe", f"it is {problem}"))
            elif (kind_and_problem := classify(name)) and not (reported and name.startswith(reported + os.sep)):
                reported = name  # the contents of an unexpected folder are not listed
                if not (is_running and kind_and_problem[0] == "leftover"):
                    findings.append(Finding(name, *kind_and_problem))
    except UnsafeFileError as error:
        findings.append(Finding(os.path.relpath(error.filename, folder), "unsafe", str(error.strerror)))
    except OSError as error:
        findings.append(Finding(os.path.relpath(error.filename or folder, folder), "unreadable", error_text(error)))
    return findings, n_files


def classify(name: str) -> tuple[Kind, str] | None:
    """The kind and the problem of a path that does not belong in a run; None if it does."""
    parts = list(Path(name).parts)
    if parts[-1].startswith(".") and parts[-1].endswith(TEMP_SUFFIX):
        return "leftover", "an unfinished file; `clearhead resume` removes it"
    match parts:
        case [file] if file in TOP_LEVEL:
            return None
        case [top, *_] if top == FIGURES:
            return None
        case ["snapshots", file] if file.endswith(SUFFIX) and parse_step(file.removesuffix(SUFFIX)) is not None:
            return None
        case ["checkpoints", step, *files] if parse_step(step) is not None:
            if not files or (len(files) == 1 and files[0] in (*FILES, MANIFEST)):
                return None
        case ["checkpoints", step, *_] if step.startswith(DAMAGED):
            return "unexpected", "a damaged checkpoint that was set aside; it is not used"
        case ["checkpoints", step, *_] if any(
            parse_step(step.removeprefix(prefix)) is not None for prefix in UNFINISHED_PREFIXES
        ):
            return "leftover", "left by a process that was killed; `clearhead resume` removes it"
    return "unexpected", "not part of a run"


def checkpoint_problems(folder: Path, step: int) -> Iterator[Finding]:
    """Compare the files of a checkpoint with its manifest."""
    path, digests = checkpoint_path(folder, step), {}
    for name in FILES:
        try:
            digests[name] = size_and_digest(path / name)
        except OSError as error:
            yield read_failure(folder, path / name, error)
    try:
        manifest = read_regular(path / MANIFEST, MAX_JSON_BYTES)
    except OSError as error:
        yield read_failure(folder, path / MANIFEST, error)
        return
    if len(digests) < len(FILES) or not is_folder(path):
        return
    problems = disagreements(digests, manifest)
    for name, problem in problems.items():
        yield Finding(os.path.relpath(path / name, folder), "changed", problem)
    if not problems and not is_valid_state(read_json_object(path / STATE), step):
        problem = f"it is not a valid state of step {step} for this version of Clearhead"
        yield Finding(os.path.relpath(path / STATE, folder), "changed", problem)


def is_valid_state(state: Mapping[str, Any], step: int) -> bool:
    try:
        RecordsDigest.from_json(state.get("records", {"count": 0, "sha256": ""}))
    except ValueError:
        return False
    return state.get("step") == step and isinstance(state.get("state"), dict)


def config_problems(folder: Path, latest: Mapping[str, Any]) -> Iterator[Finding]:
    """An invalid config, and settings that differ from those in the latest checkpoint."""
    try:
        config = RunConfig.from_dict(from_json(read_regular(folder / CONFIG, MAX_JSON_BYTES)))
        changes = changes_since_saved(latest["state"].get("config") if latest else None, config)
    except OSError as error:
        yield read_failure(folder, folder / CONFIG, error)
        return
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        yield Finding(CONFIG, "changed", f"it cannot be used: {error!s:.200}")
        return
    for name, (before, after) in changes.items():
        if name not in CHANGED_BY_RESUME:
            yield Finding(CONFIG, "changed", f"{name} is {after!r:.40}, was {before!r:.40} at step {latest['step']}")


def record_problems(folder: Path, latest: Mapping[str, Any], is_running: bool) -> tuple[int, list[Finding]]:
    """The number of records, and the findings about them.

    Findings are invalid lines, records that are missing or have changed since the latest checkpoint, and test results
    that do not match their own digest.
    """
    path, findings = folder / METRICS, []
    saved = RecordsDigest.from_json(latest["records"]) if "records" in latest else None
    digest, end, invalid, mismatched = Digest(), 0, array("q"), array("q")  # line numbers
    problem = ""
    try:
        for number, (offset, line) in enumerate(metrics_log.scan(path), 1):
            end = offset
            if not metrics_log.is_record(line):
                invalid.append(number)
                continue
            digest.add(line)
            if saved and digest.count == saved.count:
                problem = "" if digest.value() == saved else saved.changed
            elif saved and digest.count > saved.count and not metrics_log.is_covered(line):
                mismatched.append(number)
        has_partial_line = os.path.lexists(path) and end < os.lstat(path).st_size
    except OSError as error:
        return 0, [read_failure(folder, path, error)]
    if has_partial_line and not is_running:
        findings.append(Finding(METRICS, "leftover", "its last line is incomplete; `clearhead resume` removes it"))
    for numbers, message in ((invalid, "is not a JSON object"), (mismatched, "does not match its SHA-256 digest")):
        if numbers:
            more = f", and {len(numbers) - 1:,} more lines" if len(numbers) > 1 else ""
            findings.append(Finding(METRICS, "changed", f"line {numbers[0]:,} {message}{more}"))
    if saved and digest.count < saved.count:
        problem = saved.missing(digest.count)
    if problem:
        kind: Kind = "missing" if "missing" in problem else "changed"
        findings.append(Finding(METRICS, kind, f"{problem} since step {latest['step']} was saved"))
    return digest.count, findings


def best_problems(folder: Path, latest: Mapping[str, Any], is_running: bool) -> Iterator[Finding]:
    """A best.json that is invalid, names a checkpoint that does not exist, or is missing."""
    state = latest["state"].get("train_state") if latest else None
    best_step = state.get("best_step") if isinstance(state, dict) else None
    try:
        best = parse_best(read_regular(folder / BEST, MAX_JSON_BYTES))
    except FileNotFoundError:
        if best_step and not is_running:
            problem = f"the best step is {best_step!r:.20}, according to the checkpoint of step {latest['step']}"
            yield Finding(BEST, "missing", problem)
    except OSError as error:
        yield read_failure(folder, folder / BEST, error)
    except ValueError as error:
        yield Finding(BEST, "changed", f"it cannot be used: {error!s:.200}")
    else:
        if is_folder(folder / CHECKPOINTS) and best not in saved_steps(folder) and not is_running:
            yield Finding(BEST, "changed", f"it names step {best}, which has no checkpoint")


def snapshot_problems(folder: Path) -> Iterator[Finding]:
    """Attention snapshots that cannot be read, do not match their digest, or differ in layers or shapes."""
    first: dict[str, Any] | None = None
    for path in snapshot_files(folder).values() if is_folder(folder / SNAPSHOTS) else []:
        try:
            shapes = safetensors_header(path)
            is_intact = matches_digest(read_snapshot_bytes(path))
        except OSError as error:
            yield read_failure(folder, path, error)
            continue
        except (SafetensorError, ValueError) as error:
            yield Finding(os.path.relpath(path, folder), "changed", f"it cannot be used: {error!s:.200}")
            continue
        if not is_intact:
            problem = "its contents do not match the digest in its header"
            yield Finding(os.path.relpath(path, folder), "changed", problem)
        first = first or shapes
        if shapes != first:
            yield Finding(
                os.path.relpath(path, folder), "changed", "its layers or shapes differ from those of the first snapshot"
            )


def size_and_digest(path: Path) -> tuple[int, str]:
    """The size and SHA-256 digest of a regular file, which is read in chunks."""
    with opened_regular(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as content:
        return os.fstat(file).st_size, hashlib.file_digest(content, "sha256").hexdigest()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file cannot be read or contains anything else."""
    try:
        value = from_json(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_failure(folder: Path, path: Path, error: OSError) -> Finding:
    """The finding for a file that cannot be read: missing, unsafe or unreadable."""
    name = os.path.relpath(path, folder)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Finding(name, "missing", "no such file")
    if isinstance(error, IsADirectoryError):
        return Finding(name, "changed", "it is a folder")
    return Finding(name, "unsafe" if isinstance(error, UnsafeFileError) else "unreadable", error_text(error))


def error_text(error: OSError) -> str:
    return error.strerror or str(error)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()
