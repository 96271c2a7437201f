"""Conversions to and from torch.nn are lossless and reject modules without an equivalent; outputs: tests/oracles."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead.nn import masks
from clearhead.nn.attention import LayerScale, MultiHeadAttention, RMSNorm, attend_reference
from clearhead.nn.blocks import MLP, Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder, SwiGLU
from clearhead.nn.interop import attention_from_packed

WIDTH, HEADS = 8, 2


def attention(**options):
    return MultiHeadAttention(WIDTH, HEADS, **options)


def encoder_block(activation=F.gelu, bias=True, **options):
    mlp = MLP(WIDTH, 12, activation, dropout=0.2, bias=bias)
    return EncoderBlock(attention(dropout=0.1), mlp, width=WIDTH, **{"dropout": 0.3} | options)


def decoder_block(**options):
    parts = attention(dropout=0.1), attention(key_input_width=6, value_input_width=6), MLP(WIDTH, 12, F.relu)
    return DecoderBlock(*parts, width=WIDTH, **options)


def encoder(depth=2, **options):
    return Encoder([encoder_block(**options) for _ in range(depth)], nn.LayerNorm(WIDTH))


def decoder(depth=3):
    return Decoder([decoder_block(norm_first=False) for _ in range(depth)])


def pair():
    return EncoderDecoder(encoder(), decoder())


def half_frozen():
    module = attention()
    module.k_proj.requires_grad_(False)
    return module


MODULES = {
    "attention": attention,
    "attention without bias": partial(attention, bias=False, dropout=0.1),
    "attention to other widths": partial(attention, key_input_width=6, value_input_width=10),
    "encoder block": encoder_block,
    "encoder block with little bias": partial(encoder_block, bias=False, norm_layer=partial(nn.LayerNorm, eps=1e-3)),
    "decoder block": decoder_block,
    "encoder": encoder,
    "decoder": decoder,
    "pair": pair,
}


def kind(part):
    return nn.Linear if isinstance(part, nn.Linear) else type(part)


def settings_of(module):
    """Everything that is not a weight, by module path: classes, activations, rates, eps and training mode."""
    ordinary = (bool, int, float, str, tuple, type(None), type(F.gelu), type(F.relu))
    return {
        name: (kind(part), {key: value for key, value in vars(part).items() if isinstance(value, ordinary)})
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_torch_round_trip_preserves_weights_and_settings(make, batch_first):
    module = make().double()
    for name, weight in module.named_parameters():
        weight.requires_grad_(not name.endswith("bias"))
    for part in module.modules():
        part.training = not isinstance(part, nn.Dropout)
    random_state = torch.get_rng_state()
    converted = module.to_torch(batch_first=batch_first)
    restored = type(module).from_torch(converted)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert settings_of(restored) == settings_of(module)
    ours, returned = dict(module.named_parameters()), dict(restored.named_parameters())
    assert ours.keys() == returned.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, returned[name])
        assert weight.dtype == returned[name].dtype
        assert weight.requires_grad == returned[name].requires_grad
    addresses = [weight.data_ptr() for one in (module, converted, restored) for weight in one.parameters()]
    assert len(addresses) == len(set(addresses))  # copies: no storage is shared


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_conversion_preserves_training_mode(make, training):
    module = make().train(training)
    converted = module.to_torch()
    for result in (converted, type(module).from_torch(converted)):
        assert {part.training for part in result.modules()} == {training}


def test_encoder_and_decoder_depths_may_differ():
    converted = pair().to_torch()
    assert converted.encoder.num_layers == len(converted.encoder.layers) == 2
    assert converted.decoder.num_layers == len(converted.decoder.layers) == 3


def test_conversion_under_no_grad_keeps_requires_grad():
    with torch.no_grad():
        module = MultiHeadAttention.from_torch(nn.MultiheadAttention(WIDTH, HEADS))
        assert all(weight.requires_grad for weight in [*module.parameters(), *module.to_torch().parameters()])


def test_in_proj_weight_is_three_row_blocks():
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    ours = MultiHeadAttention.from_torch(theirs)
    for i, part in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
        assert torch.equal(part.weight, theirs.in_proj_weight[i * WIDTH : (i + 1) * WIDTH])
        assert part.weight.shape != theirs.in_proj_weight[i].shape  # row i is one row of W_Q, not W_Q, W_K or W_V
        assert torch.equal(theirs.in_proj_weight[i], ours.q_proj.weight[i])


def name_of(activation) -> str:
    """A name without a memory address: all test processes must agree on the test ids."""
    return getattr(activation, "__name__", str(activation))


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU(approximate="tanh"), nn.PReLU()], ids=name_of)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(EncoderBlock, nn.TransformerEncoderLayer), (DecoderBlock, nn.TransformerDecoderLayer)],
)
def test_any_activation_is_converted(ours, theirs, activation):
    block = ours.from_torch(theirs(WIDTH, HEADS, 12, activation=activation))
    expected = (
        {"relu": F.relu, "gelu": F.gelu}.get(activation, activation) if isinstance(activation, str) else activation
    )
    assert type(block.mlp.activation) is type(expected)
    x = torch.randn(5)
    torch.testing.assert_close(block.mlp.activation(x), expected(x))
    torch.testing.assert_close(block.to_torch().activation(x), expected(x))


@pytest.mark.parametrize("options", [{"activation": nn.GELU(approximate="tanh")}, {"bias": False}], ids=str)
def test_converted_blocks_avoid_an_incorrect_fast_path(options):
    block, x = encoder_block(**options).eval(), 3 * torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(block.to_torch()(x), block(x))


def reference_packed_layer(x, qkv, output, num_heads, mask):
    """A layer with heads packed one after another, written out with its mask."""
    batch, length, width = x.shape
    packed = qkv(x).reshape(batch, length, num_heads, 3 * width // num_heads).permute(0, 2, 1, 3)
    q, k, v = packed.chunk(3, dim=-1)
    logits = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    weights = F.softmax(logits.masked_fill(~mask, -9e15), dim=-1)
    return output((weights @ v).permute(0, 2, 1, 3).reshape(batch, length, width))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 5), st.booleans(), st.booleans())
def test_attention_from_packed_matches_the_reference_layer(num_heads, head_dim, length, qkv_has_bias, output_has_bias):
    width = num_heads * head_dim
    qkv = nn.Linear(width, 3 * width, qkv_has_bias, dtype=torch.float64)
    output = nn.Linear(width, width, output_has_bias, dtype=torch.float64)
    x, mask = torch.randn(2, length, width, dtype=torch.float64), masks.causal(length)
    assert not mask.dense().all()
    ours = attention_from_packed(qkv.weight, qkv.bias, output.weight, output.bias, num_heads)
    torch.testing.assert_close(ours(x, mask=mask), reference_packed_layer(x, qkv, output, num_heads, mask))
    assert all(weight.requires_grad for weight in ours.parameters())


def test_attention_from_packed_supports_another_input_width():
    qkv, output = nn.Linear(5, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    ours = attention_from_packed(qkv.weight, qkv.bias, output.weight, output.bias, 2)
    q, k, v = qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, dim=-1)
    weights = F.softmax(q @ k.mT / 2, dim=-1)
    torch.testing.assert_close(ours(x), output((weights @ v).transpose(1, 2).flatten(2)))


def test_packed_weights_of_wrong_shape_are_rejected():
    qkv, output = torch.randn(24, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"must have the shapes .* got \(8, 24\) and \(8, 8\); transpose"):
        attention_from_packed(qkv.T, None, output, None, 2)
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, got width=8, num_heads=3"):
        attention_from_packed(qkv, None, output, None, 3)


@pytest.mark.parametrize(
    ("convert", "module", "message"),
    [
        (MultiHeadAttention, nn.MultiheadAttention(8, 2, add_bias_kv=True), "got add_bias_kv=True.*add_bias_kv=False"),
        (MultiHeadAttention, nn.MultiheadAttention(8, 2, add_zero_attn=True), "got add_zero_attn=True.*build"),
        (MultiHeadAttention, nn.Linear(8, 8), "only a MultiheadAttention can be converted here, got Linear;"),
        (
            EncoderBlock,
            nn.TransformerDecoderLayer(8, 2, 12),
            "only a TransformerEncoderLayer .* got TransformerDecoder",
        ),
        (Encoder, nn.TransformerEncoder(nn.Identity(), 1, enable_nested_tensor=False), "EncoderLayer .* got Identity"),
        (
            EncoderDecoder,
            nn.Transformer(8, 2, 1, 1, 12, custom_encoder=nn.Identity()),
            "TransformerEncoder .* got Identity",
        ),
    ],
)
def test_from_torch_rejects_modules_without_an_equivalent(convert, module, message):
    with pytest.raises(ValueError, match=message) as error:
        convert.from_torch(module)
    assert "\n" not in str(error.value)


def narrow_encoder():
    block = EncoderBlock(MultiHeadAttention(6, 2), MLP(6, 12), width=6)
    return EncoderDecoder(Encoder([block]), decoder())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(attention, beta=3.0),
            r"torch.nn has beta = 1/sqrt\(head width\) = 0.5 only, got beta=3; multiply .* 2,",
        ),
        (
            partial(attention, attend=lambda *_: None),
            "attend_fused and attend_reference only, got .*lambda.*; set attend",
        ),
        (partial(attention, output_projection=False), "got output_projection=False; set out_proj"),
        (half_frozen, r"must be equal for all three, got requires_grad=\[True, False, True\]"),
        (partial(encoder_block, norm_layer=nn.Identity), "got a block with norm_layer=nn.Identity"),
        (partial(attention, num_kv_heads=1), "heads of keys and values .* got num_kv_heads=1 for num_heads=2"),
        (partial(attention, qk_norm=RMSNorm), "no norm of queries and keys, got an attention with qk_norm"),
        (lambda: EncoderBlock(attention(), SwiGLU(8, 12), width=8), "only a MLP .* got SwiGLU; convert"),
        (partial(encoder_block, layer_scale=LayerScale), "no layer scale, got a block with LayerScale; multiply"),
        (partial(encoder_block, drop_path=0.1), "no stochastic depth, got drop_path=0.1"),
        (
            lambda: MultiHeadAttention(8, 2, input_width=5),
            "queries of its own width only, got input_width=5 for width=8",
        ),
        (
            lambda: EncoderBlock(attention(), MLP(8, 12, norm=nn.LayerNorm(12)), width=8),
            "no norm inside the MLP, got an MLP with one",
        ),
        (partial(encoder, depth=0), "at least one layer, got a stack without blocks"),
        (partial(decoder, depth=0), "at least one layer, got a stack without blocks"),
        (lambda: EncoderBlock(attention(), nn.Identity(), width=8), "only a MLP .* got Identity; convert"),
        (narrow_encoder, "one width, got 6 in the encoder and 8 in the decoder; convert"),
    ],
)
def test_to_torch_rejects_modules_without_an_equivalent(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make().to_torch()
    assert "\n" not in str(error.value)


def test_the_workarounds_suggested_by_the_errors_work():
    """beta is folded into the queries and a missing output layer becomes the identity; torch.nn then agrees."""
    module, x = attention(beta=3.0, output_projection=False), torch.randn(2, 5, WIDTH)
    before = module(x)
    with torch.no_grad():
        module.q_proj.weight *= 3.0 * 2
        module.q_proj.bias *= 3.0 * 2
        module.out_proj = nn.Linear(WIDTH, WIDTH)
        module.out_proj.weight.copy_(torch.eye(WIDTH))
        module.out_proj.bias.zero_()
    module.beta = None
    torch.testing.assert_close(module.to_torch()(x, x, x)[0], before)


@pytest.mark.parametrize(
    "options", [{"beta": 0.5}, {"attend": attend_reference}], ids=lambda fields: next(iter(fields))
)
def test_equivalent_settings_are_converted(options):
    module, x = attention(**options), torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(module.to_torch()(x, x, x)[0], module(x))


@pytest.mark.parametrize("training", [True, False])
def test_rms_norm_is_converted(training):
    """torch.nn's layers accept any norm, but their inference fast path reads the bias of a layer norm."""
    attn, mlp = attention(), MLP(WIDTH, 12)
    block, x = EncoderBlock(attn, mlp, width=WIDTH, norm_layer=RMSNorm).train(training), torch.randn(2, 5, WIDTH)
    layer = block.to_torch()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), block(x))
        stack = Encoder([block], RMSNorm(WIDTH)).train(training)
        torch.testing.assert_close(stack.to_torch()(x), stack(x))
    torch.testing.assert_close(EncoderBlock.from_torch(layer)(x), block(x))
