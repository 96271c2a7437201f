"""Attention masks: bool, True = may attend, broadcastable to (B,H,Q,K), combined with &.

    causal(4)                     each token sees itself and what comes before
    padding(lengths)              each sequence of a batch sees its own tokens, not what fills it up
    window(4, 1)                  each token sees its neighbours
    causal(4) & padding(lengths)  both at once

torch.nn has the opposite meaning (True = may *not* attend) in some modules and adds numbers in others: `from_torch`
reads both.
Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def causal(n_queries: int, n_keys: int | None = None, device: torch.device | str | None = None) -> "CausalMask":
    """(Q,K): True on and below the diagonal, so that no token sees a later one.

    With more keys than queries, the queries are the last of the sequence (as in generation with a cache).
    """
    n_keys = n_queries if n_keys is None else n_keys
    check_last(n_queries, n_keys)
    return CausalMask(n_queries, n_keys, device)


def window(n_queries: int, reach: int, n_keys: int | None = None, device: torch.device | str | None = None) -> Tensor:
    """(Q,K): True where query and key are at most `reach` places apart. & causal(n) looks back only."""
    n_keys = n_queries if n_keys is None else n_keys
    check_last(n_queries, n_keys)
    if reach < 0:
        raise ValueError(f"reach must be at least 0, got {reach}; 0 lets each token see itself alone")
    query_places = torch.arange(n_keys - n_queries, n_keys, device=device)
    distance = query_places[:, None] - torch.arange(n_keys, device=device)
    return distance.abs() <= reach


def check_last(n_queries: int, n_keys: int) -> None:
    if not 0 <= n_queries <= n_keys:
        raise ValueError(
            f"a mask among the tokens of a sequence needs 0 <= n_queries <= n_keys, got {n_queries} and {n_keys}; "
            "the queries are the last n_queries of the n_keys tokens"
        )


def padding(lengths: Tensor | Sequence[int], n_keys: int | None = None) -> Tensor:
    """(B,1,1,K): True at the first lengths[b] keys of each sequence, False at what fills up the batch."""
    lengths = torch.as_tensor(lengths)
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths must be whole numbers of shape (B,), got {lengths.dtype} of shape {tuple(lengths.shape)}; "
            "for a (B,K) bool of real tokens use real[:, None, None, :]"
        )
    if n_keys is None:
        n_keys = int(lengths.max()) if lengths.numel() else 0
    # Looking at the numbers would make an accelerator wait, and has no meaning while a graph is traced.
    if lengths.device.type == "cpu" and lengths.numel() and not torch.compiler.is_compiling():
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or longest > n_keys:
            raise ValueError(
                f"lengths must be from 0 to the number of keys, {n_keys}, got {shortest if shortest < 0 else longest}; "
                "cut the lengths or pad the batch"
            )
    return (torch.arange(n_keys, device=lengths.device) < lengths[:, None])[:, None, None, :]


def from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, num_heads: int = 1
) -> Tensor | None:
    """Our mask from the two of torch.nn, where bool True (or the number -inf) means may *not* attend.

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


def from_additive(numbers: Tensor) -> Tensor:
    """Our mask from numbers that are added to the scores: 0 may attend, -10000 or lower (so -inf) may not."""
    if not numbers.is_floating_point():
        raise ValueError(f"an additive mask must be floating point, got {numbers.dtype}; a bool one goes to from_torch")
    mask = numbers == 0
    other = ~mask & ~(numbers <= -10_000)
    if other.any():
        raise ValueError(
            f"an additive mask must be 0 or at most -10000, got {numbers[other][0].item():g}; "
            "numbers between are a bias: pass them as logit_bias="
        )
    return mask


def to_additive(mask: "Mask", low: float = -math.inf, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers to add to the scores: 0 where the mask is True, `low` where it is False."""
    check_bool_mask(mask)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, low)


class CausalMask:
    """The causal mask (Q,K), without storing its numbers: the last query is at the last key.

    Attention passes it to the kernel as `is_causal=True`, also in a compiled or exported model. Indexing it, combining
    it with `&`, `|` or `~`, and any torch function make the bool tensor `dense()` of it.
    """

    dtype = torch.bool

    def __init__(self, n_queries: int, n_keys: int, device: torch.device | str | None = None):
        self.shape = torch.Size((n_queries, n_keys))
        self.device = torch.empty(0, device=device).device

    def dense(self) -> Tensor:
        n_queries, n_keys = self.shape
        return torch.ones(n_queries, n_keys, dtype=torch.bool, device=self.device).tril(n_keys - n_queries)

    def to(self, device: torch.device | str) -> "CausalMask":
        n_queries, n_keys = self.shape
        return CausalMask(n_queries, n_keys, device)

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
        n_queries, n_keys = self.shape
        return f"CausalMask(n_queries={n_queries}, n_keys={n_keys}, device={str(self.device)!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch gets the dense mask."""
        return func(*map(densified, args), **{name: densified(value) for name, value in (kwargs or {}).items()})


Mask = Tensor | CausalMask


def dense(mask: Mask) -> Tensor:
    """The mask as a bool tensor."""
    return mask.dense() if isinstance(mask, CausalMask) else mask


def densified(value: Any) -> Any:
    """An argument of a torch function, or a list of them, with dense masks."""
    if isinstance(value, list | tuple):
        return type(value)(map(densified, value))
    return value.dense() if isinstance(value, CausalMask) else value


def kernel_mask(mask: Mask | None, logit_bias: Tensor | None) -> tuple[Tensor | None, bool]:
    """What scaled_dot_product_attention takes: (attn_mask, is_causal). Its flag needs as many keys as queries."""
    if logit_bias is not None:
        return logit_bias if mask is None else logit_bias.masked_fill(~mask, -math.inf), False
    if isinstance(mask, CausalMask):
        n_queries, n_keys = mask.shape
        if n_queries == 1:
            return None, False  # a single query is the last one: it sees all
        if n_queries == n_keys:
            return None, True
        return mask.dense(), False
    return None if mask is None else torch.atleast_2d(mask), False


# What does not fit together, refused in one line: the rule, what came, what to do.


def check_bool_mask(mask: "Mask") -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"a mask must be bool with True = may attend, got {mask.dtype}; "
            "convert numbers with masks.from_additive, torch.nn's masks with masks.from_torch"
        )


def check_mask(mask: "Mask", shape: tuple[int, ...]) -> None:
    """Refuses a mask that is not bool, or that does not broadcast to the scores' shape (B,H,Q,K)."""
    check_bool_mask(mask)
    if not broadcasts_to(mask, shape):
        raise ValueError(
            f"a mask must broadcast to the scores (B,H,Q,K) = {shape}, got {tuple(mask.shape)}; "
            "use (Q,K) for one mask for all, (B,1,1,K) for padding, (B,1,Q,K) for one per example"
        )


def broadcasts_to(x: "Mask", shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to exactly this shape."""
    return x.dim() <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(x.shape), reversed(shape), strict=False)
    )
