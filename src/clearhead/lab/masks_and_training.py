"""Additive masks, training and evaluation mode, and data augmentation."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from clearhead.data.dataset import Examples
from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Curve, Result, above, at_least, at_most
from clearhead.lab.learning import mean_over_seeds, single_thread, train_recipe
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    bars,
    draw_measured,
    label,
    label_axes,
    mask_map,
    scatter_against,
    set_headline,
    subplots,
)
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference
from clearhead.training.context import TrainContext

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_additive_mask(*, seed: int = 0, width: int = 8, num_tokens: int = 6, mask_value: float = -10_000.0) -> Result:
    """Compares a boolean mask with `mask_value` added to the scores before scaling. With -10, attention leaks."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_tokens, width, generator=random)
    mask = masks.causal(num_tokens)
    beta = width**-0.5

    def additive_weights(value: float) -> Tensor:
        return attend_reference(q, k, v, logit_bias=beta * masks.to_additive(mask, value))[1]

    logits = beta * (q @ k.T + masks.to_additive(mask, mask_value))
    boolean_weights = attend_reference(q, k, v, mask)[1]
    return Result(
        (
            at_most("largest weight of a masked key", additive_weights(mask_value)[~mask].max().item(), 0.0),
            at_most(
                "difference from a boolean mask",
                (additive_weights(mask_value) - boolean_weights).abs().max().item(),
                1e-6,
            ),
            above(
                "log of the largest weight of a masked key (boolean mask: -inf)",
                logits.log_softmax(-1)[~mask].max().item(),
                -math.inf,
            ),
            at_least("largest weight of a masked key with -10", additive_weights(-10.0)[~mask].max().item(), 1e-8),
        )
    )


UNDERFLOW = 1e-46
"""height at which 0 is drawn, below the smallest positive float32"""


def draw_additive_mask(
    *, seed: int = 0, width: int = 8, num_tokens: int = 5, mask_value: float = -10_000.0
) -> "Figure":
    """Left: the additive causal mask. Right: the largest weight of a masked key against the mask value."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_tokens, width, generator=random)
    causal = masks.causal(num_tokens).dense()
    beta = width**-0.5

    def leakage(value: float) -> float:
        """The largest weight of a masked key if this value is added before scaling."""
        weights = attend_reference(q, k, v, logit_bias=beta * masks.to_additive(causal, value))[1]
        return weights[~causal].max().item() if num_tokens > 1 else 0.0

    figure, (left, right) = subplots("AB", widths=(1.25, 1))
    texts = [[f"{value:g}" for value in row] for row in masks.to_additive(causal, mask_value).tolist()]
    mask_map(left, causal, texts)
    label_axes(left, "Additive causal mask", "key token", "query token")
    mask_values = [-(10 ** (power / 8)) for power in range(49)]
    leakages = [leakage(value) for value in mask_values]
    points = [(-value, weight) for value, weight in zip(mask_values, leakages, strict=True) if weight > UNDERFLOW]
    right.plot(*zip(*points, strict=True), color=CORRECT, linewidth=3)
    highlighted = {-10.0: VERMILION, mask_value: GREEN}
    for value, color in highlighted.items():
        if value < 0:
            right.plot(-value, max(leakage(value), UNDERFLOW), "o", color=color, markersize=12)
            text = f"{value:g}: {leakage(value):.2g}"
            side: Literal["left", "right"] = "left" if value > -300 else "right"
            label(
                right,
                -value,
                max(leakage(value), UNDERFLOW),
                text,
                color,
                offset=(10 if side == "left" else -10, 8),
                ha=side,
            )
    right.set(xscale="log", yscale="log", ylim=(UNDERFLOW / 10, 30))
    right.set_yticks(
        [1e0, 1e-10, 1e-20, 1e-30, 1e-40, UNDERFLOW], labels=["1", *(f"$10^{{-{n}}}$" for n in (10, 20, 30, 40)), "0"]
    )
    label_axes(right, "Leakage to masked keys", "magnitude of the mask value", "largest attention weight")
    set_headline(figure, "An added negative number masks a key only if its exponential underflows")
    return figure


ADDITIVE_MASK = Claim(
    slug="additive-mask",
    kind="demonstration",
    lesson="Masks, training and evaluation",
    statement="Adding -10000 to a score before scaling masks a key only because e^(-10000/sqrt(d)) underflows to 0; "
    "with -10 attention leaks to masked keys.",
    misconception="Any large negative number acts as a mask.",
    formula="e^(beta (z - 10000)) = 0 in floating point, e^(beta (z - 10)) is not",
    run=run_additive_mask,
    figure=draw_additive_mask,
    try_next="clearhead lab additive-mask --mask-value -10",
    minimum={"num_tokens": 2},
)


def run_fully_masked_row(
    *, seed: int = 0, width: int = 8, num_tokens: int = 6, mask_value: float = -1e14, boolean_mask: bool = False
) -> Result:
    """boolean_mask=True tests a boolean mask in place of the additive one."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_tokens, width, generator=random)
    all_masked = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    boolean_weights = attend_reference(q, k, v, all_masked)[1]
    weights = (
        boolean_weights
        if boolean_mask
        else attend_reference(q, k, v, logit_bias=masks.to_additive(all_masked, mask_value))[1]
    )
    return Result(
        (
            at_most("difference of the weights from 1/n", (weights - 1 / num_tokens).abs().max().item(), 1e-6),
            at_most("largest weight with a boolean mask", boolean_weights.abs().max().item(), 0.0),
        )
    )


