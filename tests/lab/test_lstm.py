import pytest
import torch
from torch import nn

from clearhead.lab.lstm import (
    LSTM,
    MODEL_NAMES,
    TRANSFORMER,
    VOCAB_SIZE,
    LSTMSeq2Seq,
    PositionwiseMLP,
    build_seq2seq,
    decoder_passes,
    gradient_ratios,
    input_gradient_norm,
    sequential_operations,
    size_ratio,
    untrained_models,
)
from clearhead.nn.attention import MultiHeadAttention

WIDTH, VOCAB = 6, 9


def model(mixer, forget_bias=1.0):
    torch.manual_seed(0)
    return LSTMSeq2Seq(WIDTH, VOCAB, VOCAB, mixer, forget_bias=forget_bias).double()


def attention():
    return MultiHeadAttention(WIDTH, 1)


def ids(num_tokens, seed=1):
    return torch.randint(VOCAB, (3, num_tokens), generator=torch.Generator().manual_seed(seed))


def lstm_by_formula(lstm, x, h, c):
    """All hidden states (B,L,E), and the last hidden and cell state, by the formulas in the docstring of lstm.py."""
    states = []
    for x_t in x.unbind(1):
        gates = x_t @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, dim=1), h, c


@pytest.mark.parametrize("mixer", [PositionwiseMLP(WIDTH), attention()])
def test_lstm_seq2seq_equals_its_formula(mixer):
    net, source, target = model(mixer), ids(5), ids(4, seed=2)
    start = torch.zeros(3, WIDTH, dtype=torch.float64)
    memory, h, c = lstm_by_formula(net.encoder, net.src_embed(source), start, start)
    states, _, _ = lstm_by_formula(net.decoder, net.tgt_embed(target), h, c)
    expected = net.head(states + net.mixer(net.norm(states), memory))
    torch.testing.assert_close(net(source, target), expected)


def test_forget_bias_is_added_to_the_forget_gates():
    closed, opened = model(PositionwiseMLP(WIDTH), forget_bias=0.0), model(PositionwiseMLP(WIDTH), forget_bias=3.0)
    for before, after in ((closed.encoder, opened.encoder), (closed.decoder, opened.decoder)):
        more = after.bias_hh_l0 - before.bias_hh_l0
        i, f, g, o = more.chunk(4)
        torch.testing.assert_close(f, torch.full_like(f, 3.0))
        assert not torch.cat([i, g, o]).any()


@pytest.mark.parametrize(("mixer", "uses_memory"), [(PositionwiseMLP(WIDTH), False), (attention(), True)])
def test_only_attention_depends_on_the_memory(mixer, uses_memory):
    x, memory, other = torch.randn(3, 2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mixer(x, memory), mixer(x, other)) is not uses_memory


@pytest.mark.parametrize("mixer", [PositionwiseMLP(WIDTH), attention()])
def test_logits_do_not_depend_on_later_tokens(mixer):
    net, source, target = model(mixer), ids(5), ids(4, seed=2)
    changed = target.clone()
    changed[:, 2] = (changed[:, 2] + 1) % VOCAB
    before, after = net(source, target), net(source, changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_inputs_embeds_replaces_the_source():
    net, source, target = model(attention()), ids(5), ids(4, seed=2)
    torch.testing.assert_close(
        net(None, target, inputs_embeds=net.src_embed(source)), net(source, target), rtol=0, atol=0
    )


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(("src_vocab_size", "tgt_vocab_size"), [(13, 13), (32, 42)])
def test_models_have_nearly_the_same_number_of_parameters(width, src_vocab_size, tgt_vocab_size):
    assert 1 <= size_ratio([build_seq2seq(name, width, src_vocab_size, tgt_vocab_size) for name in MODEL_NAMES]) < 1.05


def test_size_ratio_of_models_of_different_width():
    assert size_ratio([build_seq2seq(name, width) for name, width in zip(MODEL_NAMES, (16, 32, 32), strict=True)]) > 2


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logits_have_one_row_per_target_token(name):
    torch.manual_seed(0)
    source, target = torch.randint(13, (2, 5)), torch.randint(9, (2, 4))
    assert build_seq2seq(name, 16, 13, 9)(source, target).shape == (2, 4, 9)


class OneInput(nn.Module):
    """Logits that depend on a single input position, with a gradient of 1/length."""

    def __init__(self, position):
        super().__init__()
        self.position = position

    def forward(self, source, target, *, inputs_embeds):
        logits = inputs_embeds[:, self.position, :VOCAB_SIZE] / inputs_embeds.shape[1]
        return logits[:, None].expand(-1, target.shape[1], -1)


def test_input_gradient_norm_measures_the_first_input_only():
    random = torch.Generator()
    assert input_gradient_norm(OneInput(0), 5, VOCAB_SIZE, random.manual_seed(0)) > 0
    assert input_gradient_norm(OneInput(1), 5, VOCAB_SIZE, random.manual_seed(0)) == 0


def test_gradient_ratio_is_one_over_length_for_a_known_model():
    one, tenth = gradient_ratios(
        OneInput(0), (100, 1000), VOCAB_SIZE, seed=0
    )  # logits so small that all classes are equally probable
    assert one == 1
    assert tenth == pytest.approx(0.1, rel=0.02)


def test_lstm_gradient_decays_exponentially_with_length():
    model = untrained_models(16, 1.0, seed=0)[LSTM]
    _, once, twice, four_times = gradient_ratios(model, (8, 16, 32, 64), 16, seed=0)
    assert twice < once**1.5
    assert four_times < twice**1.5


def test_large_forget_bias_preserves_the_gradient():
    closed, opened = (
        gradient_ratios(untrained_models(16, forget_bias, 0)[LSTM], (4, 64), 16, 0)[-1] for forget_bias in (1.0, 8.0)
    )
    assert opened > 0.1 > 1000 * closed


def test_seed_determines_the_weights():
    one, same, other = (untrained_models(16, 1.0, seed)[MODEL_NAMES[0]].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


DEEP = 3_000


def test_sequential_operations_counts_the_longest_path():
    x = torch.ones(2, requires_grad=True)
    one = sequential_operations(x.exp())
    assert sequential_operations(x.exp().sin()) == one + 1
    assert sequential_operations(x.exp() + x.sin()) == one + 1
    assert sequential_operations(x.exp().sin().cos() + x) == one + 3


def test_sequential_operations_of_a_deep_graph():
    y = torch.ones(1, requires_grad=True)
    for _ in range(DEEP):
        y = y * 1.0 + y
    assert sequential_operations(y) >= 2 * DEEP


def test_generation_runs_the_decoder_once_per_token():
    model = untrained_models(16, 1.0, seed=0)[TRANSFORMER]
    assert [decoder_passes(model, length) for length in (3, 9)] == [3, 9]
