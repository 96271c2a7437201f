"""The attention map: its size, where queries, keys and values come from, and whether a token attends to itself."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.drawing import BLUE, GREEN, GREY, ORANGE
from clearhead.lab.claim import Result
from clearhead.lab.figures.style import (
    MISTAKE,
    SMALL,
    TEXT,
    TITLE,
    TRUTH,
    bars,
    canvas,
    empty,
    flow,
    headline,
    heat_maps,
    name,
)
from clearhead.lab.own_token import own_largest
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@torch.no_grad()
def draw_attention_map(*, seed: int = 0, width: int = 16, n_examples: int = 3, n_tokens: int = 6) -> "Figure":
    """Left: a map for each example, along the diagonal. Right: the mistake, the batch as one long sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, 1).double()
        x = torch.randn(n_examples, n_tokens, width, dtype=torch.float64)
    weights, mixed = (
        attend_reference(layer.query(tokens), layer.key(tokens), layer.value(tokens))[1]
        for tokens in (x, x.flatten(0, 1)[None])
    )
    n_rows = n_examples * n_tokens
    apart = torch.full((n_rows, n_rows), math.nan, dtype=torch.float64)
    for example, block in enumerate(weights.unbind()):
        rows = slice(example * n_tokens, (example + 1) * n_tokens)
        apart[rows, rows] = block
    figure, both = canvas("AB")
    heat_maps(figure, both, [apart, mixed[0]], "attention weight")
    for axes in both:
        for edge in range(1, n_examples):
            axes.axhline(edge * n_tokens - 0.5, color=GREY, linewidth=1)
            axes.axvline(edge * n_tokens - 0.5, color=GREY, linewidth=1)
    name(both[0], f"Correct: {n_examples} maps of {n_tokens} × {n_tokens}", "key token", "query token")
    name(both[1], f"Misconception: one of {n_rows} × {n_rows}", "key token")
    headline(figure, "Each example of a batch has its own map: batch × sequence × sequence")
    return figure


def draw_columns(*, seed: int = 0, width: int = 768, n_tokens: int = 6) -> "Figure":
    """Left: the matrix products and their sizes. Right: the weights, whose columns sum to 1."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, n_tokens, generator=random, dtype=torch.float64)
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    weights = softargmax(k.T @ q, width**-0.5, dim=0)
    figure, (left, right) = canvas("AB", widths=(1.5, 1))
    multiply(left, 8.5, ("Kᵀ", k.T), ("Q", q), "Kᵀ Q", TRUTH)
    multiply(left, 5.3, ("V", v), ("A", weights), "V A", TRUTH)
    multiply(left, 1.9, ("Q", q), ("Kᵀ", k.T), "Q Kᵀ", MISTAKE)
    empty(left, (11, 10))
    name(left, "blue: correct, orange: misconception")
    heat_maps(figure, [right], [weights], "attention weight")
    name(right, "A: each column sums to 1", "query token", "key token")
    headline(figure, "With tokens as columns, the weights Kᵀ Q are tokens × tokens")
    return figure


def multiply(
    axes: "Axes", y: float, left: tuple[str, Tensor], right: tuple[str, Tensor], text: str, colour: str
) -> None:
    """Two matrices and their product as rectangles, whose sides grow with the logarithm of their sizes."""
    from matplotlib.patches import Rectangle

    product = left[1] @ right[1]
    for x, symbol, (called, matrix) in ((1.6, "", left), (5.4, "·", right), (9.2, "=", (text, product))):
        height, width = (grow * math.log2(1 + size) for grow, size in zip((0.23, 0.29), matrix.shape, strict=True))
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": colour, "linewidth": 2}
        axes.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, **look, alpha=0.3))
        axes.text(x, y, called, fontsize=SMALL, ha="center", va="center")
        sizes = f"{matrix.shape[0]} × {matrix.shape[1]}"
        axes.text(x, y - height / 2 - 0.15, sizes, fontsize=SMALL, ha="center", va="top")
        axes.text(x - 1.9, y, symbol, fontsize=TITLE, ha="center", va="center")


@torch.no_grad()
def draw_cross_attention(*, seed: int = 0, width: int = 16, n_source: int = 7, n_target: int = 4) -> "Figure":
    """Left: what is computed from what, with sizes. Right: the weights of both heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, 2).double()
        memory = torch.randn(1, n_source, width, dtype=torch.float64)
        x = torch.randn(1, n_target, width, dtype=torch.float64)
    q, k, v = layer.query(x), layer.key(memory), layer.value(memory)
    weights = attend_reference(layer.split(q), layer.split(k), layer.split(v))[1]
    out = layer(x, memory)

    def sized(text: str, part: Tensor) -> str:
        return f"{text}\n{part.shape[-2]} × {part.shape[-1]}"

    decoder, encoder = sized("decoder x", x), sized("encoder output m", memory)
    queries, keys, values = sized("Q = x W$_Q$", q), sized("K = m W$_K$", k), sized("V = m W$_V$", v)
    attention, output = sized("weights of a head", weights), sized("output", out)
    boxes = {
        decoder: (1.5, 0.8, ORANGE),
        encoder: (6.75, 0.8, GREEN),
        queries: (1.5, 3.6, ORANGE),
        keys: (5.0, 3.6, GREEN),
        values: (8.5, 3.6, GREEN),
        attention: (3.25, 6.4, BLUE),
        output: (5.8, 9.2, BLUE),
    }
    arrows = [(decoder, queries), (encoder, keys), (encoder, values), (queries, attention), (keys, attention)]
    figure, (left, above, below) = canvas("AB;AC", widths=(1.4, 1))
    flow(left, boxes, [*arrows, (attention, output), (values, output)], (10, 10))
    heat_maps(figure, [above, below], list(weights[0]), "attention weight")
    for head, axes in enumerate((above, below), start=1):
        name(axes, f"head {head}", "", "decoder query")
        axes.set_aspect("auto")
    below.set_xlabel("encoder key", fontsize=TEXT)
    headline(figure, "Queries come from the decoder, keys and values from the encoder")
    return figure


def draw_own_token(*, seed: int = 0, width: int = 16, n_tokens: int = 8, result: Result | None = None) -> "Figure":
    """Left: the weights of one sequence, with the largest of each row marked. Right: how often it is the own token.

    The result adds the models that were trained, if there are any in it.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, n_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    same = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    own = {"random\nweights": (own_largest(weights), BLUE), "chance\n(1/n)": (1 / n_tokens, GREY)}
    for check in result.checks if result else ():
        if check.name.startswith("trained") and "most to themselves" in check.name:
            own["trained\nreversal"] = (check.value, ORANGE)
    own["q = k"] = (own_largest(attend_reference(same, same, x)[1]), GREEN)
    figure, (left, right) = canvas("AB", widths=(1, 1.1))
    heat_maps(figure, [left], [weights[0]], "attention weight")
    best = weights[0].argmax(-1)
    left.scatter(best, range(n_tokens), s=200, facecolor="none", edgecolor="white", linewidth=4)
    left.plot([-0.5, n_tokens - 0.5], [-0.5, n_tokens - 0.5], color="white", linestyle=":", linewidth=2)
    name(left, "Ring: largest weight of each row", "key token", "query token")
    bars(right, own, "{:.0%}")
    right.set_ylim(0, 1.1)
    name(right, "Ring on the diagonal", "", "fraction of tokens")
    headline(figure, "A token need not attend most to itself, unless queries equal keys")
    return figure
