"""All claims by name, and how one is run."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from clearhead.lab import (
    attention_maps,
    blocks,
    convolutions,
    heads,
    imitations,
    keys,
    masks,
    positions,
    recurrence,
    sequential_depth,
    several_heads,
    temperature,
    training,
    vision,
)
from clearhead.lab.claim import Claim, Result, check_settings, enough_memory
from clearhead.lab.plots import TITLE
from clearhead.lab.plots import save as save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL: tuple[Claim, ...] = (
    temperature.TEMPERATURE,
    temperature.HARD_AND_SOFT,
    temperature.SATURATION,
    attention_maps.MAP,
    attention_maps.COLUMNS,
    attention_maps.OWN_TOKEN,
    keys.MOVED_KEY,
    keys.ELONGATED_KEY,
    attention_maps.CROSS,
    heads.MULTI_HEAD,
    heads.HEAD_OUTPUTS,
    heads.TORCH_WEIGHTS,
    heads.GROUPS,
    several_heads.SEVERAL_HEADS,
    positions.EQUIVARIANCE,
    vision.LEARNED,
    positions.POSITIONS,
    sequential_depth.GRADIENT_PATH,
    sequential_depth.IN_TURN,
    recurrence.RECURRENCE,
    temperature.PERMUTATION,
    imitations.RUNNING_LINEAR,
    imitations.CONVOLUTION,
    imitations.GRAPH,
    imitations.FEEDFORWARD,
    blocks.SKIP_CONNECTIONS,
    blocks.LAYER,
    blocks.WIRING,
    imitations.PATCHES,
    vision.READOUT,
    training.PLAIN_VIT,
    convolutions.REACH,
    convolutions.ANY_SIZE,
    convolutions.PARALLEL,
    convolutions.ROTATION,
    masks.ADDITIVE,
    masks.HIDDEN_ROW,
    training.STAGES,
    training.AUGMENTATION,
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


# All figures, by the name of the claim that they show.


FIGURES: "dict[str, Callable[..., Figure]]" = {
    "temperature": temperature.draw_temperature,
    "hard-and-soft": temperature.draw_hard_and_soft,
    "saturation": temperature.draw_saturation,
    "attention-map": attention_maps.draw_attention_map,
    "columns": attention_maps.draw_columns,
    "own-token": attention_maps.draw_own_token,
    "moved-key": keys.draw_moved_key,
    "elongated-key": keys.draw_elongated_key,
    "cross-attention": attention_maps.draw_cross_attention,
    "multi-head": heads.draw_multi_head,
    "head-outputs": heads.draw_head_outputs,
    "torch-weights": heads.draw_torch_weights,
    "heads-as-groups": heads.draw_heads_as_groups,
    "equivariance": positions.draw_equivariance,
    "learned-positions": positions.draw_learned_positions,
    "gradient-path": sequential_depth.draw_gradient_path,
    "in-turn": sequential_depth.draw_in_turn,
    "permutation": imitations.draw_permutation,
    "running-linear": imitations.draw_running_linear,
    "convolution": imitations.draw_convolution,
    "graph": imitations.draw_graph,
    "feed-forward": blocks.draw_feed_forward,
    "skip-connections": blocks.draw_skip_connections,
    "layer-norm": blocks.draw_layer_norm,
    "pre-norm": blocks.draw_pre_norm,
    "patches": vision.draw_patches,
    "class-token": vision.draw_class_token,
    "reach": convolutions.draw_reach,
    "any-size": convolutions.draw_any_size,
    "parallel": convolutions.draw_parallel,
    "rotation": convolutions.draw_rotation,
    "additive-mask": masks.draw_additive_mask,
    "hidden-row": masks.draw_hidden_row,
    "stages": training.draw_stages,
}
"""each takes `seed` and some of its claim's settings, all with defaults; `result` too, if it shows more with it"""

FROM_RESULTS: "dict[str, Callable[[Result], Figure]]" = {
    "several-heads": several_heads.draw_several_heads,
    "positions": positions.draw_positions,
    "recurrence": recurrence.draw_recurrence,
    "augmentation": training.draw_augmentation,
    "plain-vit": training.draw_plain_vit,
}
"""figures of claims that train: drawn from the measured numbers, since measuring them again takes a minute"""

DRAWN = (*FIGURES, *FROM_RESULTS)


def draw_claim(
    slug: str, changes: Mapping[str, object] = MappingProxyType({}), result: Result | None = None
) -> "Figure":
    """The figure of a claim, with those of the changed settings, and of its result, that it depends on."""
    draw = FIGURES[slug]
    known = inspect.signature(draw).parameters
    given = {**changes, "result": result}
    with enough_memory():
        return draw(**{name: value for name, value in given.items() if name in known})


def draw_result(
    slug: str, result: Result | None, changes: Mapping[str, object] = MappingProxyType({})
) -> "Figure | None":
    """The figure of a claim; none of a claim that is drawn from its result and was not run.

    Its headline is the claim: where that does not hold with the reader's own settings, a second line says so.
    """
    if slug in FROM_RESULTS:
        figure = FROM_RESULTS[slug](result) if result else None
    else:
        figure = draw_claim(slug, changes, result) if slug in FIGURES else None
    if figure is not None and result is not None and changes and result.verdict == "refuted":
        figure.suptitle(f"{figure.get_suptitle()}\n(does not hold with these settings)", fontsize=TITLE)
    return figure
