"""Writes docs/lab.md, docs/lab/*.md and their figures from the recorded results of the lab.

python docs/make_lab.py                      write pages and figures; trains nothing
python docs/make_lab.py --measure            run all claims first and record their results (minutes)
python docs/make_lab.py --measure recurrence run this claim only, and keep the other records
"""

import argparse
import shlex
import sys
from itertools import groupby
from pathlib import Path

from clearhead.cli.lab import add_settings, announce, claim_parser
from clearhead.lab import CLAIMS, all_claims, draw, find, run
from clearhead.lab import record as records
from clearhead.lab.claim import Claim, Finding, changed
from clearhead.lab.plots import save
from clearhead.lab.record import LESSON_PAGES, index_page, lesson_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "src/clearhead/lab/results.json"


def measure(slugs: list[str]) -> None:
    """Runs the claims and their suggested variations, and records the results."""
    kept = {slug: entry for slug, entry in records.recorded().items() if slug in CLAIMS} if RESULTS.exists() else {}
    for slug in slugs:
        claim = find(slug)
        announce(claim, will_run=True)
        kept[slug] = records.record(Finding(claim, run(slug)), vary(claim))
        RESULTS.write_text(records.to_text(kept), encoding="utf-8")
    records.recorded.cache_clear()


def variation_settings(claim: Claim) -> dict[str, object]:
    """The settings that the command suggested after this claim changes; empty if it is a command for something else."""
    program, command, *words = shlex.split(claim.try_next)
    if (program, command, words[:1]) != ("clearhead", "lab", [claim.slug]):
        return {}
    options = claim_parser(claim.slug, "")
    add_settings(options, claim)
    return changed(claim, vars(options.parse(words[1:])))


def vary(claim: Claim) -> records.Variation | None:
    """Runs the command that is suggested after this claim, if it changes a setting of the claim."""
    changes = variation_settings(claim)
    if not changes:
        return None
    result = run(claim.slug, **changes)
    failed = tuple(check for check in result.checks if not check.passed)
    return records.Variation(command=claim.try_next, verdict=result.verdict, failed=failed)


def findings() -> dict[str, Finding]:
    """Every claim with its recorded result, in the order of the lessons."""
    return {slug: Finding(find(slug), records.recorded()[slug].result) for slug in CLAIMS}


def render() -> dict[str, str]:
    """The pages by their path in docs."""
    variations = {slug: entry.variation for slug, entry in records.recorded().items()}
    pages = {"lab.md": index_page(records.recorded(), all_claims())}
    for lesson, group in groupby(findings().values(), lambda finding: finding.claim.lesson):
        pages[f"lab/{LESSON_PAGES[lesson]}.md"] = lesson_page(lesson, list(group), variations)
    return pages


def write() -> None:
    """Writes pages and figures. Figures of claims that train are drawn from their recorded curves."""
    for slug, finding in findings().items():
        figure = draw(finding.claim, result=finding.result)
        assert figure, "every claim is recorded, so every figure can be drawn"
        save(figure, DOCS / "lab" / f"{slug}.svg")
    for path, text in render().items():
        (DOCS / path).write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", metavar="CLAIM", help="run these claims, or all of them")
    args = parser.parse_args(argv)
    if args.measure is not None:
        measure(args.measure or list(CLAIMS))
    write()


if __name__ == "__main__":
    main(sys.argv[1:])
