"""`clearhead lab`: all claims in a table, or one in depth with the reader's own numbers and a figure."""

import math
import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from clearhead.lab.claim import Claim
    from clearhead.lab.page import Finding

ABOUT = """\
Claims about attention, each put to the test: you see whether it holds, and by
which numbers. A demonstration holds by construction; the outcome of an
experiment depends on random weights or on training. Without options, all
claims are listed; the words in the first column are their names.

  clearhead lab temperature               one claim in depth, with its figure
  clearhead lab temperature --help        what you may change in it
  clearhead lab temperature --n-keys 3    the same with your own numbers

From Python:
  import clearhead
  clearhead.lab.run("temperature", n_keys=3).verdict"""

UNEXPECTED = 1


def lab(argv: Sequence[str]) -> int:
    """The exit code: 1 when the verdict of a claim with its own settings is not the expected one."""
    if argv and not argv[0].startswith("-"):
        return run_one(argv[0], argv[1:])
    return run_all(argv)


def run_all(argv: Sequence[str]) -> int:
    from clearhead.lab.page import Finding, check_page, write_page
    from clearhead.lab.registry import ALL
    from clearhead.lab.registry import run as run_claim

    options = Parser("clearhead lab", ABOUT)
    training = about(sum(claim.seconds for claim in ALL if claim.trains))
    options.add_argument("--all", action="store_true", help=f"also run the claims that train a model ({training})")
    options.add_argument("--json", action="store_true", help="machine-readable output: all claims and their numbers")
    options.add_argument(
        "--page", type=Path, metavar="FILE.md", help="write a hand-out, with its figures in a folder beside it"
    )
    args = options.parse(argv)
    if args.page:
        check_page(args.page)
    found = []
    for claim in ALL:
        announce(claim, args.all)
        found.append(Finding(claim, run_claim(claim.slug) if args.all or not claim.trains else None))
    if args.page:
        write_page(args.page, found)
    if args.json:
        print(json_text([as_dict(finding) for finding in found]))
    else:
        print(table(found))
        if args.page:
            print(f"Hand-out:                 {printable(args.page)}")
    return exit_code(found)


def run_one(slug: str, argv: Sequence[str]) -> int:
    from clearhead.lab.claim import changed, check_settings, settings
    from clearhead.lab.page import Finding
    from clearhead.lab.registry import DRAWN, find
    from clearhead.lab.registry import run as run_claim

    claim = find(slug)
    options = Parser(f"clearhead lab {slug}", about_one(claim))
    options.add_argument("--json", action="store_true", help="machine-readable output")
    where = f"save the figure as .png, .svg or .pdf (default: figures/{slug}.png)" if slug in DRAWN else SUPPRESS
    options.add_argument("--figure", type=Path, metavar="FILE", help=where)
    options.add_argument(
        "--no-figure", action="store_true", help="do not draw the figure" if slug in DRAWN else SUPPRESS
    )
    add_settings(options, claim)
    args = options.parse(argv)
    check_figure(claim, args.figure)
    values = {name: getattr(args, name) for name in settings(claim)}
    check_settings(claim, values)
    announce(claim, will_run=True)
    finding = Finding(claim, run_claim(slug, **values), changed(claim, values))
    drawn = draw(finding, args)
    if args.json:
        print(json_text([as_dict(finding)]))
    else:
        print(one(finding, drawn))
    return exit_code([finding])


def announce(claim: "Claim", will_run: bool) -> None:
    """A line before a wait; on stderr, where no program reads it as an answer."""
    if claim.trains and will_run:
        print(f"{claim.slug} trains small models: {about(claim.seconds)} ...", file=sys.stderr, flush=True)


def about(seconds: int) -> str:
    """A duration that a reader can plan with."""
    return f"about {seconds} seconds" if seconds < 120 else f"about {round(seconds / 60)} minutes"


def about_one(claim: "Claim") -> str:
    from clearhead.lab.claim import settings

    explained = cleandoc(claim.run.__doc__ or "")
    conditions = f"Conditions: {claim.conditions}" if claim.conditions else ""
    values = ", ".join(f"{name}={parameter.default!r}" for name, parameter in list(settings(claim).items())[:2])
    return "\n\n".join(
        [
            *(fill(text, 78) for text in (claim.statement, conditions, explained) if text),
            f'From Python:\n  import clearhead\n  clearhead.lab.run("{claim.slug}", {values}).checks',
        ]
    )


def check_figure(claim: "Claim", path: Path | None) -> None:
    """Before the experiment: nobody waits for a figure that cannot be saved."""
    from clearhead.drawing import check_suffix
    from clearhead.lab.registry import DRAWN

    if path is None:
        return
    if claim.slug not in DRAWN:
        raise ValueError(f"--figure needs a claim with a figure, got {claim.slug}; try {', '.join(DRAWN)}")
    check_suffix(path)


def draw(finding: "Finding", args: Namespace) -> Path | None:
    """The figure's file; without --figure only where a person reads the output."""
    from clearhead.lab.plots import save
    from clearhead.lab.registry import draw_result

    if args.no_figure or (args.json and not args.figure):
        return None
    figure = draw_result(finding.claim.slug, finding.result, finding.changed)
    return save(figure, args.figure or Path("figures", f"{finding.claim.slug}.png")) if figure else None


