"""Positions: without them, attention is permutation-equivariant and cannot use the order of its tokens.

Dims: n examples, L length, E width, P patches.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.learning import learning_curve, mean_over_seeds
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    SMALL_SIZE,
    TEXT_SIZE,
    bars,
    draw_measured,
    heat_maps,
    label_axes,
    legend_below,
    rounding_band,
    set_headline,
    subplots,
)
from clearhead.lab.vision import small_vit
from clearhead.models.config import PosEmbedName, PredictorConfig
from clearhead.models.predictor import SequencePredictor
from clearhead.models.vit import VisionTransformer
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import LearnedPosEmbed2d, NoPosEmbed, PosEmbed, SinusoidalPosEmbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_permutation_equivariance(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 7, pos_embed: PosEmbed | None = None
) -> Result:
    torch.manual_seed(seed)
    attention = MultiHeadAttention(width, num_heads).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    x, cycle = torch.randn(2, num_tokens, width, dtype=torch.float64), torch.randperm(num_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)  # a single cycle: no token stays in place

    def difference(embed: PosEmbed) -> float:
        """max |f(P x) - P f(x)|"""
        with torch.no_grad():
            return (attention(embed(x[:, order])) - attention(embed(x))[:, order]).abs().max().item()

    num_moved = int((order != torch.arange(num_tokens)).sum())
    return Result(
        (
            at_least("number of tokens that the permutation moves", num_moved, num_tokens),
            at_most("without positions: largest |f(P X) - P f(X)|", difference(pos_embed or NoPosEmbed()), 1e-12),
            at_least("with sinusoidal positions: largest |f(P X) - P f(X)|", difference(SinusoidalPosEmbed()), 1e-3),
        )
    )


FLOOR = 1e-17
"""lower limit of the logarithmic axes"""


def draw_permutation_equivariance(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, num_tokens: int = 7
) -> "Figure":
    """|f(P x) - P f(x)| for each token, with and without positions."""
    torch.manual_seed(seed)
    attention = MultiHeadAttention(width, num_heads).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    x, cycle = torch.randn(2, num_tokens, width, dtype=torch.float64), torch.randperm(num_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    cases: list[tuple[str, PosEmbed, str, str]] = [
        ("with sinusoidal positions", SinusoidalPosEmbed(), VERMILION, "o"),
        ("without positions", NoPosEmbed(), BLUE, "s"),
    ]
    figure, (axes,) = subplots()
    for text, pos_embed, color, marker in cases:
        with torch.no_grad():
            difference = attention(pos_embed(x[:, order])) - attention(pos_embed(x))[:, order]
        heights = difference.abs().amax(dim=(0, 2)).clamp_min(FLOOR)
        axes.plot(range(1, num_tokens + 1), heights, marker, color=color, markersize=14, label=text)
    log_axis_from_rounding(axes)
    rounding_band(axes, FLOOR, x=0.3, above=True)
    axes.set_xlim(0.3, num_tokens + 0.7)
    axes.set_xticks(range(1, num_tokens + 1, -(-num_tokens // 10)))
    legend_below(figure, axes)
    label_axes(axes, "", "output token", "largest difference\n$|f(P\\,x) - P\\,f(x)|$")
    set_headline(figure, "Without positions, permuting the tokens only permutes the outputs")
    return figure


def log_axis_from_rounding(axes: "Axes") -> None:
    """A logarithmic axis from rounding errors to large differences."""
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 1e3)
    axes.set_yticks([1e0, 1e-4, 1e-8, 1e-12, 1e-16])


PERMUTATION_EQUIVARIANCE = Claim(
    slug="permutation-equivariance",
    kind="demonstration",
    lesson="Positions and order",
    statement="Multi-head attention without positional encodings is permutation-equivariant: permuting the tokens only "
    "permutes the outputs.",
    misconception="The output of attention depends on the order of its tokens even without positional encodings.",
    formula="attention(P X) = P attention(X) for every permutation P",
    run=run_permutation_equivariance,
    figure=draw_permutation_equivariance,
    try_next="clearhead lab permutation-equivariance --num-tokens 50",
    multiple_of={"width": 2},
    minimum={"num_tokens": 2},
)


Rule = Callable[[Tensor, Tensor], Tensor]
"""(tokens (P,E), table (P,E)) -> input of the encoder"""


def add(tokens: Tensor, table: Tensor) -> Tensor:
    return tokens + table


def index_feature(tokens: Tensor, table: Tensor) -> Tensor:
    """The misconception: the index of the patch is one more feature."""
    indices = torch.arange(len(tokens), dtype=tokens.dtype)
    return torch.cat([tokens, indices[:, None]], dim=1)


def run_learned_positions(*, seed: int = 0, width: int = 16, grid_size: int = 4, rule: Rule = add) -> Result:
    torch.manual_seed(seed)
    model = small_vit(width, "mean", grid_size)
    table = model.pos_embed
    assert isinstance(table, LearnedPosEmbed2d)
    images = torch.randn(1, 3, 4 * grid_size, 4 * grid_size, dtype=torch.float64)
    order = torch.arange(grid_size * grid_size).roll(1)
    with torch.no_grad():
        tokens = model.patch_embed(images)
        embedded, expected = table(tokens, (grid_size, grid_size))[0], rule(tokens[0], table.table)
        error = (embedded - expected).abs().max().item() if embedded.shape == expected.shape else float("inf")
        table.table.mul_(50)  # as large as the tokens, as after training
        learned_change = logit_change(model, tokens, order)
        table.table.zero_()
        zero_change = logit_change(model, tokens, order)
        sinusoidal_change = logit_change(small_vit(width, "mean", grid_size, "sinusoidal"), tokens, order)
    return Result(
        (
            at_most("difference between the encoder's input and tokens + table", error, 0.0),
            equals("width of one position embedding", table.table.shape[1], width, 0),
            at_least("change of the logits when the patches are permuted: learned", learned_change, 1e-3),
            at_most("change of the logits when the patches are permuted: table set to 0", zero_change, 1e-12),
            at_least("change of the logits when the patches are permuted: sinusoidal", sinusoidal_change, 1e-3),
        )
    )


def logit_change(model: VisionTransformer, tokens: Tensor, order: Tensor) -> float:
    logits = model(inputs_embeds=tokens), model(inputs_embeds=tokens[:, order])
    return (logits[0] - logits[1]).abs().max().item()


@torch.no_grad()
def draw_learned_positions(*, seed: int = 0, width: int = 16, grid_size: int = 4) -> "Figure":
    """Left: patches + table = input of the encoder. Right: change of the logits when the patches are permuted."""
    torch.manual_seed(seed)
    model = small_vit(width, "mean", grid_size)
    images = torch.randn(1, 3, 4 * grid_size, 4 * grid_size, dtype=torch.float64)
    sinusoidal = small_vit(width, "mean", grid_size, "sinusoidal")
    table = model.pos_embed
    assert isinstance(table, LearnedPosEmbed2d)
    tokens, order = model.patch_embed(images), torch.arange(grid_size * grid_size).roll(1)
    table.table.mul_(50)
    maps = [tokens[0], table.table.clone(), table(tokens, (grid_size, grid_size))[0]]
    changes = {"learned": logit_change(model, tokens, order), "sinusoidal": logit_change(sinusoidal, tokens, order)}
    table.table.zero_()
    changes["none"] = logit_change(model, tokens, order)

    figure, (*map_axes, right) = subplots("ABCD", widths=(1, 1, 1, 2.2))
    heat_maps(figure, map_axes, maps, "value")
    for axes, title in zip(map_axes, ("patches", "+ table E", "= input"), strict=True):
        axes.set_aspect("auto")
        axes.set_xticks([0, width - 1], labels=["1", str(width)])
        axes.set_yticks([])
        label_axes(axes, title, "feature")
    map_axes[0].set_yticks([0, grid_size * grid_size - 1], labels=["1", str(grid_size * grid_size)])
    map_axes[0].set_ylabel("patch", fontsize=TEXT_SIZE)
    colors = (BLUE, GREEN, BLACK)
    drawn = right.bar(list(changes), [max(value, 2 * FLOOR) for value in changes.values()], color=colors, width=0.6)
    texts = [f"{value:.2g}" if value > 1e-12 else "rounding\nerror" for value in changes.values()]
    right.bar_label(drawn, labels=texts, fontsize=SMALL_SIZE, padding=3)
    log_axis_from_rounding(right)
    right.grid(axis="x", visible=False)
    label_axes(right, "Permuted patches", "position embedding", "largest change of the logits")
    set_headline(figure, "A learned position is a vector that is added to the patch embedding")
    return figure


LEARNED_POSITIONS = Claim(
    slug="learned-positions",
    kind="demonstration",
    lesson="Positions and order",
    statement="A learned position embedding is a vector of the model width that is added to the token. Without "
    "position embeddings, the logits of a ViT with mean pooling do not depend on the order of the patches.",
    misconception="The position embedding of a patch is its index.",
    formula="z_i = W patch_i + E_i,  E (P, width) learned",
    run=run_learned_positions,
    figure=draw_learned_positions,
    try_next="clearhead lab class-token",
    multiple_of={"width": 4},
    minimum={"grid_size": 2},
)


LENGTH, DIGITS, POINT_DIM, NUM_TEST = 16, 10, 8, 2_000


def reversal(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Digits (n,L) and the reversed digits (n,L)."""
    digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
    return digits, digits.flip(1)


