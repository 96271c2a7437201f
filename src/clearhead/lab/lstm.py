"""The encoder-decoder from before 2017: LSTMs that read and write one token after the other.

    i_t, f_t, o_t = sigmoid(W x_t + U h_(t-1) + b)    what is let in, kept and shown; each has a W, U and b of its own
    g_t = tanh(W x_t + U h_(t-1) + b)                 what could be let in
    c_t = f_t c_(t-1) + i_t g_t                       the cell
    h_t = o_t tanh(c_t)                               the state

The decoder starts from the encoder's last state and cell: all that it knows of the source. What looks at the
encoder's other states, if anything does, is a part passed in.
Dims: B batch, Q target tokens, K source tokens, E model width, V vocabulary.
"""

from torch import Tensor, nn

from clearhead.data.vocab import SPECIAL_TOKENS
from clearhead.models.config import Seq2SeqConfig
from clearhead.models.embeddings import embeddings_or
from clearhead.models.seq2seq import Seq2Seq
from clearhead.nn.attention import Linear, MultiHeadAttention
from clearhead.nn.blocks import MLP


class Alone(nn.Module):
    """What stands where attention could: as many weights, but each step sees its own state alone."""

    def __init__(self, width: int):
        super().__init__()
        self.net = MLP(width, 2 * width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    """source (B,K), target so far (B,Q) -> logits (B,Q,V) of the target token after each: W (h_t + part(norm(h_t)))

    part(x (B,Q,E), memory (B,K,E)) -> (B,Q,E) may look at the memory, the encoder's states, as attention does.
    `forget` is added to the bias of f: the larger it is, the longer a new model's cell keeps what it has.
    """

    def __init__(self, width: int, src_vocab_size: int, tgt_vocab_size: int, part: nn.Module, *, forget: float = 1.0):
        super().__init__()
        self.width, self.part = width, part
        self.embed_source, self.embed_target = nn.Embedding(src_vocab_size, width), nn.Embedding(tgt_vocab_size, width)
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, tgt_vocab_size, bias=False)
        for lstm in (self.encoder, self.decoder):
            _, f, _, _ = lstm.get_parameter("bias_hh_l0").detach().chunk(4)  # torch's order: i, f, g, o
            f += forget

    def forward(self, source: Tensor | None, target: Tensor, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """`inputs_embeds` (B,K,E) may stand for the source."""
        memory, last = self.encoder(embeddings_or(self.embed_source, source, inputs_embeds, self.width))
        states, _ = self.decoder(self.embed_target(target), last)
        return self.head(states + self.part(self.norm(states), memory))


# Three encoder-decoders of equal size: the transformer, and the LSTM with and without attention.


TRANSFORMER, WITH, WITHOUT = "transformer", "LSTM with attention", "LSTM alone"
NAMES = (TRANSFORMER, WITH, WITHOUT)
DIGITS = 10
N_TOKENS = len(SPECIAL_TOKENS) + DIGITS
"""what they read and write, unless told otherwise"""


def rival(
    name: str, width: int, src_vocab_size: int = N_TOKENS, tgt_vocab_size: int = N_TOKENS, *, forget: float = 1.0
) -> nn.Module:
    """(source (B,K), target so far (B,Q)) -> logits (B,Q,V); `forget` is for LSTMs.

    An LSTM has 8 width² weights, a block of the transformer 8 width² in the encoder and 12 width² in the decoder: with
    4 width² for attention, or for the net in its place, all three are of one size.
    """
    if name == TRANSFORMER:
        return Seq2Seq(
            Seq2SeqConfig(
                width=width,
                depth=1,
                num_heads=1,
                mlp_dim=2 * width,
                src_vocab_size=src_vocab_size,
                tgt_vocab_size=tgt_vocab_size,
            )
        )
    part = MultiHeadAttention(width, 1) if name == WITH else Alone(width)
    return Recurrent(width, src_vocab_size, tgt_vocab_size, part, forget=forget)


def spread(models: list[nn.Module]) -> float:
    """Parameters of the largest over those of the smallest."""
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    return max(sizes) / min(sizes)
