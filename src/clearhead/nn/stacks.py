"""Blocks one after the other: the encoder, the decoder, and the pair of them.

All take embeddings: whatever can be turned into vectors of the model's width can be fed in.
Dims: B batch, L length, Q queries, K keys, E model width.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.cache import Cache
from clearhead.nn.masks import Mask


class Encoder(nn.Module):
    """Blocks of self-attention, then a norm where there is one. (B,L,E) -> (B,L,E)"""

    def __init__(self, blocks: Iterable[EncoderBlock], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: Cache | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The last hidden state; with all_layers=True every one: x itself and the output of each block.

        The last of them has gone through the final norm and equals what is returned without all_layers.
        """
        states = [x]
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, mask=mask, angles=angles, logit_bias=logit_bias, cache=layer)
            if all_layers:
                states.append(x)
        states[-1] = self.norm(x)
        return tuple(states) if all_layers else states[-1]

    @classmethod
    def from_torch(cls, stack: nn.TransformerEncoder) -> "Encoder":
        """The same stack as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange_stacks import encoder_from_torch

        return encoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoder:
        """A stack of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange_stacks import encoder_to_torch

        return encoder_to_torch(self, batch_first=batch_first)


class Decoder(nn.Module):
    """x (B,Q,E), memory (B,K,E) -> (B,Q,E)"""

    def __init__(self, blocks: Iterable[DecoderBlock], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, memory, mask=mask, memory_mask=memory_mask, angles=angles, logit_bias=logit_bias, cache=layer)
        return self.norm(x)

    @classmethod
    def from_torch(cls, stack: nn.TransformerDecoder) -> "Decoder":
        """The same stack as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange_stacks import decoder_from_torch

        return decoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoder:
        """A stack of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange_stacks import decoder_to_torch

        return decoder_to_torch(self, batch_first=batch_first)


class EncoderDecoder(nn.Module):
    """The pair of 2017, from embeddings to embeddings. source (B,K,E), target (B,Q,E) -> (B,Q,E)"""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
    ) -> Tensor:
        memory = self.encoder(source, mask=source_mask)
        return self.decoder(target, memory, mask=target_mask, memory_mask=memory_mask)

    @classmethod
    def from_torch(cls, transformer: nn.Transformer) -> "EncoderDecoder":
        """The same transformer as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange_stacks import encoder_decoder_from_torch

        return encoder_decoder_from_torch(transformer)

    def to_torch(self, *, batch_first: bool = True) -> nn.Transformer:
        """A transformer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange_stacks import encoder_decoder_to_torch

        return encoder_decoder_to_torch(self, batch_first=batch_first)
