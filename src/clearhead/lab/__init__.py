"""The lab: claims about attention, each tested by an experiment with a verdict and a figure.

    clearhead.lab.run("scaled-key", alpha=3).verdict

`CLAIMS` lists them by slug. To find, run or draw a claim, only the lesson that defines it is imported.
"""

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

from clearhead.lab.claim import Claim as Claim
from clearhead.lab.claim import Result as Result
from clearhead.lab.claim import check_settings, readable_memory_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS = {
    "temperature": "temperature",
    "hard-and-soft": "temperature",
    "saturation": "temperature",
    "attention-map": "attention_weights",
    "column-convention": "attention_weights",
    "self-weight": "attention_weights",
    "perturbed-key": "keys",
    "scaled-key": "keys",
    "cross-attention": "attention_weights",
    "multi-head": "heads",
    "head-outputs": "heads",
    "in-proj-weight": "heads",
    "heads-as-groups": "heads",
    "several-heads": "learning",
    "permutation-equivariance": "positions",
    "learned-positions": "positions",
    "positions": "positions",
    "gradient-path": "lstm",
    "sequential-depth": "lstm",
    "recurrence": "recurrence",
    "permutation": "expressivity",
    "pointwise-convolution": "expressivity",
    "convolution": "expressivity",
    "message-passing": "expressivity",
    "feed-forward": "blocks",
    "skip-connections": "blocks",
    "layer-norm": "blocks",
    "pre-norm": "blocks",
    "modern-parts": "learning",
    "patch-embedding": "vision",
    "class-token": "vision",
    "plain-vit": "vision",
    "receptive-field": "convolutions",
    "input-size": "convolutions",
    "parallelism": "convolutions",
    "rotation": "vision",
    "additive-mask": "masks_and_training",
    "fully-masked-row": "masks_and_training",
    "train-and-eval-mode": "masks_and_training",
    "augmentation": "masks_and_training",
}
"""slug -> module that defines the claim (`scaled-key` is the constant SCALED_KEY), in the order of the lessons"""

RENAMED = {
    "any-size": "input-size",
    "columns": "column-convention",
    "elongated-key": "scaled-key",
    "equivariance": "permutation-equivariance",
    "graph": "message-passing",
    "hidden-row": "fully-masked-row",
    "in-turn": "sequential-depth",
    "moved-key": "perturbed-key",
    "own-token": "self-weight",
    "parallel": "parallelism",
    "patches": "patch-embedding",
    "reach": "receptive-field",
    "running-linear": "pointwise-convolution",
    "stages": "train-and-eval-mode",
    "torch-weights": "in-proj-weight",
}
"""former slug -> slug"""


def find(slug: str) -> Claim:
    """The claim with this slug."""
    if slug not in CLAIMS:
        *others, last = suggestions(slug) or [""]
        similar = f"{', '.join(others)} or {last}" if others else last
        hint = f"did you mean {similar}? Run" if similar else "run"
        raise LookupError(f"no claim named {slug!r}; {hint} clearhead lab to list all {len(CLAIMS)}")
    lesson = importlib.import_module(f"clearhead.lab.{CLAIMS[slug]}")
    claim: Claim = getattr(lesson, slug.replace("-", "_").upper())
    return claim


def all_claims() -> list[Claim]:
    """All claims in the order of the lessons; imports every lesson."""
    return [find(slug) for slug in CLAIMS]


@dataclass(frozen=True)
class ClaimSummary:
    """The fields of a claim that `clearhead lab` lists."""

    slug: str
    lesson: str
    statement: str
    kind: str = "experiment"
    trains: bool = False


def claim_summaries() -> list[ClaimSummary]:
    """All claims in the order of the lessons.

    They are parsed from the source of the lessons: importing a lesson would import torch, which takes seconds.
    """
    names = ClaimSummary.__dataclass_fields__
    claims: dict[str, ClaimSummary] = {}
    for lesson in dict.fromkeys(CLAIMS.values()):
        source = files("clearhead.lab").joinpath(f"{lesson}.py").read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            match statement:
                case ast.Assign(value=ast.Call(func=ast.Name(id="Claim"), keywords=keywords)):
                    fields = {k.arg: ast.literal_eval(k.value) for k in keywords if k.arg in names}
                    claims[fields["slug"]] = ClaimSummary(**fields)
    return [claims[slug] for slug in CLAIMS]


def suggestions(text: str) -> list[str]:
    """Up to three slugs: the new name of a former slug, or else those that share a word with the text, contain one of
    its words in their statement, or are spelled similarly."""
    if text in RENAMED:
        return [RENAMED[text]]
    words = words_of(text)
    by_slug = [slug for slug in CLAIMS if words & words_of(slug) or (len(text) > 2 and text.lower() in slug)]
    slug_of_word = {word: slug for slug in reversed(CLAIMS) for word in words_of(slug)}
    close = difflib.get_close_matches(text.lower(), [*CLAIMS, *slug_of_word, *RENAMED], n=3, cutoff=0.7)
    by_spelling = [RENAMED.get(name, slug_of_word.get(name, name)) for name in close]
    return list(dict.fromkeys(by_slug or search_texts(words) or by_spelling))[:3]


def search_texts(words: set[str]) -> list[str]:
    """The slugs of claims whose statement, misconception or formula contains one of the words."""
    return [
        claim.slug
        for claim in (all_claims() if words else ())
        if words & words_of(f"{claim.statement} {claim.misconception} {claim.formula}")
    ]


def words_of(text: str) -> set[str]:
    """The words of at least three letters, in the singular: heads-as-groups -> head, group."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]{3,}", text.lower())}


def run(slug: str, **settings: object) -> Result:
    """Runs the experiment of a claim, optionally with changed settings: run("scaled-key", alpha=3).verdict

    The global random state of torch is preserved.
    """
    import torch

    claim = find(slug)
    known = inspect.signature(claim.run).parameters
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"{slug} has no setting {name!r}; {hint}Its settings are {', '.join(known)}")
    check_settings(claim, settings)
    with readable_memory_errors(), torch.random.fork_rng(devices=[]):
        return claim.run(**settings)


def draw(
    claim: Claim, changes: Mapping[str, object] = MappingProxyType({}), result: Result | None = None
) -> "Figure | None":
    """The figure of a claim, optionally with changed settings; None if it needs a result and there is none.

    The headline states the claim; if the claim does not hold with the changed settings, a second line says so.
    """
    import torch

    from clearhead.lab.plots import TITLE_SIZE

    parameters = inspect.signature(claim.figure).parameters
    needs_result = "result" in parameters and parameters["result"].default is inspect.Parameter.empty
    if needs_result and result is None:
        return None
    available = {**changes, "result": result}
    arguments = {name: available[name] for name in parameters if name in available}
    with readable_memory_errors(), torch.random.fork_rng(devices=[]):
        figure = claim.figure(**arguments)
    if result is not None and changes and result.verdict == "refuted":
        figure.suptitle(f"{figure.get_suptitle()}\n(does not hold with these settings)", fontsize=TITLE_SIZE)
    return figure
