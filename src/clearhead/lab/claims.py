"""All claims by name, and how one is run."""

import difflib
import inspect
from collections.abc import Iterable

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
        raise LookupError(f"a claim is one of {', '.join(CLAIMS)}, got {slug!r}; {nearest(slug, CLAIMS)}")
    return CLAIMS[slug]


def run(slug: str, **changes: object) -> Result:
    """The experiment of one claim, with its own numbers or with yours: run("elongated-key", alpha=3)."""
    claim = find(slug)
    known = inspect.signature(claim.run).parameters
    for name in changes:
        if name not in known:
            raise ValueError(f"{slug} takes {', '.join(known)}, got {name!r}; {nearest(name, known)}")
    check_settings(claim, changes)
    with (
        enough_memory(),
        torch.random.fork_rng(devices=[]),
    ):  # an experiment may seed torch; the caller's random state stays
        return claim.run(**changes)


def nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]}?" if near else "choose one of them"
