"""The recorded result of every claim, read from results.json without torch, and the lab as Markdown pages.

`python docs/make_lab.py --measure` runs all claims again and writes results.json.

A page shows the statement, formula, figure, measured numbers, conditions and misconception of each claim, and commands
to try. `docs/make_lab.py` writes the pages of the documentation: an index, and one for each lesson. `clearhead lab
--page` writes a single page with the results of a run.
"""

import json
import math
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from types import MappingProxyType
from typing import Any

from clearhead.lab.claim import LESSONS, Check, Claim, Curve, Finding, Kind, Result, Verdict, settings

DIGITS = 6
"""significant digits of recorded values"""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What the command that a claim suggests next measured: the same experiment with changed settings."""

    command: str
    verdict: Verdict
    failed: tuple[Check, ...]
    """the checks that do not pass with these settings"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was measured when a claim was last run with its default settings."""

    kind: Kind
    statement: str
    verdict: Verdict
    settings: Mapping[str, Any]
    """the default settings, `seed` among them; infinity is the string "inf", because JSON has no number for it"""
    checks: tuple[Check, ...]
    curves: tuple[Curve, ...] = ()
    variation: Variation | None = None

    @property
    def result(self) -> Result:
        return Result(self.checks, self.curves)

    def value(self, name: str) -> float:
        """The measured value of the check with this name."""
        for check in self.checks:
            if check.name == name:
                return check.value
        raise LookupError(f"no recorded check named {name!r}; the checks are {[check.name for check in self.checks]}")


@cache
def recorded() -> Mapping[str, Record]:
    """slug -> record, in alphabetical order."""
    text = files("clearhead.lab").joinpath("results.json").read_text(encoding="utf-8")
    return MappingProxyType({slug: from_fields(fields) for slug, fields in json.loads(text).items()})


def from_fields(fields: Mapping[str, Any]) -> Record:
    variation = fields.get("variation")
    return Record(
        kind=fields["kind"],
        statement=fields["statement"],
        verdict=fields["verdict"],
        settings=MappingProxyType(fields["settings"]),
        checks=checks_from(fields["checks"]),
        curves=tuple(
            Curve(curve["quantity"], curve["name"], tuple(curve["x"]), tuple(curve["y"]))
            for curve in fields.get("curves", ())
        ),
        variation=variation and Variation(**{**variation, "failed": checks_from(variation["failed"])}),
    )


