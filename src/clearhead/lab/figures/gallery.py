"""All figures, by the name of the claim that they show."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from clearhead.lab.claim import Result
from clearhead.lab.figures import (
    depth,
    graph,
    imitations,
    keys,
    masks,
    positions,
    reach,
    recurrence,
    saturation,
    temperature,
    tokens,
)
from clearhead.lab.figures.style import save as save
from clearhead.lab.settings import enough_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: "dict[str, Callable[..., Figure]]" = {
    "temperature": temperature.draw_temperature,
    "hard-and-soft": temperature.draw_hard_and_soft,
    "saturation": saturation.draw_saturation,
    "moved-key": keys.draw_moved_key,
    "elongated-key": keys.draw_elongated_key,
    "own-token": tokens.draw_own_token,
    "equivariance": tokens.draw_equivariance,
    "positions": positions.draw_positions,
    "gradient-path": recurrence.draw_paths,
    "in-turn": recurrence.draw_paths,
    "permutation": imitations.draw_permutation,
    "running-linear": imitations.draw_running_linear,
    "convolution": imitations.draw_convolution,
    "graph": graph.draw_graph,
    "skip-connections": depth.draw_skip_connections,
    "pre-norm": depth.draw_pre_norm,
    "reach": reach.draw_reach,
    "additive-mask": masks.draw_masks,
    "hidden-row": masks.draw_hidden_row,
}
"""each takes `seed` and some of its claim's settings, all with defaults"""

FROM_RESULTS: "dict[str, Callable[[Result], Figure]]" = {"recurrence": recurrence.draw_recurrence}
"""figures of claims that train: drawn from what was measured, for to measure it again takes a minute"""

DRAWN = (*FIGURES, *FROM_RESULTS)


def draw_claim(slug: str, changes: Mapping[str, object] = MappingProxyType({})) -> "Figure":
    """The figure of a claim, with those of the reader's numbers that it depends on."""
    draw = FIGURES[slug]
    known = inspect.signature(draw).parameters
    with enough_memory():
        return draw(**{name: value for name, value in changes.items() if name in known})


def draw_result(
    slug: str, result: Result | None, changes: Mapping[str, object] = MappingProxyType({})
) -> "Figure | None":
    """The figure of a claim, if it has one, and of one that trains, if it was run."""
    if slug in FROM_RESULTS:
        return FROM_RESULTS[slug](result) if result else None
    return draw_claim(slug, changes) if slug in FIGURES else None
