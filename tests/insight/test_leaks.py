import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead import LanguageModel, Seq2Seq
from clearhead.insight.leaks import Leak, future_leak, output_change, padding_leak
from clearhead.models.config import LanguageConfig, Seq2SeqConfig

VOCAB_SIZE, L = 11, 6
SMALL = {"width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16}
TABLE = torch.randn(VOCAB_SIZE, 4, generator=torch.Generator().manual_seed(1))


def ids(batch_size=2, length=L):
    return torch.randint(0, VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(0))


def mixing(matrix):
    """Output i is the sum over j of matrix[i, j] times the embedding of token j."""
    return lambda ids: matrix @ TABLE[ids]


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_future_leak_is_located(batch_size, length, data):
    matrix = torch.ones(length, length).tril()
    assert future_leak(mixing(matrix), ids(batch_size, length), VOCAB_SIZE) is None
    if length > 1:
        output = data.draw(st.integers(0, length - 2))
        token = data.draw(st.integers(output + 1, length - 1))
        matrix[output, token] = 1.0
        leak = future_leak(mixing(matrix), ids(batch_size, length), VOCAB_SIZE)
        assert (leak.output, leak.token) == (output, token)
        assert leak.example == leak.token_example
        assert leak.change > 0


@given(st.lists(st.integers(1, L), min_size=1, max_size=4), st.data())
def test_padding_leak_is_located(lengths, data):
    valid = torch.arange(L) < torch.tensor(lengths)[:, None]
    matrix = valid[:, None, :].float().repeat(1, L, 1)
    batch = ids(len(lengths))
    assert padding_leak(mixing(matrix), batch, torch.tensor(lengths), VOCAB_SIZE) is None
    example = data.draw(st.integers(0, len(lengths) - 1))
    if lengths[example] < L:
        output = data.draw(st.integers(0, lengths[example] - 1))
        token = data.draw(st.integers(lengths[example], L - 1))
        matrix[example, output, token] = 1.0
        leak = padding_leak(mixing(matrix), batch, torch.tensor(lengths), VOCAB_SIZE)
        assert (leak.example, leak.output, leak.token) == (example, output, token)


def test_outputs_at_padding_positions_are_ignored():
    assert padding_leak(mixing(torch.eye(L)), ids(), torch.tensor([3, 6]), VOCAB_SIZE) is None


def test_outputs_may_have_other_positions_than_ids():
    """A decoder's outputs with a padded source, and pooled outputs."""
    to_targets = torch.zeros(8, L)
    to_targets[:, :3] = 1.0
    lengths, output_lengths = torch.tensor([3, 3]), torch.tensor([7, 8])
    assert padding_leak(mixing(to_targets), ids(), lengths, VOCAB_SIZE, output_lengths=output_lengths) is None
    to_targets[6, 4] = 1.0
    assert padding_leak(mixing(to_targets), ids(), lengths, VOCAB_SIZE, output_lengths=output_lengths).output == 6
    to_targets[6, 4], to_targets[7, 4] = 0.0, 1.0  # beyond the outputs of the first example, within those of the second
    assert padding_leak(mixing(to_targets), ids(), lengths, VOCAB_SIZE, output_lengths=output_lengths).example == 1

    def pooled(ids):
        return TABLE[ids].sum(1)

    assert padding_leak(pooled, ids(), torch.tensor([3, 6]), VOCAB_SIZE).token == 3
    assert padding_leak(lambda ids: TABLE[ids][:, :3].sum(1), ids(), torch.tensor([3, 6]), VOCAB_SIZE) is None


def test_leak_between_examples_names_both():
    def across(ids):
        x = TABLE[ids].cumsum(1)
        x[0, 0] += x[1, 2]
        return x

    leak = future_leak(across, ids(), VOCAB_SIZE)
    assert (leak.example, leak.output) == (0, 0)
    assert leak.token_example == 1
    assert "of example 1 changes" in str(leak)


def test_clearhead_models_do_not_leak():
    model = LanguageModel.from_config(LanguageConfig(vocab_size=VOCAB_SIZE, context_length=L, **SMALL)).eval()
    assert future_leak(model, ids(), VOCAB_SIZE) is None
    assert (
        padding_leak(model, ids(), torch.tensor([3, 6]), VOCAB_SIZE) is None
    )  # under a causal mask, padding is the future
    model = Seq2Seq.from_config(Seq2SeqConfig(src_vocab_size=VOCAB_SIZE, tgt_vocab_size=VOCAB_SIZE, **SMALL)).eval()
    target, lengths = ids(length=4), torch.tensor([3, 6])
    assert future_leak(lambda ids: model(target, ids), ids(), VOCAB_SIZE) is None
    leak = padding_leak(
        lambda ids: model(ids, target, source_lengths=lengths), ids(), lengths, VOCAB_SIZE, output_lengths=lengths
    )
    assert leak is None
    assert padding_leak(lambda ids: model(ids, target), ids(), lengths, VOCAB_SIZE).kind == "padding"


def test_rng_state_is_preserved_and_gradients_are_disabled():
    table = TABLE.clone().requires_grad_()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    calls = []

    def logits_fn(ids):
        calls.append((table[ids].requires_grad, ids.tolist()))
        return table[ids].cumsum(1)

    future_leak(logits_fn, ids(), VOCAB_SIZE)
    first_calls, calls = calls, []
    future_leak(logits_fn, ids(), VOCAB_SIZE)
    assert torch.equal(torch.get_rng_state(), before)
    assert calls == first_calls
    assert not any(requires_grad for requires_grad, _ in calls)


def test_leak_is_described_in_one_sentence():
    assert str(Leak("future", 0, 3, 4, 0.1234, 0)) == (
        "output 3 of example 0 changes by 0.123 when the later token 4 changes"
    )
    assert str(Leak("padding", 1, 0, 5, 2.0, 1)) == (
        "output 0 of example 1 changes by 2 when the padding token 5 changes"
    )


def test_rounding_and_unchanged_nan_are_not_reported():
    before = torch.tensor([[[1.0, 100.0], [torch.nan, 0.0]]])
    assert not output_change(before, before).any()
    assert not output_change(before, before + torch.tensor([1e-5, 0.0])).any()
    assert output_change(before, before + torch.tensor([1e-3, 0.0]))[0, 0] > 0
    assert output_change(before, before.nan_to_num())[0].tolist() == [0.0, torch.inf]
    assert output_change(torch.zeros(1, 2), torch.ones(1, 2)).tolist() == [[1.0]]


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_fill_values_do_not_raise_the_tolerance(fill):
    """Such as those of forbidden ids."""
    before = torch.tensor([[[1.0, fill], [2.0, fill]]])
    assert output_change(before, before + torch.tensor([0.1, 0.0]))[0].tolist() == pytest.approx([0.1, 0.1])


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match=r"ids must be integers \(B,L\), got torch.float32"):
        future_leak(mixing(torch.eye(L)), torch.zeros(2, L), VOCAB_SIZE)
    with pytest.raises(ValueError, match="vocab_size must be at least 2, got 1"):
        padding_leak(mixing(torch.eye(L)), ids(), torch.tensor([1, 1]), 1)
    with pytest.raises(ValueError, match=r"each of the 6 tokens, got \(2, 4, 4\)"):
        future_leak(mixing(torch.ones(4, L)), ids(), VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"different logits; call model.eval\(\)"):
        future_leak(lambda ids: torch.rand(2, L, 4), ids(), VOCAB_SIZE)