def odd_one_out(random: torch.Generator, n: int, width: int = POINT_DIM) -> tuple[Tensor, Tensor]:
    """Sets (n,L,width) of points around one center, except for one point; the target (n,) is its index."""
    center, other = 2 * torch.randn(2, n, 1, width, generator=random)
    index = torch.randint(0, LENGTH, (n,), generator=random)
    points = center.expand(n, LENGTH, width).clone()
    points[torch.arange(n), index] = other[:, 0]
    return points + 0.3 * torch.randn(points.shape, generator=random), index


def bag_of_digits_accuracy(random: torch.Generator, n: int) -> float:
    """The best reversal accuracy given the digit of each token and the multiset of the others.

    The target is always another token's digit, so the best guess is the most common of the other digits.
    """
    digits, _ = reversal(random, n)
    counts = nn.functional.one_hot(digits, DIGITS).sum(1)  # (n,DIGITS)
    others = counts[:, None] - nn.functional.one_hot(digits, DIGITS)  # (n,L,DIGITS)
    return (others.amax(-1).double() / (LENGTH - 1)).mean().item()


class SetScorer(nn.Module):
    """One score per element of a set. (n,L,width) -> (n,L)"""

    def __init__(self, predictor: SequencePredictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, points: Tensor) -> Tensor:
        return self.predictor(points).squeeze(-1)


