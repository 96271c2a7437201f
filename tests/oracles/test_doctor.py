"""Widely used models of other libraries have no fault, and the conventions of their masks are found."""

import pytest

from clearhead import examine

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

# x-transformers scripts a function when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def bert():
    transformers = pytest.importorskip("transformers")
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def t5():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "d_kv": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def x_transformers():
    x = pytest.importorskip("x_transformers")
    layers = x.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    return x.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)


@pytest.mark.parametrize("build", [gpt2, llama, bert, t5, x_transformers], ids=lambda build: build.__name__)
def test_widely_used_models_have_no_fault(build):
    report = examine(build(), causal=build is not bert)
    assert not report.faults, report
    assert report["padding"].verdict == "fine"
    if build is not x_transformers:
        assert "attention_mask: (B,K), True = may attend" in report["padding"].text
    if build is t5:
        assert report["scale"].verdict == "warning"
