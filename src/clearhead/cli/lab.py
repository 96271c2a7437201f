"""`clearhead lab`: list all claims or run them, or run one claim with changed settings and draw its figure."""

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from clearhead.lab.claim import Claim, Finding

ABOUT = """\
Test claims about attention and print the verdicts. A demonstration holds by
construction; the outcome of an experiment depends on random weights or on
training. Without a claim, all claims are listed; --run, --json and --page run
them, except those that train a model; --all runs those, too.

Examples:
  clearhead lab temperature                 run one claim and draw its figure
  clearhead lab temperature --help          list the settings of the claim
  clearhead lab temperature --num-keys 3    run it with a changed setting

From Python:
  import clearhead
  clearhead.lab.run("temperature", num_keys=3).verdict"""

TRAINING_TIME = "about 9 minutes"
"""the run time of all claims that train"""


def lab(argv: Sequence[str]) -> int:
    """The exit code: 1 if a claim with its default settings has an unexpected verdict."""
    if argv and not argv[0].startswith("-"):
        return run_one(argv[0], argv[1:])
    options = Parser("clearhead lab", ABOUT, usage="clearhead lab [CLAIM] [options]")
    options.add_argument("--run", action="store_true", help="run all claims that do not train a model (seconds)")
    options.add_argument("--all", action="store_true", help=f"run all claims ({TRAINING_TIME})")
    options.add_argument("--json", action="store_true", help="run the claims and print machine-readable results")
    options.add_argument(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="run the claims and write a Markdown page, with its figures in a directory beside it",
    )
    args = options.parse(argv)
    if args.run or args.all or args.json or args.page:
        return run_all(args)
    print(claim_list())
    return 0


def claim_list() -> str:
    """Slug, kind and statement of every claim, grouped by lesson, followed by commands to run them."""
    from clearhead.lab import claim_summaries

    claims = claim_summaries()
    size = max(len(claim.slug) for claim in claims)
    lines: list[str] = []
    for lesson, group in groupby(claims, lambda claim: claim.lesson):
        lines += ["", lesson]
        for claim in group:
            lines += entry(claim.slug, claim.kind, claim.statement, size)
    n_training, first = sum(claim.trains for claim in claims), claims[0].slug
    return "\n".join(
        [
            *lines[1:],
            "",
            f"Run one claim, with its figure:        clearhead lab {first}",
            f"List its settings:                     clearhead lab {first} --help",
            f"Run all but the {n_training} that train a model:  clearhead lab --run",
            "Run all claims:                        clearhead lab --all",
            f'From Python:                           clearhead.lab.run("{first}")',
        ]
    )


def entry(label: str, kind: str, statement: str, size: int) -> Iterator[str]:
    """The lines of one claim: the label and, below it, the kind; beside them, the wrapped statement."""
    first, second, *others = [*wrap(statement, 78 - size - 4), ""]
    yield f"  {label:{size}}  {first}"
    yield f"    {kind:{size}}{second}".rstrip()
    yield from (" " * (size + 4) + line for line in others if line)


def run_all(args: Namespace) -> int:
    """Runs the claims; the exit code is that of `lab`."""
    from clearhead.lab import all_claims, run
    from clearhead.lab.claim import Finding

    if args.page:
        check_page(args.page)
    findings = []
    for claim in all_claims():
        announce(claim, args.all)
        findings.append(Finding(claim, run(claim.slug) if args.all or not claim.trains else None))
    if args.page:
        write_page(args.page, findings)
    if args.json:
        print(json_text([as_dict(finding) for finding in findings]))
    else:
        print(table(findings))
        if args.page:
            print(f"Page: {printable(args.page)}")
    return exit_code(findings)


def run_one(slug: str, argv: Sequence[str]) -> int:
    from clearhead.drawing import check_suffix
    from clearhead.lab import find, run
    from clearhead.lab.claim import Finding, changed, check_settings, settings

    claim = find(slug)
    options = claim_parser(slug, about_claim(claim))
    add_settings(options, claim)
    args = options.parse(argv)
    if args.figure:
        check_suffix(args.figure)
    values = {name: getattr(args, name) for name in settings(claim)}
    check_settings(claim, values)
    announce(claim, will_run=True)
    finding = Finding(claim, run(slug, **values), changed(claim, values))
    figure = save_figure(finding, args)
    if args.json:
        print(json_text([as_dict(finding)]))
    else:
        print(report(finding, figure))
    return exit_code([finding])


