"""Blocks and stacks to and from torch.nn: the same function, with a copy of the weights.

Both sides have the same parts under other names, and the tables below are the whole translation. Only attention is
packed otherwise (interchange.py); every other part is copied as it is, so eps, bias, dropout, mode and what is frozen
come along without being named. Each function here makes an empty frame, then fills it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.interchange import attention_from_torch, attention_to_torch, known
from clearhead.nn.stacks import Decoder, Encoder, EncoderDecoder

COMMON_PARTS = {  # torch.nn's name: ours
    "self_attn": "attention",
    "norm1": "around_attention.norm",
    "dropout1": "around_attention.dropout",
    "linear1": "feedforward.widen",
    "dropout": "feedforward.dropout",
    "linear2": "feedforward.narrow",
}
ENCODER_PARTS = COMMON_PARTS | {
    "norm2": "around_feedforward.norm",
    "dropout2": "around_feedforward.dropout",
}
DECODER_PARTS = COMMON_PARTS | {
    "multihead_attn": "cross_attention",
    "norm2": "around_cross_attention.norm",
    "dropout2": "around_cross_attention.dropout",
    "norm3": "around_feedforward.norm",
    "dropout3": "around_feedforward.dropout",
}

Block = TypeVar("Block", EncoderBlock, DecoderBlock)
Stack = TypeVar("Stack", Encoder, Decoder)
TorchLayer = TypeVar("TorchLayer", nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
TorchStack = TypeVar("TorchStack", nn.TransformerEncoder, nn.TransformerDecoder)


def encoder_block_from_torch(layer: nn.Module) -> EncoderBlock:
    layer = known(layer, nn.TransformerEncoderLayer)
    with torch.device("meta"):  # nothing is drawn, and any size will do: all parts are replaced
        block = EncoderBlock(MultiHeadAttention(1, 1), FeedForward(1, 1), width=1, norm=wiring(layer))
    return fill_block(block, layer, ENCODER_PARTS)


def decoder_block_from_torch(layer: nn.Module) -> DecoderBlock:
    layer = known(layer, nn.TransformerDecoderLayer)
    with torch.device("meta"):
        attentions = MultiHeadAttention(1, 1), MultiHeadAttention(1, 1)
        block = DecoderBlock(*attentions, FeedForward(1, 1), width=1, norm=wiring(layer))
    return fill_block(block, layer, DECODER_PARTS)


def wiring(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> str:
    return "pre" if layer.norm_first else "post"


def fill_block(block: Block, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, parts: dict) -> Block:
    block.train(layer.training)  # first: the parts bring their own mode
    for theirs, ours in parts.items():
        copied = attention_from_torch if theirs.endswith("attn") else deepcopy
        block.set_submodule(ours, copied(layer.get_submodule(theirs)))
    block.feedforward.activation = deepcopy(layer.activation)
    return block


def encoder_block_to_torch(block: nn.Module, *, batch_first: bool = True) -> nn.TransformerEncoderLayer:
    block = known(block, EncoderBlock)
    activation, norm_first = activation_and_order(block)
    layer = nn.TransformerEncoderLayer(1, 1, 1, activation=activation, norm_first=norm_first, device="meta")
    fill_layer(layer, block, ENCODER_PARTS, batch_first)
    has_biases = all(part.bias is not None for part in (layer.linear1, layer.linear2, layer.norm1, layer.norm2))
    if not has_biases or getattr(activation, "approximate", "none") != "none":
        # torch's fast path for inference fails without a bias, and takes every nn.GELU for the exact one: switch it off
        layer.activation_relu_or_gelu = 0
    return layer


def decoder_block_to_torch(block: nn.Module, *, batch_first: bool = True) -> nn.TransformerDecoderLayer:
    block = known(block, DecoderBlock)
    activation, norm_first = activation_and_order(block)
    layer = nn.TransformerDecoderLayer(1, 1, 1, activation=activation, norm_first=norm_first, device="meta")
    return fill_layer(layer, block, DECODER_PARTS, batch_first)


def activation_and_order(block: EncoderBlock | DecoderBlock) -> tuple[Callable, bool]:
    """(activation, norm_first): what torch.nn does not keep as a part."""
    residual = block.around_attention
    if residual.wiring == "none":
        raise ValueError(
            "torch.nn has norm='pre' and norm='post' only, got norm='none'; build the block with one of them"
        )
    if residual.drop_path:
        raise ValueError(f"torch.nn has no stochastic depth, got drop_path={residual.drop_path:g}; set drop_path to 0")
    feedforward = known(block.feedforward, FeedForward)
    if feedforward.norm is not None:
        raise ValueError("torch.nn has no norm inside the feed-forward net, got a FeedForward with one")
    return deepcopy(feedforward.activation), residual.wiring == "pre"


def fill_layer(layer: TorchLayer, block: EncoderBlock | DecoderBlock, parts: dict, batch_first: bool) -> TorchLayer:
    layer.train(block.training)
    for theirs, ours in parts.items():
        part = block.get_submodule(ours)
        copy = attention_to_torch(part, batch_first=batch_first) if theirs.endswith("attn") else deepcopy(part)
        layer.set_submodule(theirs, copy)
    return layer


def encoder_from_torch(stack: nn.Module) -> Encoder:
    return fill_stack(Encoder([]), known(stack, nn.TransformerEncoder), encoder_block_from_torch)


def decoder_from_torch(stack: nn.Module) -> Decoder:
    return fill_stack(Decoder([]), known(stack, nn.TransformerDecoder), decoder_block_from_torch)


def fill_stack(
    ours: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder, convert: Callable[[nn.Module], nn.Module]
) -> Stack:
    ours.train(theirs.training)
    ours.blocks.extend(convert(layer) for layer in theirs.layers)
    if theirs.norm is not None:
        ours.norm = deepcopy(theirs.norm)
    return ours


def encoder_to_torch(encoder: nn.Module, *, batch_first: bool = True) -> nn.TransformerEncoder:
    encoder = known(encoder, Encoder)
    layers = [encoder_block_to_torch(block, batch_first=batch_first) for block in at_least_one(encoder.blocks)]
    # nested tensors would answer zeros at the padding, where we answer what the layers compute
    return fill_torch_stack(nn.TransformerEncoder(layers[0], 0, enable_nested_tensor=False), encoder, layers)


def decoder_to_torch(decoder: nn.Module, *, batch_first: bool = True) -> nn.TransformerDecoder:
    decoder = known(decoder, Decoder)
    layers = [decoder_block_to_torch(block, batch_first=batch_first) for block in at_least_one(decoder.blocks)]
    return fill_torch_stack(nn.TransformerDecoder(layers[0], 0), decoder, layers)


def at_least_one(blocks: nn.ModuleList) -> nn.ModuleList:
    if not blocks:
        raise ValueError(
            "a stack of torch.nn must have a layer, got a stack without blocks; build it with at least one"
        )
    return blocks


def fill_torch_stack(theirs: TorchStack, ours: Encoder | Decoder, layers: list) -> TorchStack:
    theirs.train(ours.training)
    theirs.layers.extend(layers)
    theirs.num_layers = len(layers)
    theirs.norm = None if isinstance(ours.norm, nn.Identity) else deepcopy(ours.norm)
    return theirs


def encoder_decoder_from_torch(transformer: nn.Module) -> EncoderDecoder:
    transformer = known(transformer, nn.Transformer)
    pair = EncoderDecoder(encoder_from_torch(transformer.encoder), decoder_from_torch(transformer.decoder))
    pair.training = transformer.training
    return pair


def encoder_decoder_to_torch(pair: nn.Module, *, batch_first: bool = True) -> nn.Transformer:
    pair = known(pair, EncoderDecoder)
    encoder = encoder_to_torch(pair.encoder, batch_first=batch_first)
    decoder = decoder_to_torch(pair.decoder, batch_first=batch_first)
    width, source_width = (stack.layers[0].self_attn.embed_dim for stack in (decoder, encoder))
    if width != source_width:
        raise ValueError(
            f"nn.Transformer has one width, got {source_width} in the encoder and {width} in the decoder; "
            "convert the two one by one"
        )
    empty = nn.Identity()  # nn.Transformer draws new weights for what is passed in: so the stacks come after that
    heads = decoder.layers[0].self_attn.num_heads
    transformer = nn.Transformer(width, heads, custom_encoder=empty, custom_decoder=empty, batch_first=batch_first)
    transformer.encoder, transformer.decoder, transformer.training = encoder, decoder, pair.training
    return transformer
