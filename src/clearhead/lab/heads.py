"""Multi-head attention: the computation of each head, the output projection, and the weight layout of torch.nn.

Dims: with tokens as columns C is (e,n), e width, n tokens, h heads, d head width; with tokens as rows B batch, H heads,
L length, D head width, E width.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GRAY, GREEN, ORANGE
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    SMALL_SIZE,
    TEXT_SIZE,
    heat_maps,
    label,
    label_axes,
    legend_below,
    scatter_against,
    set_headline,
    subplots,
)
from clearhead.nn.attention import MultiHeadAttention, attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_multi_head(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 5, left_multiply: bool = True
) -> Result:
    """left_multiply=False multiplies from the right, which for square weights amounts to Wᵀ C: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads, bias=False).double()
    C, *qkv_inputs = torch.randn(4, width, num_tokens, dtype=torch.float64)  # tokens are columns

    def heads(weight: Tensor) -> tuple[Tensor, ...]:
        return (weight if left_multiply else weight.T).chunk(num_heads)  # W_i (d,e)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """O_i = W_V,i v softargmax(beta (W_K,i k)ᵀ W_Q,i q), beta = 1/sqrt(d), (d,n) each"""
        per_head = []
        for W_Q, W_K, W_V in zip(*(heads(p.weight) for p in (layer.q_proj, layer.k_proj, layer.v_proj)), strict=True):
            Q, K, V = W_Q @ q, W_K @ k, W_V @ v
            per_head.append(V @ softargmax(K.T @ Q, len(Q) ** -0.5, dim=0))
        return per_head

    def error(output: Tensor, *inputs: Tensor) -> float:
        return (output - layer(*(x.T[None] for x in inputs))[0].T).abs().max().item()

    with torch.no_grad():
        assert isinstance(layer.out_proj, nn.Linear)
        W_O, self_outputs = layer.out_proj.weight, outputs(C, C, C)
        summed = torch.stack(
            [part @ out for part, out in zip(W_O.chunk(num_heads, dim=1), self_outputs, strict=True)]
        ).sum(0)
        return Result(
            (
                equals("number of rows of one head's output", len(self_outputs[0]), width // num_heads, 0),
                at_most(
                    "self-attention: difference between W_O [O_1; ...; O_h] and the layer",
                    error(W_O @ torch.cat(self_outputs), C),
                    1e-12,
                ),
                at_most(
                    "self-attention: difference between the sum of W_O,i O_i and the layer", error(summed, C), 1e-12
                ),
                at_most(
                    "separate query, key and value inputs: difference from the layer",
                    error(W_O @ torch.cat(outputs(*qkv_inputs)), *qkv_inputs),
                    1e-12,
                ),
            )
        )


HEAD_PANELS = "abcd"
"""mosaic letters of the heads' panels; at most four heads are drawn"""


def head_outputs(layer: MultiHeadAttention, C: Tensor) -> tuple[Tensor, Tensor]:
    """O_i = W_V,i C A_i of all heads (h,d,n), and the attention weights A_i (h,n,n), from C (e,n)."""
    parts = (layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight)
    w_q, w_k, w_v = (weight.unflatten(0, (layer.num_heads, -1)) for weight in parts)  # (h,d,e)
    q, k, v = w_q @ C, w_k @ C, w_v @ C
    attention = softargmax(k.mT @ q, q.shape[1] ** -0.5, dim=1)
    return v @ attention, attention


@torch.no_grad()
def draw_multi_head(*, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 5) -> "Figure":
    """From left to right: the tokens C, the attention weights of each head, and W_O times the stacked outputs."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads, bias=False).double()
    C = torch.randn(4, width, num_tokens, dtype=torch.float64)[0]
    assert isinstance(layer.out_proj, nn.Linear)
    W_O = layer.out_proj.weight
    outputs, attention = head_outputs(layer, C)
    stacked = outputs.flatten(0, 1)
    letters = HEAD_PANELS[:num_heads]
    figure, (input_axes, output_axes, concat_axes, weight_axes, *heads) = subplots(
        ";".join(f"C{letter}WOH" for letter in letters), widths=(1, 1.1, 2, 1, 1)
    )
    heat_maps(figure, heads, list(attention[: len(heads)]), "weight")
    heat_maps(
        figure,
        [input_axes, weight_axes, concat_axes, output_axes],
        [C, W_O, stacked, W_O @ stacked],
        "value",
        beside=[output_axes],
    )
    for axes in (input_axes, weight_axes, concat_axes, output_axes):
        axes.set_aspect("auto")
        label_first_and_last(axes, width if axes is weight_axes else num_tokens, width if axes is input_axes else 0)
    for axes in (concat_axes, weight_axes):
        for head in range(1, num_heads):
            (axes.axhline if axes is concat_axes else axes.axvline)(
                head * width // num_heads - 0.5, color="white", linewidth=2
            )
    for head, axes in enumerate(heads, start=1):
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(f"head {head}", fontsize=SMALL_SIZE)
    label_axes(input_axes, "C", "token", "feature")
    label_axes(weight_axes, "$W_O$", "head feature")
    label_axes(concat_axes, f"[O$_1$; ...; O$_{{{num_heads}}}$]", "token")
    label_axes(output_axes, "H", "token")
    heads[0].set_title("weights", fontsize=TEXT_SIZE, pad=10)
    heads[-1].set_xlabel("query", fontsize=TEXT_SIZE)
    set_headline(figure, "Each head projects all tokens; a single $W_O$ mixes the stacked head outputs")
    return figure


def label_first_and_last(axes: "Axes", columns: int, rows: int) -> None:
    """Labels only the first and the last index along each axis; none along an axis of size 0."""
    for set_ticks, size in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        ends = sorted({1, size}) if size else []
        set_ticks([end - 1 for end in ends], labels=[str(end) for end in ends])


MULTI_HEAD = Claim(
    slug="multi-head",
    kind="demonstration",
    lesson="Multi-head attention",
    statement="With tokens as columns, each head multiplies the input from the left by its own weights, W_i C; a "
    "single output projection W_O, shared by all heads, mixes the stacked head outputs.",
    misconception="Each head computes C W_i, from the right, and has an output projection of its own.",
    formula="Q_i = W_Q,i C (d,n), K_i, V_i likewise;  O_i = V_i softargmax(K_iᵀ Q_i / sqrt(d)) over each column "
    "(d,n);  H = W_O [O_1; ...; O_h], W_O (e, h d)",
    run=run_multi_head,
    figure=draw_multi_head,
    try_next="clearhead lab head-outputs",
)


def run_head_outputs(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 5, mix_weights: bool = False
) -> Result:
    """mix_weights=True applies the mean of the heads' attention weights to all values: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads).double()
    x = 3 * torch.randn(1, num_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (layer.split_heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        outputs, weights = attend_reference(q, k, v)  # (1,H,L,D), (1,H,L,L)
        if mix_weights:
            outputs = weights.mean(1, keepdim=True) @ v
        concatenated = outputs.transpose(1, 2).flatten(-2)
        error = (layer.out_proj(concatenated) - layer(x)).abs().max().item()
        unscaled = attend_reference(q, k, v, beta=1.0)[0].transpose(1, 2).flatten(-2)
        without_beta = (layer.out_proj(unscaled) - layer(x)).abs().max().item()
    spread = (weights - weights.mean(1, keepdim=True)).abs().max().item()
    scaled = (
        [at_least("the same with beta = 1: difference", without_beta, 1e-3)] if num_heads < width else []
    )  # else beta = 1
    return Result(
        (
            at_most("difference between W_O [O_1; ...; O_h] and the layer", error, 1e-12),
            *scaled,
            at_least("largest difference between the heads' attention weights", spread, 0.01),
        )
    )


@torch.no_grad()
def draw_head_outputs(*, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 5) -> "Figure":
    """Left: the attention weights of each head. Right: the layer's output, computed in two ways."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads).double()
    x = 3 * torch.randn(1, num_tokens, width, dtype=torch.float64)
    q, k, v = (layer.split_heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    outputs, weights = attend_reference(q, k, v)
    joined, averaged = (
        layer.out_proj(out.transpose(1, 2).flatten(-2)) for out in (outputs, weights.mean(1, keepdim=True) @ v)
    )
    mosaic = {1: "aZ", 2: "aZ;bZ", 3: "abZ;c.Z"}.get(num_heads, "abZ;cdZ")
    figure, (scatter, *heads) = subplots(mosaic, widths=(1,) * (len(mosaic.split(";")[0]) - 1) + (1.9,))
    heat_maps(figure, heads, list(weights[0, : len(heads)]), "attention weight")
    for head, axes in enumerate(heads, start=1):
        label_axes(axes, f"head {head}")
    label_outer(heads, "key", "query")
    scatter_against(
        scatter,
        layer(x),
        {
            "outputs concatenated, then $W_O$": (joined, CORRECT, "o"),
            "attention weights averaged": (averaged, MISCONCEPTION, "x"),
        },
    )
    label_axes(scatter, "Output of the layer", "predicted", "measured")
    legend_below(figure, scatter)
    set_headline(figure, "The outputs of the heads are concatenated, not their attention weights")
    return figure


def label_outer(heads: "list[Axes]", x: str, y: str) -> None:
    """Labels the axes at the left and at the bottom of a group of panels only."""
    for axes in heads:
        position = axes.get_subplotspec()
        assert position is not None
        if position.is_first_col():
            axes.set_ylabel(y, fontsize=TEXT_SIZE)
        if position.is_last_row():
            axes.set_xlabel(x, fontsize=TEXT_SIZE)


HEAD_OUTPUTS = Claim(
    slug="head-outputs",
    kind="demonstration",
    lesson="Multi-head attention",
    statement="The outputs of the heads are concatenated and mixed by one W_O; the attention weights of the heads are "
    "never combined.",
    misconception="The attention weights of the heads are concatenated.",
    formula="H = W_O [O_1; ...; O_h],  O_i = W_V,i V softargmax(beta (W_K,i K)ᵀ W_Q,i Q),  beta = 1/sqrt(head width)",
    run=run_head_outputs,
    figure=draw_head_outputs,
    try_next="clearhead shapes attention --width 768 --heads 12",
    minimum={"num_heads": 2, "num_tokens": 2},
)


Splitter = Callable[[Tensor], tuple[Tensor, ...]]


def row_blocks(packed: Tensor) -> tuple[Tensor, ...]:
    """Three equal blocks of rows."""
    return packed.chunk(3)


def first_rows(packed: Tensor) -> tuple[Tensor, ...]:
    """The misconception: rows 0, 1 and 2."""
    return tuple(packed[i].expand(packed.shape[1], -1) for i in range(3))


def run_in_proj_weight(*, seed: int = 0, width: int = 16, num_tokens: int = 5, split: Splitter = row_blocks) -> Result:
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(width, 1, batch_first=True).double()
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (x @ w.T for w in split(module.in_proj_weight))
        out = module.out_proj(attend_reference(q, k, v)[0])
        error = (out - module(x, x, x)[0]).abs().max().item()
    return Result((at_most("difference between attention by hand and nn.MultiheadAttention", error, 1e-12),))


@torch.no_grad()
def draw_in_proj_weight(*, seed: int = 0, width: int = 16, num_tokens: int = 5) -> "Figure":
    """Left: the packed weight of nn.MultiheadAttention. Right: its output, recomputed from row blocks and from rows."""
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(width, 1, batch_first=True).double()
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    packed = module.in_proj_weight
    recomputed = []
    for split in (row_blocks, first_rows):
        q, k, v = (x @ weight.T for weight in split(packed))
        recomputed.append(module.out_proj(attend_reference(q, k, v)[0]))
    figure, (left, right) = subplots("AB", widths=(1, 1.25))
    heat_maps(figure, [left], [packed], "weight")
    for block, text in enumerate(("Q", "K", "V")):
        middle = (block + 0.5) * width - 0.5
        label(left, 0.5, middle, f"$W_{text}$", "white", xycoords=("axes fraction", "data"), ha="center", va="center")
        left.texts[-1].set_bbox({"facecolor": "black", "edgecolor": "none", "alpha": 0.7})
        left.axhline((block + 1) * width - 0.5, color="white", linewidth=3)
    edges = [0, width, 2 * width, 3 * width - 1]
    left.set_yticks(edges, labels=[str(edge) for edge in edges])
    left.set_xticks([0, width - 1], labels=["0", str(width - 1)])
    label_axes(left, "in_proj_weight", "column", "row")
    scatter_against(
        right,
        module(x, x, x)[0],
        {"three blocks of rows": (recomputed[0], CORRECT, "o"), "rows 0, 1 and 2": (recomputed[1], MISCONCEPTION, "x")},
    )
    label_axes(right, "Output of nn.MultiheadAttention", "predicted", "measured")
    legend_below(figure, right)
    set_headline(figure, "$W_Q$, $W_K$ and $W_V$ are three equal blocks of rows of in_proj_weight")
    return figure


IN_PROJ_WEIGHT = Claim(
    slug="in-proj-weight",
    kind="demonstration",
    lesson="Multi-head attention",
    statement="W_Q, W_K and W_V of nn.MultiheadAttention are three equal blocks of rows of in_proj_weight.",
    misconception="W_Q, W_K and W_V are rows 0, 1 and 2 of in_proj_weight.",
    formula="W_Q, W_K, W_V = in_proj_weight.chunk(3)",
    run=run_in_proj_weight,
    figure=draw_in_proj_weight,
    try_next="clearhead lab head-outputs",
)


def run_heads_as_groups(
    *, seed: int = 0, width: int = 8, num_heads: int = 4, length: int = 9, one_kernel: bool = False
) -> Result:
    """one_kernel=True gives all heads the attention weights of the first: the misconception."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(num_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)  # attention weights sum to 1
    v = torch.randn(1, num_heads, length, width // num_heads, generator=random, dtype=torch.float64)
    # Circular relative scores of each head: the log of its kernel at offsets -1, 0, 1, and -inf elsewhere.
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]  # (H,L,L)
    if one_kernel:
        scores = scores[:1].expand_as(scores)
    zeros = torch.zeros(1, num_heads, length, 1, dtype=torch.float64)
    attended = attend_reference(zeros, zeros, v, logit_bias=scores)[0]
    channels = v.transpose(2, 3).flatten(1, 2)  # (1,E,L): a head is a group of channels
    by_channel = kernels.repeat_interleave(width // num_heads, dim=0)[:, None]  # (E,1,3)
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)
    error = (attended.transpose(2, 3).flatten(1, 2) - convolved).abs().max().item()
    return Result((at_most("difference between heads with relative scores and a grouped convolution", error, 1e-12),))


def draw_heads_as_groups(*, seed: int = 0, width: int = 8, num_heads: int = 4, length: int = 9) -> "Figure":
    """Top: the kernel of each group. Bottom: the attention weights of the head. Right: the outputs of both."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(num_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)
    v = torch.randn(1, num_heads, length, width // num_heads, generator=random, dtype=torch.float64)
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]
    zeros = torch.zeros(1, num_heads, length, 1, dtype=torch.float64)
    (attended, weights), (repeated, _) = (
        attend_reference(zeros, zeros, v, logit_bias=bias) for bias in (scores, scores[:1].expand_as(scores))
    )
    channels = v.transpose(2, 3).flatten(1, 2)
    by_channel = kernels.repeat_interleave(width // num_heads, dim=0)[:, None]
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)

    letters = HEAD_PANELS[:num_heads]
    figure, (scatter, *heads) = subplots(
        f"{letters}Z;{'efgh'[: len(letters)]}Z", widths=(1,) * len(letters) + (0.6 * len(letters) + 0.4,)
    )
    top, bottom = heads[: len(letters)], heads[len(letters) :]
    heat_maps(figure, bottom, list(weights[0, : len(bottom)]), "")
    for head, axes in enumerate(top):
        axes.bar([-1, 0, 1], kernels[head].tolist(), color=(BLUE, GREEN, ORANGE, GRAY)[head])
        axes.set_ylim(0, 1.05 * kernels.max().item())
        axes.set_xticks([-1, 0, 1])
        axes.grid(axis="x", visible=False)
        axes.set_yticklabels([]) if head else None
        label_axes(axes, f"head {head + 1}", "offset", "" if head else "kernel")
    for axes in bottom:
        axes.set(xticks=[], yticks=[])
        label_axes(axes, "", "key", "query" if axes is bottom[0] else "")
    scatter_against(
        scatter,
        convolved.unflatten(1, (num_heads, -1)).transpose(2, 3),
        {"one pattern per head": (attended, CORRECT, "o"), "one pattern for all heads": (repeated, MISCONCEPTION, "x")},
    )
    label_axes(scatter, "Outputs", "attention", "grouped convolution")
    legend_below(figure, scatter)
    set_headline(figure, "Heads with relative scores compute a grouped convolution")
    return figure


HEADS_AS_GROUPS = Claim(
    slug="heads-as-groups",
    kind="demonstration",
    lesson="Multi-head attention",
    statement="Heads correspond to the groups of a convolution: each has its own channels and its own kernel. With "
    "scores that depend on the offset alone, multi-head attention is a grouped convolution.",
    misconception="All heads use the same attention pattern, and convolutions have no counterpart to heads.",
    minimum={"length": 3},
    formula="scores_h(i,j) = log w_h(j - i):  attention = grouped convolution with kernels w_h",
    run=run_heads_as_groups,
    figure=draw_heads_as_groups,
    try_next="clearhead lab convolution",
)
