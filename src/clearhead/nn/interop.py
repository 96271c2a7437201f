"""Convert attention, blocks and stacks to and from torch.nn: the same function, with a copy of the weights.

torch.nn stacks W_Q, W_K and W_V in one `in_proj_weight` (3E,E); other code packs them head by head. Here they are three
layers, `q_proj`, `k_proj` and `v_proj`. All other parts are copied unchanged under another name (see COMMON_PARTS), so
that eps, bias and dropout are preserved. A conversion also preserves dtype, device, mode and requires_grad, and draws
no random numbers.
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


def require_type(module: nn.Module, kind: type[Kind]) -> Kind:
    """The module, if it is an instance of `kind`; otherwise a ValueError."""
    if not isinstance(module, kind):
        raise ValueError(
            f"only a {kind.__name__} can be converted here, got {type(module).__name__}; "
            "convert the other parts one by one"
        )
    return module


def attention_from_torch(module: nn.Module) -> MultiHeadAttention:
    """The same attention as an nn.MultiheadAttention with any options except add_bias_kv and add_zero_attn."""
    module = require_type(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ValueError(
            f"every key must belong to a token, got {option}=True, which adds a key without one; "
            f"build the torch.nn module with {option}=False"
        )
    if module.in_proj_weight is None:
        weights = [deepcopy(w) for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    else:
        weights = split_qkv(module.in_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else split_qkv(module.in_proj_bias)
    output = linear(deepcopy(module.out_proj.weight), deepcopy(module.out_proj.bias))
    attention = build_attention([*map(linear, weights, biases), output], module.num_heads, module.dropout)
    return attention.train(module.training)


def attention_to_torch(attention: nn.Module, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention that computes the same; a ValueError if none can."""
    attention = require_type(attention, MultiHeadAttention)
    output = convertible_out_proj(attention)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    module = nn.MultiheadAttention(
        attention.q_proj.out_features,
        attention.num_heads,
        attention.dropout,
        bias=attention.q_proj.bias is not None,
        kdim=attention.k_proj.in_features,
        vdim=attention.v_proj.in_features,
        batch_first=batch_first,
        device="meta",  # no random numbers: every parameter is set below
    )
    if module.in_proj_weight is None:
        for name, part in zip("qkv", parts, strict=True):
            setattr(module, f"{name}_proj_weight", deepcopy(part.weight))
    else:
        module.in_proj_weight = concat_qkv([part.weight for part in parts])
    if module.in_proj_bias is not None:
        module.in_proj_bias = concat_qkv([part.bias for part in parts])
    module.out_proj.weight, module.out_proj.bias = deepcopy(output.weight), deepcopy(output.bias)
    return module.train(attention.training)


def convertible_out_proj(attention: MultiHeadAttention) -> nn.Linear:
    """The output layer of an attention that torch.nn can express; otherwise a ValueError."""
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
    if attention.num_kv_heads != attention.num_heads:
        raise ValueError(
            "torch.nn has as many heads of keys and values as of queries, got "
            f"num_kv_heads={attention.num_kv_heads} for num_heads={attention.num_heads}"
        )
    if attention.q_norm is not None or attention.k_norm is not None:
        raise ValueError("torch.nn has no norm of queries and keys, got an attention with qk_norm")
    if not isinstance(attention.out_proj, nn.Linear):
        raise ValueError(
            "torch.nn always mixes the heads by an output layer, got output_projection=False; "
            "set out_proj to a linear layer with identity weights"
        )
    return attention.out_proj


