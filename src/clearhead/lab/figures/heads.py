"""Heads: what each computes, how their outputs are joined, and how torch.nn stores their weights."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, GREY, ORANGE
from clearhead.lab.figures.style import (
    MISTAKE,
    SMALL,
    TEXT,
    TRUTH,
    against,
    canvas,
    headline,
    heat_maps,
    key_below,
    label,
    name,
)
from clearhead.lab.torch_weights import blocks, rows
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = "abcd"
"""the panels of the heads that are drawn, at most"""


def head_outputs(layer: MultiHeadAttention, C: Tensor) -> tuple[Tensor, Tensor]:
    """For tokens as columns, C (e,n): O_i = W_V,i C A_i of all heads (h,d,n), and the weights A_i (h,n,n)."""
    parts = (layer.query.weight, layer.key.weight, layer.value.weight)
    w_q, w_k, w_v = (weight.unflatten(0, (layer.n_heads, -1)) for weight in parts)  # (h,d,e)
    q, k, v = w_q @ C, w_k @ C, w_v @ C
    attention = softargmax(k.mT @ q, q.shape[1] ** -0.5, dim=1)
    return v @ attention, attention


@torch.no_grad()
def draw_multi_head(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 5) -> "Figure":
    """From left to right: the tokens C, the weights of each head, and W_O times the stacked outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, n_heads, bias=False).double()
        C = torch.randn(4, width, n_tokens, dtype=torch.float64)[0]
    assert isinstance(layer.output, nn.Linear)
    W_O = layer.output.weight
    outputs, attention = head_outputs(layer, C)
    stacked = outputs.flatten(0, 1)
    letters = SHOWN[:n_heads]
    figure, (given, result, joined, mixing, *heads) = canvas(
        ";".join(f"C{letter}WOH" for letter in letters), widths=(1, 1.1, 2, 1, 1)
    )
    heat_maps(figure, heads, list(attention[: len(heads)]), "weight")
    heat_maps(figure, [given, mixing, joined, result], [C, W_O, stacked, W_O @ stacked], "value", beside=[result])
    for axes in (given, mixing, joined, result):
        axes.set_aspect("auto")
        first_and_last(axes, width if axes is mixing else n_tokens, width if axes is given else 0)
    for axes in (joined, mixing):
        for head in range(1, n_heads):
            (axes.axhline if axes is joined else axes.axvline)(
                head * width // n_heads - 0.5, color="white", linewidth=2
            )
    for head, axes in enumerate(heads, start=1):
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(f"head {head}", fontsize=SMALL)
    name(given, "C", "token", "feature")
    name(mixing, "$W_O$", "head feature")
    name(joined, f"[O$_1$; ...; O$_{{{n_heads}}}$]", "token")
    name(result, "H", "token")
    heads[0].set_title("weights", fontsize=TEXT, pad=10)
    heads[-1].set_xlabel("query", fontsize=TEXT)
    headline(figure, "Each head projects all tokens; one $W_O$ mixes the stacked outputs")
    return figure


def first_and_last(axes: "Axes", columns: int, rows: int) -> None:
    """Only the first and the last number along each axis, for narrow panels; none along one of size 0."""
    for set_ticks, size in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        ends = sorted({1, size}) if size else []
        set_ticks([end - 1 for end in ends], labels=[str(end) for end in ends])


