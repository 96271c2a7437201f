"""`clearhead lab`: all claims in a table, or one in depth with the reader's own numbers and a figure."""

import json
import math
import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.parser import Parser

if TYPE_CHECKING:
    from clearhead.lab.claim import Claim
    from clearhead.lab.page import Finding

ABOUT = """\
Each claim about attention is an experiment: it holds or it is refuted, and you
see by which numbers. Without options, all claims in a table; the words in its
first column are their names.

  clearhead lab temperature               one claim in depth, with its figure
  clearhead lab temperature --help        what you may change in it
  clearhead lab temperature --n-keys 3    the same with your own numbers

From Python:
  import clearhead
  clearhead.lab.run("temperature", n_keys=3).verdict"""

UNEXPECTED = 1


def run(argv: Sequence[str]) -> int:
    """The exit code: 1 when a verdict is not the expected one."""
    if argv and not argv[0].startswith("-"):
        return run_one(argv[0], argv[1:])
    return run_all(argv)


def run_all(argv: Sequence[str]) -> int:
    from clearhead.lab.claims import ALL
    from clearhead.lab.claims import run as run_claim
    from clearhead.lab.page import Finding, check_page, write_page

    options = Parser("clearhead lab", ABOUT)
    options.add_argument("--all", action="store_true", help="run the claims that train a model, too (a minute each)")
    options.add_argument("--json", action="store_true", help="all claims with their numbers, for programs")
    options.add_argument(
        "--page", type=Path, metavar="FILE.md", help="write a hand-out with figures in a folder beside it"
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
        print(json.dumps([as_dict(finding) for finding in found], indent=2))
    else:
        print(table(found))
        if args.page:
            print(f"Hand-out:                  {args.page}")
    return exit_code(found)


def run_one(slug: str, argv: Sequence[str]) -> int:
    from clearhead.lab.claims import find
    from clearhead.lab.claims import run as run_claim
    from clearhead.lab.figures.gallery import DRAWN
    from clearhead.lab.page import Finding
    from clearhead.lab.settings import check_settings, settings

    claim = find(slug)
    options = Parser(f"clearhead lab {slug}", about_one(claim))
    options.add_argument("--json", action="store_true", help="everything, for programs")
    where = f"where the figure goes: .png, .svg or .pdf (now figures/{slug}.png)" if slug in DRAWN else SUPPRESS
    options.add_argument("--figure", type=Path, metavar="FILE", help=where)
    options.add_argument("--no-figure", action="store_true", help="numbers only" if slug in DRAWN else SUPPRESS)
    add_settings(options, claim)
    args = options.parse(argv)
    check_figure(claim, args.figure)
    changes = {name: getattr(args, name) for name in settings(claim)}
    check_settings(claim, changes)
    announce(claim, will_run=True)
    finding = Finding(claim, run_claim(slug, **changes))
    drawn = draw(
        finding, args, {name: value for name, value in changes.items() if value != settings(claim)[name].default}
    )
    if args.json:
        print(json.dumps([as_dict(finding)], indent=2))
    else:
        print(one(finding, drawn))
    return exit_code([finding])


def announce(claim: "Claim", will_run: bool) -> None:
    """A line before a wait; on stderr, where no program reads it as an answer."""
    if claim.trains and will_run:
        print(f"{claim.slug} trains small models: about {claim.seconds} seconds ...", file=sys.stderr, flush=True)


def about_one(claim: "Claim") -> str:
    from clearhead.lab.settings import settings

    explained = cleandoc(claim.run.__doc__ or "")
    values = ", ".join(f"{name}={parameter.default!r}" for name, parameter in list(settings(claim).items())[:2])
    return "\n\n".join(
        [
            fill(claim.statement, 78),
            *([fill(explained, 78)] if explained else []),
            f'From Python:\n  import clearhead\n  clearhead.lab.run("{claim.slug}", {values}).checks',
        ]
    )


def check_figure(claim: "Claim", path: Path | None) -> None:
    """Before the experiment: nobody waits for a figure that cannot be saved."""
    from clearhead.drawing import check_suffix
    from clearhead.lab.figures.gallery import DRAWN

    if path is None:
        return
    if claim.slug not in DRAWN:
        raise ValueError(f"--figure needs a claim with a figure, got {claim.slug}; try {', '.join(DRAWN)}")
    check_suffix(path)


def draw(finding: "Finding", args: Namespace, changes: dict[str, object]) -> Path | None:
    """The figure's file; without --figure only where a person reads the answer."""
    from clearhead.lab.figures.gallery import draw_result, save

    if args.no_figure or (args.json and not args.figure):
        return None
    figure = draw_result(finding.claim.slug, finding.result, changes)
    return save(figure, args.figure or Path("figures", f"{finding.claim.slug}.png")) if figure else None


def add_settings(options: Parser, claim: "Claim") -> None:
    from clearhead.lab.settings import MEANING, settings

    for name, parameter in settings(claim).items():
        default = parameter.default
        is_flag = isinstance(default, bool)
        kind: Any = yes_or_no if is_flag else type(default)
        text = f"true or false, now {str(default).lower()}" if is_flag else f"{MEANING[name]}; now {default}"
        option = f"--{name.replace('_', '-')}"
        options.add_argument(
            option, dest=name, type=kind, default=default, help=text, metavar="TRUE" if is_flag else "N"
        )


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def exit_code(found: Sequence["Finding"]) -> int:
    return 0 if all(finding.is_expected for finding in found) else UNEXPECTED


def as_dict(finding: "Finding") -> dict[str, Any]:
    claim = finding.claim
    return {
        "id": claim.slug,
        "rows": list(claim.rows),
        "claim": claim.statement,
        "expected": claim.expected,
        "verdict": finding.verdict,
        "numbers": [
            {"name": c.name, "value": c.value if math.isfinite(c.value) else str(c.value), "says": c.says, "ok": c.ok}
            for c in finding.checks
        ],
        **({"curves": [vars(curve) for curve in finding.curves]} if finding.curves else {}),
    }


def table(found: Sequence["Finding"]) -> str:
    size = max(len(finding.claim.slug) for finding in found)
    lines: list[str] = []
    lesson = ""
    for finding in found:
        claim = finding.claim
        if claim.lesson != lesson:
            lesson = claim.lesson
            lines += ["", lesson]
        mark = "" if finding.is_expected else f" (expected: {claim.expected})"
        first, *others = wrap(claim.statement + mark, 78 - size - 13)
        lines.append(f"  {claim.slug:{size}}  {finding.verdict:7}  {first}")
        lines += [" " * (size + 13) + line for line in others]
    return "\n".join([*lines[1:], "", *summary(found)])


def summary(found: Sequence["Finding"]) -> list[str]:
    ran = [finding for finding in found if finding.result]
    waiting = [finding.claim.slug for finding in found if not finding.result]
    first = found[0].claim.slug
    return [
        f"{sum(finding.is_expected for finding in ran)} of {len(ran)} verdicts are as expected.",
        *([f"{len(waiting)} that train a model:      clearhead lab --all"] if waiting else []),
        f"One in depth, with figure: clearhead lab {first}",
        f"What you may change in it: clearhead lab {first} --help",
        "As numbers for programs:   clearhead lab --json",
        "As a page to hand out:     clearhead lab --page lab.md",
        f'From Python:               clearhead.lab.run("{first}")',
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
            f"{claim.slug}  ({claim.lesson}; answers {', '.join(claim.rows)} of the course reports)",
            "",
            fill(claim.statement, 78),
            fill(f"The mistake: {claim.mistake}", 78),
            "",
            *wrap(claim.formula, 76, initial_indent="  ", subsequent_indent="  "),
            "",
            *numbers,
            "",
            f"Verdict: {finding.verdict} (expected: {claim.expected}).",
            *([f"Figure:  {figure}"] if figure else []),
            f"Try:     {claim.try_next}",
            f"Change:  clearhead lab {claim.slug} --help",
        ]
    )
