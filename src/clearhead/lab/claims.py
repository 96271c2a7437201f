"""All claims by name, and how one is run."""

import difflib
import inspect
import re

import torch

from clearhead.lab import (
    augmentation,
    beside_convolutions,
    choices,
    columns,
    depth,
    elongated_key,
    equivariance,
    gradient_path,
    head_outputs,
    imitations,
    in_turn,
    maps,
    masking,
    moved_key,
    multi_head,
    normalisation,
    order,
    own_token,
    pieces,
    places,
    plain_vit,
    reach,
    recurrence,
    saturation,
    several_heads,
    stages,
    temperature,
    torch_weights,
)
from clearhead.lab.claim import Claim, Result
from clearhead.lab.settings import check_settings, enough_memory

ALL: tuple[Claim, ...] = (
    temperature.CLAIM,
    choices.HARD_AND_SOFT,
    saturation.CLAIM,
    maps.MAP,
    columns.CLAIM,
    own_token.CLAIM,
    moved_key.CLAIM,
    elongated_key.CLAIM,
    maps.CROSS,
    multi_head.COLUMNS,
    head_outputs.CLAIM,
    torch_weights.CLAIM,
    multi_head.GROUPS,
    several_heads.CLAIM,
    equivariance.CLAIM,
    places.LEARNED,
    order.CLAIM,
    gradient_path.CLAIM,
    in_turn.CLAIM,
    recurrence.CLAIM,
    choices.PERMUTATION,
    imitations.RUNNING_LINEAR,
    imitations.CONVOLUTION,
    pieces.GRAPH,
    pieces.FEEDFORWARD,
    depth.CLAIM,
    normalisation.LAYER,
    normalisation.WIRING,
    pieces.PATCHES,
    places.READOUT,
    plain_vit.CLAIM,
    reach.CLAIM,
    beside_convolutions.ANY_SIZE,
    beside_convolutions.PARALLEL,
    beside_convolutions.ROTATION,
    masking.ADDITIVE,
    masking.HIDDEN_ROW,
    stages.CLAIM,
    augmentation.CLAIM,
)
"""in the order of the lessons"""

CLAIMS: dict[str, Claim] = {claim.slug: claim for claim in ALL}


def find(slug: str) -> Claim:
    if slug not in CLAIMS:
        *others, last = suggestions(slug) or [""]
        listed = f"run clearhead lab to list all {len(CLAIMS)}"
        near = f"{', '.join(others)} or {last}" if others else last
        raise LookupError(f"no claim named {slug!r}; {f'did you mean {near}? R{listed[1:]}' if near else listed}")
    return CLAIMS[slug]


def suggestions(text: str) -> list[str]:
    """Up to three claims: with one of these words in the name, else in the text, else of a similar name."""
    wanted = words(text)
    by_name = [slug for slug in CLAIMS if wanted & words(slug) or (len(text) > 2 and text.lower() in slug)]
    by_word = {word: slug for slug in reversed(CLAIMS) for word in words(slug)}
    similar = difflib.get_close_matches(text.lower(), [*CLAIMS, *by_word], n=3)
    by_text = [slug for slug, c in CLAIMS.items() if wanted & words(f"{c.statement} {c.mistake} {c.formula}")]
    found = by_name or by_text or [by_word.get(name, name) for name in similar]
    return list(dict.fromkeys(found))[:3]


def words(text: str) -> set[str]:
    """The words of a name or a sentence, in the singular and without the shortest: heads-as-groups -> head, group."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]{3,}", text.lower())}


def run(slug: str, **changes: object) -> Result:
    """The experiment of one claim, with its own numbers or with yours: run("elongated-key", alpha=3)."""
    claim = find(slug)
    known = inspect.signature(claim.run).parameters
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{slug} has no setting {name!r}; {suggestion}Its settings are {', '.join(known)}")
    check_settings(claim, changes)
    with (
        enough_memory(),
        torch.random.fork_rng(devices=[]),
    ):  # an experiment may seed torch; the caller's random state stays
        return claim.run(**changes)