def checks_from(rows: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    return tuple(Check(**{**row, "value": float(row["value"])}) for row in rows)


def record(finding: Finding, variation: Variation | None = None) -> Record:
    """The record of a claim that was run with its default settings."""
    assert finding.result, "the claim was not run"
    assert not finding.changed, "a record is a result of the default settings"
    claim = finding.claim
    return Record(
        kind=claim.kind,
        statement=claim.statement,
        verdict=finding.result.verdict,
        settings={name: json_number(parameter.default) for name, parameter in settings(claim).items()},
        checks=finding.checks,
        curves=finding.curves,
        variation=variation,
    )


def to_text(records: Mapping[str, Record]) -> str:
    """The contents of results.json: sorted by slug, one line for each check, values rounded to DIGITS digits."""
    claims = []
    for slug, entry in sorted(records.items()):
        fields = {
            "kind": dump(entry.kind),
            "statement": dump(entry.statement),
            "verdict": dump(entry.verdict),
            "settings": dump(dict(entry.settings)),
            "checks": dump_lines(entry.checks),
        }
        if entry.curves:
            fields["curves"] = dump_lines(entry.curves)
        if entry.variation:
            fields["variation"] = dump(as_json(entry.variation))
        claims.append(
            f" {dump(slug)}: {{\n" + ",\n".join(f'  "{name}": {text}' for name, text in fields.items()) + "\n }"
        )
    return "{\n" + ",\n".join(claims) + "\n}\n"


def dump_lines(items: Iterable[Check | Curve]) -> str:
    """A JSON list with one line for each item."""
    return "[\n" + ",\n".join(f"   {dump(as_json(item))}" for item in items) + "\n  ]"


def as_json(item: Check | Curve | Variation) -> dict[str, Any]:
    return {name: rounded(value) for name, value in asdict(item).items()}


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def rounded(value: Any) -> Any:
    """Numbers rounded to DIGITS significant digits; integers without a decimal point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return json_number(value)


def json_number(value: Any) -> Any:
    """JSON has neither infinity nor NaN, so they are written as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


INTRODUCTIONS = {
    "temperature": "Attention turns scores into weights with softargmax, and one number decides how sharp these "
    "weights are: the inverse temperature beta. It moves attention between an average and a selection, and it explains "
    "the factor 1/sqrt(d).",
    "attention-weights": "What the attention weights are, which shape they have, and what changes them. A query is "
    "compared with every key; the weights say how much of each value the output contains.",
    "multi-head": "A head is an attention layer of its own on a slice of the width. This lesson shows what is computed "
    "per head, what is shared, and when several heads are better than one.",
    "positions": "Attention treats its tokens as a set. Order enters only through positional encodings: some tasks "
    "need it, others do not.",
    "recurrence": "A recurrent network passes information from step to step; attention connects any two positions "
    "directly. This lesson compares the paths of the gradient, the number of sequential operations and what models of "
    "equal size learn.",
    "expressivity": "With suitable weights and masks, attention computes permutations, convolutions and message "
    "passing on graphs. These constructions show what one layer can express, not what training finds.",
    "blocks": "Between two attention layers stand a feed-forward network, normalization and skip connections. This "
    "lesson shows what each of them does.",
    "vision": "A vision transformer cuts an image into patches and treats them as tokens. This lesson compares it with "
    "a convolutional network: receptive field, input size, parallelism and equivariance.",
    "masks-and-training": "How keys are masked, what happens if all of them are, and how a model behaves in training "
    "and in evaluation.",
}
"""name of the page in docs/lab, without .md -> the paragraph below its title"""

LESSON_PAGES = dict(zip(LESSONS, INTRODUCTIONS, strict=True))
"""lesson -> name of its page"""

KINDS = {
    "demonstration": "These claims follow from the definitions. The numbers illustrate an identity; no other weights "
    "or inputs could refute it.",
    "experiment": "The outcome of these claims depends on random weights or on training, so each states its "
    "conditions. With other settings the verdict may differ.",
}

INDEX = """\
# The lab

The lab tests claims about attention with numbers. Each claim comes with its formula, the values that were measured, the
range that the statement predicts for them, a figure, and the misconception that it refutes. A *demonstration* shows a
consequence of the definitions. The outcome of an *experiment* depends on random weights or on training.

```bash
clearhead lab                     # list all claims
clearhead lab temperature         # run one and draw its figure
clearhead lab temperature --help  # list the settings that you can change
```

"""

GENERATED = """\
`python docs/make_lab.py --measure` runs every claim with its default settings and records the results in
`src/clearhead/lab/results.json`; `python docs/make_lab.py` writes these pages from the record. Most claims run in
seconds; those that train a model take up to five minutes.
"""

SINGLE_PAGE_HEAD = """\
# The lab

Each section states a claim about attention and the numbers that were measured to test it. The claim holds if every
number is in the predicted range. A common misconception is listed with each claim. A *demonstration* holds by
construction: it shows an identity with numbers. The outcome of an *experiment* depends on random weights or on
training. The commands below each claim run it again, and with other settings. Most claims take seconds; those that
train a model take up to five minutes. A claim need not hold with changed settings; the program says whether it does.
"""


def index_page(records: Mapping[str, Record], claims: Sequence[Claim]) -> str:
    """The index: a table of the claims of each lesson, with links to their sections."""
    lines = [INDEX]
    for number, (lesson, group) in enumerate(groupby(claims, lambda claim: claim.lesson), start=1):
        page = LESSON_PAGES[lesson]
        lines += [f"## {number}. [{lesson}](lab/{page}.md)\n", INTRODUCTIONS[page] + "\n"]
        lines += ["| claim | kind | verdict | statement |", "|---|---|---|---|"]
        for claim in group:
            verdict = records[claim.slug].verdict
            cells = (f"[{claim.slug}](lab/{page}.md#{claim.slug})", claim.kind, verdict, claim.statement)
            lines.append("| " + " | ".join(map(cell, cells)) + " |")
        lines.append("")
    return "\n".join([*lines, GENERATED])


def lesson_page(lesson: str, findings: Sequence[Finding], variations: Mapping[str, Variation | None]) -> str:
    """One lesson: its introduction, its demonstrations, its experiments."""
    lines = [
        f"# {LESSONS.index(lesson) + 1}. {lesson}\n",
        navigation(lesson) + "\n",
        INTRODUCTIONS[LESSON_PAGES[lesson]] + "\n",
    ]
    for kind, about in KINDS.items():
        of_kind = [finding for finding in findings if finding.claim.kind == kind]
        if of_kind:
            lines += [f"## {kind.capitalize()}s\n", about + "\n"]
        for finding in of_kind:
            slug = finding.claim.slug
            lines += section(finding, f"{slug}.svg", variations[slug])
    return "\n".join([*lines, navigation(lesson) + "\n"])


def navigation(lesson: str) -> str:
    """Links to the index and to the lessons before and after."""
    number = LESSONS.index(lesson)
    links = ["[All lessons](../lab.md)"]
    if number > 0:
        before = LESSONS[number - 1]
        links.append(f"previous: [{before}]({LESSON_PAGES[before]}.md)")
    if number + 1 < len(LESSONS):
        after = LESSONS[number + 1]
        links.append(f"next: [{after}]({LESSON_PAGES[after]}.md)")
    return " · ".join(links)


def single_page(findings: Sequence[Finding], directory: str, drawn: Container[str]) -> str:
    """All claims on one page, with links to the figures of the claims in `drawn`."""
    lines = [SINGLE_PAGE_HEAD]
    for number, (lesson, group) in enumerate(groupby(findings, lambda finding: finding.claim.lesson), start=1):
        lines.append(f"## {number}. {lesson}\n")
        for finding in group:
            slug = finding.claim.slug
            lines += section(finding, f"{directory}/{slug}.svg" if slug in drawn else None)
    return "\n".join(lines)


def section(finding: Finding, figure: str | None, variation: Variation | None = None) -> list[str]:
    """One claim. The heading is the slug alone, so that links to it survive."""
    claim = finding.claim
    return [
        f"### {claim.slug}\n",
        f"> {claim.statement}\n",
        *([f"*Conditions:* {claim.conditions}\n"] if claim.conditions else []),
        "\n".join(["```text", *claim.formulas, "```\n"]),
        *([f"![Figure of the claim {claim.slug}]({figure})\n"] if figure else []),
        f"*Verdict:* **{finding.verdict}**{counted(finding)}\n",
        *(check_table(finding.checks) if finding.checks else []),
        f"*Misconception:* {claim.misconception}\n",
        f"*Settings:* {setting_list(claim)}.\n",
        "Try it:\n",
        "\n".join(["```bash", *commands(claim), "```\n"]),
        *([outcome(variation) + "\n"] if variation else []),
    ]


def counted(finding: Finding) -> str:
    """After the verdict: how many of the numbers are as predicted."""
    total, passed = len(finding.checks), sum(check.passed for check in finding.checks)
    if not total:
        return "."
    if passed < total:
        return f": {passed} of {total} measured numbers are as predicted."
    return (
        f": all {total} measured numbers are as predicted." if total > 1 else ": the measured number is as predicted."
    )


def check_table(checks: Sequence[Check]) -> list[str]:
    rows = [
        "| "
        + " | ".join((cell(check.name), shown(check.value), check.expectation, "yes" if check.passed else "no"))
        + " |"
        for check in checks
    ]
    return ["| measured | value | predicted | as predicted |", "|---|---|---|---|", *rows, ""]


def setting_list(claim: Claim) -> str:
    return ", ".join(f"`{name}={parameter.default}`" for name, parameter in settings(claim).items())


def commands(claim: Claim) -> list[str]:
    """The claim itself, then what it suggests next; both end with exit code 0."""
    return [f"clearhead lab {claim.slug}", claim.try_next]


def outcome(variation: Variation) -> str:
    """What the suggested command with changed settings finds, in a sentence."""
    options = " ".join(shlex.split(variation.command)[3:])
    if variation.verdict == "holds":
        return f"With `{options}` the claim still holds."
    failed = "; ".join(
        f"{check.name}: {shown(check.value)} (predicted: {check.expectation})" for check in variation.failed
    )
    return f"With `{options}` the claim does not hold: {failed}."


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|")


def shown(value: float) -> str:
    """Three significant digits; rounding errors differ between machines, so their size is not shown."""
    return "below 1e-12" if 0 < abs(value) < 1e-12 else f"{value:.3g}"
