from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from clearhead import SequencePredictor, masks
from clearhead.models.config import PredictorConfig

CONFIG = PredictorConfig(width=8, depth=2, num_heads=2, in_features=5, out_features=3, context_length=6)
POS_EMBEDS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
POOLED = ["cls", "mean", "attention"]


def build(**fields):
    torch.manual_seed(0)
    return SequencePredictor.from_config(replace(CONFIG, **fields)).double()


@pytest.fixture
def ids():
    return torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
@pytest.mark.parametrize("pooling", ["none", *POOLED])
def test_logits_are_per_token_or_pooled(ids, pos_embed, pooling):
    logits = build(pos_embed=pos_embed, pooling=pooling)(ids)
    assert logits.shape == ((3, 6, 3) if pooling == "none" else (3, 3))


def test_ids_equal_one_hot_features(ids):
    model = build()
    torch.testing.assert_close(model(ids), model(F.one_hot(ids, 5).double()))


def test_inputs_embeds_equal_ids(ids):
    model = build()
    torch.testing.assert_close(model(inputs_embeds=model.embed(ids)), model(ids))


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
@pytest.mark.parametrize("pooling", ["none", *POOLED])
def test_padding_does_not_change_valid_outputs(ids, pos_embed, pooling):
    model, lengths = build(pos_embed=pos_embed, pooling=pooling), torch.tensor([2, 6, 4])
    valid = torch.arange(6) < lengths[:, None]
    other = torch.where(valid, ids, (ids + 1) % 5)
    assert not torch.equal(ids, other)
    before, after = model(ids, lengths=lengths), model(other, lengths=lengths)
    if pooling == "none":
        before, after = before[valid], after[valid]
    torch.testing.assert_close(before, after, rtol=0, atol=1e-12)
    short = model(ids[:1, :2])
    torch.testing.assert_close(short[0], before[:2] if pooling == "none" else before[0])


@pytest.mark.parametrize("pooling", POOLED)
def test_pooled_logits_without_positions_are_permutation_invariant(ids, pooling):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    model = build(pos_embed="none", pooling=pooling)
    torch.testing.assert_close(model(ids), model(ids[:, order]))
    with_positions = build(pos_embed="learned", pooling=pooling)
    with torch.no_grad():
        with_positions.pos_embed.table.mul_(50)
    assert (with_positions(ids) - with_positions(ids[:, order])).abs().max() > 1e-3


def test_token_logits_without_positions_are_permutation_equivariant(ids):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    model = build(pos_embed="none")
    torch.testing.assert_close(model(ids)[:, order], model(ids[:, order]))


def test_a_causal_mask_masks_the_suffix(ids):
    model = build()
    other = torch.cat([ids[:, :3], (ids[:, 3:] + 1) % 5], dim=1)
    mask = masks.causal(6)
    torch.testing.assert_close(model(ids, mask=mask)[:, :3], model(other, mask=mask)[:, :3], rtol=0, atol=1e-12)
    assert (model(ids)[:, :3] - model(other)[:, :3]).abs().max() > 1e-6


def test_a_mask_is_extended_for_the_class_token(ids):
    """With everything masked, each token attends only to the class token."""
    model = build(pooling="cls")
    all_masked = torch.zeros(6, 6, dtype=torch.bool)
    assert model(ids, mask=all_masked).shape == (3, 3)
    torch.testing.assert_close(model(ids, mask=torch.ones(1, 1, dtype=torch.bool)), model(ids))


def test_dropout_is_active_only_in_training_mode(ids):
    model = build(dropout=0.5, attention_dropout=0.5, mlp_dropout=0.5, drop_path=0.5)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("pooling", ["none", *POOLED])
