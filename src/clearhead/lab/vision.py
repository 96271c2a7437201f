"""Positions are added, as vectors as wide as a token; and what the answer is read from."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.constructions import patches_as_convolution
from clearhead.lab.plots import TEXT, canvas, headline, heat_maps, label, name_axis
from clearhead.models.config import PoolingName, PosEmbed2dName, VisionConfig
from clearhead.models.vit import VisionTransformer
from clearhead.nn.blocks import DecoderBlock
from clearhead.nn.patch_embed import PatchEmbed
from clearhead.nn.positions import LearnedPosEmbed2d

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rule = Callable[[Tensor, Tensor], Tensor]
"""(tokens (P,E), table (P,E)) -> what the encoder is given"""


def added(tokens: Tensor, table: Tensor) -> Tensor:
    return tokens + table


def place_only(tokens: Tensor, table: Tensor) -> Tensor:
    """The mistake: one more number, the place itself."""
    places = torch.arange(len(tokens), dtype=tokens.dtype)
    return torch.cat([tokens, places[:, None]], dim=1)


def model_for(
    width: int, pooling: PoolingName, side: int = 4, pos_embed: PosEmbed2dName = "learned"
) -> VisionTransformer:
    config = VisionConfig(
        width=width,
        depth=2,
        num_heads=2,
        image_size=4 * side,
        patch_size=4,
        num_classes=3,
        pooling=pooling,
        pos_embed=pos_embed,
    )
    return VisionTransformer(config).double().eval()


def run_learned_positions(*, seed: int = 0, width: int = 16, side: int = 4, rule: Rule = added) -> Result:
    torch.manual_seed(seed)
    model = model_for(width, "mean", side)
    table = model.pos_embed
    assert isinstance(table, LearnedPosEmbed2d)
    images = torch.randn(1, 3, 4 * side, 4 * side, dtype=torch.float64)
    order = torch.arange(side * side).roll(1)
    with torch.no_grad():
        tokens = model.patch_embed(images)
        given, expected = table(tokens, (side, side))[0], rule(tokens[0], table.table)
        error = (given - expected).abs().max().item() if given.shape == expected.shape else float("inf")
        table.table.mul_(50)  # as large as the tokens: training makes it so
        shuffled = change(model, tokens, order)
        table.table.zero_()
        without = change(model, tokens, order)
        waves = change(model_for(width, "mean", side, "sinusoidal"), tokens, order)
    return Result(
        (
            at_most("what the encoder gets: difference from tokens + table", error, 0.0),
            equals("numbers that tell one place", table.table.shape[1], width, 0),
            at_least("patches shuffled: the answer moves by", shuffled, 1e-3),
            at_most("the same with the table at zero", without, 1e-12),
            at_least("the same with sinusoidal positions instead", waves, 1e-3),
        )
    )


def change(model: VisionTransformer, tokens: Tensor, order: Tensor) -> float:
    answers = model(inputs_embeds=tokens), model(inputs_embeds=tokens[:, order])
    return (answers[0] - answers[1]).abs().max().item()


def gradient_by_token(width: int, pooling: PoolingName, images: Tensor) -> Tensor:
    """Norm of the gradient of the squared logits by each token that leaves the encoder. (L,)"""
    model = model_for(width, pooling)
    encoded: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda module, args, out: encoded.append(out))
    answer = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(answer.square().sum(), encoded)
    return gradient[0].norm(dim=-1)


def run_pooling(*, seed: int = 0, width: int = 16, mean: bool = False) -> Result:
    """mean asks of mean pooling what holds of the class token."""
    torch.manual_seed(seed)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def read_places(pooling: PoolingName) -> int:
        """Tokens leaving the encoder that the answer is read from."""
        return int((gradient_by_token(width, pooling, images) > 0).sum())

    def classifier_inputs(*poolings: PoolingName) -> int:
        """The largest number of inputs of a classifier."""
        given: list[Tensor] = []
        for pooling in poolings:
            model = model_for(width, pooling)
            model.head.register_forward_pre_hook(lambda module, args: given.append(args[0]))
            model(images)
        return max(x[0].numel() for x in given)

    model = model_for(width, "cls")
    norm, z = model.norm, []
    assert isinstance(norm, nn.LayerNorm)
    handle = norm.register_forward_hook(lambda module, args, out: z.append(args[0]))
    with torch.no_grad():
        answer = model(images)
        handle.remove()
        by_hand = model.head(F.layer_norm(z[0][:, 0], (width,), eps=norm.eps))  # fresh: its scale is 1, its shift 0
        error = (by_hand - answer).abs().max().item()
    return Result(
        (
            at_most("difference of MLP(LN(z_0)) from the model", error, 1e-12),
            equals("class token: tokens that the answer is read from", read_places("mean" if mean else "cls"), 1, 0),
            equals("mean pooling: tokens that the answer is read from", read_places("mean"), 16, 0),
            equals("numbers that the classifier is given, of either", classifier_inputs("cls", "mean"), width, 0),
            equals("decoder blocks in it", sum(isinstance(part, DecoderBlock) for part in model.modules()), 0, 0),
        )
    )


LEARNED = Claim(
    slug="learned-positions",
    kind="demonstration",
    rows=("R4.15",),
    lesson="Positions and order",
    statement="A learned position is a vector as wide as a token, added to it; without it patches are a bag.",
    mistake="The position is just the number of the patch.",
    formula="z_i = W patch_i + E_i,  E (P, width) learned",
    run=run_learned_positions,
    try_next="clearhead lab class-token",
    multiples={"width": 4},
    least={"side": 2},
)

READOUT = Claim(
    slug="class-token",
    kind="demonstration",
    rows=("R4.15",),
    lesson="Images and convolutions",
    statement="The classifier of a vision transformer is given one vector, that of the class token, MLP(LN(z_0)), or "
    "the mean of all tokens; there is no decoder.",
    mistake="The classifier is given all tokens side by side (flattened), or the output of a decoder.",
    formula="y = MLP(LN(z_0));  or y = MLP(mean_i LN(z_i))",
    run=run_pooling,
    try_next="clearhead shapes vit_base",
    multiples={"width": 2},
)


# Images: patches, what the answer is read from, and transformers beside convolutional networks.


@torch.no_grad()
def draw_patches(*, seed: int = 0, width: int = 8, patch: int = 4, side: int = 3, stride: int = 0) -> "Figure":
    """Left: the image and its patches. Middle: cut and projected. Right: the convolution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = PatchEmbed(3, width, patch).double()
        images = torch.randn(2, 3, side * patch, side * patch).double()
        conv = patches_as_convolution(tokens)
    conv.stride = (stride or patch, stride or patch)
    cut, convolved = tokens(images)[0], conv(images).flatten(2).mT[0]
    figure, (image, left, right) = canvas("ABC", widths=(1.3, 1, 1))
    picture = images[0] - images[0].min()
    image.imshow((picture / picture.max()).permute(1, 2, 0).numpy(), interpolation="nearest")
    image.grid(False)
    for edge in range(side + 1):
        image.axhline(edge * patch - 0.5, color="white", linewidth=3)
        image.axvline(edge * patch - 0.5, color="white", linewidth=3)
    if side <= 5:
        for place in range(side * side):
            row, column = divmod(place, side)
            label(
                image, (column + 0.5) * patch - 0.5, (row + 0.5) * patch - 0.5, str(place + 1), ha="center", va="center"
            )
            image.texts[-1].set_bbox({"boxstyle": "circle", "facecolor": "white", "edgecolor": "none"})
    image.set_xticks([0, side * patch - 1])
    image.set_yticks([0, side * patch - 1])
    heat_maps(figure, [left, right], [cut, convolved], "value")
    for axes in (left, right):
        axes.set_aspect("auto")
    name_axis(image, f"{side * side} patches of {patch} × {patch}", "pixel column", "pixel row")
    name_axis(left, "cut, then projected", "feature", "patch")
    name_axis(right, f"convolution,\nstride {stride or patch}", "feature")
    headline(figure, "Patch embedding is a convolution whose stride is the size of its kernel")
    return figure


def draw_class_token(*, seed: int = 0, width: int = 16) -> "Figure":
    """The gradient of the logits at each token that leaves the encoder, with a class token and with mean pooling."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        norms = {"class token": gradient_by_token(width, "cls", images)}
        norms["mean pooling"] = gradient_by_token(width, "mean", images)
    figure, both = canvas("AB")
    for axes, (title, heights), first in zip(both, norms.items(), (0, 1), strict=True):
        reached = int((heights > 0).sum())
        places = range(first, first + len(heights))
        axes.bar(places, (heights / heights.max()).tolist(), color=[GREEN if n == 0 else BLUE for n in places])
        axes.set_xlim(-1, 17)
        axes.set_xticks([first, 4, 8, 12, 16], labels=["cls" if first == 0 else "1", "4", "8", "12", "16"])
        axes.set_ylim(0, 1.1)
        axes.grid(axis="x", visible=False)
        tokens = f"{reached} of {len(heights)} tokens"
        name_axis(axes, f"{title}: logits read from\n{tokens}", "token (1 to 16: patches)")
    both[0].set_ylabel("gradient norm of the logits\n(largest = 1)", fontsize=TEXT)
    headline(figure, "A ViT classifies from one token, or from the mean of all patches")
    return figure