def predictor(width: int, pos_embed: PosEmbedName, in_features: int, out_features: int) -> SequencePredictor:
    config = PredictorConfig(
        width=width,
        depth=1,
        num_heads=1,
        mlp_dim=2 * width,
        norm="post",
        in_features=in_features,
        out_features=out_features,
        head_mlp_dim=width,
        pos_embed=pos_embed,
    )
    return SequencePredictor.from_config(config)


def reversal_accuracy(width: int, pos_embed: PosEmbedName, steps: int, seed: int) -> float:
    """Accuracy of a model trained to reverse digits."""
    torch.manual_seed(seed)
    model = predictor(width, pos_embed, DIGITS, DIGITS)
    (accuracy,) = learning_curve(model, reversal, budgets=[steps], seed=seed, batch_size=128, num_test=NUM_TEST)
    return accuracy


def odd_one_out_accuracy(width: int, steps: int, seed: int) -> float:
    """Accuracy of a model without positions trained to point at the odd one out."""
    torch.manual_seed(seed)
    scores = SetScorer(predictor(width, "none", POINT_DIM, 1))
    (accuracy,) = learning_curve(scores, odd_one_out, budgets=[steps], seed=seed, batch_size=128, num_test=2_000)
    return accuracy


def accuracies(width: int, steps: int, pos_embed: PosEmbedName, seed: int) -> list[float]:
    """Reversal with positions, without them, the best guess without them, and odd-one-out without positions."""
    return [
        reversal_accuracy(width, pos_embed, steps, seed),
        reversal_accuracy(width, "none", steps, seed),
        bag_of_digits_accuracy(torch.Generator().manual_seed(seed), NUM_TEST),
        odd_one_out_accuracy(width, steps, seed),
    ]


def run_positions(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, steps: int = 300, with_positions: bool = True
) -> Result:
    """with_positions=False tests the model without positions in place of the one with positions."""
    pos_embed: PosEmbedName = "sinusoidal" if with_positions else "none"
    with_accuracy, without_accuracy, best_guess, odd_accuracy = mean_over_seeds(
        lambda run_seed: accuracies(width, steps, pos_embed, run_seed), seed, num_seeds
    )
    return Result(
        (
            at_least("reversal with positions: accuracy", with_accuracy, 0.9),
            at_most(
                "reversal without positions: accuracy minus that of the best guess", without_accuracy - best_guess, 0.02
            ),
            at_least("reversal without positions: accuracy", without_accuracy, 0.15),
            at_least("odd one out of 16 without positions: accuracy", odd_accuracy, 0.9),
        )
    )


def draw_positions(result: Result) -> "Figure":
    """Accuracy with and without positions, and that of the best guess without order."""
    values = {check.name: check.value for check in result.checks}
    accuracies = {
        part: value
        for part in ("reversal with positions", "minus", "reversal without", "odd one out")
        for name, value in values.items()
        if part in name and ("minus" in name) == (part == "minus")
    }
    sentence = "Reversal needs positions; finding the odd one out does not"
    if len(accuracies) < 4:
        return draw_measured(result, sentence)
    with_positions, excess, without, odd = accuracies.values()
    figure, (axes,) = subplots()
    heights = {
        "reversal,\nwith positions": (with_positions, CORRECT),
        "reversal,\nwithout": (without, MISCONCEPTION),
        "best guess\nwithout order": (without - excess, GRAY),
        "odd one out,\nwithout": (odd, CORRECT),
    }
    bars(axes, heights, "{:.0%}")
    axes.set_ylim(0, 1.1)
    label_axes(axes, "", "", "accuracy")
    set_headline(figure, sentence)
    return figure


POSITIONS = Claim(
    slug="positions",
    lesson="Positions and order",
    statement="Without positional encodings, a transformer encoder cannot learn to reverse a sequence, but it can "
    "learn to find the odd one out in a set.",
    misconception="A transformer always needs positional encodings, or it learns the order of the tokens without them.",
    formula="without positions: output_i = f(x_i, multiset of all x_j)",
    conditions="One encoder block without a causal mask, trained for 300 steps of 128 sequences in float32; mean of "
    "three seeds.",
    run=run_positions,
    figure=draw_positions,
    try_next="clearhead lab positions --steps 1000",
    multiple_of={"width": 2},
    trains=True,
    seconds=20,
)
