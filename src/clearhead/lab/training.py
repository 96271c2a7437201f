"""Training against testing: the same input twice."""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.data.dataset import Examples
from clearhead.lab.claim import Claim, Curve, Result, above, at_least, at_most, within
from clearhead.lab.learning import mean_over_seeds, one_thread, train_recipe
from clearhead.lab.plots import MISTAKE, TRUTH, against, bars, canvas, draw_measured, headline, name_axis
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor
from clearhead.training.context import TrainContext
from clearhead.training.objectives import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_stages(*, seed: int = 0, width: int = 16, dropout: float = 0.2, testing: bool = True) -> Result:
    """testing=False asks of the training stage what holds in the testing stage only."""
    torch.manual_seed(seed)
    model = SequencePredictor.from_config(
        PredictorConfig(width=width, depth=2, num_heads=2, in_features=10, out_features=10, dropout=dropout)
    )
    ids = torch.randint(0, 10, (4, 8))

    def change(training: bool) -> float:
        model.train(training)
        with torch.no_grad():
            return (model(ids) - model(ids)).abs().max().item()

    def moved(training: bool) -> float:
        return weight_change(model, ids, training)

    return Result(
        (
            at_most("same input twice, testing stage: difference", change(not testing), 0.0),
            at_least("same input twice, training stage: difference", change(True), 1e-3),
            at_most("one pass in the testing stage: the weights move by", moved(not testing), 0.0),
            at_least("one pass and its step in the training stage: they move by", moved(True), 1e-6),
        )
    )


