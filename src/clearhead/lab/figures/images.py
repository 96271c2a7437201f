"""Images: patches, what the answer is read from, and transformers beside convolutional networks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, VERMILION
from clearhead.lab.beside_convolutions import LENGTHS, SIDES, accepted, classifier
from clearhead.lab.constructions import patches_as_convolution
from clearhead.lab.figures.style import (
    SMALL,
    TEXT,
    canvas,
    headline,
    heat_maps,
    key_below,
    label,
    name,
    two_colours,
)
from clearhead.lab.in_turn import longest_chain
from clearhead.lab.places import gradient_by_token, model_for
from clearhead.lab.reach import AlongTheLine
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.patches import PatchTokens
from clearhead.nn.positions import LearnedPositions, SinusoidalPositions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@torch.no_grad()
def draw_patches(*, seed: int = 0, width: int = 8, patch: int = 4, side: int = 3, stride: int = 0) -> "Figure":
    """Left: the image and its patches. Middle: cut and projected. Right: the convolution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = PatchTokens(3, width, patch).double()
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
    name(image, f"{side * side} patches of {patch} × {patch}", "pixel column", "pixel row")
    name(left, "cut, then projected", "feature", "patch")
    name(right, f"convolution,\nstride {stride or patch}", "feature")
    headline(figure, "Patch embedding is a convolution whose stride is the size of its kernel")
    return figure


def draw_class_token(*, seed: int = 0, width: int = 16) -> "Figure":
    """The gradient of the logits at each token that leaves the encoder, with a class token and with mean pooling."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        norms = {"class token": gradient_by_token(width, "class", images)}
        norms["mean pooling"] = gradient_by_token(width, "mean", images)
    figure, both = canvas("AB")
    for axes, (title, heights), first in zip(both, norms.items(), (0, 1), strict=True):
        reached = int((heights > 0).sum())
        places = range(first, first + len(heights))
        axes.bar(places, (heights / heights.max()).tolist(), color=[GREEN if n == 0 else BLUE for n in places])
        axes.set_xlim(-1, 17)
        axes.set_xticks([first, 4, 8, 12, 16], labels=["class" if first == 0 else "1", "4", "8", "12", "16"])
        axes.set_ylim(0, 1.1)
        axes.grid(axis="x", visible=False)
        tokens = f"{reached} of {len(heights)} tokens"
        name(axes, f"{title}: logits read from\n{tokens}", "token (1 to 16: patches)")
    both[0].set_ylabel("gradient norm of the logits\n(largest = 1)", fontsize=TEXT)
    headline(figure, "A ViT classifies from one token, or from the mean of all patches")
    return figure


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """Norm of the Jacobian of the middle output to each input, in units of the largest. x (1,L,E) -> (L,)"""
    middle = x.shape[1] // 2
    jacobian = torch.autograd.functional.jacobian(lambda tokens: layer(tokens)[0, middle], x)  # (E,1,L,E)
    norms = jacobian[:, 0].square().sum(dim=(0, 2)).sqrt()
    return norms / norms.max()


def draw_reach(*, seed: int = 0, width: int = 8, n_tokens: int = 21, kernel: int = 3) -> "Figure":
    """Attention, one convolution, and as many as it takes to see every token."""
    needed = -(-(n_tokens // 2) // (kernel // 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(1, n_tokens, width, dtype=torch.float64)
        layers = {
            "1 attention layer": (MultiHeadAttention(width, 2), BLUE),
            "1 convolution": (AlongTheLine(width, kernel, 1), VERMILION),
            f"{needed} convolutions": (AlongTheLine(width, kernel, needed), GREEN),
        }
    figure, all_axes = canvas("ABC", same_y=True)
    offsets = [place - n_tokens // 2 for place in range(n_tokens)]
    lowest = 1.0
    for axes, (title, (layer, colour)) in zip(all_axes, layers.items(), strict=True):
        norms = influence(layer.double(), x)
        lowest = min(lowest, norms[norms > 0].min().item())
        axes.bar(offsets, norms.tolist(), color=colour, width=0.8)
        axes.grid(axis="x", visible=False)
        name(axes, f"{title}:\nsees {int((norms > 0).sum())} of {n_tokens}", "input (0 = output)")
    all_axes[0].set_yscale("log")
    all_axes[0].set_ylim(lowest / 3, 1.5)
    all_axes[0].set_ylabel("influence (largest = 1)", fontsize=TEXT)
    headline(figure, "One attention layer sees every token; convolutions need depth for that")
    return figure


@torch.no_grad()
def draw_any_size(*, seed: int = 0, width: int = 8, context: int = 8) -> "Figure":
    """Which layers take which sizes: sequences of several lengths, and images of several sides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention, table, waves = MultiHeadAttention(width, 2), LearnedPositions(context, width), SinusoidalPositions()
        sequence: dict[str, Callable[[Tensor], Tensor]] = {
            "convolution": AlongTheLine(width, kernel=3, depth=2),
            "attention, sinusoidal\npositions": lambda x: attention(waves(x)),
            f"attention, learned\ntable of {context} rows": lambda x: attention(table(x)),
        }
        built = SIDES[1]
        image: dict[str, Callable[[Tensor], Tensor]] = {
            "CNN, mean and linear": classifier(width, flatten=False),
            "CNN, flatten and linear": classifier(width, flatten=True),
            "ViT, learned table,\ninterpolated": model_for(4 * width, "mean", built // 4).float(),
        }
        lengths = torch.tensor(
            [[accepted(layer, [torch.randn(1, n, width)]) for n in LENGTHS] for layer in sequence.values()]
        )
        sides = torch.tensor([[accepted(layer, [torch.randn(1, 3, n, n)]) for n in SIDES] for layer in image.values()])
    figure, both = canvas("A;B")
    for axes, taken, names, sizes, x in (
        (both[0], lengths, sequence, LENGTHS, "sequence length (tokens)"),
        (both[1], sides, image, SIDES, f"image side (pixels; built for {built})"),
    ):
        two_colours(axes, taken, [["yes" if cell else "no" for cell in row] for row in taken.tolist()])
        axes.set_aspect("auto")
        axes.set_yticks(range(len(names)), labels=list(names))
        axes.set_xticks(range(len(sizes)), labels=[str(size) for size in sizes])
        name(axes, "", x)
    headline(figure, "Attention and convolution take any size; fixed tables and flatten do not")
    return figure


def draw_parallel(*, seed: int = 0, width: int = 8, n_tokens: int = 9) -> "Figure":
    """The longest chain of operations that wait for one another: against tokens, and against layers."""

    def recurrent() -> nn.Module:
        return nn.GRU(width, width, batch_first=True)

    makers: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
        "attention": (lambda: MultiHeadAttention(width, 2), BLUE, "o"),
        "convolution": (lambda: AlongTheLine(width, 3, 1), GREEN, "s"),
        "recurrent network (GRU)": (recurrent, VERMILION, "^"),
    }

    def chain(make: Callable[[], nn.Module], length: int, depth: int) -> int:
        x = torch.randn(1, length, width)
        for _ in range(depth):
            out = make()(x)
            x = out[0] if isinstance(out, tuple) else out
        return longest_chain(x)

    lengths = sorted({1, *(max(1, round(n_tokens * part / 4)) for part in range(1, 5))})
    depths = [1, 2, 3, 4]
    figure, (left, right) = canvas("AB")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for text, (make, colour, marker) in reversed(makers.items()):
            look: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 3, "markersize": 9, "label": text}
            left.plot(lengths, [chain(make, n, 1) for n in lengths], **look)
            if make is not recurrent:
                right.plot(depths, [chain(make, n_tokens, n) for n in depths], **look)
    for axes in (left, right):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    left.set_xticks(lengths)
    right.set_xticks(depths)
    name(left, "One layer", "tokens", "operations in sequence")
    name(right, f"{n_tokens} tokens", "layers", "operations in sequence")
    key_below(figure, left)
    headline(figure, "Attention and convolution: parallel over tokens, sequential over layers")
    return figure


