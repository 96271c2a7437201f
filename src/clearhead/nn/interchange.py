"""Attention to and from torch.nn: the same function, with a copy of the weights.

torch.nn keeps W_Q, W_K and W_V in one `in_proj_weight` of three equal row blocks, rows 0 to E-1 being W_Q; other code
packs them head by head. Here they are three layers that can be seen, named `query`, `key` and `value`.
A conversion keeps dtype, device, mode and what is frozen, and draws no random number.
Dims: B batch, L length, H heads, D head width, E model width.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention, attend_fused, attend_reference
from clearhead.nn.sizes import check_heads

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
    parts = [attention.query, attention.key, attention.value]
    module = nn.MultiheadAttention(
        attention.query.out_features,
        attention.n_heads,
        attention.dropout,
        bias=attention.query.bias is not None,
        kdim=attention.key.in_features,
        vdim=attention.value.in_features,
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
    if attention.query.in_features != attention.query.out_features:
        raise ValueError(
            "nn.MultiheadAttention takes queries of its own width only, got "
            f"input_width={attention.query.in_features} for width={attention.query.out_features}"
        )
    root = math.sqrt(attention.query.out_features // attention.n_heads)
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
    if not isinstance(attention.output, nn.Linear):
        raise ValueError(
            "torch.nn always mixes the heads by an output layer, got output_projection=False; "
            "set output to a linear layer with identity weights"
        )
    return attention.output


def attention_from_packed(
    qkv_weight: Tensor, qkv_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor | None, n_heads: int
) -> MultiHeadAttention:
    """The attention of a layer that computes q, k, v as x Wᵀ + b -> (B,L,H,3D), then cuts each head's 3D in three.

    qkv_weight (3E,input width), qkv_bias (3E,): rows go head by head, with [q, k, v] inside each; output_weight (E,E).
    """
    width = output_weight.shape[0]
    check_heads(width, n_heads)
    if qkv_weight.dim() != 2 or qkv_weight.shape[0] != 3 * width or output_weight.shape != (width, width):
        raise ValueError(
            "packed weights must have the shapes (3E, input width) for qkv and (E,E) for the output, "
            f"got {tuple(qkv_weight.shape)} and {tuple(output_weight.shape)}; transpose them if they are (in, out)"
        )

    def by_role(packed: Tensor) -> list[nn.Parameter]:
        """(3E,...) in rows [head, role, D] -> query, key and value (E,...) each."""
        roles = packed.detach().unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        return [nn.Parameter(rows.clone()) for rows in roles]

    biases = [None] * 3 if qkv_bias is None else by_role(qkv_bias)
    mix = None if output_bias is None else nn.Parameter(output_bias.detach().clone())
    output = linear(nn.Parameter(output_weight.detach().clone()), mix)
    return assemble([*map(linear, by_role(qkv_weight), biases), output], n_heads)


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


def assemble(projections: Sequence[nn.Linear], n_heads: int, dropout: float = 0.0) -> MultiHeadAttention:
    """The attention that has these very layers as query, key, value and output."""
    with torch.device("meta"):  # nothing is drawn: every layer is set below
        attention = MultiHeadAttention(projections[0].out_features, n_heads, dropout=dropout)
    attention.query, attention.key, attention.value, attention.output = projections
    return attention
