"""Heads while they form: pictures of the maps that a run with a probe has kept.

Dims: T steps, N inputs, H heads, Q queries, K keys.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clearhead.drawing import save_figure
from clearhead.insight.animation import save_animation
from clearhead.insight.figures_heads import draw_entropy, draw_strip
from clearhead.insight.heads import entropy
from clearhead.training.probe import read_maps
from clearhead.training.run import RunDirectory


def look_over_time(
    run: str | Path, folder: Path | None = None, before_drawing: Callable[[], None] = lambda: None
) -> list[tuple[Path, str]]:
    """Entropy of each head against the step; of the head that changed most, a strip of pictures and an animation."""
    path = RunDirectory.open(run).path
    folder = path / "figures/look" if folder is None else folder
    steps, found = read_maps(path)
    before_drawing()
    maps = {name: found[name] for name in in_order(found)}
    names = list(maps)
    table = entropies(list(maps.values()))
    layer, head = changed_most(table)
    one = maps[names[layer]][:, 0, head]  # (T,Q,K) of the first input
    title = f"{names[layer]}, head {head}"
    alike = {round(entropy_if_alike(layer_maps), 6) for layer_maps in maps.values()}
    most = alike.pop() if len(alike) == 1 else None
    return [
        (
            save_figure(draw_entropy(steps, table, names, most=most), folder / "entropy.png"),
            "how many keys each head looks at, against the step",
        ),
        (save_figure(draw_strip(steps, one, title=title), folder / "strip.png"), "the head that changed most"),
        (save_animation(steps, one, folder / "head.gif", title=title), "the same, moving"),
    ]


def in_order(addresses: Iterable[str]) -> list[str]:
    """A file of maps has no order of its own: by name, block 2 before block 10."""
    return sorted(addresses, key=lambda name: [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")])


def entropies(layers: Sequence[Tensor]) -> Tensor:
    """(T,layers,H) of weights (T,N,H,Q,K) for each layer; nan where a layer has fewer heads."""
    n_heads = max(layer.shape[2] for layer in layers)
    table = torch.full((len(layers[0]), len(layers), n_heads), torch.nan)
    for i, layer in enumerate(layers):
        table[:, i, : layer.shape[2]] = torch.stack([entropy(weights) for weights in layer])
    return table


def entropy_if_alike(layer: Tensor) -> float:
    """Of weights (T,N,H,Q,K): that of a head which looks alike at all keys that a query may see: those that any
    head has looked at."""
    n_keys = (layer > 0).any(0).any(1).sum(-1).double()  # (N,Q)
    return n_keys[n_keys > 0].log().mean().item()


def changed_most(table: Tensor) -> tuple[int, int]:
    """The layer and head whose entropy moved most from its first value."""
    moved = (table - table[:1]).abs().amax(0).nan_to_num(-1)
    return divmod(int(moved.argmax()), moved.shape[1])
