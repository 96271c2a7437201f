"""Attention masks: bool, True = may attend, broadcastable to (B,H,Q,K), combined with &.

    causal(4)                     each token attends to itself and to earlier tokens
    padding(lengths)              no token attends to the padding of its sequence
    window(4, 1)                  each token attends to itself and to its direct neighbors
    causal(4) & padding(lengths)  both

torch.nn uses the opposite convention (True = may *not* attend) in some modules, and additive masks in others:
`from_torch` converts both.
Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def causal(num_queries: int, num_keys: int | None = None, device: torch.device | str | None = None) -> "CausalMask":
    """(Q,K): True on and below the diagonal, so that no token attends to a later one.

    With more keys than queries, the queries are the last tokens of the sequence, as in generation with a cache.
    """
    num_keys = num_queries if num_keys is None else num_keys
    check_query_count(num_queries, num_keys)
    return CausalMask(num_queries, num_keys, device)


def window(
    num_queries: int, window_size: int, num_keys: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """(Q,K): True where query and key are at most `window_size` positions apart, on either side.

    window(n, w) & causal(n) is a sliding window over the w previous tokens and the token itself.
    """
    num_keys = num_queries if num_keys is None else num_keys
    check_query_count(num_queries, num_keys)
    if window_size < 0:
        raise ValueError(f"window_size must be non-negative, got {window_size}")
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query_positions[:, None] - torch.arange(num_keys, device=device)
    return distance.abs() <= window_size


def check_query_count(num_queries: int, num_keys: int) -> None:
    if not 0 <= num_queries <= num_keys:
        raise ValueError(
            f"a self-attention mask needs 0 <= num_queries <= num_keys, got {num_queries} and {num_keys}; "
            "the queries are the last num_queries of the num_keys tokens"
        )


def padding(lengths: Tensor | Sequence[int], num_keys: int | None = None) -> Tensor:
    """(B,1,1,K): True at the first lengths[b] keys of sequence b, False at its padding."""
    lengths = torch.as_tensor(lengths)
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths must be integers of shape (B,), got {lengths.dtype} of shape {tuple(lengths.shape)}; "
            "a (B,K) bool tensor that is True at real tokens becomes a mask by real[:, None, None, :]"
        )
    if num_keys is None:
        num_keys = int(lengths.max()) if lengths.numel() else 0
    # Reading the values would synchronize an accelerator, and is impossible while a graph is traced.
    if lengths.device.type == "cpu" and lengths.numel() and not torch.compiler.is_compiling():
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or longest > num_keys:
            raise ValueError(
                f"lengths must be in [0, num_keys] = [0, {num_keys}], got {shortest if shortest < 0 else longest}"
            )
    return (torch.arange(num_keys, device=lengths.device) < lengths[:, None])[:, None, None, :]


def from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, num_heads: int = 1
) -> Tensor | None:
    """The mask for torch.nn's attn_mask and key_padding_mask, in which True (or -inf) means may *not* attend.

    attn_mask (Q,K) or (B*H,Q,K), key_padding_mask (B,K) or (K,) -> broadcastable to (B,H,Q,K)
    """
    mask = None
    if attn_mask is not None:
        mask = ~attn_mask if attn_mask.dtype == torch.bool else from_additive(attn_mask)
        if mask.dim() == 3:
            if mask.shape[0] % num_heads:
                raise ValueError(
                    f"a 3-D attn_mask must be (B*num_heads,Q,K), got {tuple(mask.shape)} with num_heads={num_heads}; "
                    "pass the module's num_heads"
                )
            mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        real = ~key_padding_mask if key_padding_mask.dtype == torch.bool else from_additive(key_padding_mask)
        real = real[..., None, None, :]
        mask = real if mask is None else mask & real
    return mask


def from_additive(additive: Tensor) -> Tensor:
    """The mask for one that is added to the scores: 0 may attend, -10000 or lower, such as -inf, may not."""
    if not additive.is_floating_point():
        raise ValueError(f"an additive mask must be floating point, got {additive.dtype}; from_torch converts bool")
    mask = additive == 0
    other = ~mask & ~(additive <= -10_000)
    if other.any():
        raise ValueError(
            f"an additive mask must be 0 or at most -10000, got {additive[other][0].item():g}; "
            "pass other values as logit_bias="
        )
    return mask


def to_additive(mask: "Mask", low: float = -math.inf, dtype: torch.dtype = torch.float32) -> Tensor:
    """The additive mask: 0 where the mask is True, `low` where it is False."""
    check_bool_mask(mask)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, low)


class CausalMask:
    """The causal mask (Q,K) without its Q x K entries. The last query is at the position of the last key.

    Attention passes it to the kernel as `is_causal=True`, also in a compiled or exported model. Indexing,
    `&`, `|`, `~` and any torch function convert it to the bool tensor `dense()`.
    """

    dtype = torch.bool

    def __init__(self, num_queries: int, num_keys: int, device: torch.device | str | None = None):
        self.shape = torch.Size((num_queries, num_keys))
        self.device = torch.empty(0, device=device).device

    def dense(self) -> Tensor:
        num_queries, num_keys = self.shape
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.device).tril(num_keys - num_queries)

    def to(self, device: torch.device | str) -> "CausalMask":
        num_queries, num_keys = self.shape
        return CausalMask(num_queries, num_keys, device)

    def dim(self) -> int:
        return 2

    def __and__(self, other: "Mask") -> Tensor:
        return self.dense() & dense(other)

    __rand__ = __and__

    def __or__(self, other: "Mask") -> Tensor:
        return self.dense() | dense(other)

    __ror__ = __or__

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.dense())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.dense().numpy(force=True).astype(dtype or bool)

    def tolist(self) -> list[list[bool]]:
        return self.dense().tolist()

    def __repr__(self) -> str:
        num_queries, num_keys = self.shape
        return f"CausalMask(num_queries={num_queries}, num_keys={num_keys}, device={str(self.device)!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the torch function with dense masks."""
        return func(*map(to_dense, args), **{name: to_dense(value) for name, value in (kwargs or {}).items()})


