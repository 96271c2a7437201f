"""Vision transformers: patch embedding, class token, components of a plain ViT; and equivariance of convolutions."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN
from clearhead.lab.claim import Claim, Curve, Result, above, at_least, at_most, equals, within
from clearhead.lab.learning import mean_over_seeds, single_thread, train_recipe
from clearhead.lab.plots import (
    SMALL_SIZE,
    TEXT_SIZE,
    draw_measured,
    heat_maps,
    label,
    label_axes,
    set_headline,
    subplots,
)
from clearhead.models.config import PoolingName, PosEmbed2dName, VisionConfig
from clearhead.models.vit import VisionTransformer
from clearhead.nn.blocks import DecoderBlock
from clearhead.nn.tokens import PatchEmbed
from clearhead.training.evaluation import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def small_vit(
    width: int, pooling: PoolingName, grid_size: int = 4, pos_embed: PosEmbed2dName = "learned"
) -> VisionTransformer:
    config = VisionConfig(
        width=width,
        depth=2,
        num_heads=2,
        image_size=4 * grid_size,
        patch_size=4,
        num_classes=3,
        pooling=pooling,
        pos_embed=pos_embed,
    )
    return VisionTransformer.from_config(config).double().eval()


def run_patch_embedding(
    *, seed: int = 0, width: int = 8, patch_size: int = 4, grid_size: int = 3, stride: int = 0
) -> Result:
    """A stride other than the patch size refutes the claim."""
    torch.manual_seed(seed)
    patch_embed, images = (
        PatchEmbed(3, width, patch_size).double(),
        torch.randn(2, 3, grid_size * patch_size, grid_size * patch_size).double(),
    )
    conv = patch_embed.as_convolution()
    conv.stride = (stride or patch_size, stride or patch_size)
    with torch.no_grad():
        convolved = conv(images).flatten(2).mT
        projected = patch_embed(images)
    error = (convolved - projected).abs().max().item() if convolved.shape == projected.shape else float("inf")
    return Result((at_most("difference between projected patches and the convolution", error, 1e-12),))


@torch.no_grad()
def draw_patch_embedding(
    *, seed: int = 0, width: int = 8, patch_size: int = 4, grid_size: int = 3, stride: int = 0
) -> "Figure":
    """Left: the image and its patches. Middle: the projected patches. Right: the output of the convolution."""
    torch.manual_seed(seed)
    patch_embed = PatchEmbed(3, width, patch_size).double()
    images = torch.randn(2, 3, grid_size * patch_size, grid_size * patch_size).double()
    conv = patch_embed.as_convolution()
    conv.stride = (stride or patch_size, stride or patch_size)
    projected, convolved = patch_embed(images)[0], conv(images).flatten(2).mT[0]
    figure, (image, left, right) = subplots("ABC", widths=(1.3, 1, 1))
    picture = images[0] - images[0].min()
    image.imshow((picture / picture.max()).permute(1, 2, 0).numpy(), interpolation="nearest")
    image.grid(False)
    for edge in range(grid_size + 1):
        image.axhline(edge * patch_size - 0.5, color="white", linewidth=3)
        image.axvline(edge * patch_size - 0.5, color="white", linewidth=3)
    if grid_size <= 5:
        for index in range(grid_size * grid_size):
            row, column = divmod(index, grid_size)
            label(
                image,
                (column + 0.5) * patch_size - 0.5,
                (row + 0.5) * patch_size - 0.5,
                str(index + 1),
                ha="center",
                va="center",
            )
            image.texts[-1].set_bbox({"boxstyle": "circle", "facecolor": "white", "edgecolor": "none"})
    image.set_xticks([0, grid_size * patch_size - 1])
    image.set_yticks([0, grid_size * patch_size - 1])
    heat_maps(figure, [left, right], [projected, convolved], "value")
    for axes in (left, right):
        axes.set_aspect("auto")
    label_axes(image, f"{grid_size * grid_size} patches of {patch_size} × {patch_size}", "pixel column", "pixel row")
    label_axes(left, "projected patches", "feature", "patch")
    label_axes(right, f"convolution,\nstride {stride or patch_size}", "feature")
    set_headline(figure, "Patch embedding is a convolution whose stride equals its kernel size")
    return figure


PATCH_EMBEDDING = Claim(
    slug="patch-embedding",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="Patch embedding, a linear projection of flattened patches, is a convolution whose stride equals its "
    "kernel size.",
    misconception="A vision transformer contains no convolution.",
    formula="unfold(image) W = conv(image, W, stride = patch_size)",
    run=run_patch_embedding,
    figure=draw_patch_embedding,
    try_next="clearhead lab patch-embedding --stride 2",
)


def gradient_by_token(width: int, pooling: PoolingName, images: Tensor) -> Tensor:
    """Norm of the gradient of the squared logits with respect to each encoder output. (L,)"""
    model = small_vit(width, pooling)
    encoded: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda module, args, out: encoded.append(out))
    logits = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.square().sum(), encoded)
    return gradient[0].norm(dim=-1)


def run_class_token(*, seed: int = 0, width: int = 16, mean_pooling: bool = False) -> Result:
    """mean_pooling=True tests mean pooling in place of the class token."""
    torch.manual_seed(seed)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def num_tokens_used(pooling: PoolingName) -> int:
        """The number of encoder outputs that the logits depend on."""
        return int((gradient_by_token(width, pooling, images) > 0).sum())

    def classifier_inputs(*poolings: PoolingName) -> int:
        """The largest input width of the classifier."""
        head_inputs: list[Tensor] = []
        for pooling in poolings:
            model = small_vit(width, pooling)
            model.head.register_forward_pre_hook(lambda module, args: head_inputs.append(args[0]))
            model(images)
        return max(x[0].numel() for x in head_inputs)

    model = small_vit(width, "cls")
    norm, z = model.norm, []
    assert isinstance(norm, nn.LayerNorm)
    handle = norm.register_forward_hook(lambda module, args, out: z.append(args[0]))
    with torch.no_grad():
        logits = model(images)
        handle.remove()
        expected = model.head(
            F.layer_norm(z[0][:, 0], (width,), eps=norm.eps)
        )  # at initialization the scale is 1 and the shift 0
        error = (expected - logits).abs().max().item()
    return Result(
        (
            at_most("difference between MLP(LN(z_0)) and the model", error, 1e-12),
            equals(
                "class token: number of encoder outputs that the logits depend on",
                num_tokens_used("mean" if mean_pooling else "cls"),
                1,
                0,
            ),
            equals("mean pooling: number of encoder outputs that the logits depend on", num_tokens_used("mean"), 16, 0),
            equals("input width of the classifier, either pooling", classifier_inputs("cls", "mean"), width, 0),
            equals("number of decoder blocks", sum(isinstance(part, DecoderBlock) for part in model.modules()), 0, 0),
        )
    )


def draw_class_token(*, seed: int = 0, width: int = 16) -> "Figure":
    """The gradient of the logits at each encoder output, with a class token and with mean pooling."""
    torch.manual_seed(seed)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    norms = {"class token": gradient_by_token(width, "cls", images)}
    norms["mean pooling"] = gradient_by_token(width, "mean", images)
    figure, panels = subplots("AB")
    for axes, (title, heights), first in zip(panels, norms.items(), (0, 1), strict=True):
        num_used = int((heights > 0).sum())
        indices = range(first, first + len(heights))
        axes.bar(indices, (heights / heights.max()).tolist(), color=[GREEN if n == 0 else BLUE for n in indices])
        axes.set_xlim(-1, 17)
        axes.set_xticks([first, 4, 8, 12, 16], labels=["cls" if first == 0 else "1", "4", "8", "12", "16"])
        axes.set_ylim(0, 1.1)
        axes.grid(axis="x", visible=False)
        tokens = f"{num_used} of {len(heights)} tokens"
        label_axes(axes, f"{title}: logits depend on\n{tokens}", "token (1 to 16: patches)")
    panels[0].set_ylabel("gradient norm of the logits\n(largest = 1)", fontsize=TEXT_SIZE)
    set_headline(figure, "A ViT classifies from one token, or from the mean of all patches")
    return figure


CLASS_TOKEN = Claim(
    slug="class-token",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="The classifier of a vision transformer receives one vector: the class token, MLP(LN(z_0)), or the "
    "mean of all tokens. There is no decoder.",
    misconception="The classifier receives all tokens, flattened, or the output of a decoder.",
    formula="y = MLP(LN(z_0));  or y = MLP(mean_i LN(z_i))",
    run=run_class_token,
    figure=draw_class_token,
    try_next="clearhead shapes vit_base",
    multiple_of={"width": 2},
)


PARTS: dict[str, dict[str, object]] = {
    "positions": {"model.pos_embed": "learned"},
    "norm": {"model.norm": "pre"},
    "output projection": {"model.output_projection": True},
}
"""components that the plain model lacks: learned position embeddings, pre-norm and W_O"""


PLAIN, ALL = "plain", "all three"


VARIANTS: dict[str, dict[str, object]] = {
    PLAIN: {},
    **{f"+ {name}": part for name, part in PARTS.items()},
    ALL: {key: value for part in PARTS.values() for key, value in part.items()},
}


def variant_accuracy(changes: dict[str, object], steps: int, seed: int) -> list[float]:
    """Test accuracy of the recipe `mnist-plain` with these changes."""
    ctx = train_recipe("mnist-plain", {"seed": seed, **changes}, steps)
    return [evaluate(ctx.model, ctx.objective, ctx.data.test, ctx.data.normalize)["accuracy"]]


def run_plain_vit(*, seed: int = 0, num_seeds: int = 3, steps: int = 600, plain: bool = False) -> Result:
    """plain=True tests the plain model in place of the model with all three components."""
    with single_thread():
        accuracy = {
            name: mean_over_seeds(partial(variant_accuracy, changes, steps), seed, num_seeds)[0]
            for name, changes in VARIANTS.items()
        }
    base, complete = accuracy[PLAIN], accuracy[PLAIN if plain else ALL]
    positions, norm, projection = (accuracy[f"+ {name}"] - base for name in PARTS)
    checks = (
        at_least(f"{PLAIN}, {steps} steps: test accuracy", base, 0.75),
        at_least("+ positions: gain", positions, 0.02),
        at_least("+ norm: gain", norm, 0.005),
        within("+ output projection: gain", projection, -0.03, 0.03),
        at_least(f"{ALL}: gain", complete - base, 0.04),
        above(f"{ALL}: gain over the best single part", complete - base - max(positions, norm, projection), 0),
    )
    return Result(checks, tuple(Curve("test accuracy", name, (steps,), (accuracy[name],)) for name in VARIANTS))


def draw_plain_vit(result: Result) -> "Figure":
    return draw_measured(result, "Positions raise the accuracy of the plain ViT most; all three parts raise it more")


PLAIN_VIT = Claim(
    slug="plain-vit",
    lesson="Images and convolutions",
    statement="Of the three components that the plain vision transformer lacks, position embeddings improve the "
    "accuracy most, normalization improves it slightly, and the output projection of a single head has little effect. "
    "All three together improve it more than any of them alone.",
    misconception="Each missing component costs about the same accuracy, or a single missing component explains the "
    "low accuracy.",
    formula="one head: softargmax(beta Q Kᵀ) (x W_V) W_O, and W_V W_O is a single matrix, so W_O adds no new functions",
    conditions="Preset vit_mnist_plain: 4 blocks of width 64, 7×7 patches; 40,000 training images, 600 steps of 128 "
    "images in float32; mean of three seeds.",
    run=run_plain_vit,
    figure=draw_plain_vit,
    try_next="clearhead lab plain-vit --steps 200",
    trains=True,
    seconds=300,
)


def run_rotation(*, seed: int = 0, width: int = 4, image_size: int = 8, rotate: bool = False) -> Result:
    """rotate=True tests rotations by 90 degrees in place of shifts."""
    torch.manual_seed(seed)
    images = torch.randn(1, width, image_size, image_size, dtype=torch.float64)
    layer, symmetric = (nn.Conv2d(width, width, 3, padding=1, padding_mode="circular").double() for _ in range(2))
    with torch.no_grad():  # the mean over four rotations is rotationally symmetric
        symmetric.weight.copy_(
            torch.stack([symmetric.weight.rot90(quarter_turns, (2, 3)) for quarter_turns in range(4)]).mean(0)
        )

    def shifted(x: Tensor) -> Tensor:
        return x.roll((2, 3), dims=(2, 3))

    def rotated(x: Tensor) -> Tensor:
        return x.rot90(dims=(2, 3))

    def change(transform: Callable[[Tensor], Tensor], layer: nn.Module = layer) -> tuple[float, float]:
        """max |conv(T x) - T conv(x)|, and the change of the pooled output."""
        with torch.no_grad():
            before, after = layer(images), layer(transform(images))
            pooled = after.relu().mean((2, 3)) - before.relu().mean((2, 3))
            return (after - transform(before)).abs().max().item(), pooled.abs().max().item()

    transform, pooled = change(rotated if rotate else shifted)
    return Result(
        (
            at_most("shifted image: difference from the shifted output", transform, 1e-12),
            at_most("shifted image: change of the pooled output", pooled, 1e-12),
            at_least("rotated image: difference from the rotated output", change(rotated)[0], 1e-2),
            at_least("rotated image: change of the pooled output", change(rotated)[1], 1e-4),
            at_most(
                "rotated image, symmetric kernel: difference from the rotated output",
                change(rotated, symmetric)[0],
                1e-12,
            ),
        )
    )


@torch.no_grad()
def draw_rotation(*, seed: int = 0, width: int = 4, image_size: int = 8) -> "Figure":
    """Top: the output for the transformed image. Bottom: the transformed output."""
    torch.manual_seed(seed)
    images = torch.randn(1, width, image_size, image_size, dtype=torch.float64)
    layer, symmetric = (nn.Conv2d(width, width, 3, padding=1, padding_mode="circular").double() for _ in range(2))
    symmetric.weight.copy_(
        torch.stack([symmetric.weight.rot90(quarter_turns, (2, 3)) for quarter_turns in range(4)]).mean(0)
    )

    def shifted(x: Tensor) -> Tensor:
        return x.roll((2, 3), dims=(2, 3))

    def rotated(x: Tensor) -> Tensor:
        return x.rot90(dims=(2, 3))

    cases = {
        "shifted": (shifted, layer),
        "rotated": (rotated, layer),
        "rotated,\nsymmetric kernel": (rotated, symmetric),
    }
    pairs = [(conv(transform(images)), transform(conv(images))) for transform, conv in cases.values()]
    figure, all_axes = subplots("ABC;DEF")
    maps = [pair[0][0, 0] for pair in pairs] + [pair[1][0, 0] for pair in pairs]
    heat_maps(figure, all_axes, maps, "output, channel 1")
    for axes in all_axes:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(all_axes, cases, strict=False):
        label_axes(axes, title)
    for axes, (one, other) in zip(all_axes[3:], pairs, strict=True):
        largest = (one - other).abs().max().item()
        text = "equal" if largest < 1e-12 else f"differ by {largest:.2g}"
        label_axes(axes, "", text)
    all_axes[0].set_ylabel("conv(T x)", fontsize=SMALL_SIZE)
    all_axes[3].set_ylabel("T conv(x)", fontsize=SMALL_SIZE)
    set_headline(figure, "A convolution is equivariant to translation, but not to rotation")
    return figure


ROTATION = Claim(
    slug="rotation",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="A convolution is equivariant to translation but not to rotation, and global pooling does not make it "
    "invariant to rotation.",
    misconception="CNNs are invariant to rotation.",
    formula="conv(shift x) = shift conv(x);  conv(rotate x) = rotate conv(x) only for kernels that are symmetric "
    "under the rotation",
    run=run_rotation,
    figure=draw_rotation,
    try_next="clearhead lab rotation --image-size 32",
    minimum={"image_size": 4},
)
