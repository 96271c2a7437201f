"""torch.nn as the oracle: the same weights give the same values and the same gradients, for every option and mask.

The gradients of torch.nn's weights are compared through the conversion itself: a module that holds gradients where
its weights were is converted like any other.
"""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder

B, Q, K, WIDTH, HEADS, HIDDEN = 3, 5, 6, 8, 2, 12
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
both_orders = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
all_settings = pytest.mark.parametrize(
    ("dtype", "batch_first", "training"),
    [(torch.float64, True, True), (torch.float64, False, False), (torch.float32, True, False)],
    ids=["float64 train", "float64 length first", "float32 eval"],
)
all_layers = pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True},
        {"activation": "gelu"},
        {"norm_first": True, "activation": F.gelu, "layer_norm_eps": 1e-2},
        {"bias": False},
        {"norm_first": True, "bias": False, "activation": F.silu},
    ],
    ids=["post", "pre", "gelu", "pre, function, eps", "no bias", "pre, no bias, silu"],
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_equal(*pairs):
    """Each pair (ours, theirs) is equal, up to rounding of the largest number in any of them."""
    largest = max(1.0, *(theirs.abs().max().item() for _, theirs in pairs))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0, atol=TOLERANCE[ours.dtype] * largest)


def shaken(module, dtype):
    """The module with no weight left at 0 or 1: a bias that gets lost, or two norms that are swapped, must be seen."""
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return module.to(dtype)


def inputs(*shapes, dtype):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def ordered(x, batch_first):
    return x if batch_first else x.transpose(0, 1)


def with_gradients_as_weights(module):
    copy = deepcopy(module)
    for place, weight in zip(copy.parameters(), module.parameters(), strict=True):
        place.data = weight.grad
    return copy


def assert_same(ours, theirs, run, *leaves):
    """Equal outputs of run(module, *leaves), and equal gradients of a random sum of them, for leaves and weights.

    The oracle's gradients are computed in float64: its own rounding in float32 can exceed the tolerance.
    """
    output = run(ours, *leaves)
    assert_equal((output, run(theirs, *leaves)))
    upstream = torch.randn_like(output)
    output.backward(upstream)
    exact, exact_leaves = deepcopy(theirs).double(), [leaf.detach().double().requires_grad_() for leaf in leaves]
    run(exact, *exact_leaves).backward(upstream.double())
    expected = dict(type(ours).from_torch(with_gradients_as_weights(exact)).named_parameters())
    actual = dict(ours.named_parameters())
    assert expected.keys() == actual.keys()
    assert_equal(
        *((leaf.grad, exact_leaf.grad) for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True)),
        *((actual[name].grad, expected[name].data) for name in actual),
    )


# ---- attention


def mask_pair(kind, n_queries, n_keys):
    """A mask as we say it, and the same as torch.nn says it: (attn_mask, key_padding_mask), True = may not attend."""
    lengths = torch.arange(n_keys, n_keys - B, -1)
    causal, window = masks.causal(n_queries, n_keys), masks.window(n_queries, 1, n_keys)
    padding = masks.padding(lengths.clamp(min=1), n_keys)
    ours, attn_mask, key_padding_mask = {
        "none": (None, None, None),
        "causal": (causal, ~causal, None),
        "window": (window, ~window, None),
        "padding": (padding, None, ~padding[:, 0, 0]),
        "causal and padding": (causal & padding, ~causal, ~padding[:, 0, 0]),
    }[kind]
    if kind != "none":
        assert not masks.dense(ours).all(), "a mask that masks nothing proves nothing"
        assert masks.dense(ours).any(-1).all(), "rows without any key have their own test"
    return ours, {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}


def compare_attention(theirs, mask, their_masks, *leaves):
    """leaves: x for self-attention, or x, keys and values."""

    def run(module, *leaves, need_weights=True):
        if isinstance(module, MultiHeadAttention):
            return module(*leaves, mask=mask)
        triple = [ordered(t, module.batch_first) for t in (leaves if len(leaves) == 3 else 3 * leaves)]
        return ordered(module(*triple, need_weights=need_weights, **their_masks)[0], module.batch_first)

    ours = MultiHeadAttention.from_torch(theirs)
    assert_same(ours, theirs, run, *leaves)
    assert_equal((run(ours, *leaves), run(theirs, *leaves, need_weights=False)))


