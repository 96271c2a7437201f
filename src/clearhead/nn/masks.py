"""Masks: who may attend to whom. Bool, True = may attend, broadcastable to (B,H,Q,K), joined with &.

Every mask here is a torch.Tensor. `causal` is a lazy one: it stores nothing, reaches the kernel as a flag, and becomes
an ordinary tensor as soon as it is joined, indexed, printed or calculated with.
torch.nn says the opposite (True = may *not* attend) in some places and adds numbers in others: `from_torch` reads both.
Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clearhead.nn.checks import check_bool

IN_PLACE = "a causal mask stores nothing, so it cannot be changed in place; write mask = mask & other, or mask.clone()"


class CausalMask(Tensor):
    """(Q,K): each query sees the keys up to its own place; the last query stands at the last key."""

    # what is calculated from it is an ordinary tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, n_queries: int, n_keys: int, device: torch.device | str | None = None) -> "CausalMask":
        size = (n_queries, n_keys)
        return Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=torch.empty(0, device=device).device)

    def __init__(self, n_queries: int, n_keys: int, device: torch.device | str | None = None):
        super().__init__()

    def dense(self) -> Tensor:
        n_queries, n_keys = self.shape
        return torch.ones(n_queries, n_keys, dtype=torch.bool, device=self.device).tril(n_keys - n_queries)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made: list[tuple[Tensor, CausalMask]] = []

        def dense(mask: CausalMask) -> Tensor:
            made.append((mask.dense(), mask))
            return made[-1][0]

        out = func(*tree_map_only(cls, dense, args), **tree_map_only(cls, dense, kwargs or {}))
        if func._schema.is_mutable and not all(now.equal(mask.dense()) for now, mask in made):
            raise ValueError(IN_PLACE)  # what changes nothing may pass: load_state_dict copies equal masks
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ValueError(IN_PLACE)

    def __deepcopy__(self, memo: dict) -> "CausalMask":
        n_queries, n_keys = self.shape
        return CausalMask(n_queries, n_keys, self.device)

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def share_memory_(self) -> "CausalMask":
        return self  # there is nothing to share

    def tolist(self) -> list:
        return self.dense().tolist()


def causal(n_queries: int, n_keys: int | None = None, device: torch.device | str | None = None) -> Tensor:
    """(Q,K): True on and below the diagonal, so that no token sees a later one.

    With more keys than queries, the queries are the last of the sequence (as in generation with a cache).
    """
    n_keys = n_queries if n_keys is None else n_keys
    check_last(n_queries, n_keys)
    if torch.compiler.is_compiling():  # the compiler traces ordinary tensors only
        return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)
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
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, n_heads: int = 1
) -> Tensor | None:
    """Our mask from the two of torch.nn, where bool True (or the number -inf) means may *not* attend.

    attn_mask (Q,K) or (B*H,Q,K), key_padding_mask (B,K) or (K,) -> broadcastable to (B,H,Q,K)
    """
    mask = None
    if attn_mask is not None:
        mask = ~attn_mask if attn_mask.dtype == torch.bool else from_additive(attn_mask)
        if mask.dim() == 3:
            if mask.shape[0] % n_heads:
                raise ValueError(
                    f"a 3-D attn_mask must be (B*n_heads,Q,K), got {tuple(mask.shape)} with n_heads={n_heads}; "
                    "pass the module's n_heads"
                )
            mask = mask.unflatten(0, (-1, n_heads))
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


def to_additive(mask: Tensor, low: float = -math.inf, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers to add to the scores: 0 where the mask is True, `low` where it is False."""
    check_bool(mask)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, low)


def kernel_mask(mask: Tensor | None, logit_bias: Tensor | None) -> tuple[Tensor | None, bool]:
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
