"""The gradient from the last output of an untrained encoder-decoder to its first input."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data.vocab import BOS
from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.lstm import N_TOKENS, NAMES, TRANSFORMER, WITH, WITHOUT, rival, spread
from clearhead.lab.plots import canvas, headline, key_below, name_axis
from clearhead.models.seq2seq import Seq2Seq

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = 4
"""tokens of the sequence that others are compared with"""
N_EXAMPLES = 16


def end_to_end(model: nn.Module, length: int, width: int, random: torch.Generator) -> float:
    """Norm of the gradient of the last output's loss by the first input, the mean of some random sequences."""
    source = torch.randn(N_EXAMPLES, length, width, generator=random, dtype=torch.float64, requires_grad=True)
    target, answers = torch.randint(N_TOKENS, (2, N_EXAMPLES, length), generator=random)
    last: Tensor = model(None, target, inputs_embeds=source)[:, -1]
    (gradient,) = torch.autograd.grad(F.cross_entropy(last, answers[:, -1], reduction="sum"), source)
    return gradient[:, 0].norm(dim=-1).mean().item()


def fading(model: nn.Module, lengths: Sequence[int], width: int, seed: int) -> list[float]:
    """The gradient at each length, in units of that at the first of them."""
    random = torch.Generator().manual_seed(seed)
    found = [end_to_end(model, length, width, random) for length in lengths]
    return [gradient / found[0] for gradient in found]


def untrained(width: int, forget: float, seed: int) -> dict[str, nn.Module]:
    """The three models with random weights; float64, for the gradients become very small."""
    torch.manual_seed(seed)
    return {name: rival(name, width, forget=forget).double() for name in NAMES}


def run_gradient_path(
    *, seed: int = 0, width: int = 32, length: int = 64, forget: float = 1.0, attends: bool = True
) -> Result:
    """attends=False asks of the LSTM without attention what holds with it; forget=8 holds the LSTMs' cells open."""
    models = untrained(width, forget, seed)
    left = {name: fading(model, (SHORT, length), width, seed)[-1] for name, model in models.items()}
    further = length / SHORT
    return Result(
        (
            at_most("parameters of the largest model over the smallest", spread(list(models.values())), 1.05),
            at_least(f"transformer: gradient left, times {further:g}", left[TRANSFORMER] * further, 0.3),
            at_least("LSTM with attention: the same", left[WITH if attends else WITHOUT] * further, 0.3),
            at_most("LSTM alone: the same", left[WITHOUT] * further, 0.01),
        )
    )


GRADIENT_PATH = Claim(
    slug="gradient-path",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="In untrained models, the gradient from the last output to the first input falls as 1/length through "
    "attention, and exponentially through an LSTM whose forget gates are not held open.",
    mistake="An LSTM's cell carries the gradient over any distance.",
    conditions="Random weights: the gradient with which training starts, not that of trained models, whose gates and "
    "attention weights may be anything.",
    formula="attention: 1 step, its weight about 1/n;  LSTM: 2n steps, each of d c_t / d c_(t-1) = f_t + ..., f_t < 1",
    run=run_gradient_path,
    try_next="clearhead lab gradient-path --forget 8",
    least={"width": 16, "length": 32, "forget": -10},
    most={"width": 256, "length": 256, "forget": 100},
    multiples={"width": 2},
)


# Sequential operations of an encoder-decoder: those that can only be done one after the other.


def longest_chain(output: Tensor) -> int:
    """Operations on the longest way from the output back to an input or a weight: each needs the one before it."""
    assert output.grad_fn is not None
    lengths: dict[object, int] = {}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        inputs = [other for other, _ in node.next_functions if other is not None]
        unknown = [other for other in inputs if other not in lengths]
        waiting += unknown
        if not unknown:
            lengths[waiting.pop()] = 1 + max((lengths[other] for other in inputs), default=0)
    return lengths[output.grad_fn]


def chain(model: nn.Module, length: int) -> int:
    """That of all logits for one source and target of this length."""
    ids = torch.arange(length)[None] % N_TOKENS
    return longest_chain(model(ids, ids))


def decoder_passes(model: Seq2Seq, length: int) -> int:
    """Passes of the decoder, one after the other, in which a transformer generates that many tokens by itself."""
    passes = []
    handle = model.decoder.register_forward_hook(lambda *_: passes.append(1))
    try:
        source = torch.arange(length)[None] % N_TOKENS
        model.generate(source, bos_id=BOS, eos_id=None, max_new_tokens=length)
    finally:
        handle.remove()
    return len(passes)