def add_settings(options: Parser, claim: "Claim") -> None:
    from clearhead.lab.claim import MEANING, settings

    for name, parameter in settings(claim).items():
        default = parameter.default
        is_flag = isinstance(default, bool)
        kind: Any = yes_or_no if is_flag else type(default)
        meaning, value = ("true or false", str(default).lower()) if is_flag else (MEANING[name], default)
        option = f"--{name.replace('_', '-')}"
        options.add_argument(
            option,
            dest=name,
            type=kind,
            default=default,
            help=f"{meaning} (default: {value})",
            metavar="TRUE" if is_flag else "N",
        )


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def exit_code(found: Sequence["Finding"]) -> int:
    return 0 if all(finding.is_expected for finding in found) else UNEXPECTED


def as_dict(finding: "Finding") -> dict[str, Any]:
    from clearhead.lab.claim import settings

    claim = finding.claim
    values = {name: finding.changed.get(name, parameter.default) for name, parameter in settings(claim).items()}
    return {
        "id": claim.slug,
        "lesson": claim.lesson,
        "kind": claim.kind,
        "claim": claim.statement,
        "conditions": claim.conditions,
        "misconception": claim.mistake,
        "formula": claim.formula,
        "settings": {name: finite(value) for name, value in values.items()},
        "changed": list(finding.changed),
        "expected": claim.expected,
        "verdict": finding.verdict,
        "numbers": [{"name": c.name, "value": finite(c.value), "says": c.says, "ok": c.ok} for c in finding.checks],
        **({"curves": [vars(curve) for curve in finding.curves]} if finding.curves else {}),
    }


def finite(value: Any) -> Any:
    """JSON has no number for infinity, nor for NaN: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(found: Sequence["Finding"]) -> str:
    """Two lines or more for each claim, with its kind below its name."""
    size = max(len(finding.claim.slug) for finding in found)
    lines: list[str] = []
    lesson = ""
    for finding in found:
        claim = finding.claim
        if claim.lesson != lesson:
            lesson = claim.lesson
            lines += ["", lesson]
        mark = "" if finding.is_expected else f" (expected: {claim.expected})"
        first, second, *others = [*wrap(claim.statement + mark, 78 - size - 13), ""]
        lines.append(f"  {claim.slug:{size}}  {finding.verdict:7}  {first}")
        lines.append(f"    {claim.kind:{size + 9}}{second}".rstrip())
        lines += [" " * (size + 13) + line for line in others if line]
    return "\n".join([*lines[1:], "", *summary(found)])


def summary(found: Sequence["Finding"]) -> list[str]:
    ran = [finding for finding in found if finding.result]
    waiting = [finding.claim.slug for finding in found if not finding.result]
    first = found[0].claim.slug
    shown = sum(finding.claim.kind == "demonstration" for finding in found)
    return [
        f"{sum(finding.is_expected for finding in ran)} of {len(ran)} verdicts are as expected.",
        f"{shown} demonstrations hold by construction; the outcome of the {len(found) - shown} experiments",
        "depends on random weights or on training.",
        "",
        *([f"{len(waiting)} that train a model:     clearhead lab --all"] if waiting else []),
        f"One claim, with figure:   clearhead lab {first}",
        f"Its settings:             clearhead lab {first} --help",
        "Machine-readable output:  clearhead lab --json",
        "A page to hand out:       clearhead lab --page lab.md",
        f'From Python:              clearhead.lab.run("{first}")',
    ]


def one(finding: "Finding", figure: Path | None) -> str:
    claim = finding.claim
    size = max(len(check.name) for check in finding.checks)
    numbers = [
        f"  {'yes' if check.ok else 'no ':3}  {check.name:{size}}  {check.value:.6g}  ({check.says})"
        for check in finding.checks
    ]
    return "\n".join(
        [
            f"{claim.slug}: {'an' if claim.kind == 'experiment' else 'a'} {claim.kind} ({claim.lesson})",
            "",
            fill(claim.statement, 78),
            *([fill(f"Conditions: {claim.conditions}", 78)] if claim.conditions else []),
            fill(f"Misconception: {claim.mistake}", 78),
            "",
            *(
                line
                for part in claim.formulas
                for line in wrap(part, 76, initial_indent="  ", subsequent_indent="    ")
            ),
            "",
            *numbers,
            "",
            *conclusion(finding),
            *([f"Figure:  {printable(figure)}"] if figure else []),
            f"Default: clearhead lab {claim.slug}" if finding.changed else f"Try:     {claim.try_next}",
            f"Change:  clearhead lab {claim.slug} --help",
        ]
    )


def conclusion(finding: "Finding") -> list[str]:
    """The verdict; with the reader's own settings it is an answer, neither expected nor unexpected."""
    from clearhead.lab.claim import settings

    if not finding.changed:
        return [f"Verdict: {finding.verdict} (expected: {finding.claim.expected})."]
    defaults = settings(finding.claim)
    own = ", ".join(f"{name} {value} (default: {defaults[name].default})" for name, value in finding.changed.items())
    return [
        *wrap(f"Settings: {own}", 78, subsequent_indent=" " * 10),
        f"The claim {'holds' if finding.verdict == 'holds' else 'does not hold'} with these settings.",
    ]
