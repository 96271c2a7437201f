import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead import LanguageModel, Seq2Seq
from clearhead.insight.leaks import Leak, future_leak, movement, padding_leak
from clearhead.models.config import LanguageConfig, Seq2SeqConfig

N_IDS, L = 11, 6
SMALL = {"width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16}
TABLE = torch.randn(N_IDS, 4, generator=torch.Generator().manual_seed(1))


def ids(n_examples=2, length=L):
    return torch.randint(0, N_IDS, (n_examples, length), generator=torch.Generator().manual_seed(0))


def mixing(matrix):
    """Logits of which output i is the sum of matrix[i, j] times token j: it sees exactly what the matrix says."""
    return lambda ids: matrix @ TABLE[ids]


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_one_leaking_pair_is_found_and_named(n_examples, length, data):
    sees = torch.ones(length, length).tril()
    assert future_leak(mixing(sees), ids(n_examples, length), N_IDS) is None
    if length > 1:
        output = data.draw(st.integers(0, length - 2))
        changed = data.draw(st.integers(output + 1, length - 1))
        sees[output, changed] = 1.0
        leak = future_leak(mixing(sees), ids(n_examples, length), N_IDS)
        assert (leak.output, leak.changed) == (output, changed)
        assert leak.example == leak.changed_example
        assert leak.by > 0


@given(st.lists(st.integers(1, L), min_size=1, max_size=4), st.data())
def test_padding_that_leaks_is_found_and_named(lengths, data):
    real = torch.arange(L) < torch.tensor(lengths)[:, None]
    sees = real[:, None, :].float().repeat(1, L, 1)
    batch = ids(len(lengths))
    assert padding_leak(mixing(sees), batch, torch.tensor(lengths), N_IDS) is None
    example = data.draw(st.integers(0, len(lengths) - 1))
    if lengths[example] < L:
        output = data.draw(st.integers(0, lengths[example] - 1))
        changed = data.draw(st.integers(lengths[example], L - 1))
        sees[example, output, changed] = 1.0
        leak = padding_leak(mixing(sees), batch, torch.tensor(lengths), N_IDS)
        assert (leak.example, leak.output, leak.changed) == (example, output, changed)


def test_what_stands_in_the_padding_may_move_by_itself():
    assert padding_leak(mixing(torch.eye(L)), ids(), torch.tensor([3, 6]), N_IDS) is None


def test_outputs_may_have_places_of_their_own():
    """A decoder's outputs against a padded source; and one answer for the whole sequence."""
    to_targets = torch.zeros(8, L)
    to_targets[:, :3] = 1.0
    lengths, three = torch.tensor([3, 3]), torch.tensor([7, 8])
    assert padding_leak(mixing(to_targets), ids(), lengths, N_IDS, output_lengths=three) is None
    to_targets[6, 4] = 1.0
    assert padding_leak(mixing(to_targets), ids(), lengths, N_IDS, output_lengths=three).output == 6
    to_targets[6, 4], to_targets[7, 4] = 0.0, 1.0  # behind the first example's outputs, not behind the second's
    assert padding_leak(mixing(to_targets), ids(), lengths, N_IDS, output_lengths=three).example == 1

    def pooled(ids):
        return TABLE[ids].sum(1)

    assert padding_leak(pooled, ids(), torch.tensor([3, 6]), N_IDS).changed == 3
    assert padding_leak(lambda ids: TABLE[ids][:, :3].sum(1), ids(), torch.tensor([3, 6]), N_IDS) is None


def test_an_example_that_sees_another_is_told_apart():
    def across(ids):
        x = TABLE[ids].cumsum(1)
        x[0, 0] += x[1, 2]
        return x

    leak = future_leak(across, ids(), N_IDS)
    assert (leak.example, leak.output) == (0, 0)
    assert leak.changed_example == 1
    assert "of example 1 is changed" in str(leak)


def test_our_models_keep_the_future_and_the_padding_to_themselves():
    model = LanguageModel(LanguageConfig(vocab_size=N_IDS, context_length=L, **SMALL)).eval()
    assert future_leak(model, ids(), N_IDS) is None
    assert padding_leak(model, ids(), torch.tensor([3, 6]), N_IDS) is None  # causal: the padding is the future
    model = Seq2Seq(Seq2SeqConfig(src_vocab_size=N_IDS, tgt_vocab_size=N_IDS, **SMALL)).eval()
    target, lengths = ids(length=4), torch.tensor([3, 6])
    assert future_leak(lambda ids: model(target, ids), ids(), N_IDS) is None
    told = padding_leak(
        lambda ids: model(ids, target, source_lengths=lengths), ids(), lengths, N_IDS, output_lengths=lengths
    )
    assert told is None
    assert padding_leak(lambda ids: model(ids, target), ids(), lengths, N_IDS).kind == "padding"


def test_random_state_and_gradients_are_left_alone():
    table = TABLE.clone().requires_grad_()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seen = []

    def logits_of(ids):
        seen.append((table[ids].requires_grad, ids.tolist()))
        return table[ids].cumsum(1)

    future_leak(logits_of, ids(), N_IDS)
    once, seen = seen, []
    future_leak(logits_of, ids(), N_IDS)
    assert torch.equal(torch.get_rng_state(), before)
    assert seen == once
    assert not any(requires_grad for requires_grad, _ in seen)


def test_the_sentence_names_the_pair():
    assert str(Leak("future", 0, 3, 4, 0.1234, 0)) == (
        "output 3 of example 0 moves by 0.123 when the token at place 4, after it, is changed"
    )
    assert str(Leak("padding", 1, 0, 5, 2.0, 1)) == (
        "output 0 of example 1 moves by 2 when the padding at place 5 is changed"
    )


def test_roundings_and_lasting_nan_are_no_movement():
    before = torch.tensor([[[1.0, 100.0], [torch.nan, 0.0]]])
    assert not movement(before, before).any()
    assert not movement(before, before + torch.tensor([1e-5, 0.0])).any()
    assert movement(before, before + torch.tensor([1e-3, 0.0]))[0, 0] > 0
    assert movement(before, before.nan_to_num())[0].tolist() == [0.0, torch.inf]
    assert movement(torch.zeros(1, 2), torch.ones(1, 2)).tolist() == [[1.0]]


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_a_number_that_is_filled_in_hides_no_movement(fill):
    """As for ids that a model may not choose."""
    before = torch.tensor([[[1.0, fill], [2.0, fill]]])
    assert movement(before, before + torch.tensor([0.1, 0.0]))[0].tolist() == pytest.approx([0.1, 0.1])


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match=r"must be whole numbers \(B,L\), got torch.float32"):
        future_leak(mixing(torch.eye(L)), torch.zeros(2, L), N_IDS)
    with pytest.raises(ValueError, match="there must be another one, got n_ids=1"):
        padding_leak(mixing(torch.eye(L)), ids(), torch.tensor([1, 1]), 1)
    with pytest.raises(ValueError, match=r"an output for each of the 6 tokens, got \(2, 4, 4\)"):
        future_leak(mixing(torch.ones(4, L)), ids(), N_IDS)
    with pytest.raises(ValueError, match=r"got two different answers; call model.eval\(\) first"):
        future_leak(lambda ids: torch.rand(2, L, 4), ids(), N_IDS)