@both_dtypes
@both_orders
@pytest.mark.parametrize("kind", ["none", "causal", "window", "padding", "causal and padding"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_self_attention(kind, bias, batch_first, dtype):
    theirs = shaken(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first), dtype)
    (x,) = inputs((B, Q, WIDTH), dtype=dtype)
    compare_attention(theirs, *mask_pair(kind, Q, Q), x)


@both_dtypes
@both_orders
@pytest.mark.parametrize("kind", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}, {"kdim": 6, "bias": False}], ids=str)
def test_cross_attention(kind, options, batch_first, dtype):
    theirs = shaken(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options), dtype)
    x, keys, values = inputs((B, Q, WIDTH), (B, K, theirs.kdim), (B, K, theirs.vdim), dtype=dtype)
    compare_attention(theirs, *mask_pair(kind, Q, K), x, keys, values)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_attention_of_any_shape(data):
    heads, head_dim, n_queries, more_keys, kdim, vdim = (data.draw(st.integers(1, 4)) for _ in range(6))
    theirs = nn.MultiheadAttention(heads * head_dim, heads, kdim=kdim, vdim=vdim, batch_first=True)
    theirs, n_keys = shaken(theirs, torch.float64), n_queries + more_keys
    shapes = (B, n_queries, heads * head_dim), (B, n_keys, kdim), (B, n_keys, vdim)
    compare_attention(theirs, *mask_pair("padding", n_queries, n_keys), *inputs(*shapes, dtype=torch.float64))


