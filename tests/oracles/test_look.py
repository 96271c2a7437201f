"""Other libraries as the oracle: `look` sees their attention, and its weights are those of their own slow paths."""

import pytest
import torch

from clearhead.insight.heads import edit
from clearhead.insight.trace import look

WIDTH, DEPTH, HEADS, CLASSES = 16, 2, 4, 3
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 32}

# x-transformers scripts a function when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def _evaluation():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def bert(attention):
    from transformers import BertConfig, BertModel

    return BertModel._from_config(BertConfig(vocab_size=50, **SIZES), attn_implementation=attention)


def gpt2(attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": 32}
    config = GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes)
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


def llama(attention):
    """Two heads of keys and values for four of queries, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def t5(attention):
    """Encoder-decoder, with a learned bias on the logits and no scale."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": DEPTH, "num_heads": HEADS}
    config = T5Config(vocab_size=50, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return T5ForConditionalGeneration._from_config(config, attn_implementation=attention)


def vit(attention):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SIZES)
    return ViTForImageClassification._from_config(config, attn_implementation=attention)


def padded_ids():
    real = torch.ones(2, 7, dtype=torch.long)
    real[1, 5:] = 0
    return {"input_ids": torch.randint(1, 50, (2, 7)), "attention_mask": real}


def pairs_of_ids():
    return {**padded_ids(), "decoder_input_ids": torch.randint(1, 50, (2, 4))}


HUGGING_FACE = {
    "bert": (bert, padded_ids),
    "gpt2": (gpt2, padded_ids),
    "llama": (llama, padded_ids),
    "t5": (t5, pairs_of_ids),
    "vit": (vit, lambda: {"pixel_values": torch.randn(2, 3, 8, 8)}),
}


def own_attentions(output):
    """Address by name, in the order of execution: the encoder, then self- and cross-attention of each layer."""
    if "encoder_attentions" not in output:
        return list(output.attentions)
    decoder = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for layer in decoder for weights in layer)]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_gives_the_same_weights_by_its_eager_path(name):
    build, inputs = HUGGING_FACE[name][0], HUGGING_FACE[name][1]()
    fused, eager = build("sdpa").eval(), build("eager").eval()
    eager.load_state_dict(fused.state_dict())
    own = own_attentions(eager(**inputs, output_attentions=True))
    for model, kernel in ((fused, "sdpa"), (eager, "softmax")):
        trace = look(model, **inputs)
        assert torch.equal(trace.output[0], model(**inputs)[0])
        assert len(trace) == len(own)
        assert max(trace.verify().values()) < 1e-5
        for name, weights in zip(trace, own, strict=True):
            assert trace[name].kernel == kernel
            real = rows_of_real_tokens(weights, inputs)
            torch.testing.assert_close(trace[name].weights()[real], weights[real], rtol=0, atol=1e-5)


def rows_of_real_tokens(weights, inputs):
    """(B,H,Q) True where the query is no padding: what padding attends to is left open by both paths."""
    real = torch.ones(weights.shape[:3], dtype=torch.bool)
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        real &= inputs["attention_mask"].bool()[:, None, :]
    return real


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_output_of_hugging_face_follows_an_edited_head(name, attention):
    build, inputs = HUGGING_FACE[name][0], HUGGING_FACE[name][1]()
    check_edits(build(attention).eval(), (), inputs)


def check_edits(model, args, kwargs):
    before = look(model, *args, **kwargs)
    name = next(iter(before))
    plain = value(before.output)
    with edit(model, name, pattern=lambda weights: weights):
        torch.testing.assert_close(value(model(*args, **kwargs)), plain, rtol=0, atol=1e-5)
    with edit(model, name, head=1, pattern="zero"):
        after = look(model, *args, **kwargs)
    assert not torch.equal(value(after.output), plain)
    assert after[name].out[:, 1].count_nonzero() == 0
    assert torch.equal(after[name].out[:, [0, 2, 3]], before[name].out[:, [0, 2, 3]])


