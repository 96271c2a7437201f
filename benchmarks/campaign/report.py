"""The table of docs/reliability.md, from the results of all shards."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- results: made by `python -m benchmarks.campaign report` -->", "<!-- end of results -->"
INVARIANTS = {"lost save": "lost saves", "silent difference": "silent differences", "write outside": "writes outside",
              "exit 5": "exits with code 5"}  # fmt: skip


def write_report(results: Path, page: Path = PAGE) -> int:
    """Replaces what is between the markers; 1 if there is a failure in the results."""
    found = read_results(results)
    text = page.read_text()
    if BEGIN not in text or END not in text:
        print(f"campaign: {page} has no markers for the results", file=sys.stderr)
        return 2
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    return 1 if any(result["n_failures"] for result in found) else 0


def read_results(results: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    order = [
        "kills", "ranks", "nodes", "signals", "races", "file-calls", "power", "full-disk", "non-finite", "flips",
        "links", "parsers", "images", "archives", "commands", "soak",
    ]  # fmt: skip
    return sorted(found, key=lambda result: order.index(result["shard"]) if result["shard"] in order else len(order))


def table(results: Sequence[dict[str, Any]]) -> str:
    if not results:
        return "No results are stored yet."
    lines = [
        "| shard | fault | cases done | of | failures | seed | seconds | date |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for result in results:
        done, wanted = sum(result["done"].values()), sum(result["wanted"].values())
        numbers = f"{done:,} | {wanted:,} | {result['n_failures']:,} | {result['seed']} | {result['seconds']:,.0f}"
        lines.append(f"| `{result['shard']}` | {result['what']} | {numbers} | {result['date']} |")
    return "\n".join([*lines, "", *sums(results), "", *notes(results), *failures(results)]).strip()


def sums(results: Sequence[dict[str, Any]]) -> list[str]:
    """What must be zero, and whether the campaign is complete."""
    kinds = Counter[str]()
    for result in results:
        kinds.update(result["kinds"])
    counted = [f"{kinds[kind]:,} {name}" for kind, name in INVARIANTS.items()]
    others = sum(n for kind, n in kinds.items() if kind not in INVARIANTS)
    unfinished = [
        f"`{result['shard']}`" for result in results if sum(result["done"].values()) < sum(result["wanted"].values())
    ]
    lines = [f"In all: {', '.join(counted)}, {others:,} other failures."]
    if unfinished:
        lines += [
            "",
            f"**Not the full campaign**: these shards have done only a part of their cases: {', '.join(unfinished)}.",
        ]
    return lines


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    where = sorted({f"{r['system']}, {r['processor']}, Python {r['python']}, torch {r['torch']}" for r in results})
    sources = sorted({f"`{r['source']}`" for r in results})
    lines = [f"Measured on {'; '.join(where)}, with the sources of digest {', '.join(sources)}.", ""]
    lines += [f"- `{result['shard']}`: {result['note']}." for result in results if result["note"]]
    peaks = [f"{result['peak_mb']:,.0f} MB in `{result['shard']}`" for result in results if "peak_mb" in result]
    if peaks:
        lines.append(f"- Peak memory of the parsers above the baseline after imports: {', '.join(peaks)}.")
    return [*lines, ""]


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """A few of each kind, with the command that repeats them."""
    lines = []
    for result in results:
        shown: dict[str, int] = {}
        for failure in result["failures"]:
            shown[failure["kind"]] = shown.get(failure["kind"], 0) + 1
            if shown[failure["kind"]] <= 2:
                what = " ".join(failure["what"].replace("|", "\\|").replace("`", "'").split())[:200]
                lines.append(f"- {failure['kind']} in `{result['shard']}`: {what} (`{failure['reproduce']}`)")
    return ["Failures, at most two of each kind:", "", *lines] if lines else []
