"""All figures, by the name of the claim that they show."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from clearhead.lab.claim import Result
from clearhead.lab.figures import (
    attention,
    blocks,
    heads,
    images,
    imitations,
    keys,
    masks,
    positions,
    recurrence,
    temperature,
    training,
)
from clearhead.lab.figures.style import TITLE
from clearhead.lab.figures.style import save as save
from clearhead.lab.settings import enough_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: "dict[str, Callable[..., Figure]]" = {
    "temperature": temperature.draw_temperature,
    "hard-and-soft": temperature.draw_hard_and_soft,
    "saturation": temperature.draw_saturation,
    "attention-map": attention.draw_attention_map,
    "columns": attention.draw_columns,
    "own-token": attention.draw_own_token,
    "moved-key": keys.draw_moved_key,
    "elongated-key": keys.draw_elongated_key,
    "cross-attention": attention.draw_cross_attention,
    "multi-head": heads.draw_multi_head,
    "head-outputs": heads.draw_head_outputs,
    "torch-weights": heads.draw_torch_weights,
    "heads-as-groups": heads.draw_heads_as_groups,
    "equivariance": positions.draw_equivariance,
    "learned-positions": positions.draw_learned_positions,
    "gradient-path": recurrence.draw_gradient_path,
    "in-turn": recurrence.draw_in_turn,
    "permutation": imitations.draw_permutation,
    "running-linear": imitations.draw_running_linear,
    "convolution": imitations.draw_convolution,
    "graph": imitations.draw_graph,
    "feed-forward": blocks.draw_feed_forward,
    "skip-connections": blocks.draw_skip_connections,
    "layer-norm": blocks.draw_layer_norm,
    "pre-norm": blocks.draw_pre_norm,
    "patches": images.draw_patches,
    "class-token": images.draw_class_token,
    "reach": images.draw_reach,
    "any-size": images.draw_any_size,
    "parallel": images.draw_parallel,
    "rotation": images.draw_rotation,
    "additive-mask": masks.draw_additive_mask,
    "hidden-row": masks.draw_hidden_row,
    "stages": training.draw_stages,
}
"""each takes `seed` and some of its claim's settings, all with defaults; `result` too, if it shows more with it"""

FROM_RESULTS: "dict[str, Callable[[Result], Figure]]" = {
    "several-heads": training.draw_several_heads,
    "positions": training.draw_positions,
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