def draw_fully_masked_row(*, seed: int = 0, width: int = 8, num_tokens: int = 6, mask_value: float = -1e14) -> "Figure":
    """The weights of a fully masked query: without a mask, with an additive mask, with a boolean mask."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_tokens, width, generator=random)
    all_masked = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    cases = {
        "no mask": (attend_reference(q, k, v)[1], GREEN),
        f"{mask_value:g} added": (
            attend_reference(q, k, v, logit_bias=masks.to_additive(all_masked, mask_value))[1],
            VERMILION,
        ),
        "Boolean mask": (attend_reference(q, k, v, all_masked)[1], BLUE),
    }
    figure, all_axes = subplots("ABC", same_y=True)
    for axes, (title, (weights, color)) in zip(all_axes, cases.items(), strict=True):
        axes.bar(range(1, num_tokens + 1), weights[0].tolist(), color=color)
        axes.axhline(1 / num_tokens, color=BLACK, linestyle="--")
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(1, num_tokens + 1, -(-num_tokens // 8)))
        label_axes(axes, title, "key")
        label(axes, 0.98, 0.98, f"sum {weights[0].sum():.2g}", color, xycoords="axes fraction", ha="right", va="top")
    top = max(float(weights[0].max()) for weights, _ in cases.values())
    all_axes[0].set_ylim(0, 1.2 * top)
    label_axes(all_axes[0], "no mask", "key", "attention weight")
    all_axes[0].locator_params(axis="y", nbins=5)
    label(all_axes[2], 0.03, 1 / num_tokens, "1/n", xycoords=("axes fraction", "data"), offset=(0, 4))
    set_headline(figure, "If every key is masked, adding a large negative number gives uniform weights")
    return figure


FULLY_MASKED_ROW = Claim(
    slug="fully-masked-row",
    kind="demonstration",
    lesson="Masks, training and evaluation",
    statement="If every key of a query is masked by adding -1e14, its weights become uniform over the masked keys; "
    "with a boolean mask they are zero.",
    misconception="With any kind of mask, the attention weights of a fully masked query are zero.",
    formula="z - 1e14 = -1e14 in float32 for every moderate z;  softargmax of equal scores is 1/n",
    run=run_fully_masked_row,
    figure=draw_fully_masked_row,
    try_next="clearhead lab additive-mask",
)


def run_train_and_eval_mode(*, seed: int = 0, width: int = 16, dropout: float = 0.2, eval_mode: bool = True) -> Result:
    """eval_mode=False tests training mode in place of evaluation mode."""
    torch.manual_seed(seed)
    model = SequencePredictor.from_config(
        PredictorConfig(width=width, depth=2, num_heads=2, in_features=10, out_features=10, dropout=dropout)
    )
    ids = torch.randint(0, 10, (4, 8))

    def change(training: bool) -> float:
        model.train(training)
        with torch.no_grad():
            return (model(ids) - model(ids)).abs().max().item()

    def weight_changes(training: bool) -> float:
        return weight_change(model, ids, training)

    return Result(
        (
            at_most("evaluation mode: difference between two passes", change(not eval_mode), 0.0),
            at_least("training mode: difference between two passes", change(True), 1e-3),
            at_most("evaluation mode: change of the weights", weight_changes(not eval_mode), 0.0),
            at_least("training mode: change of the weights in one step", weight_changes(True), 1e-6),
        )
    )


def weight_change(model: nn.Module, ids: Tensor, training: bool) -> float:
    """The largest change of a weight: after one step of SGD in training mode, without a step in evaluation mode."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.train(training)
    with torch.set_grad_enabled(training):
        output = model(ids)
    if output.requires_grad:
        output.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return max((new - old).abs().max().item() for new, old in zip(model.parameters(), before, strict=True))


