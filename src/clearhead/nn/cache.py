"""Key-value caches: generating a token costs the work of one token instead of the whole sequence.

Dims: B batch, H heads, K keys, D head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """The keys and values of one attention layer. For generation only: it stores no gradients."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._memory: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values (B,H,new,D) and returns all of them."""
        end = self.length + k.shape[-2]
        if self._k is None or self._v is None:
            self._k, self._v = _allocate(k, end), _allocate(v, end)
        if k.shape[:-2] != self._k.shape[:-2]:
            raise ValueError(
                f"the (batch, heads) of a cache must not change: it holds {tuple(self._k.shape[:-2])}, "
                f"got {tuple(k.shape[:-2])}; use a new cache for a new batch"
            )
        if end > self._k.shape[-2]:  # doubling: the cost of copying is linear in the final length
            old_k, old_v = self._k, self._v
            self._k, self._v = _allocate(k, 2 * end), _allocate(v, 2 * end)
            self._k[..., : self.length, :] = old_k[..., : self.length, :]
            self._v[..., : self.length, :] = old_v[..., : self.length, :]
        self._k[..., self.length : end, :] = k
        self._v[..., self.length : end, :] = v
        self.length = end
        return self._k[..., :end, :], self._v[..., :end, :]

    def get_or_compute(self, memory: Tensor, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The keys and values of the encoder's output: computed at the first call, stored for later calls."""
        if self._k is None or self._v is None:
            self._memory = memory
            self._k, self._v = compute()
        if self._memory is not memory:
            raise ValueError("this cache holds the keys and values of another memory; use a new cache")
        return self._k, self._v

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order (for beam search)."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k[rows], self._v[rows]


class LayerKVCache:
    """The caches of one decoder block."""

    def __init__(self) -> None:
        self.self_attn, self.cross_attn = KVCache(), KVCache()


class DecoderCache:
    """One LayerKVCache for each block of a model. `length` is the number of tokens in it."""

    def __init__(self, depth: int) -> None:
        self.layers = [LayerKVCache() for _ in range(depth)]

    @property
    def length(self) -> int:
        return self.layers[0].self_attn.length

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order. Rows move within one example only, which keeps its memory."""
        for layer in self.layers:
            layer.self_attn.select(rows)


def _allocate(like: Tensor, length: int) -> Tensor:
    return torch.empty(*like.shape[:-2], length, like.shape[-1], dtype=like.dtype, device=like.device)
