"""Attention to and from torch.nn: the same function, with a copy of the weights.

torch.nn keeps W_Q, W_K and W_V in one `in_proj_weight` of three equal row blocks, rows 0 to E-1 being W_Q; other code
packs them head by head. Here they are three layers that can be seen, named `q_proj`, `k_proj` and `v_proj`.
A conversion keeps dtype, device, mode and what is frozen, and draws no random number.
Dims: B batch, L length, H heads, D head width, E model width.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention, attend_fused, attend_reference
from clearhead.nn.blocks import MLP, Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder
from clearhead.validation import check_heads

Kind = TypeVar("Kind", bound=nn.Module)


def known(module: nn.Module, kind: type[Kind]) -> Kind:
    """The module itself, if it is of the kind that we know how to convert."""
    if not isinstance(module, kind):
        raise ValueError(
            f"only a {kind.__name__} can be converted at this place, got {type(module).__name__}; "
            "convert the parts around it one by one"
        )
    return module


def attention_from_torch(module: nn.Module) -> MultiHeadAttention:
    """The attention of an nn.MultiheadAttention of any options but add_bias_kv and add_zero_attn."""
    module = known(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ValueError(
            f"every key must belong to a token, got {option}=True, which adds one that does not; "
            f"build the torch.nn module with {option}=False"
        )
    if module.in_proj_weight is None:
        weights = [deepcopy(w) for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    else:
        weights = thirds(module.in_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else thirds(module.in_proj_bias)
    output = linear(deepcopy(module.out_proj.weight), deepcopy(module.out_proj.bias))
    attention = assemble([*map(linear, weights, biases), output], module.num_heads, module.dropout)
    return attention.train(module.training)


def attention_to_torch(attention: nn.Module, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention that computes what this MultiHeadAttention does, or an error if none can."""
    attention = known(attention, MultiHeadAttention)
    output = expressible_output(attention)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    module = nn.MultiheadAttention(
        attention.q_proj.out_features,
        attention.num_heads,
        attention.dropout,
        bias=attention.q_proj.bias is not None,
        kdim=attention.k_proj.in_features,
        vdim=attention.v_proj.in_features,
        batch_first=batch_first,
        device="meta",  # nothing is drawn: every parameter is set below
    )
    if module.in_proj_weight is None:
        for name, part in zip("qkv", parts, strict=True):
            setattr(module, f"{name}_proj_weight", deepcopy(part.weight))
    else:
        module.in_proj_weight = joined([part.weight for part in parts])
    if module.in_proj_bias is not None:
        module.in_proj_bias = joined([part.bias for part in parts])
    module.out_proj.weight, module.out_proj.bias = deepcopy(output.weight), deepcopy(output.bias)
    return module.train(attention.training)


