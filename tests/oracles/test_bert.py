"""Hugging Face's BertModel as the oracle: with its weights, the preset bert_cifar10 has its hidden states and logits.

The published notebook feeds 64 patch embeddings behind a class token into BertModel and classifies the class token's
last hidden state by an MLP. BERT adds a position and a token type to every token; here both are part of the position
table and of the class token, which are learned anyway.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead import VisionTransformer
from clearhead.models.presets import bert_cifar10
from clearhead.nn.blocks import MLP

BLOCK = {  # BertLayer's name: ours
    "attention.self.query": "attn.q_proj",
    "attention.self.key": "attn.k_proj",
    "attention.self.value": "attn.v_proj",
    "attention.output.dense": "attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


@pytest.fixture(scope="module")
def bert():
    """With biases and gains that are not 0 and 1, so that none of them can be forgotten."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 1024}
    config = BertConfig(hidden_act="gelu", hidden_dropout_prob=0.1, max_position_embeddings=65, **sizes)
    model = BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model.double().eval()


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).double()


@pytest.fixture(scope="module")
def inputs():
    """The class token and 64 patches, before BERT adds anything."""
    return torch.randn(2, 65, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def ours(bert, classifier, cls_token, **changes) -> VisionTransformer:
    """The preset with BERT's weights, and this class token."""
    model = VisionTransformer.from_config(replace(bert_cifar10(), **changes)).double().eval()
    for block, layer in zip(model.blocks, bert.encoder.layer, strict=True):
        for theirs, name in BLOCK.items():
            block.get_submodule(name).load_state_dict(layer.get_submodule(theirs).state_dict())
    added = added_by_bert(bert)
    model.pos_embed.table.copy_(added[1:])
    model.pool.cls_token.copy_(cls_token + added[0])
    model.embed_norm.load_state_dict(bert.embeddings.LayerNorm.state_dict())
    assert isinstance(model.head, MLP)
    model.head.fc1.load_state_dict(classifier[0].state_dict())
    model.head.fc2.load_state_dict(classifier[2].state_dict())
    return model


def added_by_bert(bert):
    """Position and token type of each of the 65 tokens: (65,256)"""
    return bert.embeddings.position_embeddings.weight + bert.embeddings.token_type_embeddings.weight[0]


@torch.no_grad()
def theirs(bert, classifier, inputs):
    """Hidden states of all layers, and logits."""
    out = bert(inputs_embeds=inputs, output_hidden_states=True)
    return out.hidden_states, classifier(out.last_hidden_state[:, 0])


def distance(one, other):
    return (one - other).abs().max().item()


@torch.no_grad()
def test_logits_equal_bert_with_the_same_weights(bert, classifier, inputs):
    """Within 1e-10 in float64, whether the class token is the model's own or comes with inputs_embeds."""
    inputs = torch.cat([inputs[:1, :1].expand(2, -1, -1), inputs[:, 1:]], dim=1)  # one class token for both examples
    model, expected = ours(bert, classifier, inputs[0, 0]), theirs(bert, classifier, inputs)[1]
    assert distance(model(inputs_embeds=inputs[:, 1:]), expected) < 1e-10
    with_cls = torch.cat([inputs[:, :1] + added_by_bert(bert)[0], inputs[:, 1:]], dim=1)
    assert distance(model(inputs_embeds=with_cls, includes_cls_token=True), expected) < 1e-10
    assert expected.std() > 0.01, "logits of zero would equal anything"


@torch.no_grad()
def test_hidden_states_equal_bert(bert, classifier, inputs):
    model, (expected, _) = ours(bert, classifier, inputs[0, 0]), theirs(bert, classifier, inputs[:1])
    states = model.features(inputs_embeds=inputs[:1, 1:], all_layers=True)
    assert len(states) == len(expected) == 13
    for state, other in zip(states, expected, strict=True):
        assert distance(state, other) < 1e-10


@torch.no_grad()
def test_logits_equal_bert_in_float32(bert, classifier, inputs):
    expected = theirs(bert, classifier, inputs[:1])[1]
    model = ours(bert, classifier, inputs[0, 0]).float()
    single = theirs(deepcopy(bert).float(), deepcopy(classifier).float(), inputs[:1].float())[1]
    came = model(inputs_embeds=inputs[:1, 1:].float())
    assert distance(came, single) < 1e-5
    assert distance(came.double(), expected) < 1e-4


@torch.no_grad()
def test_a_different_layer_norm_eps_changes_the_logits(bert, classifier, inputs):
    """Guards the tests above: with PyTorch's usual 1e-5 instead of BERT's 1e-12 they would fail."""
    model, expected = ours(bert, classifier, inputs[0, 0], norm_eps=1e-5), theirs(bert, classifier, inputs[:1])[1]
    assert distance(model(inputs_embeds=inputs[:1, 1:]), expected) > 1e-8


@torch.no_grad()
def test_images_are_embedded_by_the_same_convolution(bert, classifier, inputs):
    """From images (192, 3, 32, 32) to tokens (192, 65, 256) in the notebook; two images here."""
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model = ours(bert, classifier, inputs[0, 0])
    patches = model.patch_embed.as_convolution()(images).flatten(2).transpose(1, 2)
    embedded = torch.cat([inputs[:1, :1].expand(2, -1, -1), patches], dim=1)
    states, expected = theirs(bert, classifier, embedded)
    assert states[0].shape == (2, 65, 256)
    assert distance(model(images), expected) < 1e-10
