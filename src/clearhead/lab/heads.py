"""Multi-head attention from C (e,n), with tokens as columns; and what its heads are like in a convolution."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GRAY, GREEN, ORANGE
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.plots import (
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
    name_axis,
)
from clearhead.nn.attention import MultiHeadAttention, attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_multi_head(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 5, from_left: bool = True
) -> Result:
    """from_left=False multiplies from the other side, Cᵀ W, which for square weights is Wᵀ C."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads, bias=False).double()
    C, *given = torch.randn(4, width, n_tokens, dtype=torch.float64)  # columns are tokens

    def heads(weight: Tensor) -> tuple[Tensor, ...]:
        return (weight if from_left else weight.T).chunk(num_heads)  # W_i (d,e)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """O_i = W_V,i v softargmax(beta (W_K,i k)ᵀ W_Q,i q), beta = 1/sqrt(d), (d,n) each"""
        found = []
        for W_Q, W_K, W_V in zip(*(heads(p.weight) for p in (layer.q_proj, layer.k_proj, layer.v_proj)), strict=True):
            Q, K, V = W_Q @ q, W_K @ k, W_V @ v
            found.append(V @ softargmax(K.T @ Q, len(Q) ** -0.5, dim=0))
        return found

    def gap(made: Tensor, *inputs: Tensor) -> float:
        return (made - layer(*(x.T[None] for x in inputs))[0].T).abs().max().item()

    with torch.no_grad():
        assert isinstance(layer.out_proj, nn.Linear)
        W_O, own = layer.out_proj.weight, outputs(C, C, C)
        summed = torch.stack([part @ out for part, out in zip(W_O.chunk(num_heads, dim=1), own, strict=True)]).sum(0)
        return Result(
            (
                equals("rows of one head's output", len(own[0]), width // num_heads, 0),
                at_most("difference of W_O [O_1; ...; O_h] from the layer", gap(W_O @ torch.cat(own), C), 1e-12),
                at_most("difference of the sum of W_O,i O_i from it", gap(summed, C), 1e-12),
                at_most(
                    "for given Q, K and V: difference from the layer",
                    gap(W_O @ torch.cat(outputs(*given)), *given),
                    1e-12,
                ),
            )
        )


def run_groups(
    *, seed: int = 0, width: int = 8, num_heads: int = 4, length: int = 9, one_kernel: bool = False
) -> Result:
    """one_kernel gives all heads the first one's weights: the mistake that heads are copies."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(num_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)  # as the weights of a query, they sum to 1
    v = torch.randn(1, num_heads, length, width // num_heads, generator=random, dtype=torch.float64)
    # Scores of each head by distance alone, around a circle: log of its kernel at -1, 0, 1 and -inf beyond.
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]  # (H,L,L)
    if one_kernel:
        scores = scores[:1].expand_as(scores)
    nothing = torch.zeros(1, num_heads, length, 1, dtype=torch.float64)
    attended = attend_reference(nothing, nothing, v, logit_bias=scores)[0]
    channels = v.transpose(2, 3).flatten(1, 2)  # (1,E,L): a head is a group of channels
    by_channel = kernels.repeat_interleave(width // num_heads, dim=0)[:, None]  # (E,1,3)
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)
    error = (attended.transpose(2, 3).flatten(1, 2) - convolved).abs().max().item()
    return Result((at_most("difference of heads that attend by distance from a grouped convolution", error, 1e-12),))


MULTI_HEAD = Claim(
    slug="multi-head",
    kind="demonstration",
    rows=("R4.6",),
    lesson="Heads",
    statement="From C (e,n) each head projects once, from the left: W_i C; one W_O without an index mixes the outputs.",
    mistake="C W_i, from the right, and a W_O of its own for each head.",
    formula="Q_i = W_Q,i C (d,n), K_i, V_i likewise;  O_i = V_i softargmax(K_iᵀ Q_i / sqrt(d)) by columns (d,n);  "
    "H = W_O [O_1; ...; O_h], W_O (e, h d)",
    run=run_multi_head,
    try_next="clearhead lab head-outputs",
)

GROUPS = Claim(
    slug="heads-as-groups",
    kind="demonstration",
    rows=("R4.7",),
    lesson="Heads",
    statement="Heads are to attention what groups with a kernel each are to a convolution: own pattern, own channels.",
    mistake="Heads repeat one pattern; a convolution has nothing like them.",
    least={"length": 3},
    formula="scores_h(i,j) = log w_h(j - i):  attention = grouped convolution with kernels w_h",
    run=run_groups,
    try_next="clearhead lab convolution",
)


# What is joined after the heads.


def run_head_outputs(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 5, mix_weights: bool = False
) -> Result:
    """mix_weights applies the mean of the heads' weights to all values: the mistake, as far as it can be computed."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads).double()
    x = 3 * torch.randn(1, n_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (layer.split_heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        outputs, weights = attend_reference(q, k, v)  # (1,H,L,D), (1,H,L,L)
        if mix_weights:
            outputs = weights.mean(1, keepdim=True) @ v
        joined = outputs.transpose(1, 2).flatten(-2)
        error = (layer.out_proj(joined) - layer(x)).abs().max().item()
        unscaled = attend_reference(q, k, v, beta=1.0)[0].transpose(1, 2).flatten(-2)
        without_beta = (layer.out_proj(unscaled) - layer(x)).abs().max().item()
    spread = (weights - weights.mean(1, keepdim=True)).abs().max().item()
    scaled = [at_least("the same without beta: difference", without_beta, 1e-3)] if num_heads < width else []
    return Result(  # with a head width of 1, beta is 1
        (
            at_most("difference of W_O [O_1; ...; O_h] from the layer", error, 1e-12),
            *scaled,
            at_least("how much the heads' weights differ", spread, 0.01),
        )
    )


HEAD_OUTPUTS = Claim(
    slug="head-outputs",
    kind="demonstration",
    rows=("R4.6",),
    lesson="Heads",
    statement="The heads' outputs are joined and mixed by one W_O; their weights never meet.",
    mistake="Attention matrices are concatenated.",
    formula="H = W_O [O_1; ...; O_h],  O_i = W_V,i V softargmax(beta (W_K,i K)ᵀ W_Q,i Q),  beta = 1/sqrt(head width)",
    run=run_head_outputs,
    try_next="clearhead shapes attention --width 768 --heads 12",
    least={"num_heads": 2, "n_tokens": 2},
)


# Where torch.nn keeps W_Q, W_K and W_V.


Reader = Callable[[Tensor], tuple[Tensor, ...]]


def blocks(packed: Tensor) -> tuple[Tensor, ...]:
    """Three equal blocks of rows."""
    return packed.chunk(3)


def rows(packed: Tensor) -> tuple[Tensor, ...]:
    """The mistake: rows 0, 1 and 2."""
    return tuple(packed[i].expand(packed.shape[1], -1) for i in range(3))


def run_torch_weights(*, seed: int = 0, width: int = 16, n_tokens: int = 5, read: Reader = blocks) -> Result:
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(width, 1, batch_first=True).double()
    x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (x @ w.T for w in read(module.in_proj_weight))
        out = module.out_proj(attend_reference(q, k, v)[0])
        error = (out - module(x, x, x)[0]).abs().max().item()
    return Result((at_most("difference from nn.MultiheadAttention", error, 1e-12),))


TORCH_WEIGHTS = Claim(
    slug="torch-weights",
    kind="demonstration",
    rows=("R0.4",),
    lesson="Heads",
    statement="W_Q, W_K and W_V are three equal row blocks of in_proj_weight.",
    mistake="They are its rows 0, 1 and 2.",
    formula="W_Q, W_K, W_V = in_proj_weight.chunk(3)",
    run=run_torch_weights,
    try_next="clearhead lab head-outputs",
)


# Heads: what each computes, how their outputs are joined, and how torch.nn stores their weights.


SHOWN = "abcd"
"""the panels of the heads that are drawn, at most"""


def head_outputs(layer: MultiHeadAttention, C: Tensor) -> tuple[Tensor, Tensor]:
    """For tokens as columns, C (e,n): O_i = W_V,i C A_i of all heads (h,d,n), and the weights A_i (h,n,n)."""
    parts = (layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight)
    w_q, w_k, w_v = (weight.unflatten(0, (layer.num_heads, -1)) for weight in parts)  # (h,d,e)
    q, k, v = w_q @ C, w_k @ C, w_v @ C
    attention = softargmax(k.mT @ q, q.shape[1] ** -0.5, dim=1)
    return v @ attention, attention


@torch.no_grad()
def draw_multi_head(*, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 5) -> "Figure":
    """From left to right: the tokens C, the weights of each head, and W_O times the stacked outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, num_heads, bias=False).double()
        C = torch.randn(4, width, n_tokens, dtype=torch.float64)[0]
    assert isinstance(layer.out_proj, nn.Linear)
    W_O = layer.out_proj.weight
    outputs, attention = head_outputs(layer, C)
    stacked = outputs.flatten(0, 1)
    letters = SHOWN[:num_heads]
    figure, (given, result, joined, mixing, *heads) = canvas(
        ";".join(f"C{letter}WOH" for letter in letters), widths=(1, 1.1, 2, 1, 1)
    )
    heat_maps(figure, heads, list(attention[: len(heads)]), "weight")
    heat_maps(figure, [given, mixing, joined, result], [C, W_O, stacked, W_O @ stacked], "value", beside=[result])
    for axes in (given, mixing, joined, result):
        axes.set_aspect("auto")
        first_and_last(axes, width if axes is mixing else n_tokens, width if axes is given else 0)
    for axes in (joined, mixing):
        for head in range(1, num_heads):
            (axes.axhline if axes is joined else axes.axvline)(
                head * width // num_heads - 0.5, color="white", linewidth=2
            )
    for head, axes in enumerate(heads, start=1):
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(f"head {head}", fontsize=SMALL)
    name_axis(given, "C", "token", "feature")
    name_axis(mixing, "$W_O$", "head feature")
    name_axis(joined, f"[O$_1$; ...; O$_{{{num_heads}}}$]", "token")
    name_axis(result, "H", "token")
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
def draw_head_outputs(*, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 5) -> "Figure":
    """Left: the weights of each head. Right: the layer's output, from joined outputs and from averaged weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, num_heads).double()
        x = 3 * torch.randn(1, n_tokens, width, dtype=torch.float64)
    q, k, v = (layer.split_heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    outputs, weights = attend_reference(q, k, v)
    joined, averaged = (
        layer.out_proj(out.transpose(1, 2).flatten(-2)) for out in (outputs, weights.mean(1, keepdim=True) @ v)
    )
    places = {1: "aZ", 2: "aZ;bZ", 3: "abZ;c.Z"}.get(num_heads, "abZ;cdZ")
    figure, (scatter, *heads) = canvas(places, widths=(1,) * (len(places.split(";")[0]) - 1) + (1.9,))
    heat_maps(figure, heads, list(weights[0, : len(heads)]), "attention weight")
    for head, axes in enumerate(heads, start=1):
        name_axis(axes, f"head {head}")
    label_outer(heads, "key", "query")
    against(
        scatter,
        layer(x),
        {"outputs concatenated, then $W_O$": (joined, TRUTH, "o"), "weights averaged": (averaged, MISTAKE, "x")},
    )
    name_axis(scatter, "Output of the layer", "computed by hand", "measured")
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
    name_axis(left, "in_proj_weight", "column", "row")
    against(
        right,
        module(x, x, x)[0],
        {"three blocks of rows": (by_hand[0], TRUTH, "o"), "rows 0, 1 and 2": (by_hand[1], MISTAKE, "x")},
    )
    name_axis(right, "Output of nn.MultiheadAttention", "computed by hand", "measured")
    key_below(figure, right)
    headline(figure, "$W_Q$, $W_K$ and $W_V$ are three equal blocks of rows of in_proj_weight")
    return figure


def draw_heads_as_groups(*, seed: int = 0, width: int = 8, num_heads: int = 4, length: int = 9) -> "Figure":
    """Above: the kernel of each group. Below: the weights of the head. Right: what both compute, and one kernel."""
    random = torch.Generator().manual_seed(seed)
    kernels = torch.rand(num_heads, 3, generator=random, dtype=torch.float64) + 0.1
    kernels /= kernels.sum(1, keepdim=True)
    v = torch.randn(1, num_heads, length, width // num_heads, generator=random, dtype=torch.float64)
    distance = (torch.arange(length) - torch.arange(length)[:, None] + 1) % length
    scores = F.pad(kernels.log(), (0, length - 3), value=-torch.inf)[:, distance]
    nothing = torch.zeros(1, num_heads, length, 1, dtype=torch.float64)
    (attended, weights), (repeated, _) = (
        attend_reference(nothing, nothing, v, logit_bias=bias) for bias in (scores, scores[:1].expand_as(scores))
    )
    channels = v.transpose(2, 3).flatten(1, 2)
    by_channel = kernels.repeat_interleave(width // num_heads, dim=0)[:, None]
    convolved = F.conv1d(F.pad(channels, (1, 1), mode="circular"), by_channel, groups=width)

    letters = SHOWN[:num_heads]
    figure, (scatter, *heads) = canvas(
        f"{letters}Z;{'efgh'[: len(letters)]}Z", widths=(1,) * len(letters) + (0.6 * len(letters) + 0.4,)
    )
    above, below = heads[: len(letters)], heads[len(letters) :]
    heat_maps(figure, below, list(weights[0, : len(below)]), "")
    for head, axes in enumerate(above):
        axes.bar([-1, 0, 1], kernels[head].tolist(), color=(BLUE, GREEN, ORANGE, GRAY)[head])
        axes.set_ylim(0, 1.05 * kernels.max().item())
        axes.set_xticks([-1, 0, 1])
        axes.grid(axis="x", visible=False)
        axes.set_yticklabels([]) if head else None
        name_axis(axes, f"head {head + 1}", "offset", "" if head else "kernel")
    for axes in below:
        axes.set(xticks=[], yticks=[])
        name_axis(axes, "", "key", "query" if axes is below[0] else "")
    against(
        scatter,
        convolved.unflatten(1, (num_heads, -1)).transpose(2, 3),
        {"a pattern for each head": (attended, TRUTH, "o"), "one pattern for all": (repeated, MISTAKE, "x")},
    )
    name_axis(scatter, "Both outputs", "attention", "grouped convolution")
    key_below(figure, scatter)
    headline(figure, "Heads are to attention what groups are to a convolution")
    return figure
