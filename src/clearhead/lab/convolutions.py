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


def receptive_field(layer: nn.Module, x: Tensor) -> int:
    """The number of tokens that the middle output depends on: nonzero blocks of its Jacobian. x (1,L,E)"""
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
    """depth is the number of convolutions whose receptive field is compared with `kernel_size`."""
    if kernel_size > num_tokens:
        raise ValueError(f"num_tokens must be at least kernel_size, got {num_tokens} and {kernel_size}")
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    needed = -(-(num_tokens // 2) // (kernel_size // 2))
    return Result(
        (
            equals(
                "receptive field of one attention layer (tokens)",
                receptive_field(MultiHeadAttention(width, 2).double(), x),
                num_tokens,
                0,
            ),
            equals(
                "receptive field of one convolution (tokens)",
                receptive_field(ConvStack(width, kernel_size, depth).double(), x),
                kernel_size,
                0,
            ),
            equals(
                f"receptive field of {needed} convolutions (tokens)",
                receptive_field(ConvStack(width, kernel_size, needed).double(), x),
                num_tokens,
                0,
            ),
        )
    )


def draw_receptive_field(*, seed: int = 0, width: int = 8, num_tokens: int = 21, kernel_size: int = 3) -> "Figure":
    """Attention, one convolution, and as many convolutions as cover every token."""
    needed = -(-(num_tokens // 2) // (kernel_size // 2))
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    layers = {
        "1 attention layer": (MultiHeadAttention(width, 2), BLUE),
        "1 convolution": (ConvStack(width, kernel_size, 1), VERMILION),
        f"{needed} convolutions": (ConvStack(width, kernel_size, needed), GREEN),
    }
    figure, all_axes = subplots("ABC", same_y=True)
    offsets = [index - num_tokens // 2 for index in range(num_tokens)]
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
    statement="The receptive field of one attention layer is the whole sequence. That of a convolution is its kernel "
    "size, and only a stack of convolutions covers the sequence.",
    misconception="The receptive field of a single convolution is the whole input, too.",
    formula="d h_i / d x_j is dense for attention, k wide for a convolution, and 1 + depth (k-1) wide for a stack",
    run=run_receptive_field,
    figure=draw_receptive_field,
    try_next="clearhead lab receptive-field --kernel-size 7",
    multiple_of={"width": 2},
    minimum={"kernel_size": 3},
)


LENGTHS = (5, 8, 13, 40)


SIDES = (12, 16, 20, 32)
"""image sizes; networks with a fixed input size are built for the second"""


def num_accepted(layer: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> int:
    """The number of inputs that the layer accepts."""
    count = 0
    for x in inputs:
        try:
            count += len(layer(x)) == len(x)
        except (ValueError, RuntimeError):  # position table too short, or wrong number of features
            continue
    return count


def classifier(width: int, *, flatten: bool) -> nn.Sequential:
    """A CNN with three classes whose linear layer receives the flattened feature map or its mean over positions."""
    head = (nn.Flatten(), nn.Linear(width * SIDES[1] ** 2, 3)) if flatten else (MeanOverImage(), nn.Linear(width, 3))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *head)


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

    def num_accepted_lengths(layer: Callable[[Tensor], Tensor], sizes: Sequence[int] = LENGTHS) -> int:
        return num_accepted(layer, [torch.randn(1, length, width) for length in sizes])

    def with_positions(pos_embed: PosEmbed) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(pos_embed(x))

    with torch.no_grad():
        return Result(
            (
                equals("convolutions: accepted lengths of 4", num_accepted_lengths(convolution), 4, 0),
                equals(
                    "attention with sinusoidal positions: accepted lengths of 4",
                    num_accepted_lengths(with_positions(table if learned_positions else SinusoidalPosEmbed())),
                    4,
                    0,
                ),
                equals(
                    f"attention with {context_length} learned positions: accepted lengths of 2",
                    num_accepted_lengths(with_positions(table), (context_length, context_length + 1)),
                    1,
                    0,
                ),
                equals("ViT with interpolated positions: accepted image sizes of 4", num_accepted(vit, images), 4, 0),
                equals(
                    "CNN with mean + linear: accepted image sizes of 4",
                    num_accepted(classifier(width, flatten=False), images),
                    4,
                    0,
                ),
                equals(
                    "CNN with flatten + linear: accepted image sizes of 4",
                    num_accepted(classifier(width, flatten=True), images),
                    1,
                    0,
                ),
            )
        )


@torch.no_grad()
def draw_input_size(*, seed: int = 0, width: int = 8, context_length: int = 8) -> "Figure":
    """Which layers accept which sequence lengths and image sizes."""
    torch.manual_seed(seed)
    attention, table, sinusoidal = (
        MultiHeadAttention(width, 2),
        LearnedPosEmbed(context_length, width),
        SinusoidalPosEmbed(),
    )
    sequence: dict[str, Callable[[Tensor], Tensor]] = {
        "convolution": ConvStack(width, kernel_size=3, depth=2),
        "attention, sinusoidal\npositions": lambda x: attention(sinusoidal(x)),
        f"attention, learned\ntable of {context_length} rows": lambda x: attention(table(x)),
    }
    built_size = SIDES[1]
    image: dict[str, Callable[[Tensor], Tensor]] = {
        "CNN, mean and linear": classifier(width, flatten=False),
        "CNN, flatten and linear": classifier(width, flatten=True),
        "ViT, learned table,\ninterpolated": small_vit(4 * width, "mean", built_size // 4).float(),
    }
    lengths = torch.tensor(
        [[num_accepted(layer, [torch.randn(1, n, width)]) for n in LENGTHS] for layer in sequence.values()]
    )
    sides = torch.tensor([[num_accepted(layer, [torch.randn(1, 3, n, n)]) for n in SIDES] for layer in image.values()])
    figure, panels = subplots("A;B")
    for axes, accepts, names, sizes, x in (
        (panels[0], lengths, sequence, LENGTHS, "sequence length (tokens)"),
        (panels[1], sides, image, SIDES, f"image size (pixels; built for {built_size})"),
    ):
        mask_map(axes, accepts, [["yes" if cell else "no" for cell in row] for row in accepts.tolist()])
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
    statement="Attention layers and convolutions accept inputs of any size. The size is limited only by a learned "
    "position table that is not interpolated, or by a linear layer that receives a flattened feature map.",
    conditions="The ViT interpolates its position table; image height and width are multiples of the patch size.",
    misconception="A transformer accepts any input size, whereas a CNN requires a fixed one.",
    formula="the shapes of W_Q, W_K, W_V and of a kernel do not depend on the length;  those of a position table "
    "(context_length, width) and of a linear layer after flatten (h·w·channels, classes) do",
    run=run_input_size,
    figure=draw_input_size,
    try_next="clearhead lab input-size --context-length 20",
    multiple_of={"width": 2},
    maximum={"width": 1024},
)


def run_parallelism(*, seed: int = 0, width: int = 8, num_tokens: int = 9, recurrent: bool = False) -> Result:
    """recurrent=True tests a GRU in place of attention."""
    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, width, dtype=torch.float64)
    attention, convolution = MultiHeadAttention(width, 2).double(), ConvStack(width, 3, 1).double()
    attention_2, convolution_2 = MultiHeadAttention(width, 2).double(), ConvStack(width, 3, 1).double()
    gru = nn.GRU(width, width, batch_first=True).double()

    def attend_one(i: int) -> Tensor:
        """Output i, computed from the input of the layer without the other outputs."""
        return gru(x[:, i : i + 1])[0] if recurrent else attention(x[:, i : i + 1], x)

    def convolve_one(i: int) -> Tensor:
        return convolution(F.pad(x, (0, 0, 1, 1))[:, i : i + 3])[:, 1:2]

    with torch.no_grad():
        attended = gru(x)[0] if recurrent else attention(x)
        attended_separately = torch.cat([attend_one(i) for i in range(num_tokens)], dim=1)
        convolved_separately = torch.cat([convolve_one(i) for i in range(num_tokens)], dim=1)
        attention_change = attention_2(attention(x)) - attention_2(x)
        convolution_change = convolution_2(convolution(x)) - convolution_2(x)
        return Result(
            (
                at_most(
                    "attention, each position computed separately: difference",
                    (attended_separately - attended).abs().max().item(),
                    1e-12,
                ),
                at_most(
                    "convolution, each position computed separately: difference",
                    (convolved_separately - convolution(x)).abs().max().item(),
                    1e-12,
                ),
                at_least(
                    "attention, second layer applied without the first: difference",
                    attention_change.abs().max().item(),
                    1e-3,
                ),
                at_least(
                    "convolution, second layer applied without the first: difference",
                    convolution_change.abs().max().item(),
                    1e-3,
                ),
            )
        )


def draw_parallelism(*, seed: int = 0, width: int = 8, num_tokens: int = 9) -> "Figure":
    """The number of sequential operations against tokens and against layers."""

    def recurrent() -> nn.Module:
        return nn.GRU(width, width, batch_first=True)

    layers: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
        "attention": (lambda: MultiHeadAttention(width, 2), BLUE, "o"),
        "convolution": (lambda: ConvStack(width, 3, 1), GREEN, "s"),
        "recurrent network (GRU)": (recurrent, VERMILION, "^"),
    }

    def depth_of(build: Callable[[], nn.Module], length: int, depth: int) -> int:
        x = torch.randn(1, length, width)
        for _ in range(depth):
            out = build()(x)
            x = out[0] if isinstance(out, tuple) else out
        return sequential_operations(x)

    lengths = sorted({1, *(max(1, round(num_tokens * quarter / 4)) for quarter in range(1, 5))})
    depths = [1, 2, 3, 4]
    figure, (left, right) = subplots("AB")
    torch.manual_seed(seed)
    for text, (build, color, marker) in reversed(layers.items()):
        style: dict[str, Any] = {"color": color, "marker": marker, "linewidth": 3, "markersize": 9, "label": text}
        left.plot(lengths, [depth_of(build, n, 1) for n in lengths], **style)
        if build is not recurrent:
            right.plot(depths, [depth_of(build, num_tokens, n) for n in depths], **style)
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
    misconception="CNNs are sequential, whereas transformers are parallel.",
    formula="h_i^(l+1) = f(h^(l), i) needs the layer below, but no other position of its own layer",
    run=run_parallelism,
    figure=draw_parallelism,
    try_next="clearhead lab parallelism --recurrent true",
    multiple_of={"width": 2},
)
