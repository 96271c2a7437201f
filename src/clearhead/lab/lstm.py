"""LSTM encoder-decoders and a transformer of equal size, untrained: gradient path and sequential depth.

    i_t, f_t, o_t = sigmoid(W x_t + U h_(t-1) + b)    input, forget and output gate; each has its own W, U, b
    g_t = tanh(W x_t + U h_(t-1) + b)                 candidate
    c_t = f_t c_(t-1) + i_t g_t                       cell state
    h_t = o_t tanh(c_t)                               hidden state

The decoder starts from the encoder's last hidden and cell state. Attention to all encoder states is an optional module
that is passed in.
Dims: B batch, Q target tokens, K source tokens, E model width, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data.vocab import BOS, SPECIAL_TOKENS
from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.plots import label_axes, legend_below, set_headline, subplots
from clearhead.models.config import Seq2SeqConfig
from clearhead.models.seq2seq import Seq2Seq
from clearhead.models.stack import input_embeddings
from clearhead.nn.attention import Linear, MultiHeadAttention
from clearhead.nn.blocks import MLP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class PositionwiseMLP(nn.Module):
    """Replaces attention in the LSTM without attention: as many parameters, but no access to other positions."""

    def __init__(self, width: int):
        super().__init__()
        self.net = MLP(width, 2 * width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.net(x)


class LSTMSeq2Seq(nn.Module):
    """source (B,K), target so far (B,Q) -> logits (B,Q,V) of the next target token: W (h_t + mixer(norm(h_t)))

    mixer(x (B,Q,E), memory (B,K,E)) -> (B,Q,E) may attend to the memory, the encoder's hidden states.
    `forget_bias` is added to the bias of f: the larger it is, the longer an untrained model keeps its cell state.
    """

    def __init__(
        self, width: int, src_vocab_size: int, tgt_vocab_size: int, mixer: nn.Module, *, forget_bias: float = 1.0
    ):
        super().__init__()
        self.width, self.mixer = width, mixer
        self.src_embed, self.tgt_embed = nn.Embedding(src_vocab_size, width), nn.Embedding(tgt_vocab_size, width)
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, tgt_vocab_size, bias=False)
        for lstm in (self.encoder, self.decoder):
            _, f, _, _ = lstm.get_parameter("bias_hh_l0").detach().chunk(4)  # torch's order: i, f, g, o
            f += forget_bias

    def forward(self, source: Tensor | None, target: Tensor, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """`inputs_embeds` (B,K,E) may replace the source."""
        memory, state = self.encoder(input_embeddings(self.src_embed, source, inputs_embeds, self.width))
        states, _ = self.decoder(self.tgt_embed(target), state)
        return self.head(states + self.mixer(self.norm(states), memory))


TRANSFORMER, LSTM_ATTENTION, LSTM = "transformer", "LSTM with attention", "LSTM without attention"
MODEL_NAMES = (TRANSFORMER, LSTM_ATTENTION, LSTM)
DIGITS = 10
VOCAB_SIZE = len(SPECIAL_TOKENS) + DIGITS
"""of the reversal task: special tokens and digits"""


def build_seq2seq(
    name: str,
    width: int,
    src_vocab_size: int = VOCAB_SIZE,
    tgt_vocab_size: int = VOCAB_SIZE,
    *,
    forget_bias: float = 1.0,
) -> nn.Module:
    """(source (B,K), target so far (B,Q)) -> logits (B,Q,V); `forget_bias` is for LSTMs.

    An LSTM has 8 width² weights, a block of the transformer 8 width² in the encoder and 12 width² in the decoder: with
    4 width² for attention, or for the MLP in its place, all three have nearly the same size.
    """
    if name == TRANSFORMER:
        return Seq2Seq.from_config(
            Seq2SeqConfig(
                width=width,
                depth=1,
                num_heads=1,
                mlp_dim=2 * width,
                src_vocab_size=src_vocab_size,
                tgt_vocab_size=tgt_vocab_size,
            )
        )
    mixer = MultiHeadAttention(width, 1) if name == LSTM_ATTENTION else PositionwiseMLP(width)
    return LSTMSeq2Seq(width, src_vocab_size, tgt_vocab_size, mixer, forget_bias=forget_bias)


def size_ratio(models: list[nn.Module]) -> float:
    """Number of parameters of the largest model divided by that of the smallest."""
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    return max(sizes) / min(sizes)


SHORT = 4
"""length of the reference sequence"""


BATCH_SIZE = 16


def input_gradient_norm(model: nn.Module, length: int, width: int, random: torch.Generator) -> float:
    """Norm of the gradient of the last output's loss with respect to the first input; mean over random sequences."""
    source = torch.randn(BATCH_SIZE, length, width, generator=random, dtype=torch.float64, requires_grad=True)
    target, labels = torch.randint(VOCAB_SIZE, (2, BATCH_SIZE, length), generator=random)
    last_logits: Tensor = model(None, target, inputs_embeds=source)[:, -1]
    (gradient,) = torch.autograd.grad(F.cross_entropy(last_logits, labels[:, -1], reduction="sum"), source)
    return gradient[:, 0].norm(dim=-1).mean().item()


