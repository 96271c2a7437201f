"""How far one layer sees: attention against convolution."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.plots import SMALL, TEXT, canvas, headline, heat_maps, key_below, name_axis, two_colours
from clearhead.lab.sequential_depth import longest_chain
from clearhead.lab.vision import model_for
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import LearnedPosEmbed, PosEmbed, SinusoidalPosEmbed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inputs_seen(layer: nn.Module, x: Tensor) -> int:
    """Places whose change reaches the output in the middle: non-zero blocks of the Jacobian. x (1,L,E)"""
    x = x.clone().requires_grad_()
    layer(x)[0, x.shape[1] // 2].square().sum().backward()
    assert x.grad is not None
    return int((x.grad[0].abs().sum(-1) > 0).sum())


class AlongTheLine(nn.Module):
    """`depth` convolutions one after the other, on tokens (1,L,E)."""

    def __init__(self, width: int, kernel: int, depth: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv1d(width, width, kernel, padding=kernel // 2) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mT).mT


def run_reach(*, seed: int = 0, width: int = 8, n_tokens: int = 21, kernel: int = 3, depth: int = 1) -> Result:
    """depth is that of the convolutions that are said to see `kernel` places."""
    if kernel > n_tokens:
        raise ValueError(f"n_tokens must be at least kernel, got {n_tokens} and {kernel}; try n_tokens={4 * kernel}")
    torch.manual_seed(seed)
    x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    needed = -(-(n_tokens // 2) // (kernel // 2))
    return Result(
        (
            equals(
                "places that one attention layer sees",
                inputs_seen(MultiHeadAttention(width, 2).double(), x),
                n_tokens,
                0,
            ),
            equals(
                "places that one convolution sees",
                inputs_seen(AlongTheLine(width, kernel, depth).double(), x),
                kernel,
                0,
            ),
            equals(
                f"places that {needed} convolutions see",
                inputs_seen(AlongTheLine(width, kernel, needed).double(), x),
                n_tokens,
                0,
            ),
        )
    )


REACH = Claim(
    slug="reach",
    kind="demonstration",
    rows=("R1.7",),
    lesson="Images and convolutions",
    statement="One attention layer sees every token; a convolution sees its kernel, and needs depth to see everything.",
    mistake="A convolution sees the whole input at once, too.",
    formula="d h_i / d x_j is dense for attention, k wide for a convolution, 1 + depth (k-1) wide for several",
    run=run_reach,
    try_next="clearhead lab reach --kernel 7",
    multiples={"width": 2},
    least={"kernel": 3},
)


# What is said of transformers against convolutional networks: any size, in parallel, turned images.


LENGTHS = (5, 8, 13, 40)
SIDES = (12, 16, 20, 32)
"""of square images; networks that are made for one size are made for the second"""


def accepted(layer: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> int:
    """How many of the inputs it gives an output for."""
    count = 0
    for x in inputs:
        try:
            count += len(layer(x)) == len(x)
        except (ValueError, RuntimeError):  # a table without a row for the position, a linear layer of another width
            continue
    return count


def classifier(width: int, *, flatten: bool) -> nn.Sequential:
    """A CNN of three classes: its last linear layer is given all positions, flattened, or their mean."""
    ends = (nn.Flatten(), nn.Linear(width * SIDES[1] ** 2, 3)) if flatten else (MeanOverImage(), nn.Linear(width, 3))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *ends)


class MeanOverImage(nn.Module):
    """Global average pooling. (B,C,h,w) -> (B,C)"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def run_any_size(*, seed: int = 0, width: int = 8, context: int = 8, learned: bool = False) -> Result:
    """learned asks of a learned table of `context` rows what holds of sinusoidal positions."""
    torch.manual_seed(seed)
    attention, convolution = MultiHeadAttention(width, 2), AlongTheLine(width, kernel=3, depth=2)
    table = LearnedPosEmbed(context, width)
    images = [torch.randn(1, 3, side, side) for side in SIDES]
    vit = model_for(width, "cls", SIDES[1] // 4).float()

    def lengths(layer: Callable[[Tensor], Tensor], numbers: Sequence[int] = LENGTHS) -> int:
        return accepted(layer, [torch.randn(1, length, width) for length in numbers])

    def placed(where: PosEmbed) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(where(x))

    with torch.no_grad():
        return Result(
            (
                equals("of 4 lengths, convolutions accept", lengths(convolution), 4, 0),
                equals(
                    "attention with sinusoidal positions accepts",
                    lengths(placed(table if learned else SinusoidalPosEmbed())),
                    4,
                    0,
                ),
                equals(
                    f"of the lengths {context} and {context + 1}, attention with a table of {context} rows accepts",
                    lengths(placed(table), (context, context + 1)),
                    1,
                    0,
                ),
                equals("of 4 image sizes, a ViT accepts (its table is interpolated)", accepted(vit, images), 4, 0),
                equals(
                    "a CNN that ends in mean + linear accepts", accepted(classifier(width, flatten=False), images), 4, 0
                ),
                equals(
                    "a CNN that ends in flatten + linear accepts",
                    accepted(classifier(width, flatten=True), images),
                    1,
                    0,
                ),
            )
        )


def run_parallel(*, seed: int = 0, width: int = 8, n_tokens: int = 9, recurrent: bool = False) -> Result:
    """recurrent asks of a recurrent net what holds of attention."""
    torch.manual_seed(seed)
    x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    attention, convolution = MultiHeadAttention(width, 2).double(), AlongTheLine(width, 3, 1).double()
    upper, higher = MultiHeadAttention(width, 2).double(), AlongTheLine(width, 3, 1).double()
    chain = nn.GRU(width, width, batch_first=True).double()

    def attend_one(i: int) -> Tensor:
        """Place i by itself, from the layer's input alone: no other place's answer is needed."""
        return chain(x[:, i : i + 1])[0] if recurrent else attention(x[:, i : i + 1], x)

    def convolve_one(i: int) -> Tensor:
        return convolution(F.pad(x, (0, 0, 1, 1))[:, i : i + 3])[:, 1:2]

    with torch.no_grad():
        whole = chain(x)[0] if recurrent else attention(x)
        alone = torch.cat([attend_one(i) for i in range(n_tokens)], dim=1)
        windows = torch.cat([convolve_one(i) for i in range(n_tokens)], dim=1)
        second = upper(attention(x)) - upper(x)
        deeper = higher(convolution(x)) - higher(x)
        return Result(
            (
                at_most("attention, each place by itself: difference", (alone - whole).abs().max().item(), 1e-12),
                at_most(
                    "convolution, each place by itself: difference",
                    (windows - convolution(x)).abs().max().item(),
                    1e-12,
                ),
                at_least("attention, second layer without the first: difference", second.abs().max().item(), 1e-3),
                at_least("convolution, the same", deeper.abs().max().item(), 1e-3),
            )
        )


def run_rotation(*, seed: int = 0, width: int = 4, side: int = 8, turn: bool = False) -> Result:
    """turn asks of quarter turns what holds of shifts."""
    torch.manual_seed(seed)
    images = torch.randn(1, width, side, side, dtype=torch.float64)
    layer, even = (nn.Conv2d(width, width, 3, padding=1, padding_mode="circular").double() for _ in range(2))
    with torch.no_grad():  # the mean of its four turns is a kernel that is its own turn
        even.weight.copy_(torch.stack([even.weight.rot90(turns, (2, 3)) for turns in range(4)]).mean(0))

    def shifted(x: Tensor) -> Tensor:
        return x.roll((2, 3), dims=(2, 3))

    def turned(x: Tensor) -> Tensor:
        return x.rot90(dims=(2, 3))

    def change(move: Callable[[Tensor], Tensor], layer: nn.Module = layer) -> tuple[float, float]:
        """How far the moved image's answer is from the moved answer, and how far the pooled one moves."""
        with torch.no_grad():
            before, after = layer(images), layer(move(images))
            pooled = after.relu().mean((2, 3)) - before.relu().mean((2, 3))
            return (after - move(before)).abs().max().item(), pooled.abs().max().item()

    move, pooled = change(turned if turn else shifted)
    return Result(
        (
            at_most("shifted image: difference from the shifted answer", move, 1e-12),
            at_most("the pooled answer moves by", pooled, 1e-12),
            at_least("turned image: difference from the turned answer", change(turned)[0], 1e-2),
            at_least("turned image: the pooled answer moves by", change(turned)[1], 1e-4),
            at_most("turned image, a kernel that is its own turn: difference", change(turned, even)[0], 1e-12),
        )
    )


ANY_SIZE = Claim(
    slug="any-size",
    kind="demonstration",
    rows=("R1.7",),
    lesson="Images and convolutions",
    statement="Attention and convolution both accept any size. A learned position table fixes it unless it is "
    "interpolated, as that of our ViT is; so does a CNN's last linear layer if it is given all positions, flattened.",
    conditions="The sides of an image are multiples of the patch size.",
    mistake="A transformer accepts any size, a CNN needs a fixed one.",
    formula="neither W_Q, W_K, W_V nor a kernel has a size that depends on the length; a table (context, width) and "
    "the linear layer after flatten (h w channels, classes) have",
    run=run_any_size,
    try_next="clearhead lab any-size --context 20",
    multiples={"width": 2},
    most={"width": 1024},
)

PARALLEL = Claim(
    slug="parallel",
    kind="demonstration",
    rows=("R1.7",),
    lesson="Images and convolutions",
    statement="Both attention and convolution are parallel over places and sequential over layers.",
    mistake="CNNs are sequential and transformers parallel.",
    formula="h_i^(l+1) = f(h^(l), i):  needs the whole layer below, and no other place of its own",
    run=run_parallel,
    try_next="clearhead lab parallel --recurrent true",
    multiples={"width": 2},
)

ROTATION = Claim(
    slug="rotation",
    kind="demonstration",
    rows=("R0.10",),
    lesson="Images and convolutions",
    statement="A convolution follows a shift of the image; it does not follow a turn, and pooling does not help.",
    mistake="CNNs are invariant to rotation.",
    formula="conv(shift x) = shift conv(x);  conv(turn x) = turn conv(x) only for kernels that are their own turn",
    run=run_rotation,
    try_next="clearhead lab rotation --side 32",
    least={"side": 4},
)


# Images: patches, what the answer is read from, and transformers beside convolutional networks.


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
        name_axis(axes, f"{title}:\nsees {int((norms > 0).sum())} of {n_tokens}", "input (0 = output)")
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
        attention, table, waves = MultiHeadAttention(width, 2), LearnedPosEmbed(context, width), SinusoidalPosEmbed()
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
        name_axis(axes, "", x)
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
    name_axis(left, "One layer", "tokens", "operations in sequence")
    name_axis(right, f"{n_tokens} tokens", "layers", "operations in sequence")
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
        name_axis(axes, title)
    for axes, (one, other) in zip(all_axes[3:], pairs, strict=True):
        largest = (one - other).abs().max().item()
        text = "equal" if largest < 1e-12 else f"differ by {largest:.2g}"
        name_axis(axes, "", text)
    all_axes[0].set_ylabel("conv(move x)", fontsize=SMALL)
    all_axes[3].set_ylabel("move conv(x)", fontsize=SMALL)
    headline(figure, "A convolution follows a shift of the image, but not a rotation")
    return figure
