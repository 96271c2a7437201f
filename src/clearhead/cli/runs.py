"""`clearhead runs`: the runs in a folder, with how far each is and how good. It only reads, and loads no torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.cli.options import Parser
from clearhead.files import MAX_JSON_BYTES, check_tree, from_json, read_regular
from clearhead.messages import duration, json_text, printable, safe_console
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig
from clearhead.training.metrics_log import Record, read
from clearhead.training.run_directory import CONFIG, METRICS, RUNS, is_locked

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.training.audit import Audit

ABOUT_RUNS = """\
Lists the runs in ./runs, or in another folder, with the newest first: recipe,
steps, best validation accuracy, test accuracy, and state.

  running            a process is training it
  finished           trained to its end and tested
  interrupted        stopped or killed; clearhead resume NAME continues it
  diverged           loss, gradient or weights were not finite numbers
  no checkpoint yet  stopped before the first; clearhead resume NAME restarts it
  unreadable         a file in its folder is damaged"""

RUNS_EXAMPLES = """\
examples
  clearhead runs
  clearhead runs elsewhere/runs --json"""

State = Literal["running", "finished", "interrupted", "diverged", "no checkpoint yet", "unreadable"]
WITHOUT_TEST = ("text",)
"""data sets that have no test examples"""


@dataclass(frozen=True)
class RunSummary:
    name: str
    path: str
    state: State
    changed: float
    """when a record was last written, in seconds since 1970"""
    recipe: str | None = None
    step: int = 0
    total_steps: int | None = None
    """None while it depends on an epoch whose length is not known yet"""
    epochs: int | None = None
    """that the run is to last, where its length was given in epochs"""
    best_validation_accuracy: float | None = None
    test_accuracy: float | None = None
    problem: str | None = None
    """why it is unreadable"""


def runs(argv: Sequence[str]) -> None:
    options = Parser("clearhead runs", ABOUT_RUNS)
    options.usage = "clearhead runs [FOLDER] [options]"
    options.epilog = RUNS_EXAMPLES
    options.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="where runs are (default: runs)")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)
    if args.folder is not None and not args.folder.is_dir():
        raise LookupError(f"no such folder: {args.folder}")
    folder = args.folder or RUNS
    found = summaries(folder)
    if args.json:
        print(json_text([asdict(one) for one in found]))
    elif not found:
        print(f"There are no runs in {printable(folder)}. Start one with: clearhead train reverse")
    else:
        from clearhead.cli.options import show

        show(runs_table(found))


def summaries(folder: Path) -> list[RunSummary]:
    """Of all runs in a folder, or of the folder itself if it is a run; the newest first."""
    if os.path.lexists(folder / CONFIG):
        return [summarize(folder)]
    names = [name for name in (os.listdir(folder) if folder.is_dir() else []) if not name.startswith(".")]
    found = [summarize(folder / name) for name in names if os.path.lexists(folder / name / CONFIG)]
    return sorted(found, key=lambda one: (-one.changed, one.name))


def summarize(folder: Path) -> RunSummary:
    """What is known of a run, whatever is broken in it."""
    known = RunSummary(folder.name, str(folder), "unreadable", last_change(folder))
    try:
        check_tree(folder, for_writing=False)
        config = RunConfig.from_dict(from_json(read_regular(folder / CONFIG, MAX_JSON_BYTES)))
        records = read(folder / METRICS)
        known = replace(known, recipe=config.recipe, **numbers(config, records))
        known = replace(known, step=max([known.step, *saved_steps(folder)]))  # records are of every few steps
        return replace(known, state=state_of(folder, config, records, known))
    except Exception as error:  # one broken folder must not hide the others
        return replace(known, problem=" ".join(in_words(error).split()) or type(error).__name__)


def in_words(error: Exception) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)


def numbers(config: RunConfig, records: Sequence[Record]) -> dict[str, Any]:
    training = config.training
    last = max((record for record in records if record.get("epoch")), key=lambda r: r["step"], default=None)
    per_epoch = round(last["step"] / last["epoch"]) if last else 0
    accuracies = {
        kind: [record["accuracy"] for record in records if record.get("kind") == kind and "accuracy" in record]
        for kind in ("validation", "test")
    }
    return {
        "step": last["step"] if last else 0,
        "total_steps": training.n_steps(per_epoch) or None,
        "epochs": training.epochs or None,
        "best_validation_accuracy": max(accuracies["validation"], default=None),
        "test_accuracy": accuracies["test"][-1] if accuracies["test"] else None,
    }


def state_of(folder: Path, config: RunConfig, records: Sequence[Record], known: RunSummary) -> State:
    if is_locked(folder):
        return "running"
    last = records[-1] if records else {}
    if last.get("kind") == "diverged":
        return "diverged"
    has_ended = known.total_steps is not None and known.step >= known.total_steps
    if last.get("kind") == "test" and (has_ended or ran_out_of_patience(config, records)):  # else lengthened since
        return "finished"
    if has_ended and config.data.name in WITHOUT_TEST:
        return "finished"
    return "interrupted" if saved_steps(folder) else "no checkpoint yet"


def ran_out_of_patience(config: RunConfig, records: Sequence[Record]) -> bool:
    """Whether none of the last `patience` validations was better than all before them."""
    scores = [(r["accuracy"], -r["loss"]) for r in records if r.get("kind") == "validation" and "accuracy" in r]
    n = config.training.patience
    return 0 < n < len(scores) and max(scores[-n:]) <= max(scores[:-n])


def last_change(folder: Path) -> float:
    for name in (METRICS, CONFIG):
        try:
            return (folder / name).lstat().st_mtime
        except OSError:
            continue
    return 0.0


def runs_table(found: Sequence[RunSummary], *, with_time: bool = True) -> "Table":
    """The time of the last change is left out where the terminal is too narrow for all columns."""
    from rich.table import Table

    from clearhead.cli.options import console

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "recipe"):
        shown.add_column(title, overflow="fold")
    for title in ("step", "validation", "test"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("state", min_width=max(len(one.state) for one in found))
    if with_time:
        shown.add_column("last change", justify="right", no_wrap=True)
    now = time.time()
    for one in found:
        shown.add_row(
            printable(one.name),
            printable(one.recipe or ""),
            steps(one),
            percent(one.best_validation_accuracy),
            percent(one.test_accuracy),
            f"{one.state}: {printable(one.problem)}" if one.problem else one.state,
            *([f"{duration(max(1.0, now - one.changed))} ago"] if with_time else []),
        )
    if with_time and safe_console(width=1000).measure(shown).maximum > console().width:
        return runs_table(found, with_time=False)
    return shown


def steps(one: RunSummary) -> str:
    if one.state == "unreadable":
        return ""
    total = f"{one.total_steps:,}" if one.total_steps else f"{one.epochs} epochs"
    return f"{one.step:,} / {total}"


def percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.2%}"


# `clearhead verify`: whether the files of a run are those that training wrote. It only reads, and loads no torch.


ABOUT_VERIFY = """\
Checks every file of a run and lists what is wrong. Checkpoints are compared
with their manifests (size and SHA-256), metrics.jsonl and config.json with what
the newest intact checkpoint recorded about them. Nothing is written.

  missing     a file or a record is no longer there
  changed     a file is not what was saved
  surplus     a file does not belong to a run
  leftover    a process that was killed did not finish or remove a file
  unsafe      a link or a special file: other commands refuse the run
  unreadable  the system reports an error for a file