def gradient_ratios(model: nn.Module, lengths: Sequence[int], width: int, seed: int) -> list[float]:
    """The gradient at each length, relative to that at the first length."""
    random = torch.Generator().manual_seed(seed)
    norms = [input_gradient_norm(model, length, width, random) for length in lengths]
    return [norm / norms[0] for norm in norms]


def untrained_models(width: int, forget_bias: float, seed: int) -> dict[str, nn.Module]:
    """The three models with random weights, in float64 because the gradients become very small."""
    torch.manual_seed(seed)
    return {name: build_seq2seq(name, width, forget_bias=forget_bias).double() for name in MODEL_NAMES}


def run_gradient_path(
    *, seed: int = 0, width: int = 32, length: int = 64, forget_bias: float = 1.0, with_attention: bool = True
) -> Result:
    """with_attention=False tests the LSTM without attention in place of the one with attention."""
    models = untrained_models(width, forget_bias, seed)
    ratios = {name: gradient_ratios(model, (SHORT, length), width, seed)[-1] for name, model in models.items()}
    length_ratio = length / SHORT
    return Result(
        (
            at_most("parameters of the largest model / smallest model", size_ratio(list(models.values())), 1.05),
            at_least(f"transformer: gradient ratio × {length_ratio:g}", ratios[TRANSFORMER] * length_ratio, 0.3),
            at_least(
                f"LSTM with attention: gradient ratio × {length_ratio:g}",
                ratios[LSTM_ATTENTION if with_attention else LSTM] * length_ratio,
                0.3,
            ),
            at_most(f"LSTM without attention: gradient ratio × {length_ratio:g}", ratios[LSTM] * length_ratio, 0.01),
        )
    )


COLORS = {TRANSFORMER: BLUE, LSTM_ATTENTION: GREEN, LSTM: VERMILION}


MARKERS = {TRANSFORMER: ("o", 7), LSTM_ATTENTION: ("s", 10), LSTM: ("^", 14)}
"""marker and size, so that overlapping lines remain visible"""


def plot_model(axes: "Axes", name: str, x: Sequence[float], y: Sequence[float]) -> None:
    marker, size = MARKERS[name]
    axes.plot(x, y, f"{marker}-", color=COLORS[name], linewidth=3, markersize=size, label=name)


