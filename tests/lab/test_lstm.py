import pytest
import torch

from clearhead.lab.lstm import PositionwiseMLP, LSTMSeq2Seq
from clearhead.nn.attention import MultiHeadAttention

WIDTH, TOKENS = 6, 9


def model(part, forget_bias=1.0):
    torch.manual_seed(0)
    return LSTMSeq2Seq(WIDTH, TOKENS, TOKENS, part, forget_bias=forget_bias).double()


def attention():
    return MultiHeadAttention(WIDTH, 1)


def ids(num_tokens, seed=1):
    return torch.randint(TOKENS, (3, num_tokens), generator=torch.Generator().manual_seed(seed))


def by_formula(lstm, x, h, c):
    """All states (B,L,E), and the last state and cell: the file's four lines, step by step."""
    states = []
    for x_t in x.unbind(1):
        gates = x_t @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, dim=1), h, c


@pytest.mark.parametrize("part", [PositionwiseMLP(WIDTH), attention()])
def test_it_computes_what_its_formula_says(part):
    net, source, target = model(part), ids(5), ids(4, seed=2)
    start = torch.zeros(3, WIDTH, dtype=torch.float64)
    memory, h, c = by_formula(net.encoder, net.embed_source(source), start, start)
    states, _, _ = by_formula(net.decoder, net.embed_target(target), h, c)
    expected = net.head(states + net.part(net.norm(states), memory))
    torch.testing.assert_close(net(source, target), expected)


def test_forget_is_how_far_the_cell_is_kept():
    closed, opened = model(PositionwiseMLP(WIDTH), forget_bias=0.0), model(PositionwiseMLP(WIDTH), forget_bias=3.0)
    for before, after in ((closed.encoder, opened.encoder), (closed.decoder, opened.decoder)):
        more = after.bias_hh_l0 - before.bias_hh_l0
        i, f, g, o = more.chunk(4)
        torch.testing.assert_close(f, torch.full_like(f, 3.0))
        assert not torch.cat([i, g, o]).any()


@pytest.mark.parametrize(("part", "looks"), [(PositionwiseMLP(WIDTH), False), (attention(), True)])
def test_only_attention_looks_at_the_encoders_states(part, looks):
    x, memory, other = torch.randn(3, 2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    assert torch.equal(part(x, memory), part(x, other)) is not looks


@pytest.mark.parametrize("part", [PositionwiseMLP(WIDTH), attention()])
def test_no_answer_knows_a_later_token(part):
    net, source, target = model(part), ids(5), ids(4, seed=2)
    changed = target.clone()
    changed[:, 2] = (changed[:, 2] + 1) % TOKENS
    before, after = net(source, target), net(source, changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_embeddings_may_stand_for_the_source():
    net, source, target = model(attention()), ids(5), ids(4, seed=2)
    torch.testing.assert_close(
        net(None, target, inputs_embeds=net.embed_source(source)), net(source, target), rtol=0, atol=0
    )