def attention_from_packed(
    qkv_weight: Tensor, qkv_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor | None, num_heads: int
) -> MultiHeadAttention:
    """The attention of a layer that computes x Wᵀ + b -> (B,L,H,3D), then splits each head's 3D into q, k and v.

    qkv_weight (3E,input width), qkv_bias (3E,): rows ordered by head, then q, k, v; output_weight (E,E).
    """
    width = output_weight.shape[0]
    check_heads(width, num_heads)
    if qkv_weight.dim() != 2 or qkv_weight.shape[0] != 3 * width or output_weight.shape != (width, width):
        raise ValueError(
            "packed weights must have the shapes (3E, input width) for qkv and (E,E) for the output, "
            f"got {tuple(qkv_weight.shape)} and {tuple(output_weight.shape)}; transpose them if they are (in, out)"
        )

    def unpack(packed: Tensor) -> list[nn.Parameter]:
        """(3E,...) in rows [head, role, D] -> query, key and value (E,...) each."""
        roles = packed.detach().unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        return [nn.Parameter(rows.clone()) for rows in roles]

    biases = [None] * 3 if qkv_bias is None else unpack(qkv_bias)
    bias = None if output_bias is None else nn.Parameter(output_bias.detach().clone())
    output = linear(nn.Parameter(output_weight.detach().clone()), bias)
    return build_attention([*map(linear, unpack(qkv_weight), biases), output], num_heads)


def split_qkv(packed: nn.Parameter) -> list[nn.Parameter]:
    """(3E,...) -> query, key and value (E,...) each"""
    return [nn.Parameter(rows.clone(), packed.requires_grad) for rows in packed.detach().chunk(3)]


def concat_qkv(parts: Sequence[Tensor]) -> nn.Parameter:
    """query, key and value (E,...) each -> (3E,...)"""
    requires_grad = [part.requires_grad for part in parts]
    if len(set(requires_grad)) > 1:
        raise ValueError(
            "torch.nn stores query, key and value in one parameter, so requires_grad must be equal for all three, "
            f"got requires_grad={requires_grad}"
        )
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad[0])


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these parameters, not copies of them."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def build_attention(projections: Sequence[nn.Linear], num_heads: int, dropout: float = 0.0) -> MultiHeadAttention:
    """Attention with these layers as query, key, value and output projections."""
    with torch.device("meta"):  # no random numbers: every layer is set below
        attention = MultiHeadAttention(projections[0].out_features, num_heads, dropout=dropout)
    attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj = projections
    return attention


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
    layer = require_type(layer, nn.TransformerEncoderLayer)
    with torch.device("meta"):  # no random numbers, and any size: all parts are replaced
        block = EncoderBlock(MultiHeadAttention(1, 1), MLP(1, 1), width=1, norm_first=layer.norm_first)
    return fill_block(block, layer, ENCODER_PARTS)


def decoder_block_from_torch(layer: nn.Module) -> DecoderBlock:
    layer = require_type(layer, nn.TransformerDecoderLayer)
    with torch.device("meta"):
        attentions = MultiHeadAttention(1, 1), MultiHeadAttention(1, 1)
        block = DecoderBlock(*attentions, MLP(1, 1), width=1, norm_first=layer.norm_first)
    return fill_block(block, layer, DECODER_PARTS)


def fill_block(block: Block, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, parts: dict) -> Block:
    block.train(layer.training)  # first, because each part keeps its own mode
    for theirs, ours in parts.items():
        convert = attention_from_torch if theirs.endswith("attn") else deepcopy
        block.set_submodule(ours, convert(layer.get_submodule(theirs)))
    require_type(block.mlp, MLP).activation = deepcopy(layer.activation)
    return block


def encoder_block_to_torch(block: nn.Module, *, batch_first: bool = True) -> nn.TransformerEncoderLayer:
    block = require_type(block, EncoderBlock)
    activation, norm_first = activation_and_order(block)
    layer = nn.TransformerEncoderLayer(1, 1, 1, activation=activation, norm_first=norm_first, device="meta")
    fill_layer(layer, block, ENCODER_PARTS, batch_first)
    parts = (layer.linear1, layer.linear2, layer.norm1, layer.norm2)
    has_biases = all(getattr(part, "bias", None) is not None for part in parts)  # an RMSNorm has no such attribute
    if not has_biases or getattr(activation, "approximate", "none") != "none":
        # disable torch's inference fast path, which needs biases and computes the exact GELU for every nn.GELU
        layer.activation_relu_or_gelu = 0
    return layer


def decoder_block_to_torch(block: nn.Module, *, batch_first: bool = True) -> nn.TransformerDecoderLayer:
    block = require_type(block, DecoderBlock)
    activation, norm_first = activation_and_order(block)
    layer = nn.TransformerDecoderLayer(1, 1, 1, activation=activation, norm_first=norm_first, device="meta")
    return fill_layer(layer, block, DECODER_PARTS, batch_first)


