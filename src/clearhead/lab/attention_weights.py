"""The attention map, and where queries, keys and values come from."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.drawing import BLUE, GREEN, GREY, ORANGE
from clearhead.insight.look import look
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
    """flatten_batch lets the examples of the batch attend to each other, as one long sequence: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(batch_size, num_tokens, width, dtype=torch.float64)
    others = torch.cat([x[:1], torch.randn_like(x[1:])])

    def map_of(tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(0, 1)[None] if flatten_batch else tokens
        return attend_reference(layer.query(tokens), layer.key(tokens), layer.value(tokens))[1]

    with torch.no_grad():
        weights = map_of(x)
        moved = (map_of(others) - weights)[0].abs().max().item()
        by_torch, _ = layer.to_torch()(x, x, x)
        error = (layer(x) - by_torch).abs().max().item()
    return Result(
        (
            equals("first size of the map: examples", weights.shape[0], batch_size, 0),
            equals("second: tokens that ask", weights.shape[1], num_tokens, 0),
            equals("third: tokens that are asked", weights.shape[2], num_tokens, 0),
            at_most("other examples change: the first one's map moves by", moved, 0.0),
            at_most("difference of nn.MultiheadAttention(X, X, X) from self-attention", error, 1e-12),
        )
    )


@torch.no_grad()
def draw_attention_map(*, seed: int = 0, width: int = 16, batch_size: int = 3, num_tokens: int = 6) -> "Figure":
    """Left: a map for each example, along the diagonal. Right: the misconception, the batch as one long sequence."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(batch_size, num_tokens, width, dtype=torch.float64)
    weights, mixed = (
        attend_reference(layer.query(tokens), layer.key(tokens), layer.value(tokens))[1]
        for tokens in (x, x.flatten(0, 1)[None])
    )
    n_rows = batch_size * num_tokens
    apart = torch.full((n_rows, n_rows), math.nan, dtype=torch.float64)
    for example, block in enumerate(weights.unbind()):
        rows = slice(example * num_tokens, (example + 1) * num_tokens)
        apart[rows, rows] = block
    figure, both = subplots("AB")
    heat_maps(figure, both, [apart, mixed[0]], "attention weight")
    for axes in both:
        for edge in range(1, batch_size):
            axes.axhline(edge * num_tokens - 0.5, color=GREY, linewidth=1)
            axes.axvline(edge * num_tokens - 0.5, color=GREY, linewidth=1)
    label_axes(both[0], f"Correct: {batch_size} maps of {num_tokens} × {num_tokens}", "key token", "query token")
    label_axes(both[1], f"Misconception: one of {n_rows} × {n_rows}", "key token")
    set_headline(figure, "Each example of a batch has its own map: batch × sequence × sequence")
    return figure


ATTENTION_MAP = Claim(
    slug="attention-map",
    kind="demonstration",
    lesson="Attention and its weights",
    statement="The map of one head is batch x sequence x sequence, and self-attention is Attention(X, X, X).",
    misconception="The map mixes the examples of a batch.",
    formula="A = softargmax(beta X W_Q (X W_K)ᵀ)  (B,L,L)",
    run=run_attention_map,
    figure=draw_attention_map,
    try_next="clearhead steps",
)


def run_column_convention(*, seed: int = 0, width: int = 768, num_tokens: int = 6, keys_first: bool = True) -> Result:
    """keys_first: Kᵀ Q, the scores of tokens; otherwise Q Kᵀ, the misconception."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, num_tokens, generator=random, dtype=torch.float64)  # columns are tokens
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    scores = k.T @ q if keys_first else q @ k.T
    weights = softargmax(scores, width**-0.5, dim=0)  # by columns
    in_rows, _ = attend_reference(q.T, k.T, v.T)
    fits = weights.shape == (num_tokens, num_tokens)
    out = v @ weights if fits else weights @ v
    error = (out - in_rows.T).abs().max().item()
    return Result(
        (
            equals("rows of Q, K and V", len(q), width, 0),
            equals("columns of Q, K and V", q.shape[1], num_tokens, 0),
            equals("rows of the weights", weights.shape[0], num_tokens, 0),
            equals("columns of the weights", weights.shape[1], num_tokens, 0),
            equals("rows of the output", len(out), width, 0),
            equals("columns of the output", out.shape[1], num_tokens, 0),
            at_most("difference of V A from the row convention", error, 1e-12),
        )
    )


def draw_column_convention(*, seed: int = 0, width: int = 768, num_tokens: int = 6) -> "Figure":
    """Left: the matrix products and their sizes. Right: the weights, whose columns sum to 1."""
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
    set_headline(figure, "With tokens as columns, the weights Kᵀ Q are tokens × tokens")
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
        axes.text(x, y, called, fontsize=SMALL_SIZE, ha="center", va="center")
        sizes = f"{matrix.shape[0]} × {matrix.shape[1]}"
        axes.text(x, y - height / 2 - 0.15, sizes, fontsize=SMALL_SIZE, ha="center", va="top")
        axes.text(x - 1.9, y, symbol, fontsize=TITLE_SIZE, ha="center", va="center")


COLUMN_CONVENTION = Claim(
    slug="column-convention",
    kind="demonstration",
    lesson="Attention and its weights",
    statement="With tokens as columns, the weights are softargmax(Kᵀ Q / sqrt d), tokens by tokens, and out = V A.",
    misconception="Q Kᵀ is [768, 768], so the weights are as wide as the model.",
    formula="Q, K, V (d,n);  A = softargmax(Kᵀ Q / sqrt(d)) by columns (n,n);  H = V A (d,n)",
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
    """width and num_tokens are those of the layer with random weights; steps are those of the recipe `reverse`.
    same_projection makes the layer's queries and keys equal and of one length: of it, the misconception is true."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, num_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    if same_projection:
        k = q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    right, most, own, opposite = mean_over_seeds(lambda each: measure_reversal(steps, each), seed, num_seeds)
    return Result(
        (
            at_most(
                "random weights: fraction of tokens that attend most to themselves", argmax_on_diagonal(weights), 0.9
            ),
            at_least("trained to reverse: fraction of digits that are right", right, 0.95),
            at_most("trained to reverse: fraction of tokens that attend most to themselves", most, 0.1),
            at_most("trained to reverse: mean weight of a token for itself", own, 0.1),
            at_least("trained to reverse: mean weight of a token for its opposite", opposite, 0.3),
        )
    )


def argmax_on_diagonal(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


@torch.no_grad()
def measure_reversal(steps: int, seed: int) -> list[float]:
    """Accuracy and attention weights of the recipe `reverse` after `steps` steps. One block, one head: token i has to
    attend to token 15 - i."""
    with single_thread(), torch.enable_grad():
        setup = train_recipe("reverse", {"seed": seed}, steps)
    digits, reversed_digits = setup.data.test.get_batch(torch.arange(NUM_TEST))
    seen = look(setup.model, digits)
    (layer,) = seen
    weights = seen[layer].weights()[:, 0]  # (B,L,L)
    own, opposite = (each.diagonal(dim1=-2, dim2=-1).mean().item() for each in (weights, weights.flip(-1)))
    right = (seen.output.argmax(-1) == reversed_digits).double().mean().item()
    return [right, argmax_on_diagonal(weights), own, opposite]


def draw_self_weight(*, seed: int = 0, width: int = 16, num_tokens: int = 8, result: Result | None = None) -> "Figure":
    """Left: the weights of one sequence, with the largest of each row marked. Right: how often it is the own token.

    The result adds the models that were trained, if there are any in it.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, num_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    same = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    own = {"random\nweights": (argmax_on_diagonal(weights), BLUE), "chance\n(1/n)": (1 / num_tokens, GREY)}
    for check in result.checks if result else ():
        if check.name.startswith("trained") and "most to themselves" in check.name:
            own["trained\nreversal"] = (check.value, ORANGE)
    own["q = k"] = (argmax_on_diagonal(attend_reference(same, same, x)[1]), GREEN)
    figure, (left, right) = subplots("AB", widths=(1, 1.1))
    heat_maps(figure, [left], [weights[0]], "attention weight")
    best = weights[0].argmax(-1)
    left.scatter(best, range(num_tokens), s=200, facecolor="none", edgecolor="white", linewidth=4)
    left.plot([-0.5, num_tokens - 0.5], [-0.5, num_tokens - 0.5], color="white", linestyle=":", linewidth=2)
    label_axes(left, "Ring: largest weight of each row", "key token", "query token")
    bars(right, own, "{:.0%}")
    right.set_ylim(0, 1.1)
    label_axes(right, "Ring on the diagonal", "", "fraction of tokens")
    set_headline(figure, "A token need not attend most to itself, unless queries equal keys")
    return figure


SELF_WEIGHT = Claim(
    slug="self-weight",
    lesson="Attention and its weights",
    statement="A token need not attend to itself most: with random weights few tokens do, and in a model that was "
    "trained to reverse its input none.",
    misconception="The current word always has the highest weight.",
    conditions="The trained model is the recipe reverse: one block with one head, 16 digits. Float32, the mean of "
    "three seeds.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
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
    """queries_from_encoder takes the queries from the encoder's output too: the misconception."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, src_length, width, dtype=torch.float64)
    x = torch.randn(1, tgt_length, width, dtype=torch.float64)

    def attended(queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (layer.split(part) for part in (layer.query(queries), layer.key(keys), layer.value(keys)))
        return layer.output(attend_reference(q, k, v)[0].transpose(1, 2).flatten(2))

    with torch.no_grad():
        expected = layer(x, memory)
        made = attended(memory if queries_from_encoder else x, memory)
        error = (made - expected).abs().max().item() if made.shape == expected.shape else float("inf")
        moved = (layer(x, memory + 1) - expected).abs().max().item()
    return Result(
        (
            equals("answers: as many as the decoder has tokens", made.shape[1], tgt_length, 0),
            at_most("difference of W_Q x, W_K memory, W_V memory from cross-attention", error, 1e-12),
            at_least("the encoder's output moves: the answer moves by", moved, 1e-3),
        )
    )


@torch.no_grad()
def draw_cross_attention(*, seed: int = 0, width: int = 16, src_length: int = 7, tgt_length: int = 4) -> "Figure":
    """Left: what is computed from what, with sizes. Right: the weights of both heads."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, src_length, width, dtype=torch.float64)
    x = torch.randn(1, tgt_length, width, dtype=torch.float64)
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
    figure, (left, above, below) = subplots("AB;AC", widths=(1.4, 1))
    draw_flow(left, boxes, [*arrows, (attention, output), (values, output)], (10, 10))
    heat_maps(figure, [above, below], list(weights[0]), "attention weight")
    for head, axes in enumerate((above, below), start=1):
        label_axes(axes, f"head {head}", "", "decoder query")
        axes.set_aspect("auto")
    below.set_xlabel("encoder key", fontsize=TEXT_SIZE)
    set_headline(figure, "Queries come from the decoder, keys and values from the encoder")
    return figure


CROSS_ATTENTION = Claim(
    slug="cross-attention",
    kind="demonstration",
    lesson="Attention and its weights",
    statement="In cross-attention keys and values come from the encoder, queries from the decoder.",
    misconception="The encoder outputs keys, values and queries.",
    formula="softargmax(beta (x W_Q)(m W_K)ᵀ) m W_V;  x decoder (Q,e), m encoder's output (K,e) -> (Q,e)",
    run=run_cross_attention,
    figure=draw_cross_attention,
    try_next="clearhead shapes transformer_base",
    multiple_of={"width": 2},
)
