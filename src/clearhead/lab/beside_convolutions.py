"""What is said of transformers against convolutional networks: any size, in parallel, turned images."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.places import model_for
from clearhead.lab.reach import AlongTheLine
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import LearnedPositions, Positions, SinusoidalPositions

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


def run(*, seed: int = 0, width: int = 8, context: int = 8, learned: bool = False) -> Result:
    """learned asks of a learned table of `context` rows what holds of sinusoidal positions."""
    torch.manual_seed(seed)
    attention, convolution = MultiHeadAttention(width, 2), AlongTheLine(width, kernel=3, depth=2)
    table = LearnedPositions(context, width)
    images = [torch.randn(1, 3, side, side) for side in SIDES]
    vit = model_for(width, "class", SIDES[1] // 4).float()

    def lengths(layer: Callable[[Tensor], Tensor], numbers: Sequence[int] = LENGTHS) -> int:
        return accepted(layer, [torch.randn(1, length, width) for length in numbers])

    def placed(where: Positions) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(where(x))

    with torch.no_grad():
        return Result(
            (
                equals("of 4 lengths, convolutions accept", lengths(convolution), 4, 0),
                equals(
                    "attention with sinusoidal positions accepts",
                    lengths(placed(table if learned else SinusoidalPositions())),
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
    run=run,
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