Mask = Tensor | CausalMask


def dense(mask: Mask) -> Tensor:
    """The mask as a bool tensor."""
    return mask.dense() if isinstance(mask, CausalMask) else mask


def to_dense(value: Any) -> Any:
    """An argument of a torch function, or a list of them, with dense masks."""
    if isinstance(value, list | tuple):
        return type(value)(map(to_dense, value))
    return value.dense() if isinstance(value, CausalMask) else value


def kernel_mask(mask: Mask | None, logit_bias: Tensor | None) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) for scaled_dot_product_attention. Its flag needs as many keys as queries."""
    if logit_bias is not None:
        return logit_bias if mask is None else logit_bias.masked_fill(~mask, -math.inf), False
    if isinstance(mask, CausalMask):
        num_queries, num_keys = mask.shape
        if num_queries == 1:
            return None, False  # a single query is at the last position and attends to every key
        if num_queries == num_keys:
            return None, True
        return mask.dense(), False
    return None if mask is None else torch.atleast_2d(mask), False


def check_bool_mask(mask: "Mask") -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"a mask must be bool with True = may attend, got {mask.dtype}; "
            "masks.from_additive and masks.from_torch convert other masks"
        )


def check_mask(mask: "Mask", shape: tuple[int, ...]) -> None:
    """Raises unless the mask is bool and broadcasts to the scores' shape (B,H,Q,K)."""
    check_bool_mask(mask)
    if not broadcasts_to(mask, shape):
        raise ValueError(
            f"a mask must broadcast to the scores (B,H,Q,K) = {shape}, got {tuple(mask.shape)}; "
            "use (Q,K) for one mask, (B,1,1,K) for padding, (B,1,Q,K) for one mask per example"
        )


def broadcasts_to(x: "Mask", shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to exactly this shape."""
    return x.dim() <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(x.shape), reversed(shape), strict=False)
    )
