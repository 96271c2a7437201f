"""`clearhead lab`: all claims in a table, or one in depth, with the reader's own numbers."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead.cli.parser import Parser

if TYPE_CHECKING:
    from clearhead.lab.claim import Claim, Result

ABOUT = """\
Each claim about attention is an experiment: it holds or it is refuted, and you
see by which numbers."""

UNEXPECTED = 1


def run(argv: Sequence[str]) -> int:
    """The exit code: 1 when a verdict is not the expected one."""
    from clearhead.lab.claims import ALL, find
    from clearhead.lab.claims import run as run_claim

    slug, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    if slug is None:
        options = Parser("clearhead lab", ABOUT)
        options.add_argument("--json", action="store_true", help="everything, for programs")
        args = options.parse(rest)
        found = [(claim, run_claim(claim.slug)) for claim in ALL]
    else:
        claim = find(slug)
        options = Parser(f"clearhead lab {slug}", claim.statement)
        options.add_argument("--json", action="store_true", help="everything, for programs")
        add_settings(options, claim)
        args = options.parse(rest)
        changes = {name: value for name, value in vars(args).items() if name != "json"}
        found = [(claim, run_claim(slug, **changes))]
    if args.json:
        print(json.dumps([as_dict(claim, result) for claim, result in found], indent=2))
    else:
        print(one(*found[0]) if slug else table(found))
    return UNEXPECTED if any(result.verdict != claim.expected for claim, result in found) else 0


def add_settings(options: Parser, claim: "Claim") -> None:
    from clearhead.lab.claims import settings

    for name, parameter in settings(claim).items():
        default = parameter.default
        kind: Any = yes_or_no if isinstance(default, bool) else type(default)
        text = f"now {default}"
        options.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, default=default, help=text)


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def as_dict(claim: "Claim", result: "Result") -> dict[str, Any]:
    return {
        "id": claim.slug,
        "rows": list(claim.rows),
        "claim": claim.statement,
        "expected": claim.expected,
        "verdict": result.verdict,
        "numbers": [
            {"name": c.name, "value": c.value if math.isfinite(c.value) else str(c.value), "says": c.says, "ok": c.ok}
            for c in result.checks
        ],
    }


def table(found: Sequence[tuple["Claim", "Result"]]) -> str:
    from textwrap import wrap

    size = max(len(claim.slug) for claim, _ in found)
    lines, lesson = [], ""
    for claim, result in sorted(found, key=lambda pair: lessons().index(pair[0].lesson)):
        if claim.lesson != lesson:
            lesson = claim.lesson
            lines += ["", lesson]
        first, *others = wrap(claim.statement, 78 - size - 13)
        mark = "" if result.verdict == claim.expected else f"  (expected: {claim.expected})"
        lines.append(f"  {claim.slug:{size}}  {result.verdict:7}  {first}{mark}")
        lines += [" " * (size + 13) + line for line in others]
    as_expected = sum(result.verdict == claim.expected for claim, result in found)
    return "\n".join(
        [
            *lines[1:],
            "",
            f"{as_expected} of {len(found)} verdicts are as expected.",
            f"One in depth:              clearhead lab {found[0][0].slug}",
            f"What you may change in it: clearhead lab {found[0][0].slug} --help",
        ]
    )


def one(claim: "Claim", result: "Result") -> str:
    from textwrap import fill

    size = max(len(check.name) for check in result.checks)
    numbers = [
        f"  {'yes' if check.ok else 'no ':3}  {check.name:{size}}  {check.value:.6g}  ({check.says})"
        for check in result.checks
    ]
    return "\n".join(
        [
            f"{claim.slug}  ({', '.join(claim.rows)}; {claim.lesson})",
            "",
            fill(claim.statement, 78),
            fill(f"The mistake: {claim.mistake}", 78),
            "",
            f"  {claim.formula}",
            "",
            *numbers,
            "",
            f"Verdict: {result.verdict} (expected: {claim.expected}).",
            f"Try: {claim.try_next}",
        ]
    )


def lessons() -> tuple[str, ...]:
    from clearhead.lab.claim import LESSONS

    return LESSONS
