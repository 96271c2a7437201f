"""Attention, written twice: once as the formula, once as the fused kernel.

`attend_reference` is the definition, and shows its weights; `attend_fused` is the same function, fast, without them.
tests/nn/test_attention.py proves them equal in values and gradients; nothing else may assume it.
Dims: B batch, L length, Q queries, K keys, H heads, D head width, E model width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.cache import KeyValues
from clearhead.nn.checks import check_attend, check_width
from clearhead.nn.linear import xavier_linear
from clearhead.nn.masks import kernel_mask
from clearhead.nn.rotary import rotate
from clearhead.nn.sizes import check_beta, check_heads

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def softargmax(z: Tensor, beta: float = 1.0, dim: int = -1, where: Tensor | None = None) -> Tensor:
    """e^(beta z_i) / sum_j e^(beta z_j): the share of each entry in being the largest.

    beta = 0 shares equally, +inf gives all to the largest, -inf all to the smallest; ties share.
    Entries that are False in `where` take no part; a row without any True gets zeros.
    """
    check_beta(beta)
    if not z.is_floating_point():
        z = z.to(torch.get_default_dtype())
    if z.shape[dim] == 0:
        return z
    if beta < 0:
        return softargmax(-z, -beta, dim, where)  # the smallest of z is the largest of -z
    lowest = torch.finfo(z.dtype).min  # not -inf: 0 * -inf, and a row of nothing but -inf, would be NaN
    candidates = z if where is None else z.masked_fill(~where, lowest)
    largest = candidates.amax(dim, keepdim=True).detach()
    if beta > torch.finfo(z.dtype).max:
        logits = torch.zeros_like(z).masked_fill(candidates < largest, lowest).masked_fill(largest.isnan(), math.nan)
    else:
        logits = beta * (candidates - largest).clamp(min=lowest)  # at most 0, so e^logits cannot overflow
    if where is None:
        return logits.softmax(dim)
    return logits.masked_fill(~where, lowest).softmax(dim).masked_fill(~where, 0.0)


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    beta: float | None = None,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softargmax_beta(q kᵀ + bias) v, and the weights before dropout. A query that may see nothing returns zeros.

    q (B,H,Q,D), k (B,H,K,D), v (B,H,K,Dv), mask to (B,H,Q,K) -> out (B,H,Q,Dv), weights (B,H,Q,K)
    beta is 1/sqrt(D) unless given.
    """
    beta = check_attend(q, k, v, mask, beta)
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    weights = softargmax(scores, beta, where=mask)
    return F.dropout(weights, dropout) @ v, weights


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    beta: float | None = None,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What `attend_reference` returns first, computed piece by piece: no (Q,K) matrix is ever stored.

    The kernel has no answer at beta = +inf and -inf (it gives NaN): there, the formula itself is used.
    """
    beta = check_attend(q, k, v, mask, beta)
    if abs(beta) > torch.finfo(q.dtype).max:
        return attend_reference(q, k, v, mask, beta, bias=bias, dropout=dropout)[0]
    kernels_mask, is_causal = kernel_mask(mask, None if bias is None else beta * bias)
    if is_causal and beta <= 0:  # its -inf above the diagonal is scaled too: 0 * -inf is NaN, -1 * -inf is inf
        q, beta = beta * q, 1.0
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=kernels_mask, dropout_p=dropout, is_causal=is_causal, scale=beta
    )


class SingleHeadAttention(nn.Module):
    """softargmax(q kᵀ / sqrt(key_width)) v, with q = x W_Q, k = keys W_K, v = values W_V: one head, nothing after it.

    x (B,Q,E), keys (B,K,E), values (B,K,E) -> (B,Q,value_width)
    """

    def __init__(self, width: int, key_width: int, value_width: int, *, bias: bool = True):
        super().__init__()
        self.query = xavier_linear(width, key_width, bias)
        self.key = xavier_linear(width, key_width, bias)
        self.value = xavier_linear(width, value_width, bias)

    def forward(
        self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        keys = x if keys is None else keys
        values = keys if values is None else values
        for name, given, layer in (("x", x, self.query), ("keys", keys, self.key), ("values", values, self.value)):
            check_width(given, layer.in_features, name)
        q, k, v = (y.unsqueeze(-3) for y in (self.query(x), self.key(keys), self.value(values)))  # (B,1,L,D)
        return attend_fused(q, k, v, mask).squeeze(-3)


class MultiHeadAttention(nn.Module):
    """n_heads attentions side by side, each on its own slice of the width; their outputs joined and mixed by W_O.

    x (B,Q,width), keys (B,K,key_input_width), values (B,K,value_input_width) -> (B,Q,width)
    Self-attention when only x is given; values default to keys.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        *,
        key_input_width: int | None = None,
        value_input_width: int | None = None,
        bias: bool = True,
        output_projection: bool = True,
        dropout: float = 0.0,
        beta: float | None = None,
        attend: Attend = attend_fused,
    ):
        super().__init__()
        check_heads(width, n_heads)
        self.n_heads, self.dropout, self.beta, self.attend = n_heads, dropout, beta, attend
        self.query = xavier_linear(width, width, bias)
        self.key = xavier_linear(key_input_width or width, width, bias)
        self.value = xavier_linear(value_input_width or width, width, bias)
        self.output = xavier_linear(width, width, bias) if output_projection else nn.Identity()

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        angles: Tensor | None = None,
        bias: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """The attention of x to keys, or of x to itself.

        For self-attention alone: angles (Q,D/2) turn queries and keys (rotary positions), and a cache holds the keys
        and values of the tokens before x. bias (H,Q,K) is added to the scores (ALiBi).
        """
        check_width(x, self.query.in_features, "x")
        q = self.split(self.query(x))
        if keys is None:
            k, v = self.keys_values(x, values)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            if cache is not None:
                k, v = cache.extend(k, v)
        elif cache is not None:
            k, v = cache.once(lambda: self.keys_values(keys, values))
        else:
            k, v = self.keys_values(keys, values)
        dropout = self.dropout if self.training else 0.0
        out = self.attend(q, k, v, mask, self.beta, bias=bias, dropout=dropout)
        if isinstance(out, tuple):
            out, _ = out  # attend_reference shows its weights too
        return self.output(out.transpose(-3, -2).flatten(-2))  # (B,H,Q,D) -> (B,Q,E)

    def keys_values(self, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        values = keys if values is None else values
        check_width(keys, self.key.in_features, "keys")
        check_width(values, self.value.in_features, "values")
        return self.split(self.key(keys)), self.split(self.value(values))

    def split(self, x: Tensor) -> Tensor:
        """(B,L,E) -> (B,H,L,D): each head gets its slice of the width."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """The same attention as this torch.nn module, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange import attention_from_torch

        return attention_from_torch(module)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """A torch.nn module that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange import attention_to_torch

        return attention_to_torch(self, batch_first=batch_first)