def claim_parser(slug: str, description: str) -> Parser:
    """The options of every claim, without its settings."""
    options = Parser(f"clearhead lab {slug}", description)
    options.add_argument("--json", action="store_true", help="machine-readable output")
    options.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help=f"save the figure as .png, .svg or .pdf (default: figures/{slug}.png)",
    )
    options.add_argument("--no-figure", action="store_true", help="do not draw the figure")
    return options


def announce(claim: "Claim", will_run: bool) -> None:
    """Prints to stderr how long a claim that trains will take."""
    if claim.trains and will_run:
        print(f"{claim.slug} trains small models: {duration(claim.seconds)} ...", file=sys.stderr, flush=True)


def duration(seconds: int) -> str:
    return f"about {seconds} seconds" if seconds < 120 else f"about {round(seconds / 60)} minutes"


def about_claim(claim: "Claim") -> str:
    """The description in the help of one claim."""
    from clearhead.lab.claim import settings

    explanation = cleandoc(claim.run.__doc__ or "")
    conditions = f"Conditions: {claim.conditions}" if claim.conditions else ""
    values = ", ".join(f"{name}={parameter.default!r}" for name, parameter in list(settings(claim).items())[:2])
    return "\n\n".join(
        [
            *(fill(text, 78) for text in (claim.statement, conditions, explanation) if text),
            f'From Python:\n  import clearhead\n  clearhead.lab.run("{claim.slug}", {values}).checks',
        ]
    )


def save_figure(finding: "Finding", args: Namespace) -> Path | None:
    """The path of the saved figure. With --json it is drawn only if --figure names a file."""
    from clearhead.lab import draw
    from clearhead.lab.plots import save

    if args.no_figure or (args.json and not args.figure):
        return None
    figure = draw(finding.claim, finding.changed, finding.result)
    return save(figure, args.figure or Path("figures", f"{finding.claim.slug}.png")) if figure else None


def add_settings(options: Parser, claim: "Claim") -> None:
    from clearhead.lab.claim import SETTING_HELP, settings

    for name, parameter in settings(claim).items():
        default = parameter.default
        is_flag = isinstance(default, bool)
        parse: Any = parse_bool if is_flag else type(default)
        meaning, value = ("true or false", str(default).lower()) if is_flag else (SETTING_HELP[name], default)
        options.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=parse,
            default=default,
            help=f"{meaning} (default: {value})",
            metavar="BOOL" if is_flag else "N",
        )


def parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def exit_code(findings: Sequence["Finding"]) -> int:
    return 0 if all(finding.is_expected for finding in findings) else 1


def as_dict(finding: "Finding") -> dict[str, Any]:
    from clearhead.lab.claim import settings
    from clearhead.lab.record import json_number

    claim = finding.claim
    values = {name: finding.changed.get(name, parameter.default) for name, parameter in settings(claim).items()}
    checks = [{**vars(check), "value": json_number(check.value)} for check in finding.checks]
    return {
        "slug": claim.slug,
        "lesson": claim.lesson,
        "kind": claim.kind,
        "statement": claim.statement,
        "conditions": claim.conditions,
        "misconception": claim.misconception,
        "formula": claim.formula,
        "settings": {name: json_number(value) for name, value in values.items()},
        "changed": list(finding.changed),
        "expected": claim.expected,
        "verdict": finding.verdict,
        "checks": checks,
        **({"curves": [vars(curve) for curve in finding.curves]} if finding.curves else {}),
    }


