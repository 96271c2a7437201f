"""The lab as Markdown: one page for each lesson, an index, or a single page with the results of a run.

A page shows the statement, formula, figure, measured numbers, conditions and misconception of each claim, and commands
to try. `docs/make_lab.py` writes the pages of the documentation, `clearhead lab --page` a single page.
"""

import shlex
from collections.abc import Container, Mapping, Sequence
from itertools import groupby

from clearhead.lab.claim import LESSONS, Check, Claim, Finding, settings
from clearhead.lab.record import Record, Variation

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
