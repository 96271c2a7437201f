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
    pooling = NoPooling()
    assert pooling.prepend_tokens(x) is x
    assert pooling(x, PRESENT) is x
    assert pooling.num_prefix_tokens == 0


def test_a_class_token_is_put_first_and_read_there():
    x, pooling = torch.randn(3, 4, 8), ClassToken(8)
    begun = pooling.prepend_tokens(x)
    assert begun.shape == (3, 4 + pooling.num_prefix_tokens, 8)
    assert torch.equal(begun[:, 1:], x)
    assert torch.equal(begun[:, 0], pooling.cls_token.expand(3, 8))
    assert torch.equal(pooling(begun), begun[:, 0])
    pooling(begun).sum().backward()
    assert (pooling.cls_token.grad == 3).all(), "one token, learned from every example"


def test_the_mean_is_of_the_real_tokens_alone():
    x, pooling = torch.randn(3, 4, 8), MeanPooling()
    torch.testing.assert_close(pooling(x), x.mean(1))
    expected = torch.stack([tokens[real].mean(0) for tokens, real in zip(x, PRESENT, strict=True)])
    torch.testing.assert_close(pooling(x, PRESENT), expected)
    assert torch.equal(pooling(padded_differently(x), PRESENT), pooling(x, PRESENT))
    not_a_number = x.masked_fill(~PRESENT[..., None], float("nan"))
    assert torch.equal(pooling(not_a_number, PRESENT), pooling(x, PRESENT))
    assert (pooling(x, torch.zeros_like(PRESENT)) == 0).all()


def test_attention_pooling_ignores_padded_tokens():
    x, pooling = torch.randn(3, 4, 8), AttentionPooling(8, 2)
    out = pooling(x, PRESENT)
    assert out.shape == (3, 8)
    torch.testing.assert_close(pooling(padded_differently(x), PRESENT), out, rtol=0, atol=1e-6)
    for b in range(3):
        torch.testing.assert_close(pooling(x[b : b + 1, PRESENT[b]]), out[b : b + 1])
    assert not torch.allclose(pooling(x), out, atol=1e-3)


@pytest.mark.parametrize("pooling", [MeanPooling(), AttentionPooling(8, 2)], ids=["mean", "attention"])
def test_pooling_does_not_know_the_order(pooling):
    x, order = torch.randn(3, 4, 8), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(pooling(x[:, order]), pooling(x))
    torch.testing.assert_close(pooling(x[:, order], PRESENT[:, order]), pooling(x, PRESENT))
