import pytest
import torch

from clearhead.nn.pooling import AttentionPooling, ClassToken, MeanPooling, NoPooling

PRESENT = torch.tensor([[True, True, False, False], [True, True, True, True], [False, True, False, True]])


def padded_differently(x):
    """The same real tokens, other numbers where there is none."""
    other = torch.where(PRESENT[..., None], x, 100 * torch.randn_like(x))
    assert not torch.equal(other, x)
    return other


def test_each_token_is_left_as_it_is():
    x = torch.randn(3, 4, 8)
    readout = NoPooling()
    assert readout.begin(x) is x
    assert readout(x, PRESENT) is x
    assert readout.n_extra == 0


def test_a_class_token_is_put_first_and_read_there():
    x, readout = torch.randn(3, 4, 8), ClassToken(8)
    begun = readout.begin(x)
    assert begun.shape == (3, 4 + readout.n_extra, 8)
    assert torch.equal(begun[:, 1:], x)
    assert torch.equal(begun[:, 0], readout.token.expand(3, 8))
    assert torch.equal(readout(begun), begun[:, 0])
    readout(begun).sum().backward()
    assert (readout.token.grad == 3).all(), "one token, learned from every example"


def test_the_mean_is_of_the_real_tokens_alone():
    x, readout = torch.randn(3, 4, 8), MeanPooling()
    torch.testing.assert_close(readout(x), x.mean(1))
    expected = torch.stack([tokens[real].mean(0) for tokens, real in zip(x, PRESENT, strict=True)])
    torch.testing.assert_close(readout(x, PRESENT), expected)
    assert torch.equal(readout(padded_differently(x), PRESENT), readout(x, PRESENT))
    not_a_number = x.masked_fill(~PRESENT[..., None], float("nan"))
    assert torch.equal(readout(not_a_number, PRESENT), readout(x, PRESENT))
    assert (readout(x, torch.zeros_like(PRESENT)) == 0).all()


def test_attention_pooling_ignores_padded_tokens():
    x, readout = torch.randn(3, 4, 8), AttentionPooling(8, 2)
    out = readout(x, PRESENT)
    assert out.shape == (3, 8)
    torch.testing.assert_close(readout(padded_differently(x), PRESENT), out, rtol=0, atol=1e-6)
    for b in range(3):
        torch.testing.assert_close(readout(x[b : b + 1, PRESENT[b]]), out[b : b + 1])
    assert not torch.allclose(readout(x), out, atol=1e-3)


@pytest.mark.parametrize("readout", [MeanPooling(), AttentionPooling(8, 2)], ids=["mean", "attention"])
def test_pooling_does_not_know_the_order(readout):
    x, order = torch.randn(3, 4, 8), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(readout(x[:, order]), readout(x))
    torch.testing.assert_close(readout(x[:, order], PRESENT[:, order]), readout(x, PRESENT))
