"""Without positions, attention does not know the order of its tokens."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.learning import learning_curve, mean_over_seeds
from clearhead.lab.plots import (
    MISTAKE,
    SMALL,
    TEXT,
    TRUTH,
    bars,
    canvas,
    draw_measured,
    headline,
    heat_maps,
    key_below,
    name_axis,
    rounding_band,
)
from clearhead.lab.vision import change, model_for
from clearhead.models.config import PosEmbedName, PredictorConfig
from clearhead.models.predictor import SequencePredictor
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import LearnedPosEmbed2d, NoPosEmbed, PosEmbed, SinusoidalPosEmbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_equivariance(
    *, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 7, positions: PosEmbed | None = None
) -> Result:
    torch.manual_seed(seed)
    attention = MultiHeadAttention(width, num_heads).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    x, cycle = torch.randn(2, n_tokens, width, dtype=torch.float64), torch.randperm(n_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)  # one round through all places: no token stays

    def change(where: PosEmbed) -> float:
        """How far the answer to the shuffled tokens is from the shuffled answer."""
        with torch.no_grad():
            return (attention(where(x[:, order])) - attention(where(x))[:, order]).abs().max().item()

    moved = int((order != torch.arange(n_tokens)).sum())
    return Result(
        (
            at_least("tokens that changed places", moved, n_tokens),
            at_most("difference without positions", change(positions or NoPosEmbed()), 1e-12),
            at_least("difference with positions", change(SinusoidalPosEmbed()), 1e-3),
        )
    )


EQUIVARIANCE = Claim(
    slug="equivariance",
    kind="demonstration",
    rows=("R2.6",),
    lesson="Positions and order",
    statement="Shuffling the tokens shuffles the answers of multi-head attention, and changes nothing else.",
    mistake="Attention knows which token came first.",
    formula="attention(P X) = P attention(X) for every permutation P",
    run=run_equivariance,
    try_next="clearhead lab equivariance --n-tokens 50",
    multiples={"width": 2},
    least={"n_tokens": 2},
)


# When positions are needed: a task of order, and one of content. Trains three small models.


LENGTH, DIGITS, POINT, N_TEST = 16, 10, 8, 2_000


def reversal(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Digits (n,L), to be said backwards."""
    digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
    return digits, digits.flip(1)


def odd_one_out(random: torch.Generator, n: int, width: int = POINT) -> tuple[Tensor, Tensor]:
    """Sets of points (n,L,width) around one centre, but for one point; the target (n,) is its index."""
    centre, other = 2 * torch.randn(2, n, 1, width, generator=random)
    index = torch.randint(0, LENGTH, (n,), generator=random)
    points = centre.expand(n, LENGTH, width).clone()
    points[torch.arange(n), index] = other[:, 0]
    return points + 0.3 * torch.randn(points.shape, generator=random), index


def bag_limit(random: torch.Generator, n: int) -> float:
    """The best share of right digits for who knows its own digit and the others' counts, but no place.

    Its answer is never its own place's, so the best guess is the commonest of the 15 other digits.
    """
    digits, _ = reversal(random, n)
    counts = nn.functional.one_hot(digits, DIGITS).sum(1)  # (n,DIGITS)
    others = counts[:, None] - nn.functional.one_hot(digits, DIGITS)  # (n,L,DIGITS)
    return (others.amax(-1).double() / (LENGTH - 1)).mean().item()


class Scores(nn.Module):
    """One score for each element of a set, from a predictor with one output each. (n,L,width) -> (n,L)"""

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
    return SequencePredictor(config)


def reversed_digits(width: int, positions: PosEmbedName, steps: int, seed: int) -> float:
    """Accuracy of a model that learns to reverse digits, with these positions."""
    torch.manual_seed(seed)
    model = predictor(width, positions, DIGITS, DIGITS)
    (accuracy,) = learning_curve(model, reversal, budgets=[steps], seed=seed, batch_size=128, num_test=N_TEST)
    return accuracy


def odd_ones_found(width: int, steps: int, seed: int) -> float:
    """Accuracy of a model without positions that learns to point at the odd one out."""
    torch.manual_seed(seed)
    scores = Scores(predictor(width, "none", POINT, 1))
    (accuracy,) = learning_curve(scores, odd_one_out, budgets=[steps], seed=seed, batch_size=128, num_test=2_000)
    return accuracy


def accuracies(width: int, steps: int, positions: PosEmbedName, seed: int) -> list[float]:
    """With positions, without them, that of the best guess without them, and of the task that needs none."""
    return [
        reversed_digits(width, positions, steps, seed),
        reversed_digits(width, "none", steps, seed),
        bag_limit(torch.Generator().manual_seed(seed), N_TEST),
        odd_ones_found(width, steps, seed),
    ]


def run_positions(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, steps: int = 300, placed: bool = True
) -> Result:
    """placed=False asks of the model without positions what holds with them."""
    positions: PosEmbedName = "sinusoidal" if placed else "none"
    with_places, without, limit, found = mean_over_seeds(
        lambda each: accuracies(width, steps, positions, each), seed, num_seeds
    )
    return Result(
        (
            at_least("reversal with positions: accuracy", with_places, 0.9),
            at_most("reversal without positions: accuracy above that of the best guess", without - limit, 0.02),
            at_least("reversal without positions: accuracy", without, 0.15),
            at_least("odd one out of 16, without positions: accuracy", found, 0.9),
        )
    )


