"""Attention, written twice: once as the formula, once as the fused kernel.

`attend_reference` is the definition, and shows its weights; `attend_fused` is the same function, fast, without them.
tests/nn/test_attention.py holds the two to the same values and gradients, for every kind of mask and beta.
Dims: B batch, L length, Q queries, K keys, H heads, D head width of queries and keys, Dv of values, E model width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.cache import KeyValues
from clearhead.nn.checks import check_attend, check_width
from clearhead.nn.linear import XavierLinear
from clearhead.nn.masks import Mask, kernel_mask
from clearhead.nn.rotary import rotate
from clearhead.nn.sizes import check_heads, check_positive, check_rate
from clearhead.nn.softargmax import softargmax

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    beta: float | None = None,
    *,
    logit_bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softargmax(beta q kᵀ + logit_bias) v, and the weights before dropout. A query that may see nothing gets zeros.

    q (B,H,Q,D), k (B,H,K,D), v (B,H,K,Dv), mask and logit_bias to (B,H,Q,K) -> out (B,H,Q,Dv), weights (B,H,Q,K)
    beta is 1/sqrt(D) unless given. Beside an infinite beta, a bias weighs nothing.
    """
    check_attend(q, k, v, mask, beta, logit_bias)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    scores = in_float32(q) @ in_float32(k).transpose(-2, -1)
    if logit_bias is not None and not is_infinite(beta, scores):
        scores, beta = beta * scores + logit_bias, 1.0
    weights = softargmax(scores, beta, where=mask).to(v.dtype)
    return F.dropout(weights, dropout) @ v, weights


def in_float32(x: Tensor) -> Tensor:
    """At least: half-precision numbers are multiplied as such, but summed in float32, as the kernel does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_infinite(beta: float, scores: Tensor) -> bool:
    """So large that beta times a score overflows: beside it, nothing else counts."""
    return abs(beta) > torch.finfo(scores.dtype).max ** 0.5


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    beta: float | None = None,
    *,
    logit_bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What `attend_reference` returns first; the kernel goes piece by piece and, where it can, stores no (Q,K) matrix.

    It has no answer (NaN) at an infinite beta: there, the formula is used.
    """
    check_attend(q, k, v, mask, beta, logit_bias)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    if is_infinite(beta, q):
        return attend_reference(q, k, v, mask, beta, logit_bias=logit_bias, dropout=dropout)[0]
    kernels_mask, is_causal = kernel_mask(mask, None if logit_bias is None else logit_bias.to(q.dtype))
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
        self.query = XavierLinear(width, key_width, bias)
        self.key = XavierLinear(width, key_width, bias)
        self.value = XavierLinear(width, value_width, bias)

    def forward(
        self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None, *, mask: Mask | None = None
    ) -> Tensor:
        keys = x if keys is None else keys
        values = keys if values is None else values
        for name, given, layer in (("x", x, self.query), ("keys", keys, self.key), ("values", values, self.value)):
            check_width(given, layer.in_features, name)
        q, k, v = (y.unsqueeze(-3) for y in (self.query(x), self.key(keys), self.value(values)))  # (B,1,L,D)
        return attend_fused(q, k, v, mask).squeeze(-3)


class MultiHeadAttention(nn.Module):
    """n_heads attentions side by side, each on its own slice of the width; their outputs joined and mixed by W_O.

    x (B,Q,input_width), keys (B,K,key_input_width), values (B,K,value_input_width) -> (B,Q,width)
    Self-attention when only x is given; values default to keys. input_width defaults to width, and the input widths of
    keys and values default to input_width.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        *,
        input_width: int | None = None,
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
        check_rate("dropout", dropout)
        self.n_heads, self.dropout, self.beta, self.attend = n_heads, dropout, beta, attend
        input_width = width if input_width is None else input_width
        key_input_width = input_width if key_input_width is None else key_input_width
        value_input_width = input_width if value_input_width is None else value_input_width
        check_positive(input_width=input_width, key_input_width=key_input_width, value_input_width=value_input_width)
        self.query: nn.Linear = XavierLinear(input_width, width, bias)
        self.key: nn.Linear = XavierLinear(key_input_width, width, bias)
        self.value: nn.Linear = XavierLinear(value_input_width, width, bias)
        self.output: nn.Module = XavierLinear(width, width, bias) if output_projection else nn.Identity()

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: KeyValues | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The attention of x to keys, or of x to itself.

        angles (Q,D/2) turn queries and keys (rotary positions; self-attention only), logit_bias (H,Q,K) is added to
        the logits (ALiBi). A cache holds the keys and values of earlier tokens, or those of a memory.
        return_weights=True computes the formula instead of calling the fused kernel, and returns (output, weights):
        the attention weights (B,H,Q,K) of each head, before dropout.
        """
        check_width(x, self.query.in_features, "x")
        q = self.split(self.query(x))
        if keys is None:
            k, v = self.keys_values(x, values)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            if cache is not None:
                k, v = cache.extend(k, v)
        elif angles is not None:
            raise ValueError("angles are for self-attention, got them together with keys; leave out one of the two")
        elif cache is not None:
            k, v = cache.once(keys, lambda: self.keys_values(keys, values))
        else:
            k, v = self.keys_values(keys, values)
        dropout = self.dropout if self.training else 0.0
        attend = attend_reference if return_weights and self.attend is attend_fused else self.attend
        result = attend(q, k, v, mask, self.beta, logit_bias=logit_bias, dropout=dropout)
        heads, weights = result if isinstance(result, tuple) else (result, None)
        out = self.output(heads.transpose(-3, -2).flatten(-2))  # (B,H,Q,D) -> (B,Q,E)
        if not return_weights:
            return out
        if weights is None:
            raise ValueError(
                f"return_weights=True needs an attend function that returns (output, weights), got {self.attend}, "
                "which returns the output only; attend_reference returns both"
            )
        return out, weights

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