def draw_train_and_eval_mode(*, seed: int = 0, width: int = 16, dropout: float = 0.2) -> "Figure":
    """Left and middle: two passes with the same input in each mode. Right: the change of the weights in one step."""
    torch.manual_seed(seed)
    model = SequencePredictor.from_config(
        PredictorConfig(width=width, depth=2, num_heads=2, in_features=10, out_features=10, dropout=dropout)
    )
    ids = torch.randint(0, 10, (4, 8))
    passes, weight_changes = {}, {}
    for text, training, color in (("evaluation", False, CORRECT), ("training", True, MISCONCEPTION)):
        model.train(training)
        with torch.no_grad():
            passes[text] = (model(ids)[0], model(ids)[0], color)
    for text, training, color in (("evaluation", False, CORRECT), ("training", True, MISCONCEPTION)):
        weight_changes[text] = (weight_change(model, ids, training), color)
    figure, (left, middle, right) = subplots("ABC")
    for axes, (text, (first, second, color)) in zip((left, middle), passes.items(), strict=True):
        scatter_against(axes, second, {text: (first, color, "o")})
        label_axes(axes, text, "logits, first pass", "logits, second pass")
    bars(right, weight_changes)
    right.set_box_aspect(1)
    label_axes(right, "weights, one step", "", "largest change")
    set_headline(figure, "In training mode the same input gives different outputs, and weights change")
    return figure


TRAIN_AND_EVAL_MODE = Claim(
    slug="train-and-eval-mode",
    lesson="Masks, training and evaluation",
    statement="In evaluation mode, a model is deterministic and its weights do not change. In training mode with "
    "dropout, two passes with the same input differ, and each optimizer step changes the weights.",
    misconception="A trained model gives the same output in either mode.",
    formula="dropout(x) = x m / (1-p) with a new random m in training mode;  x in evaluation mode",
    run=run_train_and_eval_mode,
    figure=draw_train_and_eval_mode,
    try_next="clearhead lab train-and-eval-mode --dropout 0.01",
    minimum={"dropout": 0},
    maximum={"dropout": 0.9},
    multiple_of={"width": 2},
    kind="demonstration",
)


NUM_TEST = 2_000


IMAGES = ("training images", "test images", "shifted test images", "rotated test images")


