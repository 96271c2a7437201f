import pytest
import torch

from clearhead.nn.tokens import AttentionPooling, ClassToken, MeanPooling, NoPooling, RegisterTokens

VALID = torch.tensor([[True, True, False, False], [True, True, True, True], [False, True, False, True]])


def padded_differently(x):
    """The same valid tokens with other values in the padding."""
    other = torch.where(VALID[..., None], x, 100 * torch.randn_like(x))
    assert not torch.equal(other, x)
    return other


def test_no_pooling_returns_the_tokens_unchanged():
    x = torch.randn(3, 4, 8)
    pooling = NoPooling()
    assert pooling.prepend_tokens(x) is x
    assert pooling(x, VALID) is x
    assert pooling.num_prefix_tokens == 0


def test_class_token_is_prepended_and_returned():
    x, pooling = torch.randn(3, 4, 8), ClassToken(8)
    prepended = pooling.prepend_tokens(x)
    assert prepended.shape == (3, 4 + pooling.num_prefix_tokens, 8)
    assert torch.equal(prepended[:, 1:], x)
    assert torch.equal(prepended[:, 0], pooling.cls_token.expand(3, 8))
    assert torch.equal(pooling(prepended), prepended[:, 0])
    pooling(prepended).sum().backward()
    assert (pooling.cls_token.grad == 3).all(), "one token receives gradients from every example"


def test_mean_pooling_averages_only_valid_tokens():
    x, pooling = torch.randn(3, 4, 8), MeanPooling()
    torch.testing.assert_close(pooling(x), x.mean(1))
    expected = torch.stack([tokens[valid].mean(0) for tokens, valid in zip(x, VALID, strict=True)])
    torch.testing.assert_close(pooling(x, VALID), expected)
    assert torch.equal(pooling(padded_differently(x), VALID), pooling(x, VALID))
    with_nan_padding = x.masked_fill(~VALID[..., None], float("nan"))
    assert torch.equal(pooling(with_nan_padding, VALID), pooling(x, VALID))
    assert (pooling(x, torch.zeros_like(VALID)) == 0).all()


def test_attention_pooling_ignores_padded_tokens():
    x, pooling = torch.randn(3, 4, 8), AttentionPooling(8, 2)
    out = pooling(x, VALID)
    assert out.shape == (3, 8)
    torch.testing.assert_close(pooling(padded_differently(x), VALID), out, rtol=0, atol=1e-6)
    for b in range(3):
        torch.testing.assert_close(pooling(x[b : b + 1, VALID[b]]), out[b : b + 1])
    assert not torch.allclose(pooling(x), out, atol=1e-3)


@pytest.mark.parametrize("pooling", [MeanPooling(), AttentionPooling(8, 2)], ids=["mean", "attention"])
def test_pooling_is_permutation_invariant(pooling):
    x, order = torch.randn(3, 4, 8), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(pooling(x[:, order]), pooling(x))
    torch.testing.assert_close(pooling(x[:, order], VALID[:, order]), pooling(x, VALID))


def test_register_tokens_are_put_before_the_sequence_and_removed_again():
    x, registers = torch.randn(3, 4, 8), RegisterTokens(2, 8)
    longer = registers(x)
    assert torch.equal(longer[:, :2], registers.tokens.expand(3, 2, 8))
    assert torch.equal(longer[:, 2:], x)
    assert torch.equal(registers.remove(longer, 0), x)
    pooling = ClassToken(8)
    with_class_token = pooling.prepend_tokens(longer)  # class token, register tokens, x
    assert torch.equal(registers.remove(with_class_token, 1), pooling.prepend_tokens(x))