Attention maps are compared with the digest in their header. Figures cannot be
compared with anything.
The exit code is 0 if the run is intact, and 1 if it is not."""

VERIFY_EXAMPLES = """\
examples
  clearhead verify mine
  clearhead verify runs/mine --json"""

NOT_INTACT = 1


def verify(argv: Sequence[str]) -> int:
    options = Parser("clearhead verify", ABOUT_VERIFY)
    options.usage = "clearhead verify RUN [options]"
    options.epilog = VERIFY_EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.training.audit import audit
    from clearhead.training.run_directory import find_run

    found = audit(find_run(args.run, checked=False))
    if args.json:
        print(json_text({"is_intact": found.is_intact} | asdict(found)))
    else:
        tell(found)
    return 0 if found.is_intact else NOT_INTACT


def tell(found: "Audit") -> None:
    from clearhead.cli.options import show

    n = len(found.findings)
    state = "is intact" if found.is_intact else f"is not intact: {n} {'problem' if n == 1 else 'problems'}"
    print(f"{printable(found.run)} {state}{' (a process is training it)' if found.is_running else ''}")
    if found.findings:
        print()
        show(findings_table(found))
        print()
    steps = ", ".join(map(str, found.checkpoints)) or "none"
    print(f"intact checkpoints: {steps}; records: {found.records:,}; files: {found.files:,}")


def findings_table(found: "Audit") -> "Table":
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("file", overflow="fold")
    shown.add_column("finding", no_wrap=True)
    shown.add_column("what is wrong", overflow="fold")
    for finding in found.findings:
        shown.add_row(printable(finding.path), finding.kind, printable(finding.problem))
    return shown