def table(findings: Sequence["Finding"]) -> str:
    """Slug, verdict, kind and statement of each claim, grouped by lesson."""
    size = max(len(finding.claim.slug) for finding in findings)
    lines: list[str] = []
    for lesson, group in groupby(findings, lambda finding: finding.claim.lesson):
        lines += ["", lesson]
        for finding in group:
            claim = finding.claim
            note = "" if finding.is_expected else f" (expected: {claim.expected})"
            label = f"{claim.slug:{size}}  {finding.verdict:7}"
            lines += entry(label, claim.kind, claim.statement + note, size + 9)
    return "\n".join([*lines[1:], "", *summary(findings)])


def summary(findings: Sequence["Finding"]) -> list[str]:
    ran = [finding for finding in findings if finding.result]
    skipped = len(findings) - len(ran)
    first = findings[0].claim.slug
    demonstrations = sum(finding.claim.kind == "demonstration" for finding in findings)
    return [
        f"{sum(finding.is_expected for finding in ran)} of {len(ran)} verdicts are as expected.",
        (
            f"{demonstrations} demonstrations hold by construction; the outcome of the "
            f"{len(findings) - demonstrations} experiments"
        ),
        "depends on random weights or on training.",
        "",
        *([f"Also run the {skipped} that train a model:  clearhead lab --all"] if skipped else []),
        f"Run one claim, with its figure:     clearhead lab {first}",
        f"List its settings:                  clearhead lab {first} --help",
        "Machine-readable output:            clearhead lab --json",
        "Markdown page:                      clearhead lab --page lab.md",
        f'From Python:                        clearhead.lab.run("{first}")',
    ]


def report(finding: "Finding", figure: Path | None) -> str:
    """One claim in full: statement, misconception, formulas, measured numbers and verdict."""
    from clearhead.lab.claim import check_lines

    claim = finding.claim
    formulas = [
        line for part in claim.formulas for line in wrap(part, 76, initial_indent="  ", subsequent_indent="    ")
    ]
    return "\n".join(
        [
            f"{claim.slug}: {'an' if claim.kind == 'experiment' else 'a'} {claim.kind} ({claim.lesson})",
            "",
            fill(claim.statement, 78),
            *([fill(f"Conditions: {claim.conditions}", 78)] if claim.conditions else []),
            fill(f"Misconception: {claim.misconception}", 78),
            "",
            *formulas,
            "",
            *check_lines(finding.checks),
            "",
            *conclusion(finding),
            *([f"Figure:   {printable(figure)}"] if figure else []),
            f"Default:  clearhead lab {claim.slug}" if finding.changed else f"Next:     {claim.try_next}",
            f"Settings: clearhead lab {claim.slug} --help",
        ]
    )


def conclusion(finding: "Finding") -> list[str]:
    """The verdict; with changed settings, the settings and whether the claim holds with them."""
    from clearhead.lab.claim import settings

    if not finding.changed:
        return [f"Verdict:  {finding.verdict} (expected: {finding.claim.expected})"]
    defaults = settings(finding.claim)
    values = ", ".join(f"{name}={value} (default: {defaults[name].default})" for name, value in finding.changed.items())
    return [
        *wrap(f"Changed:  {values}", 78, subsequent_indent=" " * 10),
        f"The claim {'holds' if finding.verdict == 'holds' else 'does not hold'} with these settings.",
    ]


def check_page(path: Path) -> None:
    """Called before the experiments, so that nobody waits for a page that cannot be written."""
    if path.suffix.lower() != ".md" or path.is_dir():
        raise ValueError(f"--page must be a file that ends in .md, got {str(path)!r}; try {path.stem or 'lab'}.md")


def write_page(path: Path, findings: Sequence["Finding"]) -> None:
    """Writes the page, and its figures to a directory of the same name: hand-out.md and hand-out/."""
    from clearhead.lab import draw
    from clearhead.lab.plots import save
    from clearhead.lab.record import single_page

    directory = path.with_suffix("")
    directory.mkdir(parents=True, exist_ok=True)
    drawn = set()
    for finding in findings:
        if figure := draw(finding.claim, result=finding.result):
            save(figure, directory / f"{finding.claim.slug}.svg")
            drawn.add(finding.claim.slug)
    path.write_text(single_page(findings, directory.name, drawn), encoding="utf-8")
