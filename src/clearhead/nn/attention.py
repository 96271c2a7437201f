"""Attention, and the linear layers and norms around it:

    scores  = beta * q @ kᵀ                  similarity of each query and each key; beta = 1/sqrt(D)
    weights = softargmax(scores, where=mask)     each row sums to 1
    out     = weights @ v                    weighted mean of the values

`attend_reference` computes exactly this and returns the weights. `attend_fused` is the same function on PyTorch's fused
kernel, without them; tests/nn/test_attention.py holds both to equal outputs and gradients for every mask and beta.
Keys and values may have fewer heads than the queries (grouped-query attention, Ainslie et al. 2023; multi-query
attention, Shazeer 2019, is the case of one): each of their G heads serves H/G consecutive heads of the queries.

Norms and layer scale keep the activations of a deep model at a moderate size. Mean and variance are taken over the
width of each token by itself.

    layer norm    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     torch.nn.LayerNorm, Ba et al. 2016
    RMS norm      x / sqrt(mean(x²) + eps) * weight                      Zhang & Sennrich 2019
    layer scale   gamma * x                                              Touvron et al. 2021

Dims: B batch, L length, Q queries, K keys, H heads, G heads of keys and values, D head width (Dv that of values),
E model width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.cache import KVCache
from clearhead.nn.masks import Mask, broadcasts_to, check_bool_mask, check_mask, kernel_mask
from clearhead.nn.positions import apply_rotary
from clearhead.validation import check_beta, check_heads, check_kv_heads, check_positive, check_rate

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]
NormLayer = Callable[[int], nn.Module]
"""from the width of the tokens to a module: nn.LayerNorm, RMSNorm, or nn.Identity for none"""


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
    """softargmax(beta q kᵀ + logit_bias) v, and the weights before dropout. A query that sees no key gets zeros.

    q (B,H,Q,D), k (B,G,K,D), v (B,G,K,Dv), mask and logit_bias to (B,H,Q,K) -> out (B,H,Q,Dv), weights (B,H,Q,K)
    beta defaults to 1/sqrt(D). With an infinite beta, the bias has no effect.
    """
    check_attend(q, k, v, mask, beta, logit_bias)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    if is_grouped(q, k):
        k, v = repeat_kv_heads(k, q.shape[-3]), repeat_kv_heads(v, q.shape[-3])
    scores = in_float32(q) @ in_float32(k).transpose(-2, -1)
    if logit_bias is not None and not is_infinite(beta, scores):
        scores, beta = beta * scores + logit_bias, 1.0
    weights = softargmax(scores, beta, where=mask).to(v.dtype)
    return F.dropout(weights, dropout) @ v, weights


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
    """The first output of `attend_reference`, by the fused kernel, which avoids the (Q,K) matrix where it can.

    The kernel returns NaN for an infinite beta: the reference is used then.
    """
    check_attend(q, k, v, mask, beta, logit_bias)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    if is_infinite(beta, q):
        return attend_reference(q, k, v, mask, beta, logit_bias=logit_bias, dropout=dropout)[0]
    attn_mask, is_causal = None, False
    if mask is not None or logit_bias is not None:
        attn_mask, is_causal = kernel_mask(mask, None if logit_bias is None else logit_bias.to(q.dtype))
    if is_causal and beta <= 0:  # the kernel scales its -inf above the diagonal too: 0 * -inf is NaN, -1 * -inf is inf
        q, beta = beta * q, 1.0
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal, scale=beta, enable_gqa=is_grouped(q, k)
    )


def softargmax(z: Tensor, beta: float = 1.0, dim: int = -1, where: "Mask | None" = None) -> Tensor:
    """e^(beta z_i) / sum_j e^(beta z_j): positive weights that sum to 1. PyTorch calls it softmax.

    beta is the inverse temperature: 0 gives equal weights, +inf puts all weight on the largest entry, -inf on the
    smallest; ties are shared. Entries that are False in `where` get weight 0; a row without any True is all zeros.
    """
    check_beta(beta)
    if z.is_complex() or z.dim() == 0:
        raise ValueError(f"z must be real and have at least one dimension, got {z!r}")
    if where is not None:
        check_bool_mask(where)
    if not z.is_floating_point():
        z = z.to(torch.get_default_dtype())
    if z.shape[dim] == 0:
        return z
    if beta < 0:
        return softargmax(-z, -beta, dim, where)  # the smallest of z is the largest of -z

    # Finite numbers replace inf and -inf, which would make NaN: 0 * -inf, inf - inf.
    lowest, highest = torch.finfo(z.dtype).min, torch.finfo(z.dtype).max
    z = z.clamp(lowest, highest)
    if where is not None:
        z = z.masked_fill(~where, lowest)  # the maximum is taken over unmasked entries
    largest = z.amax(dim, keepdim=True).detach()  # subtracting a constant changes neither weights nor gradients
    if beta > highest:  # infinite in this dtype
        zeros = 0 * z.clamp(-1, 1)  # keeps the graph, with gradients of zero
        logits = zeros.masked_fill(z < largest, lowest)
    else:
        logits = beta * (z - largest).clamp(min=lowest)  # at most 0, so that e^logits cannot overflow
    if where is None:
        return logits.softmax(dim)
    return logits.masked_fill(~where, lowest).softmax(dim).masked_fill(~where, 0.0)


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether each head of the keys (B,G,K,D) serves several heads of the queries (B,H,Q,D)."""
    if not q.dim() == k.dim() > 3 or q.shape[:-3] != k.shape[:-3]:
        return False
    H, G = q.shape[-3], k.shape[-3]
    return 0 < G < H and H % G == 0


