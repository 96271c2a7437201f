"""The attention map, and where queries, keys and values come from."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.drawing import BLUE, GRAY, GREEN, ORANGE
from clearhead.insight.look import look
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.learning import mean_over_seeds, one_thread, train_recipe
from clearhead.lab.plots import (
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
    name_axis,
)
from clearhead.nn.attention import MultiHeadAttention, attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_attention_map(
    *, seed: int = 0, width: int = 16, n_examples: int = 3, n_tokens: int = 6, mixed: bool = False
) -> Result:
    """mixed lets the examples of the batch attend to each other, as one long sequence: the mistake."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(n_examples, n_tokens, width, dtype=torch.float64)
    others = torch.cat([x[:1], torch.randn_like(x[1:])])

    def map_of(tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(0, 1)[None] if mixed else tokens
        return attend_reference(layer.q_proj(tokens), layer.k_proj(tokens), layer.v_proj(tokens))[1]

    with torch.no_grad():
        weights = map_of(x)
        moved = (map_of(others) - weights)[0].abs().max().item()
        by_torch, _ = layer.to_torch()(x, x, x)
        error = (layer(x) - by_torch).abs().max().item()
    return Result(
        (
            equals("first size of the map: examples", weights.shape[0], n_examples, 0),
            equals("second: tokens that ask", weights.shape[1], n_tokens, 0),
            equals("third: tokens that are asked", weights.shape[2], n_tokens, 0),
            at_most("other examples change: the first one's map moves by", moved, 0.0),
            at_most("difference of nn.MultiheadAttention(X, X, X) from self-attention", error, 1e-12),
        )
    )


def run_cross(
    *, seed: int = 0, width: int = 16, src_vocab_size: int = 7, tgt_vocab_size: int = 4, encoder_queries: bool = False
) -> Result:
    """encoder_queries takes the queries from the encoder's output too: the mistake."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, src_vocab_size, width, dtype=torch.float64)
    x = torch.randn(1, tgt_vocab_size, width, dtype=torch.float64)

    def attended(queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (layer.split_heads(part) for part in (layer.q_proj(queries), layer.k_proj(keys), layer.v_proj(keys)))
        return layer.out_proj(attend_reference(q, k, v)[0].transpose(1, 2).flatten(2))

    with torch.no_grad():
        expected = layer(x, memory)
        made = attended(memory if encoder_queries else x, memory)
        error = (made - expected).abs().max().item() if made.shape == expected.shape else float("inf")
        moved = (layer(x, memory + 1) - expected).abs().max().item()
    return Result(
        (
            equals("answers: as many as the decoder has tokens", made.shape[1], tgt_vocab_size, 0),
            at_most("difference of W_Q x, W_K memory, W_V memory from cross-attention", error, 1e-12),
            at_least("the encoder's output moves: the answer moves by", moved, 1e-3),
        )
    )


MAP = Claim(
    slug="attention-map",
    kind="demonstration",
    rows=("R3.4",),
    lesson="Attention and its weights",
    statement="The map of one head is batch x sequence x sequence, and self-attention is Attention(X, X, X).",
    mistake="The map mixes the examples of a batch.",
    formula="A = softargmax(beta X W_Q (X W_K)ᵀ)  (B,L,L)",
    run=run_attention_map,
    try_next="clearhead steps",
)

CROSS = Claim(
    slug="cross-attention",
    kind="demonstration",
    rows=("R4.12",),
    lesson="Attention and its weights",
    statement="In cross-attention keys and values come from the encoder, queries from the decoder.",
    mistake="The encoder outputs keys, values and queries.",
    formula="softargmax(beta (x W_Q)(m W_K)ᵀ) m W_V;  x decoder (Q,e), m encoder's output (K,e) -> (Q,e)",
    run=run_cross,
    try_next="clearhead shapes transformer_base",
    multiples={"width": 2},
)


# The dimensions of attention when tokens are columns.


def run_columns(*, seed: int = 0, width: int = 768, n_tokens: int = 6, keys_first: bool = True) -> Result:
    """keys_first: Kᵀ Q, the scores of tokens; otherwise Q Kᵀ, the mistake."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, n_tokens, generator=random, dtype=torch.float64)  # columns are tokens
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    scores = k.T @ q if keys_first else q @ k.T
    weights = softargmax(scores, width**-0.5, dim=0)  # by columns
    in_rows, _ = attend_reference(q.T, k.T, v.T)
    fits = weights.shape == (n_tokens, n_tokens)
    out = v @ weights if fits else weights @ v
    error = (out - in_rows.T).abs().max().item()
    return Result(
        (
            equals("rows of Q, K and V", len(q), width, 0),
            equals("columns of Q, K and V", q.shape[1], n_tokens, 0),
            equals("rows of the weights", weights.shape[0], n_tokens, 0),
            equals("columns of the weights", weights.shape[1], n_tokens, 0),
            equals("rows of the output", len(out), width, 0),
            equals("columns of the output", out.shape[1], n_tokens, 0),
            at_most("difference of V A from the row convention", error, 1e-12),
        )
    )


COLUMNS = Claim(
    slug="columns",
    kind="demonstration",
    rows=("R1.1",),
    lesson="Attention and its weights",
    statement="With tokens as columns, the weights are softargmax(Kᵀ Q / sqrt d), tokens by tokens, and out = V A.",
    mistake="Q Kᵀ is [768, 768], so the weights are as wide as the model.",
    formula="Q, K, V (d,n);  A = softargmax(Kᵀ Q / sqrt(d)) by columns (n,n);  H = V A (d,n)",
    run=run_columns,
    try_next="clearhead shapes attention --width 768 --tokens 6 --columns",
)


# Does a token attend to itself most? With random weights, and in a model that was trained to reverse its input.


N_TEST = 1_000


def run_own_token(
    *,
    seed: int = 0,
    num_seeds: int = 3,
    width: int = 16,
    n_tokens: int = 8,
    steps: int = 200,
    same_projection: bool = False,
) -> Result:
    """width and n_tokens are those of the layer with random weights; steps are those of the recipe `reverse`.
    same_projection makes the layer's queries and keys equal and of one length: of it, the misconception is true."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, n_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    if same_projection:
        k = q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    right, most, own, opposite = mean_over_seeds(lambda each: of_reversal(steps, each), seed, num_seeds)
    return Result(
        (
            at_most("random weights: fraction of tokens that attend most to themselves", own_largest(weights), 0.9),
            at_least("trained to reverse: fraction of digits that are right", right, 0.95),
            at_most("trained to reverse: fraction of tokens that attend most to themselves", most, 0.1),
            at_most("trained to reverse: mean weight of a token for itself", own, 0.1),
            at_least("trained to reverse: mean weight of a token for its opposite", opposite, 0.3),
        )
    )


def own_largest(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


@torch.no_grad()
def of_reversal(steps: int, seed: int) -> list[float]:
    """Accuracy and attention weights of the recipe `reverse` after `steps` steps. One block, one head: token i has to
    attend to token 15 - i."""
    with one_thread(), torch.enable_grad():
        ctx = train_recipe("reverse", {"seed": seed}, steps)
    digits, reversed_digits = ctx.data.test.get_batch(torch.arange(N_TEST))
    seen = look(ctx.model, digits)
    (layer,) = seen
    weights = seen[layer].weights()[:, 0]  # (B,L,L)
    own, opposite = (each.diagonal(dim1=-2, dim2=-1).mean().item() for each in (weights, weights.flip(-1)))
    right = (seen.output.argmax(-1) == reversed_digits).double().mean().item()
    return [right, own_largest(weights), own, opposite]


OWN_TOKEN = Claim(
    slug="own-token",
    rows=("R1.5",),
    lesson="Attention and its weights",
    statement="A token need not attend to itself most: with random weights few tokens do, and in a model that was "
    "trained to reverse its input none.",
    mistake="The current word always has the highest weight.",
    conditions="The trained model is the recipe reverse: one block with one head, 16 digits. Float32, the mean of "
    "three seeds.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
    run=run_own_token,
    try_next="clearhead lab own-token --same-projection true",
    least={"n_tokens": 2},
    trains=True,
    seconds=10,
)


# The attention map: its size, where queries, keys and values come from, and whether a token attends to itself.


@torch.no_grad()
def draw_attention_map(*, seed: int = 0, width: int = 16, n_examples: int = 3, n_tokens: int = 6) -> "Figure":
    """Left: a map for each example, along the diagonal. Right: the mistake, the batch as one long sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, 1).double()
        x = torch.randn(n_examples, n_tokens, width, dtype=torch.float64)
    weights, mixed = (
        attend_reference(layer.q_proj(tokens), layer.k_proj(tokens), layer.v_proj(tokens))[1]
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
            axes.axhline(edge * n_tokens - 0.5, color=GRAY, linewidth=1)
            axes.axvline(edge * n_tokens - 0.5, color=GRAY, linewidth=1)
    name_axis(both[0], f"Correct: {n_examples} maps of {n_tokens} × {n_tokens}", "key token", "query token")
    name_axis(both[1], f"Misconception: one of {n_rows} × {n_rows}", "key token")
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
    name_axis(left, "blue: correct, orange: misconception")
    heat_maps(figure, [right], [weights], "attention weight")
    name_axis(right, "A: each column sums to 1", "query token", "key token")
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
def draw_cross_attention(
    *, seed: int = 0, width: int = 16, src_vocab_size: int = 7, tgt_vocab_size: int = 4
) -> "Figure":
    """Left: what is computed from what, with sizes. Right: the weights of both heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(width, 2).double()
        memory = torch.randn(1, src_vocab_size, width, dtype=torch.float64)
        x = torch.randn(1, tgt_vocab_size, width, dtype=torch.float64)
    q, k, v = layer.q_proj(x), layer.k_proj(memory), layer.v_proj(memory)
    weights = attend_reference(layer.split_heads(q), layer.split_heads(k), layer.split_heads(v))[1]
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
        name_axis(axes, f"head {head}", "", "decoder query")
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
    own = {"random\nweights": (own_largest(weights), BLUE), "chance\n(1/n)": (1 / n_tokens, GRAY)}
    for check in result.checks if result else ():
        if check.name.startswith("trained") and "most to themselves" in check.name:
            own["trained\nreversal"] = (check.value, ORANGE)
    own["q = k"] = (own_largest(attend_reference(same, same, x)[1]), GREEN)
    figure, (left, right) = canvas("AB", widths=(1, 1.1))
    heat_maps(figure, [left], [weights[0]], "attention weight")
    best = weights[0].argmax(-1)
    left.scatter(best, range(n_tokens), s=200, facecolor="none", edgecolor="white", linewidth=4)
    left.plot([-0.5, n_tokens - 0.5], [-0.5, n_tokens - 0.5], color="white", linestyle=":", linewidth=2)
    name_axis(left, "Ring: largest weight of each row", "key token", "query token")
    bars(right, own, "{:.0%}")
    right.set_ylim(0, 1.1)
    name_axis(right, "Ring on the diagonal", "", "fraction of tokens")
    headline(figure, "A token need not attend most to itself, unless queries equal keys")
    return figure
