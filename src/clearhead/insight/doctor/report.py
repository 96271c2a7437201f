"""What the doctor found: a line for each check, and whether there is a fault."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["fine", "note", "warning", "fault", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One check's verdict. A fault is certain; a warning can't be decided from outside, and says why it matters; a note
    is worth knowing and harmless."""

    check: str
    verdict: Verdict
    text: str
    """one line: what was seen, and what to do about it"""


@dataclass(frozen=True)
class Report:
    """All findings about one module. print() shows them as a table."""

    module: str
    called: str
    """how it was called, and in which dtype"""
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
        """The finding of one check, the worst if it has several."""
        order: list[Verdict] = ["fault", "warning", "note", "not checked", "fine"]
        own = [finding for finding in self.findings if finding.check == check]
        if not own:
            known = dict.fromkeys(finding.check for finding in self.findings)
            raise LookupError(f"no check {check!r}; there is {', '.join(known)}")
        return min(own, key=lambda finding: order.index(finding.verdict))

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "called": self.called,
            "faults": len(self.faults),
            "warnings": len(self.warnings),
            "notes": len(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def summary(self) -> str:
        notes = f", {counted(len(self.notes), 'note')}" if self.notes else ""
        return f"{counted(len(self.faults), 'fault')}, {counted(len(self.warnings), 'warning')}{notes}"

    def __str__(self) -> str:
        size = max((len(finding.check) for finding in self.findings), default=0)
        lines = [f"{finding.verdict:11}  {finding.check:{size}}  {finding.text}" for finding in self.findings]
        return "\n".join([f"{self.module}: {self.called}", "", *lines, "", self.summary()])


def counted(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'' if n == 1 else 's'}"


def listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
