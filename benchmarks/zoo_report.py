"""Writes docs/zoo.md from the results of zoo.py."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import timm
import torch
import transformers

PAGE = Path(__file__).parents[1] / "docs/zoo.md"
LIST = Path(__file__).with_name("zoo_architectures.json")
OTHER_NUMBERS = {
    "prophetnet": "returns the scores before the softmax; their softmax is what `look` records, exactly",
    "squeezebert": "returns the scores before the softmax; their softmax is what `look` records, exactly",
    "wavlm": "returns the mean over the heads, which is that of the recorded weights, exactly",
}
"""what a model returns as its attention weights, where it is something else"""
LIBRARIES = {
    "transformers": "Hugging Face transformers",
    "timm": "timm",
    "vit-pytorch": "vit-pytorch",
    "x-transformers": "x-transformers",
    "torch": "torch.nn",
}
CLASSES = {"complete": "complete", "notice": "incomplete, with notice", "silent": "silent", "wrong": "wrong"}
Result = dict[str, Any]

INTRODUCTION = """# Published architectures

`python benchmarks/zoo.py` runs [`look`](looking.md) on {total} published architectures with tiny random weights
({versions}). An independent judge below the Python functions
records every softmax that is multiplied with values and every fused attention kernel. A model is *complete* if each of
them has a record, the recorded weights times the values give the output of the model, and the output, the model, the
random state and the switches of torch are unchanged, also after an exception inside `edit`.
Where a model returns its own eager weights, those of `look` are compared with
them. The list is `benchmarks/zoo_architectures.json`; 619 of its architectures were committed before `look` was changed
for any of them, and 6 sparse variants were added later. Models in which the judge saw no attention are listed as having
none.

*Dense* models attend to all tokens, possibly inside windows. *Sparse* ones gather blocks, buckets or sampled points, or
approximate the softmax. This page is generated; do not edit it.
"""


def write(results: list[Result]) -> None:
    results = list({(r["library"], r["name"]): r for r in results}.values())
    versions = (
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, timm {timm.__version__}"
    )
    parts = [
        INTRODUCTION.format(total=len(results), versions=versions),
        summary(results),
        comparison(results),
        incomplete(results),
        exclusions(),
    ]
    PAGE.write_text("\n".join(parts))


def with_attention(results: list[Result]) -> list[Result]:
    return [r for r in results if r["kind"] != "none" and (r["judged"] or r["recorded"])]


def summary(results: list[Result]) -> str:
    lines = ["## What `look` records", "", f"| architectures | number | {' | '.join(CLASSES.values())} | refused |"]
    lines.append("|---" * (len(CLASSES) + 3) + "|")
    for library, title in LIBRARIES.items():
        for kind in ("dense", "sparse"):
            chosen = [r for r in with_attention(results) if r["library"] == library and r["kind"] == kind]
            if chosen:
                lines.append(row(f"{title}, {kind}", chosen))
    lines.append(row("**all with attention**", with_attention(results)))
    num_none = len(results) - len(with_attention(results))
    lines += ["", f"In {num_none} further models no attention runs; `look` says so in each of them.", ""]
    return "\n".join(lines)


def row(title: str, results: list[Result]) -> str:
    counts = Counter(r["class"] for r in results)
    refused = counts["refused"] + counts["failed"]
    return f"| {title} | {len(results)} | {' | '.join(str(counts[name]) for name in CLASSES)} | {refused} |"


def comparison(results: list[Result]) -> str:
    """The share of models on which each tool returns as many attention tensors as were judged."""
    lines = [
        "## Beside other tools",
        "",
        "The number of models on which a tool returns at least as many attention tensors as the judge counts.",
        "`output_attentions` runs with the eager implementation, AttentionExtract of timm without fused attention;",
        "plain hooks are forward hooks on every module that keep outputs whose rows sum to 1.",
        "",
        "| architectures | number | `look` | the library's own tool | plain hooks |",
        "|---|---|---|---|---|",
    ]
    for library, title in LIBRARIES.items():
        chosen = [r for r in with_attention(results) if r["library"] == library]
        if not chosen:
            continue
        looked, hooked = (sum(map(test, chosen)) for test in (is_complete, lambda r: r.get("hooks")))
        tool = {"transformers": "`output_attentions`", "timm": "AttentionExtract"}.get(library)
        own = f"{sum(bool(r.get('own')) for r in chosen)} ({tool})" if tool else "none"
        lines.append(f"| {title} | {len(chosen)} | {looked} | {own} | {hooked} |")
    return "\n".join([*lines, ""])


def is_complete(result: Result) -> bool:
    return result["class"] == "complete"


def incomplete(results: list[Result]) -> str:
    lines = ["## Not complete", "", "| model | kind | recorded | judged | what `look` says |", "|---|---|---|---|---|"]
    for result in results:
        if not is_complete(result):
            why = (
                result.get("why", "")
                .split("unresolved; ")[-1]
                .split("; [")[-1]
                .strip("[]'")
                .split("; ")[0]
                .split("', ")[0]
            )
            name = f"{result['name']} ({LIBRARIES[result['library']]})"
            counts = f"{result['recorded']} | {result['judged']}"
            lines.append(
                f"| {name} | {result['kind']} | {counts} | {CLASSES.get(result['class'], result['class'])}: {why} |"
            )
    differing = [f"- {r['name']}: {OTHER_NUMBERS.get(r['name'], r['differs'])}" for r in results if "differs" in r]
    if differing:
        lines += ["", "Models whose `output_attentions` are other numbers than the recorded weights:", "", *differing]
    return "\n".join([*lines, ""])


def exclusions() -> str:
    """How many architectures are left out, by reason."""
    listed = json.loads(LIST.read_text())["exclusions"]
    reasons = Counter(item["reason"].split(":")[0].split(" (")[0] for item in listed)
    lines = ["## Left out", "", "Each is listed with its reason in `benchmarks/zoo_architectures.json`.", ""]
    return "\n".join([*lines, *(f"- {count}: {reason}" for reason, count in reasons.most_common(8)), ""])