@both_dtypes
@pytest.mark.parametrize("beta", [0.0, WIDTH**-0.5, 1.0, 50.0])
@pytest.mark.parametrize("kind", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize("n_keys", [Q, K], ids=["self", "cross"])
def test_beta_is_equivalent_to_scaling_the_queries(n_keys, kind, beta, dtype):
    """torch.nn has no beta, but queries that are beta * sqrt(D) times as long say the same."""
    theirs = shaken(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.float64)
    ours = MultiHeadAttention.from_torch(theirs).to(dtype)
    ours.beta = beta
    factor = beta * (WIDTH // HEADS) ** 0.5
    with torch.no_grad():
        theirs.in_proj_weight[:WIDTH] *= factor
        theirs.in_proj_bias[:WIDTH] *= factor
    our_mask, their_masks = mask_pair(kind, Q, n_keys)
    leaves = inputs((B, Q, WIDTH), (B, n_keys, WIDTH), dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output, expected = ours(*leaves, mask=our_mask), theirs(exact[0], exact[1], exact[1], **their_masks)[0]
    upstream = torch.randn_like(expected)
    output.backward(upstream.to(dtype))
    expected.backward(upstream)
    tolerance = TOLERANCE[dtype] * max(1.0, factor)  # rounding in the logits grows with their size
    for a, b in zip([output, *(x.grad for x in leaves)], [expected, *(x.grad for x in exact)], strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def test_attention_of_width_768_with_12_heads():
    theirs = shaken(nn.MultiheadAttention(768, 12, batch_first=True), torch.float64)
    (x,) = inputs((2, 4, 768), dtype=torch.float64)
    compare_attention(theirs, *mask_pair("causal", 4, 4), x)


def test_a_fully_masked_row():
    """Ours answers zeros, mixed by W_O, with finite gradients; torch.nn, asked for its weights, answers NaN."""
    theirs = shaken(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.float64)
    ours = MultiHeadAttention.from_torch(theirs)
    (x,) = inputs((B, Q, WIDTH), dtype=torch.float64)
    padding = masks.padding(torch.tensor([Q, 2, 0]))
    assert not padding[2].any()

    output = ours(x, mask=padding)
    assert torch.equal(output[2], ours.out_proj.bias.expand(Q, WIDTH))
    output.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in [x, *ours.parameters()])
    assert not x.grad[2].any()

    their_output, _ = theirs(x, x, x, key_padding_mask=~padding[:, 0, 0], need_weights=True)
    assert their_output[2].isnan().all()
    assert_equal((output[:2], their_output[:2]))


# ---- blocks and stacks

SOURCE_REAL = masks.padding(torch.tensor([K, 4, 1]))
TARGET_REAL = masks.padding(torch.tensor([Q, 1, 3]))
CAUSAL = masks.causal(Q)
SOURCE = {"src_key_padding_mask": ~SOURCE_REAL[:, 0, 0]}
TARGET = {
    "tgt_mask": ~CAUSAL,
    "tgt_key_padding_mask": ~TARGET_REAL[:, 0, 0],
    "memory_key_padding_mask": ~SOURCE_REAL[:, 0, 0],
}


def test_every_tested_mask_hides_a_key():
    assert not any(masks.dense(mask).all() for mask in (SOURCE_REAL, TARGET_REAL, CAUSAL))


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, **options)


def decoder_layer(**options):
    return nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, **options)


def encoder(norm=None, **options):
    return nn.TransformerEncoder(encoder_layer(**options), 2, norm, enable_nested_tensor=False)


def decoder(norm=None, **options):
    return nn.TransformerDecoder(decoder_layer(**options), 2, norm)


def transformer(**options):
    return nn.Transformer(WIDTH, HEADS, 1, 2, HIDDEN, dropout=0.0, **options)


def run_encoder(batch_first, module, source):
    if isinstance(module, Encoder | EncoderBlock):
        return module(source, mask=SOURCE_REAL)
    return ordered(module(ordered(source, batch_first), **SOURCE), batch_first)


def run_causal_encoder(batch_first, module, target):
    """The block of a language model: an encoder block with a causal mask."""
    if isinstance(module, Encoder | EncoderBlock):
        return module(target, mask=CAUSAL & TARGET_REAL)
    masked = {"src_key_padding_mask": TARGET["tgt_key_padding_mask"]}
    argument = "mask" if isinstance(module, nn.TransformerEncoder) else "src_mask"
    return ordered(module(ordered(target, batch_first), **{argument: ~CAUSAL}, **masked), batch_first)


def run_decoder(batch_first, module, source, target):
    if isinstance(module, Decoder | DecoderBlock):
        return module(target, source, mask=CAUSAL & TARGET_REAL, memory_mask=SOURCE_REAL)
    return ordered(module(ordered(target, batch_first), ordered(source, batch_first), **TARGET), batch_first)


def run_transformer(batch_first, module, source, target):
    if isinstance(module, EncoderDecoder):
        return module(
            source, target, source_mask=SOURCE_REAL, target_mask=CAUSAL & TARGET_REAL, memory_mask=SOURCE_REAL
        )
    output = module(ordered(source, batch_first), ordered(target, batch_first), **SOURCE, **TARGET)
    return ordered(output, batch_first)


final_norm = partial(nn.LayerNorm, WIDTH, eps=1e-3)
SOURCE_SHAPE, TARGET_SHAPE = BOTH_SHAPES = (B, K, WIDTH), (B, Q, WIDTH)
KINDS = {
    "encoder layer": (EncoderBlock, encoder_layer, run_encoder, [SOURCE_SHAPE]),
    "causal encoder layer": (EncoderBlock, encoder_layer, run_causal_encoder, [TARGET_SHAPE]),
    "decoder layer": (DecoderBlock, decoder_layer, run_decoder, BOTH_SHAPES),
    "encoder": (Encoder, encoder, run_encoder, [SOURCE_SHAPE]),
    "causal encoder": (Encoder, lambda **options: encoder(final_norm(), **options), run_causal_encoder, [TARGET_SHAPE]),
    "decoder": (Decoder, lambda **options: decoder(final_norm(), **options), run_decoder, BOTH_SHAPES),
    "decoder without a last norm": (Decoder, decoder, run_decoder, BOTH_SHAPES),
    "transformer": (EncoderDecoder, transformer, run_transformer, BOTH_SHAPES),
}
all_kinds = pytest.mark.parametrize(("kind", "make", "run", "shapes"), KINDS.values(), ids=KINDS)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")  # nn.Transformer cannot be told False
@all_layers
@all_kinds
@all_settings
def test_blocks_and_stacks(kind, make, run, shapes, options, dtype, batch_first, training):
    theirs = shaken(make(batch_first=batch_first, **options), dtype).train(training)
    assert_same(kind.from_torch(theirs), theirs, partial(run, batch_first), *inputs(*shapes, dtype=dtype))


@pytest.mark.parametrize(("kind", "make"), [(EncoderBlock, encoder_layer), (DecoderBlock, decoder_layer)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_is_applied_to_the_same_tensors(kind, make, norm_first):
    """With another rate at each place, the same seed drops the same numbers; one example, so that layouts agree."""
    theirs = shaken(make(norm_first=norm_first, batch_first=True), torch.float64)
    theirs.self_attn.dropout = 0.1
    dropouts = [part for part in theirs.modules() if isinstance(part, nn.Dropout)]
    for i, dropout in enumerate(dropouts, start=2):
        dropout.p = i / 10
    ours = kind.from_torch(theirs)
    arguments = inputs((1, Q, WIDTH), (1, K, WIDTH), dtype=torch.float64)[: 1 if kind is EncoderBlock else 2]
    outputs = []
    for module in (ours, theirs, ours):
        torch.manual_seed(len(outputs) // 2)
        outputs.append(module(*arguments))
    assert_equal((outputs[0], outputs[1]))
    assert (outputs[0] - outputs[2]).abs().max() > 0.1, "another seed must drop other numbers"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@all_layers
@all_kinds
def test_inference(kind, make, run, shapes, options, monkeypatch):
    """Without gradients and in eval mode torch.nn takes other kernels: same answers, ours or exported from ours."""
    calls = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        kernel = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, kernel=kernel: calls.append(kernel) or kernel(*args))
    theirs = shaken(make(batch_first=True, **options), torch.float32).eval()
    ours = kind.from_torch(theirs)
    with torch.no_grad():
        leaves = inputs(*shapes, dtype=torch.float32)
        expected = run(True, theirs, *leaves)
        assert_equal((run(True, ours, *leaves), expected))
        assert_equal((run(True, ours.to_torch(), *leaves), expected))
    assert bool(calls) == options.get("bias", True), "the fast path is what this test is about; it needs biases"
