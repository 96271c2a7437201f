"""Sequential operations of an encoder-decoder: those that can only be done one after the other."""

import torch
from torch import Tensor, nn

from clearhead.data.tokens import BEGIN
from clearhead.lab.claim import Claim, Result, at_least, equals
from clearhead.lab.gradient_path import SHORT, untrained
from clearhead.lab.rivals import N_TOKENS, TRANSFORMER, WITH, WITHOUT
from clearhead.models.seq2seq import Seq2Seq


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
    handle = model.head.register_forward_hook(lambda *_: passes.append(1))
    try:
        source = torch.arange(length)[None] % N_TOKENS
        model.generate(source, begin=BEGIN, end=None, n_tokens=length)
    finally:
        handle.remove()
    return len(passes)


def run(*, seed: int = 0, width: int = 32, length: int = 64, recurrent: bool = False) -> Result:
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


CLAIM = Claim(
    slug="in-turn",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="Under teacher forcing, a transformer's longest chain of operations is the same for any length; an "
    "LSTM's grows with every token, with attention or without. Generation is sequential in both.",
    mistake="With attention, an LSTM can read all tokens at once, too; or: a transformer generates all tokens at once.",
    conditions="Teacher forcing, as in training: all target tokens are given. In generation each token needs the one "
    "before it, so the decoder runs once for each.",
    formula="h_t = f(x_t, h_(t-1)) waits for h_(t-1);  softargmax(beta q_t Kᵀ) V for no other answer of its layer",
    run=run,
    try_next="clearhead lab in-turn --recurrent true",
    least={"width": 16, "length": 8},
    most={"width": 256, "length": 256},
    multiples={"width": 2},
    kind="demonstration",
)
