"""Three encoder-decoders of equal size: the transformer, and the LSTM with and without attention."""

from torch import nn

from clearhead.data.tokens import MARKS
from clearhead.lab.lstm import Alone, Recurrent
from clearhead.models.config import Seq2SeqConfig
from clearhead.models.seq2seq import Seq2Seq
from clearhead.nn.attention import MultiHeadAttention

TRANSFORMER, WITH, WITHOUT = "transformer", "LSTM with attention", "LSTM alone"
NAMES = (TRANSFORMER, WITH, WITHOUT)
DIGITS = 10
N_TOKENS = len(MARKS) + DIGITS
"""what they read and write, unless told otherwise"""


def rival(
    name: str, width: int, n_source: int = N_TOKENS, n_target: int = N_TOKENS, *, forget: float = 1.0
) -> nn.Module:
    """(source (B,K), target so far (B,Q)) -> logits (B,Q,V); `forget` is for LSTMs.

    An LSTM has 8 width² weights, a block of the transformer 8 width² in the encoder and 12 width² in the decoder: with
    4 width² for attention, or for the net in its place, all three are of one size.
    """
    if name == TRANSFORMER:
        return Seq2Seq(
            Seq2SeqConfig(width=width, depth=1, n_heads=1, hidden=2 * width, n_source=n_source, n_target=n_target)
        )
    part = MultiHeadAttention(width, 1) if name == WITH else Alone(width)
    return Recurrent(width, n_source, n_target, part, forget=forget)


def spread(models: list[nn.Module]) -> float:
    """Parameters of the largest over those of the smallest."""
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    return max(sizes) / min(sizes)