def train_small_vit(crop: int, num_images: int, steps: int, seed: int) -> TrainContext:
    """Trains the recipe `mnist` with a smaller model, without a convolutional stem, on few images."""
    changes = {
        "seed": seed,
        "model.patch_embed": "patch",
        "model.patch_size": 7,
        "model.width": 32,
        "model.mlp_dim": 64,
        "model.depth": 1,
        "data.limit": num_images,
        "data.augmentation.crop": crop,
        "training.batch_size": min(100, num_images),
        "optimizer.lr": 2e-2,
        "optimizer.warmup": 10,
    }
    return train_recipe("mnist", changes, steps)


@torch.no_grad()
def accuracy_on(
    ctx: TrainContext, examples: Examples, transform: Callable[[Tensor], Tensor] = lambda images: images
) -> float:
    """Accuracy on the first NUM_TEST examples, after a transform of the images."""
    images, labels = examples.get_batch(torch.arange(min(NUM_TEST, len(examples))))
    assert ctx.data.normalize is not None
    predictions = ctx.model(ctx.data.normalize(transform(images))).argmax(-1)
    return (predictions == labels).double().mean().item()


def shifted(images: Tensor) -> Tensor:
    return images.roll((3, -3), dims=(2, 3))


def rotated(images: Tensor) -> Tensor:
    return images.rot90(dims=(2, 3))


def accuracies(crop: int, num_images: int, steps: int, seed: int) -> list[float]:
    """Accuracy of one model on training, test, shifted test and rotated test images."""
    ctx = train_small_vit(crop, num_images, steps, seed)
    test = ctx.data.test
    return [
        accuracy_on(ctx, ctx.data.train),
        accuracy_on(ctx, test),
        accuracy_on(ctx, test, shifted),
        accuracy_on(ctx, test, rotated),
    ]


def run_augmentation(
    *, seed: int = 0, num_seeds: int = 3, num_images: int = 500, steps: int = 400, crop: int = 3
) -> Result:
    """crop=0 trains both models without crops."""

    def mean_accuracies(crop: int) -> list[float]:
        return mean_over_seeds(lambda run_seed: accuracies(crop, num_images, steps, run_seed), seed, num_seeds)

    with single_thread():
        plain, cropped = mean_accuracies(0), mean_accuracies(crop)
    gap = plain[0] - plain[1]
    gap_ratio = (cropped[0] - cropped[1]) / gap if gap > 0 else math.nan
    checks = (
        at_least("without crops: gap between training and test accuracy", gap, 0.1),
        at_most("gap with crops / gap without crops", gap_ratio, 0.6),
        at_least("test accuracy: gain with crops", cropped[1] - plain[1], 0.05),
        at_least("accuracy on shifted test images: gain with crops", cropped[2] - plain[2], 0.2),
        at_most("accuracy on rotated test images (90 degrees) with crops", cropped[3], 0.4),
    )
    images = tuple(float(i) for i in range(len(IMAGES)))
    return Result(
        checks,
        (
            Curve(", ".join(IMAGES), "without crops", images, tuple(plain)),
            Curve(", ".join(IMAGES), "with crops", images, tuple(cropped)),
        ),
    )


def draw_augmentation(result: Result) -> "Figure":
    return draw_measured(result, "Random crops make a model robust to shifts, but not to rotation")


AUGMENTATION = Claim(
    slug="augmentation",
    lesson="Masks, training and evaluation",
    statement="Random crops reduce the gap between training and test accuracy and make a model robust to "
    "translation, but not to rotation.",
    misconception="Random crops also make a model robust to rotation, or augmentation makes no difference.",
    formula="gap = training accuracy - test accuracy",
    conditions="A small vision transformer without a convolutional stem, trained on 500 MNIST images for 400 steps "
    "in float32; mean of three seeds.",
    run=run_augmentation,
    figure=draw_augmentation,
    try_next="clearhead lab augmentation --num-images 5000",
    minimum={"num_images": 100, "crop": 0},
    maximum={"num_images": 50_000, "crop": 14},
    trains=True,
    seconds=25,
)
