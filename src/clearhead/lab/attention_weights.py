"""Attention weights: their shape, the source of queries, keys and values, and whether tokens attend to themselves.

Dims: B batch, L length, Q queries, K keys, E model width; the column convention uses d (width) and n (tokens).
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.drawing import BLUE, GRAY, GREEN, ORANGE
from clearhead.insight.trace import look
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.learning import mean_over_seeds, single_thread, train_recipe
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    SMALL_SIZE,
    TEXT_SIZE,
    TITLE_SIZE,
    bars,
    draw_flow,
    heat_maps,
    hide_axes,
    label_axes,
    set_headline,
    subplots,
)
from clearhead.nn.attention import MultiHeadAttention, attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_attention_map(
    *, seed: int = 0, width: int = 16, batch_size: int = 3, num_tokens: int = 6, flatten_batch: bool = False
) -> Result:
    """flatten_batch=True treats the batch as one long sequence: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(batch_size, num_tokens, width, dtype=torch.float64)
    others = torch.cat([x[:1], torch.randn_like(x[1:])])

    def attention_map(tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(0, 1)[None] if flatten_batch else tokens
        return attend_reference(layer.q_proj(tokens), layer.k_proj(tokens), layer.v_proj(tokens))[1]

    with torch.no_grad():
        weights = attention_map(x)
        change = (attention_map(others) - weights)[0].abs().max().item()
        expected, _ = layer.to_torch()(x, x, x)
        error = (layer(x) - expected).abs().max().item()
    return Result(
        (
            equals("size of axis 0: examples", weights.shape[0], batch_size, 0),
            equals("size of axis 1: query tokens", weights.shape[1], num_tokens, 0),
            equals("size of axis 2: key tokens", weights.shape[2], num_tokens, 0),
            at_most("change of an example's map when the other examples change", change, 0.0),
            at_most("difference between self-attention and nn.MultiheadAttention(X, X, X)", error, 1e-12),
        )
    )


@torch.no_grad()
def draw_attention_map(*, seed: int = 0, width: int = 16, batch_size: int = 3, num_tokens: int = 6) -> "Figure":
    """Left: the maps of the examples on the diagonal. Right: the misconception, the batch as one long sequence."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(batch_size, num_tokens, width, dtype=torch.float64)
    weights, flattened = (
        attend_reference(layer.q_proj(tokens), layer.k_proj(tokens), layer.v_proj(tokens))[1]
        for tokens in (x, x.flatten(0, 1)[None])
    )
    num_rows = batch_size * num_tokens
    block_diagonal = torch.full((num_rows, num_rows), math.nan, dtype=torch.float64)
    for example, block in enumerate(weights.unbind()):
        rows = slice(example * num_tokens, (example + 1) * num_tokens)
        block_diagonal[rows, rows] = block
    figure, panels = subplots("AB")
    heat_maps(figure, panels, [block_diagonal, flattened[0]], "attention weight")
    for axes in panels:
        for edge in range(1, batch_size):
            axes.axhline(edge * num_tokens - 0.5, color=GRAY, linewidth=1)
            axes.axvline(edge * num_tokens - 0.5, color=GRAY, linewidth=1)
    label_axes(panels[0], f"Correct: {batch_size} maps of {num_tokens} × {num_tokens}", "key token", "query token")
    label_axes(panels[1], f"Misconception: 1 map of {num_rows} × {num_rows}", "key token")
    set_headline(figure, "Each example of a batch has its own attention map: (batch, sequence, sequence)")
    return figure


ATTENTION_MAP = Claim(
    slug="attention-map",
    kind="demonstration",
    lesson="Attention weights",
    statement="The attention weights of one head have shape (batch, sequence, sequence): one map per example. "
    "Self-attention is Attention(X, X, X).",
    misconception="The attention map mixes the examples of a batch.",
    formula="A = softargmax(beta X W_Q (X W_K)ᵀ)  (B,L,L)",
    run=run_attention_map,
    figure=draw_attention_map,
    try_next="clearhead steps",
)


def run_column_convention(*, seed: int = 0, width: int = 768, num_tokens: int = 6, keys_first: bool = True) -> Result:
    """keys_first=True computes Kᵀ Q, the scores between tokens; False computes Q Kᵀ: the misconception."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, num_tokens, generator=random, dtype=torch.float64)  # tokens are columns
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    scores = k.T @ q if keys_first else q @ k.T
    weights = softargmax(scores, width**-0.5, dim=0)  # columns sum to 1
    row_output, _ = attend_reference(q.T, k.T, v.T)
    out = v @ weights if weights.shape == (num_tokens, num_tokens) else weights @ v
    error = (out - row_output.T).abs().max().item()
    return Result(
        (
            equals("rows of Q, K and V", len(q), width, 0),
            equals("columns of Q, K and V", q.shape[1], num_tokens, 0),
            equals("rows of the weights", weights.shape[0], num_tokens, 0),
            equals("columns of the weights", weights.shape[1], num_tokens, 0),
            equals("rows of the output", len(out), width, 0),
            equals("columns of the output", out.shape[1], num_tokens, 0),
            at_most("difference between V A and the row convention", error, 1e-12),
        )
    )


def draw_column_convention(*, seed: int = 0, width: int = 768, num_tokens: int = 6) -> "Figure":
    """Left: the matrix products and their shapes. Right: the attention weights, whose columns sum to 1."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, num_tokens, generator=random, dtype=torch.float64)
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    weights = softargmax(k.T @ q, width**-0.5, dim=0)
    figure, (left, right) = subplots("AB", widths=(1.5, 1))
    multiply(left, 8.5, ("Kᵀ", k.T), ("Q", q), "Kᵀ Q", CORRECT)
    multiply(left, 5.3, ("V", v), ("A", weights), "V A", CORRECT)
    multiply(left, 1.9, ("Q", q), ("Kᵀ", k.T), "Q Kᵀ", MISCONCEPTION)
    hide_axes(left, (11, 10))
    label_axes(left, "blue: correct, orange: misconception")
    heat_maps(figure, [right], [weights], "attention weight")
    label_axes(right, "A: each column sums to 1", "query token", "key token")
    set_headline(figure, "With tokens as columns, the scores Kᵀ Q are tokens × tokens")
    return figure


def multiply(
    axes: "Axes", y: float, left: tuple[str, Tensor], right: tuple[str, Tensor], text: str, color: str
) -> None:
    """Draws two matrices and their product as rectangles, on a logarithmic scale."""
    from matplotlib.patches import Rectangle

    product = left[1] @ right[1]
    for x, symbol, (name, matrix) in ((1.6, "", left), (5.4, "·", right), (9.2, "=", (text, product))):
        height, width = (scale * math.log2(1 + size) for scale, size in zip((0.23, 0.29), matrix.shape, strict=True))
        style: dict[str, Any] = {"facecolor": color, "edgecolor": color, "linewidth": 2}
        axes.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, **style, alpha=0.3))
        axes.text(x, y, name, fontsize=SMALL_SIZE, ha="center", va="center")
        shape = f"{matrix.shape[0]} × {matrix.shape[1]}"
        axes.text(x, y - height / 2 - 0.15, shape, fontsize=SMALL_SIZE, ha="center", va="top")
        axes.text(x - 1.9, y, symbol, fontsize=TITLE_SIZE, ha="center", va="center")


COLUMN_CONVENTION = Claim(
    slug="column-convention",
    kind="demonstration",
    lesson="Attention weights",
    statement="With tokens as columns, the attention weights are A = softargmax(Kᵀ Q / sqrt(d)), tokens × tokens, and "
    "the output is V A.",
    misconception="The scores are Q Kᵀ, so the attention weights are width × width: (768, 768).",
    formula="Q, K, V (d,n);  A = softargmax(Kᵀ Q / sqrt(d)) over each column (n,n);  H = V A (d,n)",
    run=run_column_convention,
    figure=draw_column_convention,
    try_next="clearhead shapes attention --width 768 --tokens 6 --columns",
)


NUM_TEST = 1_000


def run_self_weight(
    *,
    seed: int = 0,
    num_seeds: int = 3,
    width: int = 16,
    num_tokens: int = 8,
    steps: int = 200,
    same_projection: bool = False,
) -> Result:
    """width and num_tokens set the size of the layer with random weights, steps the training of the recipe `reverse`.
    same_projection=True makes queries and keys of the random layer equal and of unit length: the misconception."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, num_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    if same_projection:
        k = q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    accuracy, argmax_self, self_weight, mirror_weight = mean_over_seeds(
        lambda run_seed: measure_reversal(steps, run_seed), seed, num_seeds
    )
    return Result(
        (
            at_most(
                "random weights: fraction of tokens with the largest weight on themselves",
                argmax_on_diagonal(weights),
                0.9,
            ),
            at_least("trained to reverse: digit accuracy", accuracy, 0.95),
            at_most("trained to reverse: fraction of tokens with the largest weight on themselves", argmax_self, 0.1),
            at_most("trained to reverse: mean weight of a token on itself", self_weight, 0.1),
            at_least("trained to reverse: mean weight of a token on its mirror token", mirror_weight, 0.3),
        )
    )


def argmax_on_diagonal(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


@torch.no_grad()
def measure_reversal(steps: int, seed: int) -> list[float]:
    """Trains the recipe `reverse`, whose single head must attend from token i to token L - 1 - i.

    Returns the accuracy, the fraction of rows of the weights whose argmax is on the diagonal, the mean of the diagonal,
    and the mean of the antidiagonal.
    """
    with single_thread(), torch.enable_grad():
        ctx = train_recipe("reverse", {"seed": seed}, steps)
    digits, reversed_digits = ctx.data.test.get_batch(torch.arange(NUM_TEST))
    trace = look(ctx.model, digits)
    (layer,) = trace
    weights = trace[layer].weights()[:, 0]  # (B,L,L)
    diagonal, antidiagonal = (w.diagonal(dim1=-2, dim2=-1).mean().item() for w in (weights, weights.flip(-1)))
    accuracy = (trace.output.argmax(-1) == reversed_digits).double().mean().item()
    return [accuracy, argmax_on_diagonal(weights), diagonal, antidiagonal]


def draw_self_weight(*, seed: int = 0, width: int = 16, num_tokens: int = 8, result: Result | None = None) -> "Figure":
    """Left: the weights of one sequence, with the argmax of each row. Right: how often it is on the diagonal, in the
    trained model as well if there is a result."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, num_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    unit_q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    fractions = {"random\nweights": (argmax_on_diagonal(weights), BLUE), "chance\n(1/n)": (1 / num_tokens, GRAY)}
    for check in result.checks if result else ():
        if check.name.startswith("trained") and "on themselves" in check.name:
            fractions["trained to\nreverse"] = (check.value, ORANGE)
    fractions["q = k"] = (argmax_on_diagonal(attend_reference(unit_q, unit_q, x)[1]), GREEN)
    figure, (left, right) = subplots("AB", widths=(1, 1.1))
    heat_maps(figure, [left], [weights[0]], "attention weight")
    argmax = weights[0].argmax(-1)
    left.scatter(argmax, range(num_tokens), s=200, facecolor="none", edgecolor="white", linewidth=4)
    left.plot([-0.5, num_tokens - 0.5], [-0.5, num_tokens - 0.5], color="white", linestyle=":", linewidth=2)
    label_axes(left, "Circle: largest weight of each row", "key token", "query token")
    bars(right, fractions, "{:.0%}")
    right.set_ylim(0, 1.1)
    label_axes(right, "Circle on the diagonal", "", "fraction of tokens")
    set_headline(figure, "A token need not give itself the largest attention weight, unless q = k")
    return figure


SELF_WEIGHT = Claim(
    slug="self-weight",
    lesson="Attention weights",
    statement="The largest attention weight of a token need not be on the token itself. With random weights, "
    "most tokens attend more to another token; in a model trained to reverse sequences, all of them do.",
    misconception="Every token attends most to itself.",
    conditions="The trained model is the recipe `reverse`: one block with one head, 16 digits, 200 steps in float32; "
    "mean of three seeds.",
    formula="argmax_j q_i·k_j = i only for particular W_Q and W_K",
    run=run_self_weight,
    figure=draw_self_weight,
    try_next="clearhead lab self-weight --same-projection true",
    minimum={"num_tokens": 2},
    trains=True,
    seconds=10,
)


def run_cross_attention(
    *, seed: int = 0, width: int = 16, src_length: int = 7, tgt_length: int = 4, queries_from_encoder: bool = False
) -> Result:
    """queries_from_encoder=True takes the queries from the encoder's output too: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, src_length, width, dtype=torch.float64)
    x = torch.randn(1, tgt_length, width, dtype=torch.float64)

    def cross_attend(queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (layer.split_heads(part) for part in (layer.q_proj(queries), layer.k_proj(keys), layer.v_proj(keys)))
        return layer.out_proj(attend_reference(q, k, v)[0].transpose(1, 2).flatten(2))

    with torch.no_grad():
        expected = layer(x, memory)
        output = cross_attend(memory if queries_from_encoder else x, memory)
        error = (output - expected).abs().max().item() if output.shape == expected.shape else float("inf")
        change = (layer(x, memory + 1) - expected).abs().max().item()
    return Result(
        (
            equals("number of outputs: one per decoder token", output.shape[1], tgt_length, 0),
            at_most("difference between cross-attention and its formula", error, 1e-12),
            at_least("change of the output when the encoder's output changes", change, 1e-3),
        )
    )


@torch.no_grad()
def draw_cross_attention(*, seed: int = 0, width: int = 16, src_length: int = 7, tgt_length: int = 4) -> "Figure":
    """Left: the data flow, with shapes. Right: the attention weights of both heads."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, src_length, width, dtype=torch.float64)
    x = torch.randn(1, tgt_length, width, dtype=torch.float64)
    q, k, v = layer.q_proj(x), layer.k_proj(memory), layer.v_proj(memory)
    weights = attend_reference(layer.split_heads(q), layer.split_heads(k), layer.split_heads(v))[1]
    out = layer(x, memory)

    def with_shape(text: str, x: Tensor) -> str:
        return f"{text}\n{x.shape[-2]} × {x.shape[-1]}"

    decoder, encoder = with_shape("decoder x", x), with_shape("encoder output m", memory)
    queries, keys, values = with_shape("Q = x W$_Q$", q), with_shape("K = m W$_K$", k), with_shape("V = m W$_V$", v)
    attention, output = with_shape("weights of one head", weights), with_shape("output", out)
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
    figure, (left, top, bottom) = subplots("AB;AC", widths=(1.4, 1))
    draw_flow(left, boxes, [*arrows, (attention, output), (values, output)], (10, 10))
    heat_maps(figure, [top, bottom], list(weights[0]), "attention weight")
    for head, axes in enumerate((top, bottom), start=1):
        label_axes(axes, f"head {head}", "", "decoder query")
        axes.set_aspect("auto")
    bottom.set_xlabel("encoder key", fontsize=TEXT_SIZE)
    set_headline(figure, "Queries come from the decoder, keys and values from the encoder")
    return figure


CROSS_ATTENTION = Claim(
    slug="cross-attention",
    kind="demonstration",
    lesson="Attention weights",
    statement="In cross-attention, keys and values are projections of the encoder's output, and queries are "
    "projections of the decoder's tokens.",
    misconception="The encoder provides the queries as well as the keys and values.",
    formula="softargmax(beta (x W_Q)(m W_K)ᵀ) m W_V;  decoder x (Q,E), encoder output m (K,E) -> (Q,E)",
    run=run_cross_attention,
    figure=draw_cross_attention,
    try_next="clearhead shapes transformer_base",
    multiple_of={"width": 2},
)
