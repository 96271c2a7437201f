"""Keys and values that are already computed, so that generating a token costs one token's work.

Dims: B batch, H heads, K keys, D head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """What one attention layer remembers. For generation: it keeps numbers, not gradients."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._memory: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest keys and values (B,H,new,D) and returns all of them."""
        end = self.length + k.shape[-2]
        if self._k is None or self._v is None:
            self._k, self._v = _room(k, end), _room(v, end)
        if k.shape[:-2] != self._k.shape[:-2]:
            raise ValueError(
                f"a cache goes on with the batch that it began with, {tuple(self._k.shape[:-2])} of (batch, heads), "
                f"got {tuple(k.shape[:-2])}; begin with a new cache"
            )
        if end > self._k.shape[-2]:  # twice the room each time: the copying adds up to one copy
            old_k, old_v = self._k, self._v
            self._k, self._v = _room(k, 2 * end), _room(v, 2 * end)
            self._k[..., : self.length, :] = old_k[..., : self.length, :]
            self._v[..., : self.length, :] = old_v[..., : self.length, :]
        self._k[..., self.length : end, :] = k
        self._v[..., self.length : end, :] = v
        self.length = end
        return self._k[..., :end, :], self._v[..., :end, :]

    def once(self, memory: Tensor, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The keys and values of a memory: computed at the first call, the same ones ever after."""
        if self._k is None or self._v is None:
            self._memory = memory
            self._k, self._v = compute()
        if self._memory is not memory:
            raise ValueError("a cache holds the keys and values of one memory, got another; begin with a new cache")
        return self._k, self._v

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order (beam search goes on with some of its beams)."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k[rows], self._v[rows]


class LayerKVCache:
    """One decoder block's memory: of its own tokens, and of the encoder's output."""

    def __init__(self) -> None:
        self.own, self.memory = KVCache(), KVCache()


class DecoderCache:
    """A model's memory while it generates: one LayerCache for each block. `length` tokens are in it."""

    def __init__(self, depth: int) -> None:
        self.layers = [LayerKVCache() for _ in range(depth)]

    @property
    def length(self) -> int:
        return self.layers[0].own.length

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows of the batch. Rows change places within an example, whose memory stays as it is."""
        for layer in self.layers:
            layer.own.select(rows)


def _room(like: Tensor, length: int) -> Tensor:
    return torch.empty(*like.shape[:-2], length, like.shape[-1], dtype=like.dtype, device=like.device)