def log2_length_axis(axes: "Axes", lengths: Sequence[float]) -> None:
    """A logarithmic x axis with ticks at these lengths."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels=[f"{length:g}" for length in lengths])


def doubled_lengths(length: int) -> list[int]:
    """SHORT and its doublings, up to `length`."""
    return [SHORT * 2**power for power in range(12) if SHORT * 2**power <= length / 1.5] + [length]


def draw_gradient_path(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """The gradient of the last output with respect to the first input, against the length."""
    lengths = doubled_lengths(length)
    models = untrained_models(width, 1.0, seed)
    figure, (axes,) = subplots()
    axes.plot(lengths, [lengths[0] / n for n in lengths], "--", color=BLACK, linewidth=2, label="1 / length")
    for name in reversed(MODEL_NAMES):
        plot_model(axes, name, lengths, gradient_ratios(models[name], lengths, width, seed))
    log2_length_axis(axes, lengths)
    axes.set_yscale("log")
    label_axes(
        axes,
        "Untrained models",
        "sequence length (tokens)",
        f"gradient of last output w.r.t. first\ninput (1 = {lengths[0]} tokens)",
    )
    legend_below(figure, axes)
    set_headline(figure, "Gradients decay as 1/length with attention, exponentially in an LSTM without")
    return figure


GRADIENT_PATH = Claim(
    slug="gradient-path",
    lesson="Attention and recurrence",
    statement="At initialization, the gradient of the last output with respect to the first input decreases as "
    "1/length in models with attention, and exponentially with the length in an LSTM without attention.",
    misconception="The cell state of an LSTM carries the gradient over any distance.",
    conditions="At initialization, with a forget-gate bias of 1: trained models may have other gates and attention "
    "weights.",
    formula="attention: 1 step, with a weight of about 1/n;  LSTM: up to 2n steps, d c_t / d c_(t-1) = f_t + ..., "
    "f_t < 1",
    run=run_gradient_path,
    figure=draw_gradient_path,
    try_next="clearhead lab gradient-path --forget-bias 8",
    minimum={"width": 16, "length": 32, "forget_bias": -10},
    maximum={"width": 256, "length": 256, "forget_bias": 100},
    multiple_of={"width": 2},
)


def sequential_operations(output: Tensor) -> int:
    """The number of operations on the longest path through the autograd graph of the output."""
    assert output.grad_fn is not None
    depths: dict[object, int] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack[-1]
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        pending = [parent for parent in parents if parent not in depths]
        stack += pending
        if not pending:
            depths[stack.pop()] = 1 + max((depths[parent] for parent in parents), default=0)
    return depths[output.grad_fn]


def sequential_depth(model: nn.Module, length: int) -> int:
    """The number of sequential operations to compute all logits, for a source and a target of this length."""
    ids = torch.arange(length)[None] % VOCAB_SIZE
    return sequential_operations(model(ids, ids))


def decoder_passes(model: Seq2Seq, length: int) -> int:
    """The number of decoder passes in which a transformer generates `length` tokens."""
    passes = []
    handle = model.decoder.register_forward_hook(lambda *_: passes.append(1))
    try:
        source = torch.arange(length)[None] % VOCAB_SIZE
        model.generate(source, bos_id=BOS, eos_id=None, max_new_tokens=length)
    finally:
        handle.remove()
    return len(passes)


def run_sequential_depth(*, seed: int = 0, width: int = 32, length: int = 64, recurrent: bool = False) -> Result:
    """recurrent=True tests the LSTM with attention in place of the transformer."""
    models = untrained_models(width, forget_bias=1.0, seed=seed)
    growth = {name: sequential_depth(model, length) - sequential_depth(model, SHORT) for name, model in models.items()}
    added_tokens = 2 * (length - SHORT)
    transformer = models[TRANSFORMER]
    assert isinstance(transformer, Seq2Seq)
    return Result(
        (
            equals(
                f"transformer: additional sequential operations from {SHORT} to {length} tokens",
                growth[LSTM_ATTENTION if recurrent else TRANSFORMER],
                0,
                0,
            ),
            at_least(
                "LSTM without attention: sequential operations per additional token", growth[LSTM] / added_tokens, 1
            ),
            at_least(
                "LSTM with attention: sequential operations per additional token",
                growth[LSTM_ATTENTION] / added_tokens,
                1,
            ),
            equals(
                f"transformer: sequential decoder passes to generate {length} tokens",
                decoder_passes(transformer, length),
                length,
                0,
            ),
        )
    )


def draw_sequential_depth(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """The number of sequential operations under teacher forcing, against the length."""
    lengths = doubled_lengths(length)
    models = untrained_models(width, 1.0, seed)
    figure, (axes,) = subplots()
    for name in reversed(MODEL_NAMES):
        plot_model(axes, name, lengths, [sequential_depth(models[name], n) for n in lengths])
    axes.set_ylim(0)
    axes.set_xlim(0)
    label_axes(axes, "One forward pass with teacher forcing", "sequence length (tokens)", "sequential operations")
    legend_below(figure, axes)
    set_headline(figure, "The sequential operations of a transformer do not grow with the length")
    return figure


SEQUENTIAL_DEPTH = Claim(
    slug="sequential-depth",
    lesson="Attention and recurrence",
    statement="Under teacher forcing, the number of sequential operations of a transformer does not depend on the "
    "sequence length, whereas that of an LSTM, with or without attention, grows with every token. Autoregressive "
    "generation is sequential in both.",
    misconception="An LSTM with attention processes all tokens in parallel, or a transformer generates all tokens "
    "in parallel.",
    conditions="Teacher forcing, as in training: the decoder receives all target tokens at once.",
    formula="LSTM: h_t = f(x_t, h_(t-1)) needs h_(t-1);  attention: softargmax(beta q_t Kᵀ) V needs no other output "
    "of its layer",
    run=run_sequential_depth,
    figure=draw_sequential_depth,
    try_next="clearhead lab sequential-depth --recurrent true",
    minimum={"width": 16, "length": 8},
    maximum={"width": 256, "length": 256},
    multiple_of={"width": 2},
    kind="demonstration",
)