@torch.no_grad()
def draw_rotation(*, seed: int = 0, width: int = 4, side: int = 8) -> "Figure":
    """Above: the output for a moved image. Below: the moved output for the image. Equal for shifts, not for turns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        images = torch.randn(1, width, side, side, dtype=torch.float64)
        layer, even = (nn.Conv2d(width, width, 3, padding=1, padding_mode="circular").double() for _ in range(2))
    even.weight.copy_(torch.stack([even.weight.rot90(turns, (2, 3)) for turns in range(4)]).mean(0))

    def shifted(x: Tensor) -> Tensor:
        return x.roll((2, 3), dims=(2, 3))

    def turned(x: Tensor) -> Tensor:
        return x.rot90(dims=(2, 3))

    cases = {
        "shifted": (shifted, layer),
        "quarter turn": (turned, layer),
        "quarter turn,\nsymmetric kernel": (turned, even),
    }
    pairs = [(conv(move(images)), move(conv(images))) for move, conv in cases.values()]
    figure, all_axes = canvas("ABC;DEF")
    maps = [pair[0][0, 0] for pair in pairs] + [pair[1][0, 0] for pair in pairs]
    heat_maps(figure, all_axes, maps, "output, channel 1")
    for axes in all_axes:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(all_axes, cases, strict=False):
        name(axes, title)
    for axes, (one, other) in zip(all_axes[3:], pairs, strict=True):
        largest = (one - other).abs().max().item()
        text = "equal" if largest < 1e-12 else f"differ by {largest:.2g}"
        name(axes, "", text)
    all_axes[0].set_ylabel("conv(move x)", fontsize=SMALL)
    all_axes[3].set_ylabel("move conv(x)", fontsize=SMALL)
    headline(figure, "A convolution follows a shift of the image, but not a rotation")
    return figure