POSITIONS = Claim(
    slug="positions",
    rows=("R4.8",),
    lesson="Positions and order",
    statement="Positions are needed where order matters: reversal cannot be learned without them, odd-one-out can.",
    mistake="A transformer always needs positions; or: it learns the order by itself.",
    formula="without positions the output for a token depends on its own content and the bag of the others only",
    conditions="One encoder block without a causal mask, trained for 300 steps. Float32, the mean of three seeds.",
    run=run_positions,
    try_next="clearhead lab positions --steps 1000",
    multiples={"width": 2},
    trains=True,
    seconds=20,
)


# Order: attention alone does not know it, and what positions change.


FLOOR = 1e-17


def draw_equivariance(*, seed: int = 0, width: int = 16, num_heads: int = 4, n_tokens: int = 7) -> "Figure":
    """How far the output for permuted tokens is from the permuted output, token by token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = MultiHeadAttention(width, num_heads).double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=width**-0.5)
        x, cycle = torch.randn(2, n_tokens, width, dtype=torch.float64), torch.randperm(n_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    cases: list[tuple[str, PosEmbed, str, str]] = [
        ("with sinusoidal positions", SinusoidalPosEmbed(), VERMILION, "o"),
        ("without positions", NoPosEmbed(), BLUE, "s"),
    ]
    figure, (axes,) = canvas()
    for text, positions, colour, marker in cases:
        with torch.no_grad():
            difference = attention(positions(x[:, order])) - attention(positions(x))[:, order]
        heights = difference.abs().amax(dim=(0, 2)).clamp_min(FLOOR)
        axes.plot(range(1, n_tokens + 1), heights, marker, color=colour, markersize=14, label=text)
    from_rounding(axes)
    rounding_band(axes, FLOOR, x=0.3, above=True)
    axes.set_xlim(0.3, n_tokens + 0.7)
    axes.set_xticks(range(1, n_tokens + 1, -(-n_tokens // 10)))
    key_below(figure, axes)
    name_axis(axes, "", "output token", "largest difference\n$|f(P\\,x) - P\\,f(x)|$")
    headline(figure, "Without positions, permuting the tokens only permutes the outputs")
    return figure


def from_rounding(axes: "Axes") -> None:
    """A logarithmic axis from rounding errors to differences that everybody sees."""
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 1e3)
    axes.set_yticks([1e0, 1e-4, 1e-8, 1e-12, 1e-16])


@torch.no_grad()
def draw_learned_positions(*, seed: int = 0, width: int = 16, side: int = 4) -> "Figure":
    """Left: patches + table = what the encoder gets. Right: how far the logits move when the patches are permuted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_for(width, "mean", side)
        images = torch.randn(1, 3, 4 * side, 4 * side, dtype=torch.float64)
        waves = model_for(width, "mean", side, "sinusoidal")
    table = model.pos_embed
    assert isinstance(table, LearnedPosEmbed2d)
    tokens, order = model.patch_embed(images), torch.arange(side * side).roll(1)
    table.table.mul_(50)
    maps = [tokens[0], table.table.clone(), table(tokens, (side, side))[0]]
    moved = {"learned": change(model, tokens, order), "sinusoidal": change(waves, tokens, order)}
    table.table.zero_()
    moved["none"] = change(model, tokens, order)

    figure, (*all_maps, right) = canvas("ABCD", widths=(1, 1, 1, 2.2))
    heat_maps(figure, all_maps, maps, "value")
    for axes, title in zip(all_maps, ("patches", "+ table E", "= input"), strict=True):
        axes.set_aspect("auto")
        axes.set_xticks([0, width - 1], labels=["1", str(width)])
        axes.set_yticks([])
        name_axis(axes, title, "feature")
    all_maps[0].set_yticks([0, side * side - 1], labels=["1", str(side * side)])
    all_maps[0].set_ylabel("patch", fontsize=TEXT)
    colours = (BLUE, GREEN, BLACK)
    drawn = right.bar(list(moved), [max(value, 2 * FLOOR) for value in moved.values()], color=colours, width=0.6)
    texts = [f"{value:.2g}" if value > 1e-12 else "rounding\nerror" for value in moved.values()]
    right.bar_label(drawn, labels=texts, fontsize=SMALL, padding=3)
    from_rounding(right)
    right.grid(axis="x", visible=False)
    name_axis(right, "Patches permuted", "positions", "largest change of the logits")
    headline(figure, "A learned position is a vector as wide as a patch embedding, added to it")
    return figure


# Training: figures of what a training measured, and what training does that evaluation does not.


def draw_positions(result: Result) -> "Figure":
    """Accuracy with and without positions, beside the best guess of a model that knows no order."""
    found = {check.name: check.value for check in result.checks}
    given = {
        part: value
        for part in ("reversal with positions", "above", "reversal without", "odd one out")
        for name, value in found.items()
        if part in name and ("above" in name) == (part == "above")
    }
    sentence = "Reversal needs positions; finding the odd one out does not"
    if len(given) < 4:
        return draw_measured(result, sentence)
    with_positions, above, without, odd = given.values()
    figure, (axes,) = canvas()
    heights = {
        "reversal,\nwith positions": (with_positions, TRUTH),
        "reversal,\nwithout": (without, MISTAKE),
        "best guess\nwithout order": (without - above, GRAY),
        "odd one out,\nwithout": (odd, TRUTH),
    }
    bars(axes, heights, "{:.0%}")
    axes.set_ylim(0, 1.1)
    name_axis(axes, "", "", "accuracy")
    headline(figure, sentence)
    return figure
