"""All claims by name, and how one is run."""

import difflib
import inspect
from collections.abc import Iterable

import torch

from clearhead.lab import (
    choices,
    columns,
    depth,
    elongated_key,
    equivariance,
    head_outputs,
    imitations,
    masking,
    moved_key,
    own_token,
    pieces,
    reach,
    saturation,
    stages,
    temperature,
    torch_weights,
)
from clearhead.lab.claim import Claim, Result

ALL: tuple[Claim, ...] = (
    temperature.CLAIM,
    choices.HARD_AND_SOFT,
    saturation.CLAIM,
    columns.CLAIM,
    moved_key.CLAIM,
    elongated_key.CLAIM,
    own_token.CLAIM,
    torch_weights.CLAIM,
    head_outputs.CLAIM,
    equivariance.CLAIM,
    choices.PERMUTATION,
    imitations.RUNNING_LINEAR,
    imitations.CONVOLUTION,
    pieces.GRAPH,
    pieces.FEEDFORWARD,
    depth.CLAIM,
    pieces.PATCHES,
    reach.CLAIM,
    masking.ADDITIVE,
    masking.HIDDEN_ROW,
    stages.CLAIM,
)

CLAIMS: dict[str, Claim] = {claim.slug: claim for claim in ALL}


def find(slug: str) -> Claim:
    if slug not in CLAIMS:
        raise LookupError(f"a claim is one of {', '.join(CLAIMS)}, got {slug!r}; {nearest(slug, CLAIMS)}")
    return CLAIMS[slug]


def settings(claim: Claim) -> dict[str, inspect.Parameter]:
    """What a reader may change: the numbers among the arguments of its `run`."""
    parameters = inspect.signature(claim.run).parameters.values()
    return {p.name: p for p in parameters if isinstance(p.default, int | float)}


def run(slug: str, **changes: object) -> Result:
    """The experiment of one claim, with its own numbers or with yours: run("elongated-key", alpha=3)."""
    claim = find(slug)
    known = inspect.signature(claim.run).parameters
    for name in changes:
        if name not in known:
            raise ValueError(f"{slug} takes {', '.join(known)}, got {name!r}; {nearest(name, known)}")
    with torch.random.fork_rng(devices=[]):  # an experiment may seed torch; the caller's random state stays
        return claim.run(**changes)


def nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]}?" if near else "choose one of them"