def repeat_kv_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B,G,K,D) -> (B,H,K,D): each head of keys or values, once for every head of queries that it serves."""
    return x if x.shape[-3] == num_heads else x.repeat_interleave(num_heads // x.shape[-3], dim=-3)


def in_float32(x: Tensor) -> Tensor:
    """x in at least float32: half-precision products are summed in float32, as in the kernel."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_infinite(beta: float, scores: Tensor) -> bool:
    """Whether beta is so large that beta * score overflows."""
    return abs(beta) > torch.finfo(scores.dtype).max ** 0.5


class Linear(nn.Linear):
    """x Wᵀ + b with Xavier-uniform W (keeps the variance forward and backward) and b = 0."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight: root mean square norm (Zhang & Sennrich 2019). (B,L,E) -> (B,L,E)

    Layer norm without its mean and its bias. As in layer norm, the scale of x does not matter; its mean does.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps)


class LayerScale(nn.Module):
    """gamma * x with one learned gamma per channel (CaiT, Touvron et al. 2021). (B,L,E) -> (B,L,E)

    It scales what a sublayer adds to the residual stream: with a small `init`, a block begins close to the identity.
    """

    def __init__(self, width: int, init: float = 1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), float(init)))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class SingleHeadAttention(nn.Module):
    """softargmax(q kᵀ / sqrt(key_width)) v with q = x W_Q, k = keys W_K, v = values W_V; no output projection.

    x (B,Q,E), keys (B,K,E), values (B,K,E) -> (B,Q,value_width)
    """

    def __init__(self, width: int, key_width: int, value_width: int, *, bias: bool = True):
        super().__init__()
        self.q_proj = Linear(width, key_width, bias)
        self.k_proj = Linear(width, key_width, bias)
        self.v_proj = Linear(width, value_width, bias)

    def forward(
        self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None, *, mask: Mask | None = None
    ) -> Tensor:
        keys = x if keys is None else keys
        values = keys if values is None else values
        inputs = (("x", x, self.q_proj), ("keys", keys, self.k_proj), ("values", values, self.v_proj))
        for name, tensor, layer in inputs:
            check_width(tensor, layer.in_features, name)
        q, k, v = (y.unsqueeze(-3) for y in (self.q_proj(x), self.k_proj(keys), self.v_proj(values)))  # (B,1,L,D)
        return attend_fused(q, k, v, mask).squeeze(-3)


class MultiHeadAttention(nn.Module):
    """num_heads attentions in parallel, each on its own slice of the width, concatenated and mixed by W_O.

    x (B,Q,input_width), keys (B,K,key_input_width), values (B,K,value_input_width) -> (B,Q,width)

    Self-attention if only x is given; values default to keys. input_width defaults to width, and the input widths of
    keys and values default to input_width. With num_kv_heads below num_heads, keys and values have fewer heads, which
    shrinks their projections and the cache (grouped-query attention). qk_norm normalizes the queries and keys of each
    head (Henry et al. 2020, Dehghani et al. 2023): the scores are bounded, whatever the size of the weights.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        qk_norm: NormLayer | None = None,
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
        check_heads(width, num_heads)
        check_rate(dropout=dropout)
        self.num_heads, self.dropout, self.beta, self.attend = num_heads, dropout, beta, attend
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_kv_heads(num_heads, self.num_kv_heads)
        self.head_dim = width // num_heads
        kv_width = self.num_kv_heads * self.head_dim
        input_width = width if input_width is None else input_width
        key_input_width = input_width if key_input_width is None else key_input_width
        value_input_width = input_width if value_input_width is None else value_input_width
        check_positive(input_width=input_width, key_input_width=key_input_width, value_input_width=value_input_width)
        self.q_proj: nn.Linear = Linear(input_width, width, bias)
        self.k_proj: nn.Linear = Linear(key_input_width, kv_width, bias)
        self.v_proj: nn.Linear = Linear(value_input_width, kv_width, bias)
        self.out_proj: nn.Module = Linear(width, width, bias) if output_projection else nn.Identity()
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        rotary_angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention from x to keys, or from x to itself.

        rotary_angles (Q,D/2) rotate queries and keys (self-attention only), logit_bias (H,Q,K) is added to the logits
        (ALiBi). A cache holds the keys and values of earlier tokens, or those of the encoder's output.
        return_weights=True uses `attend_reference` instead of the fused kernel and returns (output, weights): the
        attention weights (B,H,Q,K) before dropout.
        """
        check_width(x, self.q_proj.in_features, "x")
        q = self.split_heads(self.q_proj(x))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if keys is None:
            k, v = self.keys_values(x, values)
            if rotary_angles is not None:
                q, k = apply_rotary(q, rotary_angles), apply_rotary(k, rotary_angles)
            if cache is not None:
                k, v = cache.extend(k, v)
        elif rotary_angles is not None:
            raise ValueError("rotary_angles are for self-attention, got them together with keys")
        elif cache is not None:
            k, v = cache.get_or_compute(keys, lambda: self.keys_values(keys, values))
        else:
            k, v = self.keys_values(keys, values)
        dropout = self.dropout if self.training else 0.0
        attend = attend_reference if return_weights and self.attend is attend_fused else self.attend
        result = attend(q, k, v, mask, self.beta, logit_bias=logit_bias, dropout=dropout)
        heads, weights = result if isinstance(result, tuple) else (result, None)
        out = self.out_proj(heads.transpose(-3, -2).flatten(-2))  # (B,H,Q,D) -> (B,Q,E)
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
        check_width(keys, self.k_proj.in_features, "keys")
        check_width(values, self.v_proj.in_features, "values")
        k, v = self.split_heads(self.k_proj(keys)), self.split_heads(self.v_proj(values))
        return (k if self.k_norm is None else self.k_norm(k)), v

    def split_heads(self, x: Tensor) -> Tensor:
        """(B,L,E) -> (B,H,L,D), or (B,G,L,D) for keys and values: each head gets its slice of the width."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A module that computes the same as this torch.nn module, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import attention_from_torch

        return attention_from_torch(module)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """A torch.nn module that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import attention_to_torch

        return attention_to_torch(self, batch_first=batch_first)


def check_width(x: Tensor, width: int, name: str) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"the last dimension of {name} must be {width}, got shape {tuple(x.shape)}")


def check_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: "Mask | None", beta: float | None, logit_bias: Tensor | None = None
) -> None:
    if beta is not None:
        check_beta(beta)
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.dim() < 2 or not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device or not q.shape[-1]:
            raise ValueError(
                "queries, keys and values must be (..., length, width) of one floating-point dtype and device, got "
                f"{name} {x.dtype} of shape {tuple(x.shape)} on {x.device}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries and keys must have the same width, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"there must be one value for each key, got {k.shape[-2]} keys and {v.shape[-2]} values")
    if not (q.shape[:-2] == k.shape[:-2] or is_grouped(q, k)) or k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            "queries, keys and values must have the same batch and heads, got "
            f"{tuple(q.shape[:-2])}, {tuple(k.shape[:-2])} and {tuple(v.shape[:-2])}; of (B,H,L,D), keys and values "
            "may have fewer heads if their number divides that of the queries"
        )
    scores = (*q.shape[:-1], k.shape[-2])
    for name, extra in (("mask", mask), ("logit_bias", logit_bias)):
        if extra is not None and extra.device != q.device:
            raise ValueError(f"{name} must be on the device of the queries, {q.device}, got {extra.device}")
    if mask is not None:
        check_mask(mask, scores)
    if logit_bias is not None and not (logit_bias.is_floating_point() and broadcasts_to(logit_bias, scores)):
        raise ValueError(
            "logit_bias must be floating point and broadcast to the scores (B,H,Q,K) = "
            f"{scores}, got {logit_bias.dtype} of shape {tuple(logit_bias.shape)}; "
            "use (H,Q,K) for one per head"
        )