def test_features_pooling_and_head_compose_to_the_model(ids, pooling):
    model, lengths, mask = build(pooling=pooling, depth=3), torch.tensor([2, 6, 4]), masks.causal(6)
    features = model.features(ids, lengths=lengths, mask=mask)
    assert features.shape == (3, 6 + (pooling == "cls"), 8)
    valid = masks.padding(lengths, 6)[:, 0, 0]
    assert torch.equal(model.head(model.pool(features, valid)), model(ids, lengths=lengths, mask=mask))
    states = model.features(inputs_embeds=model.embed(ids), lengths=lengths, mask=mask, all_layers=True)
    assert len(states) == 4
    torch.testing.assert_close(states[-1], features)


def test_input_dropout_applies_to_the_inputs_only_in_training_mode(ids):
    """An id is a one-hot vector: its 1 becomes 0, which leaves the bias, or 1/(1-p)."""
    model, plain = build(input_dropout=0.5), build()
    with torch.no_grad():
        model.embed.bias.normal_()
    many = ids.repeat(200, 1)
    embedded, kept = model.embed(many), model.embed.weight[many] * 2 + model.embed.bias
    is_dropped = (embedded == model.embed.bias).all(-1)
    torch.testing.assert_close(embedded[~is_dropped], kept[~is_dropped])
    assert 0.45 < is_dropped.double().mean() < 0.55
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model.embed(ids), model.embed.weight[ids] + model.embed.bias)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(plain(ids), plain(ids)), "off by default"


def test_input_dropout_drops_features_independently(ids):
    model = build(input_dropout=0.5)
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(5, 8))
    embedded = model.embed(torch.ones(300, 6, 5, dtype=torch.float64))[..., :5]
    assert set(embedded.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (embedded == 0).double().mean() < 0.55


def test_input_dropout_does_not_apply_to_inputs_embeds(ids):
    model = build(input_dropout=0.5)
    embeddings = torch.randn(3, 6, 8, dtype=torch.float64)
    assert torch.equal(model(inputs_embeds=embeddings), model(inputs_embeds=embeddings))


def test_head_norm_adds_a_layer_norm_to_the_head():
    model = build(head_mlp_dim=4, head_norm=True, norm_eps=1e-4)
    assert [name for name, _ in model.head.named_children()] == ["fc1", "norm", "dropout", "fc2"]
    assert (model.head.norm.normalized_shape, model.head.norm.eps) == ((4,), 1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(), "inputs_embeds, got neither"),
        (lambda m: m(torch.zeros(1, 2, dtype=torch.long), inputs_embeds=torch.zeros(1, 2, 8)), "got both"),
        (lambda m: m(torch.full((1, 2), 5)), "ids must be from 0 to 4, got 5"),
        (lambda m: m(torch.full((1, 2), -1)), "ids must be from 0 to 4, got -1"),
        (lambda m: m(torch.zeros(2, dtype=torch.long)), r"ids must be \(batch, length\), got shape \(2,\)"),
        (lambda m: m(torch.zeros(1, 2, dtype=torch.bool)), "ids must be integers, got torch.bool"),
        (lambda m: m(torch.zeros(1, 2, 4)), r"last dimension of features must be 5, got shape \(1, 2, 4\)"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 2, 9)), "last dimension of inputs_embeds must be 8"),
        (lambda m: m(torch.zeros(1, 7, dtype=torch.long)), "must fit the learned position table of 6 rows"),
        (
            lambda m: m(torch.zeros(1, 2, dtype=torch.long), lengths=torch.tensor([3])),
            "lengths must be",
        ),
        (lambda m: m(torch.zeros(3, 2, dtype=torch.long), lengths=torch.tensor([2])), "got 1 lengths for 3"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 2, 8).long()), "inputs_embeds must be floating point"),
        (lambda m: m(torch.zeros(1, 2, dtype=torch.long), mask=torch.zeros(3, 3).bool()), "must broadcast to"),
    ],
)
def test_invalid_inputs_raise_one_line_errors(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(build(pos_embed="learned"))
    assert "\n" not in str(caught.value)
