"""The lab's hand-out: a page for a class, written from what the experiments found."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from clearhead.lab.claim import Check, Claim, Curve, Result

HEAD = """\
# The lab

Each sentence below is a claim about attention that was put to the test: numbers were measured, and the claim holds if
all of them are what it says. Beside each claim stands a common misconception. A claim is either a *demonstration*,
which holds by construction (an identity that is shown with numbers), or an *experiment*, whose outcome depends on
random weights or on training. Each can be run again, with other settings, by the command below it: a whole lesson takes
seconds on a laptop, a claim that trains a model up to five minutes. With other settings a claim need not hold, and the
program says whether it does.

This page is written by `clearhead lab --all --page docs/lab.md`.
"""


@dataclass(frozen=True)
class Finding:
    """A claim and what was measured; None if it was not run. `changed` holds the settings that are not its own."""

    claim: Claim
    result: Result | None
    changed: Mapping[str, object] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.result.checks if self.result else ()

    @property
    def curves(self) -> tuple[Curve, ...]:
        return self.result.curves if self.result else ()

    @property
    def verdict(self) -> str:
        return self.result.verdict if self.result else "not run"

    @property
    def is_expected(self) -> bool:
        """What is expected is known for the claim's own settings only: with others, every verdict is an answer."""
        return self.result is None or bool(self.changed) or self.result.verdict == self.claim.expected


def check_page(path: Path) -> None:
    """Before the experiments: nobody waits for a page that cannot be written."""
    if path.suffix.lower() != ".md" or path.is_dir():
        raise ValueError(f"a page is a file that ends in .md, got {str(path)!r}; try {path.stem or 'lab'}.md")


def write_page(path: Path, found: Sequence[Finding]) -> None:
    """The page, and the figures in a folder of its name beside it: docs/lab.md and docs/lab/."""
    from clearhead.lab.plots import save
    from clearhead.lab.registry import draw_result

    check_page(path)
    figures = path.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    drawn = set()
    for finding in found:
        if figure := draw_result(finding.claim.slug, finding.result):
            save(figure, figures / f"{finding.claim.slug}.svg")
            drawn.add(finding.claim.slug)
    path.write_text(page(found, figures.name, drawn), encoding="utf-8")


def page(found: Sequence[Finding], figures: str, drawn: Container[str]) -> str:
    """The text, with `drawn` claims' figures linked from the folder `figures`."""
    lines = [HEAD]
    for number, (lesson, findings) in enumerate(groupby(found, lambda finding: finding.claim.lesson), start=1):
        lines.append(f"## {number}. {lesson}\n")
        for finding in findings:
            lines += entry(finding, f"{figures}/{finding.claim.slug}.svg" if finding.claim.slug in drawn else None)
    return "\n".join(lines)


def entry(finding: Finding, figure: str | None) -> list[str]:
    claim = finding.claim
    rows = [
        f"| {check.name} | {shown(check.value)} | {check.says} | {'yes' if check.ok else 'no'} |"
        for check in finding.checks
    ]
    return [
        f"### {claim.slug}: {finding.verdict}\n",
        f"{claim.kind.capitalize()}: {claim.statement}  ",
        *([f"*Conditions:* {claim.conditions}  "] if claim.conditions else []),
        f"*Misconception:* {claim.mistake}\n",
        "\n".join(["```text", *claim.formulas, "```\n"]),
        *(["| measured | value | the claim says | |", "|---|---|---|---|", *rows, ""] if rows else []),
        *([f"![{claim.slug}]({figure})\n"] if figure else []),
        f"Run it: `clearhead lab {claim.slug}`; then try `{claim.try_next}`.\n",
    ]


def shown(value: float) -> str:
    """Three digits; what is smaller than rounding errors is said to be so, for it differs between machines."""
    return "below 1e-9" if 0 < abs(value) < 1e-9 else f"{value:.3g}"
