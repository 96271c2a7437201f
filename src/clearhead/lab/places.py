"""Positions are added, as vectors as wide as a token; and what the answer is read from."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.models.config import GridPlaces, Pooling, VisionConfig
from clearhead.models.vit import VisionTransformer
from clearhead.nn.blocks import DecoderBlock
from clearhead.nn.grid import LearnedGrid

Rule = Callable[[Tensor, Tensor], Tensor]
"""(tokens (P,E), table (P,E)) -> what the encoder is given"""


def added(tokens: Tensor, table: Tensor) -> Tensor:
    return tokens + table


def place_only(tokens: Tensor, table: Tensor) -> Tensor:
    """The mistake: one more number, the place itself."""
    places = torch.arange(len(tokens), dtype=tokens.dtype)
    return torch.cat([tokens, places[:, None]], dim=1)


def model_for(width: int, readout: Pooling, side: int = 4, positions: GridPlaces = "learned") -> VisionTransformer:
    config = VisionConfig(
        width=width,
        depth=2,
        n_heads=2,
        image_size=4 * side,
        patch_size=4,
        n_classes=3,
        readout=readout,
        positions=positions,
    )
    return VisionTransformer(config).double().eval()


def run(*, seed: int = 0, width: int = 16, side: int = 4, rule: Rule = added) -> Result:
    torch.manual_seed(seed)
    model = model_for(width, "mean", side)
    table = model.positions
    assert isinstance(table, LearnedGrid)
    images = torch.randn(1, 3, 4 * side, 4 * side, dtype=torch.float64)
    order = torch.arange(side * side).roll(1)
    with torch.no_grad():
        tokens = model.tokenize(images)
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


def gradient_by_token(width: int, readout: Pooling, images: Tensor) -> Tensor:
    """Norm of the gradient of the squared logits by each token that leaves the encoder. (L,)"""
    model = model_for(width, readout)
    encoded: list[Tensor] = []
    handle = model.encoder.register_forward_hook(lambda module, args, out: encoded.append(out))
    answer = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(answer.square().sum(), encoded)
    return gradient[0].norm(dim=-1)


def run_readout(*, seed: int = 0, width: int = 16, mean: bool = False) -> Result:
    """mean asks of mean pooling what holds of the class token."""
    torch.manual_seed(seed)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def read_places(readout: Pooling) -> int:
        """Tokens leaving the encoder that the answer is read from."""
        return int((gradient_by_token(width, readout, images) > 0).sum())

    def classifier_inputs(*readouts: Pooling) -> int:
        """The largest number of inputs of a classifier."""
        given: list[Tensor] = []
        for readout in readouts:
            model = model_for(width, readout)
            model.head.register_forward_pre_hook(lambda module, args: given.append(args[0]))
            model(images)
        return max(x[0].numel() for x in given)

    model = model_for(width, "class")
    norm, z = model.encoder.norm, []
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
            equals("class token: tokens that the answer is read from", read_places("mean" if mean else "class"), 1, 0),
            equals("mean pooling: tokens that the answer is read from", read_places("mean"), 16, 0),
            equals("numbers that the classifier is given, of either", classifier_inputs("class", "mean"), width, 0),
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
    run=run,
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
    run=run_readout,
    try_next="clearhead shapes vit_base",
    multiples={"width": 2},
)