@torch.no_grad()
def draw_head_outputs(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 5) -> "Figure":
    """Left: the weights of each head. Right: the layer's output, from joined outputs and from averaged weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, n_heads).double()
        x = 3 * torch.randn(1, n_tokens, width, dtype=torch.float64)
    q, k, v = (layer.split(part(x)) for part in (layer.query, layer.key, layer.value))
    outputs, weights = attend_reference(q, k, v)
    joined, averaged = (
        layer.output(out.transpose(1, 2).flatten(-2)) for out in (outputs, weights.mean(1, keepdim=True) @ v)
    )
    places = {1: "aZ", 2: "aZ;bZ", 3: "abZ;c.Z"}.get(n_heads, "abZ;cdZ")
    figure, (scatter, *heads) = canvas(places, widths=(1,) * (len(places.split(";")[0]) - 1) + (1.9,))
    heat_maps(figure, heads, list(weights[0, : len(heads)]), "attention weight")
    for head, axes in enumerate(heads, start=1):
        name(axes, f"head {head}")
    label_outer(heads, "key", "query")
    against(
        scatter,
        layer(x),
        {"outputs concatenated, then $W_O$": (joined, TRUTH, "o"), "weights averaged": (averaged, MISTAKE, "x")},
    )
    name(scatter, "Output of the layer", "computed by hand", "measured")
    key_below(figure, scatter)
    headline(figure, "The outputs of the heads are concatenated; their weights never meet")
    return figure


def label_outer(heads: "list[Axes]", x: str, y: str) -> None:
    """Names of the axes at the left and at the bottom of a group of panels only."""
    for axes in heads:
        position = axes.get_subplotspec()
        assert position is not None
        if position.is_first_col():
            axes.set_ylabel(y, fontsize=TEXT)
        if position.is_last_row():
            axes.set_xlabel(x, fontsize=TEXT)


@torch.no_grad()
def draw_torch_weights(*, seed: int = 0, width: int = 16, n_tokens: int = 5) -> "Figure":
    """Left: the packed weight of nn.MultiheadAttention. Right: its output, from blocks of it and from single rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.MultiheadAttention(width, 1, batch_first=True).double()
        x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    packed = module.in_proj_weight
    by_hand = []
    for read in (blocks, rows):
        q, k, v = (x @ weight.T for weight in read(packed))
        by_hand.append(module.out_proj(attend_reference(q, k, v)[0]))
    figure, (left, right) = canvas("AB", widths=(1, 1.25))
    heat_maps(figure, [left], [packed], "weight")
    for block, text in enumerate(("Q", "K", "V")):
        middle = (block + 0.5) * width - 0.5
        label(left, 0.5, middle, f"$W_{text}$", "white", xycoords=("axes fraction", "data"), ha="center", va="center")
        left.texts[-1].set_bbox({"facecolor": "black", "edgecolor": "none", "alpha": 0.7})
        left.axhline((block + 1) * width - 0.5, color="white", linewidth=3)
    edges = [0, width, 2 * width, 3 * width - 1]
    left.set_yticks(edges, labels=[str(edge) for edge in edges])
    left.set_xticks([0, width - 1], labels=["0", str(width - 1)])
    name(left, "in_proj_weight", "column", "row")
    against(
        right,
        module(x, x, x)[0],
        {"three blocks of rows": (by_hand[0], TRUTH, "o"), "rows 0, 1 and 2": (by_hand[1], MISTAKE, "x")},
    )
    name(right, "Output of nn.MultiheadAttention", "computed by hand", "measured")
    key_below(figure, right)
    headline(figure, "$W_Q$, $W_K$ and $W_V$ are three equal blocks of rows of in_proj_weight")
    return figure


def draw_heads_as_groups(*, seed: int = 0, width: int = 8, n_heads: int = 4, length: int = 9) -> "Figure":
    """Above: the kernel of each group. Below: the weights of the head. Right: what both compute, and one kernel."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(n_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)
    v = torch.randn(1, n_heads, length, width // n_heads, generator=random, dtype=torch.float64)
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]
    nothing = torch.zeros(1, n_heads, length, 1, dtype=torch.float64)
    (attended, weights), (repeated, _) = (
        attend_reference(nothing, nothing, v, logit_bias=bias) for bias in (scores, scores[:1].expand_as(scores))
    )
    channels = v.transpose(2, 3).flatten(1, 2)
    by_channel = kernels.repeat_interleave(width // n_heads, dim=0)[:, None]
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)

    letters = SHOWN[:n_heads]
    figure, (scatter, *heads) = canvas(
        f"{letters}Z;{'efgh'[: len(letters)]}Z", widths=(1,) * len(letters) + (0.6 * len(letters) + 0.4,)
    )
    above, below = heads[: len(letters)], heads[len(letters) :]
    heat_maps(figure, below, list(weights[0, : len(below)]), "")
    for head, axes in enumerate(above):
        axes.bar([-1, 0, 1], kernels[head].tolist(), color=(BLUE, GREEN, ORANGE, GREY)[head])
        axes.set_ylim(0, 1.05 * kernels.max().item())
        axes.set_xticks([-1, 0, 1])
        axes.grid(axis="x", visible=False)
        axes.set_yticklabels([]) if head else None
        name(axes, f"head {head + 1}", "offset", "" if head else "kernel")
    for axes in below:
        axes.set(xticks=[], yticks=[])
        name(axes, "", "key", "query" if axes is below[0] else "")
    against(
        scatter,
        convolved.unflatten(1, (n_heads, -1)).transpose(2, 3),
        {"a pattern for each head": (attended, TRUTH, "o"), "one pattern for all": (repeated, MISTAKE, "x")},
    )
    name(scatter, "Both outputs", "attention", "grouped convolution")
    key_below(figure, scatter)
    headline(figure, "Heads are to attention what groups are to a convolution")
    return figure