def run_in_turn(*, seed: int = 0, width: int = 32, length: int = 64, recurrent: bool = False) -> Result:
    """recurrent asks of the LSTM with attention what holds of the transformer."""
    models = untrained(width, forget=1.0, seed=seed)
    longer = {name: chain(model, length) - chain(model, SHORT) for name, model in models.items()}
    tokens = 2 * (length - SHORT)
    transformer = models[TRANSFORMER]
    assert isinstance(transformer, Seq2Seq)
    return Result(
        (
            equals(
                f"transformer, {length} tokens, not {SHORT}: more sequential operations by",
                longer[WITH if recurrent else TRANSFORMER],
                0,
                0,
            ),
            at_least("LSTM alone: more, for each further token read or written", longer[WITHOUT] / tokens, 1),
            at_least("LSTM with attention: the same", longer[WITH] / tokens, 1),
            equals(
                f"transformer generates {length} tokens: decoder passes in sequence",
                decoder_passes(transformer, length),
                length,
                0,
            ),
        )
    )


IN_TURN = Claim(
    slug="in-turn",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="Under teacher forcing, a transformer's longest chain of operations is the same for any length; an "
    "LSTM's grows with every token, with attention or without. Generation is sequential in both.",
    mistake="With attention, an LSTM can read all tokens at once, too; or: a transformer generates all tokens at once.",
    conditions="Teacher forcing, as in training: all target tokens are given. In generation each token needs the one "
    "before it, so the decoder runs once for each.",
    formula="h_t = f(x_t, h_(t-1)) waits for h_(t-1);  softargmax(beta q_t Kᵀ) V for no other answer of its layer",
    run=run_in_turn,
    try_next="clearhead lab in-turn --recurrent true",
    least={"width": 16, "length": 8},
    most={"width": 256, "length": 256},
    multiples={"width": 2},
    kind="demonstration",
)


# Recurrence beside attention: gradients over long distances, and operations that wait for one another.


COLORS = {TRANSFORMER: BLUE, WITH: GREEN, WITHOUT: VERMILION}
MARKERS = {TRANSFORMER: ("o", 7), WITH: ("s", 10), WITHOUT: ("^", 14)}
"""shape and size: where lines meet, all are seen"""


def line(axes: "Axes", whose: str, x: Sequence[float], y: Sequence[float]) -> None:
    marker, size = MARKERS[whose]
    axes.plot(x, y, f"{marker}-", color=COLORS[whose], linewidth=3, markersize=size, label=whose)


def doubling(axes: "Axes", lengths: Sequence[float]) -> None:
    """Lengths along the bottom, each doubling as wide as the one before."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels=[f"{length:g}" for length in lengths])


def up_to(length: int) -> list[int]:
    """Lengths from SHORT, doubled as long as they are well below the last."""
    return [SHORT * 2**power for power in range(12) if SHORT * 2**power <= length / 1.5] + [length]


def draw_gradient_path(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """The gradient from the last output to the first input of untrained models, against length, beside 1/length."""
    lengths = up_to(length)
    with torch.random.fork_rng(devices=[]):
        models = untrained(width, 1.0, seed)
    figure, (axes,) = canvas()
    axes.plot(lengths, [lengths[0] / n for n in lengths], "--", color=BLACK, linewidth=2, label="1 / length")
    for whose in reversed(NAMES):
        line(axes, whose, lengths, fading(models[whose], lengths, width, seed))
    doubling(axes, lengths)
    axes.set_yscale("log")
    name_axis(
        axes,
        "untrained models",
        "sequence length (tokens)",
        f"gradient, last output to first\ninput (1 = {lengths[0]} tokens)",
    )
    key_below(figure, axes)
    headline(figure, "Gradients fade as 1/length with attention, exponentially in an LSTM alone")
    return figure


def draw_in_turn(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """Operations that wait for one another when all target tokens are given, against length."""
    lengths = up_to(length)
    with torch.random.fork_rng(devices=[]):
        models = untrained(width, 1.0, seed)
    figure, (axes,) = canvas()
    for whose in reversed(NAMES):
        line(axes, whose, lengths, [chain(models[whose], n) for n in lengths])
    axes.set_ylim(0)
    axes.set_xlim(0)
    name_axis(axes, "one forward pass with teacher forcing", "sequence length (tokens)", "longest chain of operations")
    key_below(figure, axes)
    headline(figure, "A transformer's longest chain of operations does not grow with the length")
    return figure
