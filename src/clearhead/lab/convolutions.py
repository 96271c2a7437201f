"""Attention and convolution compared: receptive field, input size and parallelism."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.lstm import sequential_operations
from clearhead.lab.plots import TEXT_SIZE, label_axes, legend_below, mask_map, set_headline, subplots
from clearhead.lab.vision import small_vit
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import LearnedPosEmbed, PosEmbed, SinusoidalPosEmbed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def num_inputs_seen(layer: nn.Module, x: Tensor) -> int:
    """The number of tokens that the middle output depends on: non-zero blocks of its Jacobian. x (1,L,E)"""
    x = x.clone().requires_grad_()
    layer(x)[0, x.shape[1] // 2].square().sum().backward()
    assert x.grad is not None
    return int((x.grad[0].abs().sum(-1) > 0).sum())


class ConvStack(nn.Module):
    """`depth` convolutions over tokens (1,L,E)."""

    def __init__(self, width: int, kernel_size: int, depth: int):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2) for _ in range(depth))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mT).mT


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """Norm of the Jacobian of the middle output with respect to each input; largest = 1. x (1,L,E) -> (L,)"""
    middle = x.shape[1] // 2
    jacobian = torch.autograd.functional.jacobian(lambda tokens: layer(tokens)[0, middle], x)  # (E,1,L,E)
    norms = jacobian[:, 0].square().sum(dim=(0, 2)).sqrt()
    return norms / norms.max()


def run_receptive_field(
    *, seed: int = 0, width: int = 8, num_tokens: int = 21, kernel_size: int = 3, depth: int = 1
) -> Result:
    """depth is the number of convolutions that are tested to see `kernel_size` tokens."""
    if kernel_size > num_tokens:
        raise ValueError(f"num_tokens must be at least kernel_size, got {num_tokens} and {kernel_size}")
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    needed = -(-(num_tokens // 2) // (kernel_size // 2))
    return Result(
        (
            equals(
                "tokens that one attention layer sees",
                num_inputs_seen(MultiHeadAttention(width, 2).double(), x),
                num_tokens,
                0,
            ),
            equals(
                "tokens that one convolution sees",
                num_inputs_seen(ConvStack(width, kernel_size, depth).double(), x),
                kernel_size,
                0,
            ),
            equals(
                f"tokens that {needed} convolutions see",
                num_inputs_seen(ConvStack(width, kernel_size, needed).double(), x),
                num_tokens,
                0,
            ),
        )
    )


def draw_receptive_field(*, seed: int = 0, width: int = 8, num_tokens: int = 21, kernel_size: int = 3) -> "Figure":
    """Attention, one convolution, and the number of convolutions needed to see every token."""
    needed = -(-(num_tokens // 2) // (kernel_size // 2))
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    layers = {
        "1 attention layer": (MultiHeadAttention(width, 2), BLUE),
        "1 convolution": (ConvStack(width, kernel_size, 1), VERMILION),
        f"{needed} convolutions": (ConvStack(width, kernel_size, needed), GREEN),
    }
    figure, all_axes = subplots("ABC", same_y=True)
    offsets = [place - num_tokens // 2 for place in range(num_tokens)]
    lowest = 1.0
    for axes, (title, (layer, color)) in zip(all_axes, layers.items(), strict=True):
        norms = influence(layer.double(), x)
        lowest = min(lowest, norms[norms > 0].min().item())
        axes.bar(offsets, norms.tolist(), color=color, width=0.8)
        axes.grid(axis="x", visible=False)
        label_axes(axes, f"{title}:\nsees {int((norms > 0).sum())} of {num_tokens}", "input (0 = output)")
    all_axes[0].set_yscale("log")
    all_axes[0].set_ylim(lowest / 3, 1.5)
    all_axes[0].set_ylabel("influence (largest = 1)", fontsize=TEXT_SIZE)
    set_headline(figure, "One attention layer sees every token; convolutions need depth for that")
    return figure


RECEPTIVE_FIELD = Claim(
    slug="receptive-field",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="One attention layer sees every token; a convolution sees kernel_size tokens and needs depth to see "
    "all of them.",
    misconception="A single convolution also sees the whole input.",
    formula="d h_i / d x_j is dense for attention, k wide for a convolution, and 1 + depth (k-1) wide for a stack",
    run=run_receptive_field,
    figure=draw_receptive_field,
    try_next="clearhead lab receptive-field --kernel-size 7",
    multiple_of={"width": 2},
    minimum={"kernel_size": 3},
)


LENGTHS = (5, 8, 13, 40)


SIDES = (12, 16, 20, 32)
"""image sizes; networks for a fixed size are built for the second"""


def accepted(layer: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> int:
    """The number of inputs that the layer accepts."""
    count = 0
    for x in inputs:
        try:
            count += len(layer(x)) == len(x)
        except (ValueError, RuntimeError):  # position table too short, or wrong number of features
            continue
    return count


def classifier(width: int, *, flatten: bool) -> nn.Sequential:
    """A CNN with three classes whose last linear layer receives the flattened image or the mean over positions."""
    ends = (nn.Flatten(), nn.Linear(width * SIDES[1] ** 2, 3)) if flatten else (MeanOverImage(), nn.Linear(width, 3))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *ends)


class MeanOverImage(nn.Module):
    """Global average pooling. (B,C,h,w) -> (B,C)"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def run_input_size(
    *, seed: int = 0, width: int = 8, context_length: int = 8, learned_positions: bool = False
) -> Result:
    """learned_positions=True tests a learned table of `context_length` rows in place of sinusoidal positions."""
    torch.manual_seed(seed)
    attention, convolution = MultiHeadAttention(width, 2), ConvStack(width, kernel_size=3, depth=2)
    table = LearnedPosEmbed(context_length, width)
    images = [torch.randn(1, 3, side, side) for side in SIDES]
    vit = small_vit(width, "cls", SIDES[1] // 4).float()

    def lengths(layer: Callable[[Tensor], Tensor], numbers: Sequence[int] = LENGTHS) -> int:
        return accepted(layer, [torch.randn(1, length, width) for length in numbers])

    def placed(where: PosEmbed) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(where(x))

    with torch.no_grad():
        return Result(
            (
                equals("convolutions: accepted lengths of 4", lengths(convolution), 4, 0),
                equals(
                    "attention with sinusoidal positions: accepted lengths of 4",
                    lengths(placed(table if learned_positions else SinusoidalPosEmbed())),
                    4,
                    0,
                ),
                equals(
                    f"attention with {context_length} learned positions: accepted lengths of 2",
                    lengths(placed(table), (context_length, context_length + 1)),
                    1,
                    0,
                ),
                equals("ViT with interpolated positions: accepted image sizes of 4", accepted(vit, images), 4, 0),
                equals(
                    "CNN with mean + linear: accepted image sizes of 4",
                    accepted(classifier(width, flatten=False), images),
                    4,
                    0,
                ),
                equals(
                    "CNN with flatten + linear: accepted image sizes of 4",
                    accepted(classifier(width, flatten=True), images),
                    1,
                    0,
                ),
            )
        )


@torch.no_grad()
def draw_input_size(*, seed: int = 0, width: int = 8, context_length: int = 8) -> "Figure":
    """Which layers accept which sequence lengths and image sizes."""
    torch.manual_seed(seed)
    attention, table, waves = MultiHeadAttention(width, 2), LearnedPosEmbed(context_length, width), SinusoidalPosEmbed()
    sequence: dict[str, Callable[[Tensor], Tensor]] = {
        "convolution": ConvStack(width, kernel_size=3, depth=2),
        "attention, sinusoidal\npositions": lambda x: attention(waves(x)),
        f"attention, learned\ntable of {context_length} rows": lambda x: attention(table(x)),
    }
    built = SIDES[1]
    image: dict[str, Callable[[Tensor], Tensor]] = {
        "CNN, mean and linear": classifier(width, flatten=False),
        "CNN, flatten and linear": classifier(width, flatten=True),
        "ViT, learned table,\ninterpolated": small_vit(4 * width, "mean", built // 4).float(),
    }
    lengths = torch.tensor(
        [[accepted(layer, [torch.randn(1, n, width)]) for n in LENGTHS] for layer in sequence.values()]
    )
    sides = torch.tensor([[accepted(layer, [torch.randn(1, 3, n, n)]) for n in SIDES] for layer in image.values()])
    figure, both = subplots("A;B")
    for axes, taken, names, sizes, x in (
        (both[0], lengths, sequence, LENGTHS, "sequence length (tokens)"),
        (both[1], sides, image, SIDES, f"image size (pixels; built for {built})"),
    ):
        mask_map(axes, taken, [["yes" if cell else "no" for cell in row] for row in taken.tolist()])
        axes.set_aspect("auto")
        axes.set_yticks(range(len(names)), labels=list(names))
        axes.set_xticks(range(len(sizes)), labels=[str(size) for size in sizes])
        label_axes(axes, "", x)
    set_headline(figure, "Attention and convolution accept any size; fixed tables and flatten do not")
    return figure


INPUT_SIZE = Claim(
    slug="input-size",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="Attention and convolution both accept inputs of any size. A learned position table fixes the size "
    "unless it is interpolated, as in our ViT; so does the last linear layer of a CNN if it receives the flattened "
    "image.",
    conditions="The sides of an image are multiple_of of the patch size.",
    misconception="A transformer accepts any input size, a CNN needs a fixed one.",
    formula="the shapes of W_Q, W_K, W_V and of a kernel do not depend on the length;  those of a position table "
    "(context_length, width) and of a linear layer after flatten (h·w·channels, classes) do",
    run=run_input_size,
    figure=draw_input_size,
    try_next="clearhead lab input-size --context_length 20",
    multiple_of={"width": 2},
    maximum={"width": 1024},
)


def run_parallelism(*, seed: int = 0, width: int = 8, num_tokens: int = 9, recurrent: bool = False) -> Result:
    """recurrent=True tests a GRU in place of attention."""
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    attention, convolution = MultiHeadAttention(width, 2).double(), ConvStack(width, 3, 1).double()
    upper, higher = MultiHeadAttention(width, 2).double(), ConvStack(width, 3, 1).double()
    chain = nn.GRU(width, width, batch_first=True).double()

    def attend_one(i: int) -> Tensor:
        """Position i computed from the layer's input, without the other outputs."""
        return chain(x[:, i : i + 1])[0] if recurrent else attention(x[:, i : i + 1], x)

    def convolve_one(i: int) -> Tensor:
        return convolution(F.pad(x, (0, 0, 1, 1))[:, i : i + 3])[:, 1:2]

    with torch.no_grad():
        full = chain(x)[0] if recurrent else attention(x)
        alone = torch.cat([attend_one(i) for i in range(num_tokens)], dim=1)
        windows = torch.cat([convolve_one(i) for i in range(num_tokens)], dim=1)
        second = upper(attention(x)) - upper(x)
        deeper = higher(convolution(x)) - higher(x)
        return Result(
            (
                at_most(
                    "attention, each position computed alone: difference", (alone - full).abs().max().item(), 1e-12
                ),
                at_most(
                    "convolution, each position computed alone: difference",
                    (windows - convolution(x)).abs().max().item(),
                    1e-12,
                ),
                at_least(
                    "attention, second layer applied without the first: difference", second.abs().max().item(), 1e-3
                ),
                at_least(
                    "convolution, second layer applied without the first: difference", deeper.abs().max().item(), 1e-3
                ),
            )
        )


def draw_parallelism(*, seed: int = 0, width: int = 8, num_tokens: int = 9) -> "Figure":
    """The number of sequential operations against tokens and against layers."""

    def recurrent() -> nn.Module:
        return nn.GRU(width, width, batch_first=True)

    makers: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
        "attention": (lambda: MultiHeadAttention(width, 2), BLUE, "o"),
        "convolution": (lambda: ConvStack(width, 3, 1), GREEN, "s"),
        "recurrent network (GRU)": (recurrent, VERMILION, "^"),
    }

    def chain(make: Callable[[], nn.Module], length: int, depth: int) -> int:
        x = torch.randn(1, length, width)
        for _ in range(depth):
            out = make()(x)
            x = out[0] if isinstance(out, tuple) else out
        return sequential_operations(x)

    lengths = sorted({1, *(max(1, round(num_tokens * part / 4)) for part in range(1, 5))})
    depths = [1, 2, 3, 4]
    figure, (left, right) = subplots("AB")
    torch.manual_seed(seed)
    for text, (make, color, marker) in reversed(makers.items()):
        look: dict[str, Any] = {"color": color, "marker": marker, "linewidth": 3, "markersize": 9, "label": text}
        left.plot(lengths, [chain(make, n, 1) for n in lengths], **look)
        if make is not recurrent:
            right.plot(depths, [chain(make, num_tokens, n) for n in depths], **look)
    for axes in (left, right):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    left.set_xticks(lengths)
    right.set_xticks(depths)
    label_axes(left, "One layer", "tokens", "sequential operations")
    label_axes(right, f"{num_tokens} tokens", "layers", "sequential operations")
    legend_below(figure, left)
    set_headline(figure, "Attention and convolution: parallel over tokens, sequential over layers")
    return figure


PARALLELISM = Claim(
    slug="parallelism",
    kind="demonstration",
    lesson="Images and convolutions",
    statement="Attention and convolution are both parallel over positions and sequential over layers.",
    misconception="CNNs are sequential and transformers parallel.",
    formula="h_i^(l+1) = f(h^(l), i) needs the layer below, but no other position of its own layer",
    run=run_parallelism,
    figure=draw_parallelism,
    try_next="clearhead lab parallelism --recurrent true",
    multiple_of={"width": 2},
)