def expressible_output(attention: MultiHeadAttention) -> nn.Linear:
    """The output layer of an attention that torch.nn can express; any other attention is refused."""
    if attention.q_proj.in_features != attention.q_proj.out_features:
        raise ValueError(
            "nn.MultiheadAttention takes queries of its own width only, got "
            f"input_width={attention.q_proj.in_features} for width={attention.q_proj.out_features}"
        )
    root = math.sqrt(attention.q_proj.out_features // attention.num_heads)
    if attention.beta is not None and not math.isclose(attention.beta, 1 / root):
        raise ValueError(
            f"torch.nn has beta = 1/sqrt(head width) = {1 / root:g} only, got beta={attention.beta:g}; "
            f"multiply the query layer's weight and bias by beta * {root:g}, then set beta to None"
        )
    if attention.attend not in (attend_fused, attend_reference):
        raise ValueError(
            f"torch.nn has the attention of attend_fused and attend_reference only, got {attention.attend}; "
            "set attend to one of them"
        )
    if not isinstance(attention.out_proj, nn.Linear):
        raise ValueError(
            "torch.nn always mixes the heads by an output layer, got output_projection=False; "
            "set out_proj to a linear layer with identity weights"
        )
    return attention.out_proj


def attention_from_packed(
    qkv_weight: Tensor, qkv_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor | None, num_heads: int
) -> MultiHeadAttention:
    """The attention of a layer that computes q, k, v as x Wᵀ + b -> (B,L,H,3D), then cuts each head's 3D in three.

    qkv_weight (3E,input width), qkv_bias (3E,): rows go head by head, with [q, k, v] inside each; output_weight (E,E).
    """
    width = output_weight.shape[0]
    check_heads(width, num_heads)
    if qkv_weight.dim() != 2 or qkv_weight.shape[0] != 3 * width or output_weight.shape != (width, width):
        raise ValueError(
            "packed weights must have the shapes (3E, input width) for qkv and (E,E) for the output, "
            f"got {tuple(qkv_weight.shape)} and {tuple(output_weight.shape)}; transpose them if they are (in, out)"
        )

    def by_role(packed: Tensor) -> list[nn.Parameter]:
        """(3E,...) in rows [head, role, D] -> query, key and value (E,...) each."""
        roles = packed.detach().unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        return [nn.Parameter(rows.clone()) for rows in roles]

    biases = [None] * 3 if qkv_bias is None else by_role(qkv_bias)
    mix = None if output_bias is None else nn.Parameter(output_bias.detach().clone())
    output = linear(nn.Parameter(output_weight.detach().clone()), mix)
    return assemble([*map(linear, by_role(qkv_weight), biases), output], num_heads)


def thirds(packed: nn.Parameter) -> list[nn.Parameter]:
    """Three equal row blocks: query, key, value."""
    return [nn.Parameter(rows.clone(), packed.requires_grad) for rows in packed.detach().chunk(3)]


def joined(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter of three equal row blocks; trained or frozen, but as a whole."""
    trained = [part.requires_grad for part in parts]
    if len(set(trained)) > 1:
        raise ValueError(
            "torch.nn keeps query, key and value in one parameter, so all or none must be trained, "
            f"got requires_grad={trained}; make them agree"
        )
    return nn.Parameter(torch.cat([part.detach() for part in parts]), trained[0])


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """The linear layer that has these very parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def assemble(projections: Sequence[nn.Linear], num_heads: int, dropout: float = 0.0) -> MultiHeadAttention:
    """The attention that has these very layers as query, key, value and output."""
    with torch.device("meta"):  # nothing is drawn: every layer is set below
        attention = MultiHeadAttention(projections[0].out_features, num_heads, dropout=dropout)
    attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj = projections
    return attention


# Blocks and stacks to and from torch.nn: the same function, with a copy of the weights.
#
# Both sides have the same parts under other names, and the tables below are the whole translation. Only attention is
# packed otherwise (interchange.py); every other part is copied as it is, so eps, bias, dropout, mode and what is
# frozen
# come along without being named. Each function here makes an empty frame, then fills it.


COMMON_PARTS = {  # torch.nn's name: ours
    "norm1": "norm1",
    "dropout1": "drop1.dropout",
    "norm2": "norm2",
    "dropout2": "drop2.dropout",
    "linear1": "mlp.fc1",
    "dropout": "mlp.dropout",
    "linear2": "mlp.fc2",
}
ENCODER_PARTS = COMMON_PARTS | {"self_attn": "attn"}
DECODER_PARTS = COMMON_PARTS | {
    "self_attn": "self_attn",
    "multihead_attn": "cross_attn",
    "norm3": "norm3",
    "dropout3": "drop3.dropout",
}

Block = TypeVar("Block", EncoderBlock, DecoderBlock)
Stack = TypeVar("Stack", Encoder, Decoder)
TorchLayer = TypeVar("TorchLayer", nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
TorchStack = TypeVar("TorchStack", nn.TransformerEncoder, nn.TransformerDecoder)


def encoder_block_from_torch(layer: nn.Module) -> EncoderBlock:
    layer = known(layer, nn.TransformerEncoderLayer)
    with torch.device("meta"):  # nothing is drawn, and any size will do: all parts are replaced
        block = EncoderBlock(MultiHeadAttention(1, 1), MLP(1, 1), width=1, norm_first=layer.norm_first)
    return fill_block(block, layer, ENCODER_PARTS)


def decoder_block_from_torch(layer: nn.Module) -> DecoderBlock:
    layer = known(layer, nn.TransformerDecoderLayer)
    with torch.device("meta"):
        attentions = MultiHeadAttention(1, 1), MultiHeadAttention(1, 1)
        block = DecoderBlock(*attentions, MLP(1, 1), width=1, norm_first=layer.norm_first)
    return fill_block(block, layer, DECODER_PARTS)


def fill_block(block: Block, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, parts: dict) -> Block:
    block.train(layer.training)  # first: the parts bring their own mode
    for theirs, ours in parts.items():
        copied = attention_from_torch if theirs.endswith("attn") else deepcopy
        block.set_submodule(ours, copied(layer.get_submodule(theirs)))
    block.mlp.activation = deepcopy(layer.activation)
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
    if isinstance(block.norm1, nn.Identity):
        raise ValueError("torch.nn has no layers without a norm, got a block with norm_layer=nn.Identity")
    if block.drop1.drop_path:
        raise ValueError(f"torch.nn has no stochastic depth, got drop_path={block.drop1.drop_path:g}")
    mlp = known(block.mlp, MLP)
    if mlp.norm is not None:
        raise ValueError("torch.nn has no norm inside the MLP, got an MLP with one")
    return deepcopy(mlp.activation), block.norm_first


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