def value(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def timm_vit(fused):
    from timm.models import VisionTransformer

    sizes = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    model = VisionTransformer(img_size=8, patch_size=4, num_classes=CLASSES, **sizes).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def test_timm_gives_the_same_weights_without_its_fused_path():
    images = torch.randn(2, 3, 8, 8)
    fused, slow = timm_vit(True), timm_vit(False)
    slow.load_state_dict(fused.state_dict())
    own = []
    for block in slow.blocks:
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: own.append(out))
    for model, kernel in ((fused, "sdpa"), (slow, "softmax")):
        trace = look(model, images)
        assert list(trace) == ["blocks.0.attn", "blocks.1.attn"]
        assert torch.equal(trace.output, model(images))
        assert max(trace.verify().values()) < 1e-5
        slow(images)
        for name, weights in zip(trace, own[-DEPTH:], strict=True):
            assert trace[name].kernel == kernel
            torch.testing.assert_close(trace[name].weights(), weights, rtol=0, atol=1e-5)
        check_edits(model, (images,), {})


def test_vit_pytorch_gives_the_same_weights():
    from vit_pytorch import ViT

    sizes = {"dim": WIDTH, "depth": DEPTH, "heads": HEADS, "dim_head": 4, "mlp_dim": 32}
    model, images = ViT(image_size=8, patch_size=4, num_classes=CLASSES, **sizes).eval(), torch.randn(2, 3, 8, 8)
    own = []
    for attention, _ in model.transformer.layers:
        attention.attend.register_forward_hook(lambda module, args, out: own.append(out))
    trace = look(model, images)
    assert list(trace) == ["transformer.layers.0.0", "transformer.layers.1.0"]
    assert torch.equal(trace.output, model(images))
    for name, weights in zip(trace, own[:DEPTH], strict=True):
        assert torch.equal(trace[name].weights(), weights)
    assert max(trace.verify().values()) < 1e-5
    check_edits(model, (images,), {})


def test_talking_heads_are_recorded_after_mixing():
    from vit_pytorch.deepvit import DeepViT

    sizes = {"dim": WIDTH, "depth": DEPTH, "heads": HEADS, "dim_head": 4, "mlp_dim": 32}
    model, images = DeepViT(image_size=8, patch_size=4, num_classes=CLASSES, **sizes).eval(), torch.randn(2, 3, 8, 8)
    trace = look(model, images)
    assert len(trace) == DEPTH
    assert max(trace.verify().values()) < 1e-5
    check_edits(model, (images,), {})


@pytest.mark.parametrize(
    "options", [{}, {"attn_kv_heads": 2}, {"attn_one_kv_head": True}, {"rotary_pos_emb": True}], ids=str
)
@pytest.mark.parametrize("flash", [True, False])
def test_x_transformers_gives_the_same_weights(options, flash):
    from x_transformers import Decoder, TransformerWrapper

    def build(flash):
        layers = Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, attn_dim_head=8, attn_flash=flash, **options)
        return TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers).eval()

    ids = torch.randint(0, 50, (2, 7))
    slow, model = build(False), build(flash)
    model.load_state_dict(slow.state_dict())
    own = slow(ids, return_attn=True)[1]
    trace = look(model, ids)
    assert torch.equal(trace.output, model(ids))
    assert max(trace.verify().values()) < 1e-5
    for name, weights in zip(trace, own, strict=True):
        torch.testing.assert_close(trace[name].weights(), weights, rtol=0, atol=1e-5)
        assert weights.triu(1).count_nonzero() == 0
    check_edits(model, (ids,), {})


def test_cross_attention_of_x_transformers_is_recorded():
    from x_transformers import XTransformer

    sizes = {"num_tokens": 50, "depth": 1, "heads": HEADS, "max_seq_len": 16}
    named = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
    model = XTransformer(dim=WIDTH, **named).eval()
    trace = look(model, torch.randint(0, 50, (2, 7)), torch.randint(0, 50, (2, 5)))
    assert [(trace[a].num_queries, trace[a].num_keys) for a in trace] == [(7, 7), (5, 5), (5, 7)]
    assert max(trace.verify().values()) < 1e-5