def activation_and_order(block: EncoderBlock | DecoderBlock) -> tuple[Callable, bool]:
    """(activation, norm_first), which are not submodules in torch.nn."""
    if isinstance(block.norm1, nn.Identity):
        raise ValueError("torch.nn has no layers without a norm, got a block with norm_layer=nn.Identity")
    if block.drop1.drop_path:
        raise ValueError(f"torch.nn has no stochastic depth, got drop_path={block.drop1.drop_path:g}")
    if not isinstance(block.ls1, nn.Identity):
        raise ValueError(
            f"torch.nn has no layer scale, got a block with {type(block.ls1).__name__}; multiply the rows of each "
            "sublayer's last weight and bias by gamma, then set its layer scale to nn.Identity()"
        )
    mlp = require_type(block.mlp, MLP)
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
    return fill_stack(Encoder([]), require_type(stack, nn.TransformerEncoder), encoder_block_from_torch)


def decoder_from_torch(stack: nn.Module) -> Decoder:
    return fill_stack(Decoder([]), require_type(stack, nn.TransformerDecoder), decoder_block_from_torch)


def fill_stack(
    ours: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder, convert: Callable[[nn.Module], nn.Module]
) -> Stack:
    ours.train(theirs.training)
    ours.blocks.extend(convert(layer) for layer in theirs.layers)
    if theirs.norm is not None:
        ours.norm = deepcopy(theirs.norm)
    return ours


def encoder_to_torch(encoder: nn.Module, *, batch_first: bool = True) -> nn.TransformerEncoder:
    encoder = require_type(encoder, Encoder)
    layers = [encoder_block_to_torch(block, batch_first=batch_first) for block in require_blocks(encoder.blocks)]
    # with nested tensors, the outputs at padding would be zeros instead of what the layers compute
    return fill_torch_stack(nn.TransformerEncoder(layers[0], 0, enable_nested_tensor=False), encoder, layers)


def decoder_to_torch(decoder: nn.Module, *, batch_first: bool = True) -> nn.TransformerDecoder:
    decoder = require_type(decoder, Decoder)
    layers = [decoder_block_to_torch(block, batch_first=batch_first) for block in require_blocks(decoder.blocks)]
    return fill_torch_stack(nn.TransformerDecoder(layers[0], 0), decoder, layers)


def require_blocks(blocks: nn.ModuleList) -> nn.ModuleList:
    if not blocks:
        raise ValueError("torch.nn's stacks need at least one layer, got a stack without blocks")
    return blocks


def fill_torch_stack(theirs: TorchStack, ours: Encoder | Decoder, layers: list) -> TorchStack:
    theirs.train(ours.training)
    theirs.layers.extend(layers)
    theirs.num_layers = len(layers)
    theirs.norm = None if isinstance(ours.norm, nn.Identity) else deepcopy(ours.norm)
    return theirs


def encoder_decoder_from_torch(transformer: nn.Module) -> EncoderDecoder:
    transformer = require_type(transformer, nn.Transformer)
    pair = EncoderDecoder(encoder_from_torch(transformer.encoder), decoder_from_torch(transformer.decoder))
    pair.training = transformer.training
    return pair


def encoder_decoder_to_torch(pair: nn.Module, *, batch_first: bool = True) -> nn.Transformer:
    pair = require_type(pair, EncoderDecoder)
    encoder = encoder_to_torch(pair.encoder, batch_first=batch_first)
    decoder = decoder_to_torch(pair.decoder, batch_first=batch_first)
    width, source_width = (stack.layers[0].self_attn.embed_dim for stack in (decoder, encoder))
    if width != source_width:
        raise ValueError(
            f"nn.Transformer has one width, got {source_width} in the encoder and {width} in the decoder; "
            "convert encoder and decoder separately"
        )
    empty = nn.Identity()  # nn.Transformer re-initializes the stacks passed to it, so they are set afterwards
    heads = decoder.layers[0].self_attn.num_heads
    transformer = nn.Transformer(width, heads, custom_encoder=empty, custom_decoder=empty, batch_first=batch_first)
    transformer.encoder, transformer.decoder, transformer.training = encoder, decoder, pair.training
    return transformer
