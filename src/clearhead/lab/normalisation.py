"""Layer norm: how it differs from batch norm, and where it stands in the block."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least, at_most, within
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import EncoderBlock
from clearhead.nn.feedforward import FeedForward


def run(*, seed: int = 0, width: int = 16, n_tokens: int = 5, batch_norm: bool = False) -> Result:
    """All other tokens of the batch change. batch_norm=True asks of batch norm in training mode what holds of layer
    norm."""
    torch.manual_seed(seed)
    x = torch.randn(4, n_tokens, width, dtype=torch.float64)
    others = 10 * torch.randn_like(x)
    others[0, 0] = x[0, 0]

    def by_layer(tokens: Tensor) -> Tensor:
        return nn.LayerNorm(width).double()(tokens)

    def by_batch(tokens: Tensor) -> Tensor:
        return nn.BatchNorm1d(width).double()(tokens.mT).mT

    stored = nn.BatchNorm1d(width).double()
    stored(3 * torch.randn_like(x).mT + 1)  # one pass in training mode stores the statistics of another batch
    stored.eval()

    def by_stored(tokens: Tensor) -> Tensor:
        return stored(tokens.mT).mT

    def change(norm: Callable[[Tensor], Tensor]) -> float:
        """How far the output for one token moves when all other tokens of the batch do."""
        with torch.no_grad():
            return (norm(x)[0, 0] - norm(others)[0, 0]).abs().max().item()

    return Result(
        (
            at_most("layer norm: output for one token moves by", change(by_batch if batch_norm else by_layer), 0),
            at_least("batch norm, training mode: it moves by", change(by_batch), 0.01),
            at_most("batch norm, evaluation mode: it moves by", change(by_stored), 0),
        )
    )


def gradients(norm: str, depth: int, width: int) -> list[float]:
    """Norm of the gradient at the input of each of `depth` fresh blocks, the first of the stack first."""
    blocks = [
        EncoderBlock(MultiHeadAttention(width, 2), FeedForward(width, 4 * width), width=width, norm=norm).double()
        for _ in range(depth)
    ]
    final = nn.LayerNorm(width).double() if norm == "pre" else nn.Identity()
    h = torch.randn(16, 6, width, dtype=torch.float64, requires_grad=True)
    inputs: list[Tensor] = []
    for block in blocks:
        inputs.append(h)
        h = block(h)
    loss = (final(h) * torch.randn_like(h)).sum()
    return [gradient.norm().item() for gradient in torch.autograd.grad(loss, inputs)]


def run_wiring(*, seed: int = 0, width: int = 32, depth: int = 24, post: bool = False) -> Result:
    """post asks of post-norm what holds of pre-norm."""
    torch.manual_seed(seed)

    def last(norm: str) -> float:
        """Gradient at the last of `depth` blocks over that at a single one."""
        return gradients(norm, depth, width)[-1] / gradients(norm, 1, width)[-1]

    shrinking, steady = last("post" if post else "pre"), last("post")
    return Result(
        (
            within(
                f"pre-norm: last of {depth} blocks over a single one, times sqrt({depth})",
                shrinking * math.sqrt(depth),
                0.5,
                1.8,
            ),
            at_least("post-norm: the last over a single one", steady, 0.35),
        )
    )


LAYER = Claim(
    slug="layer-norm",
    rows=("R4.14",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="Layer norm treats each token by itself. With batch norm in training mode, the output for a token "
    "depends on the rest of the batch; in evaluation mode it does not, for the statistics are stored ones.",
    mistake="Batch norm would do the same; or: with batch norm, a trained model's output depends on the batch.",
    formula="LN(x) = (x - mean(x)) / std(x), over the width of one token;  BN: over the batch in training mode, "
    "by the running mean and variance in evaluation mode",
    run=run,
    try_next="clearhead lab pre-norm",
    kind="demonstration",
)

WIRING = Claim(
    slug="pre-norm",
    rows=("R4.14", "R0.5"),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="In a fresh pre-norm stack the last block's gradient falls as 1/sqrt(depth); with post-norm it stays.",
    mistake="Where the norm stands makes no difference to a fresh model.",
    formula="pre: |x_L| grows as sqrt(L), and the last norm divides by it;  post: every block's input has norm sqrt(d)",
    run=run_wiring,
    try_next="clearhead lab pre-norm --depth 48",
    least={"depth": 16, "width": 8},
    multiples={"width": 2},
)
