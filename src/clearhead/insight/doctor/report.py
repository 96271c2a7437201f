"""The doctor's report: one finding per check; and errors of the examined module in one line."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.messages import html_table, printable

Verdict = Literal["fine", "note", "warning", "fault", "not checked"]
SEVERITY: tuple[Verdict, ...] = ("fault", "warning", "note", "not checked", "fine")
"""the worst first"""


ANCHORS = {"scale": "scale-keys-and-queries", "keys and queries": "scale-keys-and-queries"}
"""paragraphs that describe more than one check"""


@dataclass(frozen=True)
class Finding:
    """The verdict of one check.

    A fault is certainly wrong. A warning may be intended, which only the author can tell. A note is harmless.
    """

    check: str
    verdict: Verdict
    text: str
    """one line: what is wrong, the evidence (which token changed, what moved, by how much), and how to fix it"""

    @property
    def docs(self) -> str:
        """The paragraph of the documentation about this check."""
        return f"docs/doctor.md#{ANCHORS.get(self.check, self.check.replace(' ', '-'))}"


@dataclass(frozen=True, repr=False)
class Report:
    """All findings about one module; print() and notebooks show them as a table."""

    module: str
    call: str
    """the arguments of forward(), the mode and the dtype"""
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fault"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "warning"]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "note"]

    def __getitem__(self, check: str) -> Finding:
        """The finding of a check; the worst one if there are several."""
        matching = [finding for finding in self.findings if finding.check == check]
        if not matching:
            checks = dict.fromkeys(finding.check for finding in self.findings)
            raise LookupError(f"no check {check!r}; the report has {', '.join(checks)}")
        return min(matching, key=lambda finding: SEVERITY.index(finding.verdict))

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "call": self.call,
            "faults": len(self.faults),
            "warnings": len(self.warnings),
            "notes": len(self.notes),
            "findings": [{**asdict(finding), "docs": finding.docs} for finding in self.findings],
        }

    def links(self) -> str:
        """One line with the paragraphs about the faults and warnings; empty if there are none."""
        links = dict.fromkeys(finding.docs for finding in (*self.faults, *self.warnings))
        return f"see {', '.join(links)}" if links else ""

    def summary(self) -> str:
        counts = [count(len(self.faults), "fault"), count(len(self.warnings), "warning")]
        return ", ".join([*counts, count(len(self.notes), "note")] if self.notes else counts)

    def __str__(self) -> str:
        size = max((len(finding.check) for finding in self.findings), default=0)
        lines = [f"{finding.verdict:11}  {finding.check:{size}}  {finding.text}" for finding in self.findings]
        return "\n".join([f"{self.module}: {self.call}", "", *lines, "", self.summary(), *filter(None, [self.links()])])

    def __repr__(self) -> str:
        return printable(self, keep="\n")

    def _repr_html_(self) -> str:
        rows = [(finding.verdict, finding.check, finding.text) for finding in self.findings]
        title = f"{self.module}: {self.call}"
        return html_table(
            ["verdict", "check", "finding"],
            rows,
            caption=title,
            footer="; ".join(filter(None, [self.summary(), self.links()])),
        )


def count(n: int, noun: str) -> str:
    return f"{n or 'no'} {noun}{'' if n == 1 else 's'}"


def join_names(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@contextmanager
def as_value_error(action: str) -> Iterator[None]:
    """Turns whatever a module raises into a one-line ValueError: "<action> failed: <error>"."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ValueError):  # a ValueError of ours is a one-line message already
        raise
    except BaseException as error:
        raise ValueError(f"{action} failed: {error_summary(error)}") from error


def error_summary(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (model.py:12)`: the first line, and the last line of the user's code."""
    try:
        message = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # an exception class of the user's may have a broken __str__
        message = ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{location}"


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to Clearhead, nor to an installed package, nor to Python."""
    path = Path(filename)
    clearhead, python = Path(__file__).resolve().parents[2], Path(traceback.__file__).resolve().parent
    return (
        path.is_file() and "site-packages" not in path.parts and not {clearhead, python} & set(path.resolve().parents)
    )