def weight_change(model: nn.Module, ids: Tensor, training: bool) -> float:
    """How far the weights move: in training by one step of SGD; in evaluation there is no gradient to step along."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.train(training)
    with torch.set_grad_enabled(training):
        output = model(ids)
    if output.requires_grad:
        output.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return max((new - old).abs().max().item() for new, old in zip(model.parameters(), before, strict=True))


STAGES = Claim(
    slug="stages",
    rows=("R0.8",),
    lesson="Masks, training and testing",
    statement="In testing the same input gives the same output and weights stay; in training neither is so.",
    mistake="A trained model always answers the same.",
    formula="dropout(x) = x m / (1-p), m drawn anew in training; x itself in testing",
    run=run_stages,
    try_next="clearhead lab stages --dropout 0.01",
    least={"dropout": 0},
    most={"dropout": 0.9},
    multiples={"width": 2},
    kind="demonstration",
)


# What random crops achieve and what they do not. Trains small vision transformers on a few handwritten digits.


N_TEST = 2_000
IMAGES = ("training images", "test images", "shifted test images", "rotated test images")


def trained(crop: int, n_images: int, steps: int, seed: int) -> TrainContext:
    """The recipe `mnist` with a smaller model without convolutions and with few images, with or without crops."""
    changes = {
        "seed": seed,
        "model.patch_embed": "patch",
        "model.patch_size": 7,
        "model.width": 32,
        "model.mlp_dim": 64,
        "model.depth": 1,
        "data.limit": n_images,
        "data.augmentation.crop": crop,
        "training.batch_size": min(100, n_images),
        "optimizer.lr": 2e-2,
        "optimizer.warmup": 10,
    }
    return train_recipe("mnist", changes, steps)


@torch.no_grad()
def right(ctx: TrainContext, examples: Examples, change: Callable[[Tensor], Tensor] = lambda images: images) -> float:
    """The accuracy on the first examples, perhaps changed."""
    images, labels = examples.get_batch(torch.arange(min(N_TEST, len(examples))))
    assert ctx.data.normalize is not None
    answers = ctx.model(ctx.data.normalize(change(images))).argmax(-1)
    return (answers == labels).double().mean().item()


def shifted(images: Tensor) -> Tensor:
    return images.roll((3, -3), dims=(2, 3))


def turned(images: Tensor) -> Tensor:
    return images.rot90(dims=(2, 3))


def accuracies(crop: int, n_images: int, steps: int, seed: int) -> list[float]:
    """Of one trained model: on its training images, on test images, and on shifted and turned test images."""
    ctx = trained(crop, n_images, steps, seed)
    test = ctx.data.test
    return [right(ctx, ctx.data.train), right(ctx, test), right(ctx, test, shifted), right(ctx, test, turned)]


def run_augmentation(
    *, seed: int = 0, num_seeds: int = 3, n_images: int = 500, steps: int = 400, crop: int = 3
) -> Result:
    """crop is the number of pixels by which training images are moved; 0 asks whether it makes a difference."""

    def measured(crop: int) -> list[float]:
        return mean_over_seeds(lambda each: accuracies(crop, n_images, steps, each), seed, num_seeds)

    with one_thread():
        plain, moved = measured(0), measured(crop)
    gap = plain[0] - plain[1]
    left = (moved[0] - moved[1]) / gap if gap > 0 else math.nan
    checks = (
        at_least("without crops: training accuracy minus test accuracy", gap, 0.1),
        at_most("with crops: this gap, relative to that without", left, 0.6),
        at_least("with crops: test accuracy minus that without", moved[1] - plain[1], 0.05),
        at_least("shifted test images: accuracy with crops minus without", moved[2] - plain[2], 0.2),
        at_most("test images rotated by 90 degrees: accuracy with crops", moved[3], 0.4),
    )
    images = tuple(float(i) for i in range(len(IMAGES)))
    return Result(
        checks,
        (
            Curve(", ".join(IMAGES), "without crops", images, tuple(plain)),
            Curve(", ".join(IMAGES), "with crops", images, tuple(moved)),
        ),
    )


AUGMENTATION = Claim(
    slug="augmentation",
    rows=("R0.10",),
    lesson="Masks, training and testing",
    statement="Random crops narrow the gap between training and test accuracy and make a model robust to shifts, but "
    "not to rotation.",
    mistake="Crop and flip make a model robust to rotation; or: augmentation makes no difference.",
    formula="gap = training accuracy - test accuracy",
    conditions="A small vision transformer without convolutions, trained on 500 MNIST images for 400 steps. "
    "Float32, the mean of three seeds.",
    run=run_augmentation,
    try_next="clearhead lab augmentation --n-images 5000",
    least={"n_images": 100, "crop": 0},
    most={"n_images": 50_000, "crop": 14},
    trains=True,
    seconds=25,
)


# What positions, norm and output projection add to the plain vision transformer. Trains five models on MNIST.


PARTS: dict[str, dict[str, object]] = {
    "positions": {"model.pos_embed": "learned"},
    "norm": {"model.norm": "pre"},
    "output projection": {"model.output_projection": True},
}
"""what the plain model lacks: learned position embeddings, layer norm before each sublayer, and W_O"""

PLAIN, ALL = "plain", "all three"
VARIANTS: dict[str, dict[str, object]] = {
    PLAIN: {},
    **{f"+ {name}": part for name, part in PARTS.items()},
    ALL: {key: value for part in PARTS.values() for key, value in part.items()},
}


def variant_accuracy(changes: dict[str, object], steps: int, seed: int) -> list[float]:
    """Accuracy on all test images of the recipe `mnist-plain` with these changes, after so many steps."""
    ctx = train_recipe("mnist-plain", {"seed": seed, **changes}, steps)
    return [evaluate(ctx.model, ctx.objective, ctx.data.test, ctx.data.normalize)["accuracy"]]


def run_plain_vit(*, seed: int = 0, num_seeds: int = 3, steps: int = 600, without: bool = False) -> Result:
    """without=True asks of the plain model what holds of the one with all three parts."""
    with one_thread():
        found = {
            name: mean_over_seeds(partial(variant_accuracy, changes, steps), seed, num_seeds)[0]
            for name, changes in VARIANTS.items()
        }
    plain, complete = found[PLAIN], found[PLAIN if without else ALL]
    positions, norm, projection = (found[f"+ {name}"] - plain for name in PARTS)
    checks = (
        at_least(f"{PLAIN}, {steps} steps: test accuracy", plain, 0.75),
        at_least("+ positions: gain", positions, 0.02),
        at_least("+ norm: gain", norm, 0.005),
        within("+ output projection: gain", projection, -0.03, 0.03),
        at_least(f"{ALL}: gain", complete - plain, 0.04),
        above(
            f"{ALL}: gain beyond that of the best single part", complete - plain - max(positions, norm, projection), 0
        ),
    )
    return Result(checks, tuple(Curve("test accuracy", name, (steps,), (found[name],)) for name in VARIANTS))


PLAIN_VIT = Claim(
    slug="plain-vit",
    rows=("R3.1",),
    lesson="Images and convolutions",
    statement="Of the parts that the plain vision transformer lacks, position embeddings alone gain most and norm "
    "alone gains some; the output projection of a single head gains next to nothing. All three together gain most.",
    mistake="Each missing part costs about as much accuracy; or: a single one explains the low accuracy.",
    formula="one head: softargmax(beta Q Kᵀ) (x W_V) W_O, and W_V W_O is a single matrix: W_O adds no new function",
    conditions="Preset plain_mnist: 4 blocks of width 64, 7 x 7 patches; 40,000 training images, 600 steps of 128. "
    "Float32, the mean of three seeds.",
    run=run_plain_vit,
    try_next="clearhead lab plain-vit --steps 200",
    trains=True,
    seconds=300,
)


# Training: figures of what a training measured, and what training does that evaluation does not.


def draw_augmentation(result: Result) -> "Figure":
    return draw_measured(result, "Random crops make a model robust to shifts, but not to rotation")


def draw_plain_vit(result: Result) -> "Figure":
    return draw_measured(result, "Positions help the plain ViT most, all three parts together more still")


def draw_stages(*, seed: int = 0, width: int = 16, dropout: float = 0.2) -> "Figure":
    """Left and middle: the same input twice, in training and in evaluation. Right: how far a pass moves the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SequencePredictor.from_config(
            PredictorConfig(width=width, depth=2, num_heads=2, in_features=10, out_features=10, dropout=dropout)
        )
        ids = torch.randint(0, 10, (4, 8))
        twice, moved = {}, {}
        for text, training, colour in (("evaluation", False, TRUTH), ("training", True, MISTAKE)):
            model.train(training)
            with torch.no_grad():
                twice[text] = (model(ids)[0], model(ids)[0], colour)
        for text, training, colour in (("evaluation", False, TRUTH), ("training", True, MISTAKE)):
            moved[text] = (weight_change(model, ids, training), colour)
    figure, (left, middle, right) = canvas("ABC")
    for axes, (text, (first, second, colour)) in zip((left, middle), twice.items(), strict=True):
        against(axes, second, {text: (first, colour, "o")})
        name_axis(axes, text, "logits, first pass", "logits, second pass")
    bars(right, moved)
    right.set_box_aspect(1)
    name_axis(right, "weights, one step", "", "largest change")
    headline(figure, "In training the same input gives other outputs, and the weights move")
    return figure
