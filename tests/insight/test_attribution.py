import pytest
import torch
from torch import nn

from clearhead.insight import attribution as module
from clearhead.insight.attribution import (
    deletion_auc,
    deletion_curve,
    grid_cells,
    max_attention,
    mean_attention,
    occlusion,
    output_map,
    relevance,
    relevance_encoder_decoder,
    rollout,
    rollout_encoder_decoder,
    weight_gradient,
)
from clearhead.insight.heads import edit
from clearhead.insight.trace import look
from clearhead.models.config import Seq2SeqConfig
from clearhead.models.seq2seq import Seq2Seq
from clearhead.nn.attention import MultiHeadAttention


def random_weights(*shape):
    return torch.randn(*shape, dtype=torch.double).softmax(-1)


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [random_weights(2, 3, 5, 5) for _ in range(4)]


def test_rows_of_mean_and_rollout_sum_to_one(layers):
    for aggregate in (mean_attention, rollout):
        assert torch.allclose(aggregate(layers).sum(-1), torch.ones(2, 5, dtype=torch.double))


def test_rollout_of_one_layer_is_half_identity_and_half_attention(layers):
    assert torch.allclose(rollout(layers[:1]), (layers[0].mean(1) + torch.eye(5)) / 2)


def test_rollout_multiplies_later_layers_from_the_left(layers):
    first, second = ((weights.mean(1) + torch.eye(5)) / 2 for weights in layers[:2])
    assert torch.allclose(rollout(layers[:2]), second @ first)
    assert not torch.allclose(rollout(layers[:2]), first @ second)


def test_rollout_of_identity_attention_is_the_identity():
    identity = torch.eye(4).expand(1, 2, 4, 4)
    assert torch.equal(rollout([identity, identity])[0], torch.eye(4))


def test_rollout_keeps_fully_masked_rows_unchanged(layers):
    layers[0][:, :, 2] = 0
    assert torch.equal(rollout(layers[:1])[:, 2], torch.eye(5, dtype=torch.double)[2].expand(2, 5))
    assert torch.allclose(rollout(layers).sum(-1), torch.ones(2, 5, dtype=torch.double))


def test_rollout_of_causal_layers_is_lower_triangular():
    causal = [torch.randn(1, 2, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)] * 3
    assert rollout(causal).triu(1).abs().max() == 0
    assert rollout(causal).tril(-1).min() >= 0


def test_a_pooling_query_has_no_residual_connection(layers):
    pool = random_weights(2, 3, 1, 5)
    rolled = rollout([*layers, pool])
    assert torch.allclose(rolled, pool.mean(1) @ rollout(layers))
    assert torch.allclose(rolled.sum(-1), torch.ones(2, 1, dtype=torch.double))


def test_mean_and_max_attention_are_over_layers_and_heads(layers):
    every = torch.stack(layers)  # (layers,B,H,Q,K)
    assert torch.allclose(mean_attention(layers), every.mean((0, 2)))
    assert torch.equal(max_attention(layers), every.amax((0, 2)))


def test_output_map_is_the_class_token_row_or_the_mean_row(layers):
    matrix = rollout(layers)
    assert torch.equal(output_map(matrix, class_token=True), matrix[:, 0, 1:])
    assert torch.allclose(output_map(matrix, class_token=False).sum(-1), torch.ones(2, dtype=torch.double))
    after_registers = output_map(matrix, class_token=True, num_register_tokens=2)
    assert torch.equal(after_registers, matrix[:, 0, 3:])
    patches = matrix[:, 2:, 2:]
    assert torch.equal(output_map(matrix, class_token=False, num_register_tokens=2), patches.mean(1))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return {
        "encoder": [random_weights(2, 2, 4, 4) for _ in range(3)],
        "decoder": [random_weights(2, 2, 6, 6).tril() for _ in range(2)],
        "cross": [random_weights(2, 2, 6, 4) for _ in range(2)],
    }


def test_encoder_decoder_rollout_rows_sum_to_one_over_target_and_source(pair):
    target, source = rollout_encoder_decoder(**pair)
    assert (target.shape, source.shape) == ((2, 6, 6), (2, 6, 4))
    assert torch.allclose(target.sum(-1) + source.sum(-1), torch.ones(2, 6, dtype=torch.double))
    assert source.min() > 0


def test_rollout_of_one_decoder_layer_matches_its_formula(pair):
    one = {"encoder": pair["encoder"], "decoder": pair["decoder"][:1], "cross": pair["cross"][:1]}
    target, source = rollout_encoder_decoder(**one)
    assert torch.allclose(source, pair["cross"][0].mean(1) @ rollout(pair["encoder"]) / 2)
    assert torch.allclose(target, rollout(pair["decoder"][:1]) / 2)


def test_incompatible_layers_raise(layers, pair):
    with pytest.raises(ValueError, match=r"as many queries as keys, .* got 6 x 4, 4 x 4"):
        rollout([pair["cross"][0], pair["encoder"][0]])
    with pytest.raises(ValueError, match="layers of one shape, got 4 x 4, 5 x 5"):
        mean_attention([layers[0], pair["encoder"][0]])
    with pytest.raises(ValueError, match="at least one layer is needed, got none"):
        rollout([])
    with pytest.raises(ValueError, match="got 3, 1 and 2"):
        rollout_encoder_decoder(pair["encoder"], pair["decoder"][:1], pair["cross"])


def test_encoder_decoder_rollout_works_on_a_trace():
    config = Seq2SeqConfig(width=8, depth=2, num_heads=2, src_vocab_size=5, tgt_vocab_size=5, decoder_depth=3)
    trace = look(Seq2Seq.from_config(config).eval(), torch.randint(0, 5, (2, 4)), torch.randint(0, 5, (2, 6)))
    weights = {name: trace[name].weights() for name in trace}
    encoder = [w for name, w in weights.items() if name.startswith("encoder")]
    decoder, cross = ([w for w in weights.values() if w.shape[-2:] == shape] for shape in ((6, 6), (6, 4)))
    assert (len(encoder), len(decoder), len(cross)) == (2, 3, 3)
    target, source = rollout_encoder_decoder(encoder, decoder, cross)
    assert torch.allclose(target.sum(-1) + source.sum(-1), torch.ones(2, 6), atol=1e-5)
    assert target.triu(1).abs().max() == 0  # causal
    with pytest.raises(ValueError, match="use rollout_encoder_decoder"):
        rollout(trace)


class Stack(nn.Module):
    """Residual self-attention layers, then a pooling query or the mean, and logits of 3 classes."""

    def __init__(self, depth=3, pools=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MultiHeadAttention(8, 2) for _ in range(depth))
        self.pool = MultiHeadAttention(8, 2) if pools else None
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        if self.pool is not None:
            return self.head(self.pool(self.query.expand(len(x), 1, 8), x)[:, 0])
        return self.head(x.mean(1))


def explicit_contributions(model, *inputs, score):
    """relu(A * dA) by module name, from explicit weights and their autograd gradients."""
    recorded = {}
    parts = {name: part for name, part in model.named_modules() if isinstance(part, MultiHeadAttention)}
    for name, part in parts.items():

        def attend(q, k, v, *_, name=name, **__):
            recorded[name] = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            recorded[name].retain_grad()
            return recorded[name] @ v

        part.attend = attend
    score(model(*inputs)).sum().backward()
    return {name: (A * A.grad).clamp(min=0).mean(1) for name, A in recorded.items()}


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("class_index", [0, 2])
def test_relevance_equals_explicit_autograd(pools, class_index):
    model, x = Stack(pools=pools), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    found = relevance(trace, trace.output[:, class_index])
    explicit = explicit_contributions(model, x, score=lambda output: output[:, class_index])
    expected = torch.eye(5, dtype=torch.double).expand(2, 5, 5)
    for i in range(3):
        expected = expected + explicit[f"layers.{i}"] @ expected
    if pools:
        expected = explicit["pool"] @ expected
    assert torch.allclose(found, expected, atol=1e-6)
    assert (found - torch.eye(5)).abs().max() > 1e-3  # relevance differs from the identity


def test_relevance_is_class_specific_and_repeatable():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    first, second = (relevance(trace, trace.output[:, c]) for c in (0, 1))
    assert not torch.allclose(first, second)
    assert torch.equal(relevance(trace, trace.output[:, 0]), first)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not first.requires_grad


def test_relevance_is_independent_across_the_batch():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    both = look(model, x)
    one = look(model, x[1:])
    assert torch.allclose(relevance(both, both.output[:, 1])[1:], relevance(one, one.output[:, 1]))


def test_relevance_accepts_a_subset_of_layers():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    explicit = explicit_contributions(model, x, score=lambda output: output[:, 0])
    last = relevance(trace, trace.output[:, 0], ["layers.2"])
    assert torch.allclose(last, torch.eye(5) + explicit["layers.2"], atol=1e-6)


def test_relevance_ignores_layers_that_the_score_does_not_depend_on():
    model, x = Stack(depth=1), torch.randn(1, 5, 8, dtype=torch.double)
    trace = look(model, x)
    score = (trace["layers.0"].q * 2).sum()  # before its attention
    assert torch.equal(relevance(trace, score)[0], torch.eye(5, dtype=torch.double))


class Pair(Stack):
    def forward(self, source, target):
        encoder, self_attn_1, cross_1, self_attn_2, cross_2 = self.layers
        source = source + encoder(source)
        for self_attn, cross in ((self_attn_1, cross_1), (self_attn_2, cross_2)):
            target = target + self_attn(target)
            target = target + cross(target, source)
        return self.head(target)


def test_encoder_decoder_relevance_matches_its_formula():
    model = Pair(depth=5)
    source, target = torch.randn(2, 4, 8, dtype=torch.double), torch.randn(2, 6, 8, dtype=torch.double)
    trace = look(model, source, target)
    encoder, *rest = list(trace)
    to_target, to_source = relevance_encoder_decoder(
        trace, trace.output[:, -1, 1], encoder=[encoder], decoder=rest[::2], cross=rest[1::2]
    )
    explicit = explicit_contributions(model, source, target, score=lambda output: output[:, -1, 1])
    C = {
        name: explicit[f"layers.{i}"]
        for i, name in enumerate(("encoder", "decoder.0", "cross.0", "decoder.1", "cross.1"))
    }
    encoded = torch.eye(4) + C["encoder"]
    expected = C["cross.0"] @ encoded
    expected = expected + C["decoder.1"] @ expected + C["cross.1"] @ encoded
    assert torch.allclose(to_source, expected, atol=1e-6)
    assert torch.allclose(to_target, (torch.eye(6) + C["decoder.1"]) @ (torch.eye(6) + C["decoder.0"]), atol=1e-6)
    assert to_source[:, -1].max() > 0


def test_relevance_without_gradients_raises():
    model, x = Stack(), torch.randn(1, 5, 8, dtype=torch.double)
    trace = look(model, x)
    with pytest.raises(ValueError, match=r"score must be computed from trace\.output"):
        relevance(trace, trace.output[:, 0].detach())
    with torch.no_grad():
        trace = look(model, x)
    with pytest.raises(ValueError, match=r"needs a pass with gradients, got none for layers\.0"):
        relevance(trace, trace.output[:, 0])


def test_weight_gradient_matches_finite_differences(model_and_inputs):
    """Finite differences: the weights are perturbed with `edit`."""
    model, inputs = model_and_inputs[0].double(), [x.double() for x in model_and_inputs[1]]

    def score(output):
        first = output[0] if isinstance(output, tuple) else output
        return (first * torch.arange(first.numel()).view_as(first).sin()).sum()

    trace = look(model, *inputs)
    for name in trace:
        layer = trace[name]
        (d_out,) = torch.autograd.grad(score(trace.output), layer.call.raw_out, retain_graph=True)
        change = torch.randn_like(layer.weights()) * 1e-6
        outputs = []
        for sign in (1, -1):
            with torch.no_grad(), edit(model, name, pattern=lambda weights, sign=sign: weights + sign * change):  # noqa: B023
                outputs.append(score(model(*inputs)).item())
        expected = (weight_gradient(layer, d_out) * change).sum().item()
        assert (outputs[0] - outputs[1]) / 2 == pytest.approx(expected, rel=1e-4, abs=1e-11)
        assert abs(expected) > 1e-8


class Corner(nn.Module):
    """The logit of class 1 is the sum of the upper-left quarter of a 4 x 4 image."""

    def forward(self, images):
        total = images[:, :, :2, :2].sum((1, 2, 3))
        return torch.stack([torch.zeros_like(total), total], dim=1)


IMAGES = torch.ones(3, 1, 4, 4) * torch.tensor([0.5, 1.0, 2.0])[:, None, None, None]


def test_occluding_unused_pixels_has_no_effect():
    change = occlusion(Corner(), IMAGES, (2, 2), 1)
    assert change.shape == (3, 2, 2)
    assert change.flatten(1)[:, 1:].abs().max() == 0
    assert torch.allclose(change[:, 0, 0], (IMAGES[:, 0, 0, 0] * 4).sigmoid() - 0.5)


def test_evidence_against_a_class_is_negative():
    assert torch.allclose(occlusion(Corner(), IMAGES, (2, 2), 0), -occlusion(Corner(), IMAGES, (2, 2), 1))


def test_occlusion_defaults_to_the_predicted_class():
    both = torch.cat([IMAGES, -IMAGES])
    named = occlusion(Corner(), both, (2, 2), torch.tensor([1, 1, 1, 0, 0, 0]))
    assert torch.equal(occlusion(Corner(), both, (2, 2)), named)
    assert (named[:, 0, 0] > 0).all()


def test_mean_fill_has_no_effect_on_constant_images():
    assert occlusion(Corner(), IMAGES, (2, 2), 1, fill="mean").abs().max() == 0
    with pytest.raises(ValueError, match="fill must be one of gray, mean, black, got 'white'"):
        occlusion(Corner(), IMAGES, (2, 2), 1, fill="white")


def test_black_fill_is_the_image_minimum():
    images = IMAGES.clone()
    images[:, :, 3, 3] = -1
    change = occlusion(Corner(), images, (2, 2), 1, fill="black")
    assert torch.allclose(change[:, 0, 0], (IMAGES[:, 0, 0, 0] * 4).sigmoid() - torch.tensor(-4.0).sigmoid())


def test_grid_cells_partition_the_image():
    cells = grid_cells(torch.zeros(1, 3, 6, 8), (3, 2))
    assert cells.shape == (6, 6, 8)
    assert torch.equal(cells.sum(0), torch.ones(6, 8, dtype=torch.long))
    assert cells[1, :2, 4:].all()
    with pytest.raises(ValueError, match=r"got \(1, 3, 6, 8\) and 4 x 2"):
        grid_cells(torch.zeros(1, 3, 6, 8), (4, 2))


def test_the_deletion_curve_drops_when_the_relevant_patch_is_deleted():
    first = torch.tensor([[4.0, 3.0], [2.0, 1.0]]).expand(3, 2, 2)
    before = (IMAGES[:, 0, 0, 0] * 4).sigmoid()
    curve = deletion_curve(Corner(), IMAGES, first, 1)
    assert torch.allclose(curve[:, 0], before)
    assert torch.equal(curve[:, 1:], torch.full((3, 4), 0.5))
    assert torch.allclose(deletion_curve(Corner(), IMAGES, -first, 1)[:, :4], before[:, None].expand(3, 4))


def test_a_better_ranking_has_a_lower_deletion_auc():
    first = torch.tensor([[4.0, 3.0], [2.0, 1.0]]).expand(3, 2, 2)
    good, bad = (deletion_auc(deletion_curve(Corner(), IMAGES, ranking, 1)) for ranking in (first, -first))
    assert (good < bad).all()
    before = (IMAGES[:, 0, 0, 0] * 4).sigmoid()
    assert torch.allclose(good, 0.5 + (before - 0.5) / 8)
    assert torch.allclose(bad, before - (before - 0.5) / 8)


def test_deletion_curve_requires_one_map_per_image():
    with pytest.raises(ValueError, match=r"ranking must be \(images, rows, columns\), got \(2, 2\) for 3 images"):
        deletion_curve(Corner(), IMAGES, torch.zeros(2, 2))


def test_images_are_processed_in_chunks_and_logits_can_be_extracted(monkeypatch):
    expected = occlusion(Corner(), IMAGES, (4, 4), 1)
    monkeypatch.setattr(module, "MAX_BATCH", 5)
    assert torch.equal(occlusion(Corner(), IMAGES, (4, 4), 1), expected)

    class Wrapped(nn.Module):
        def forward(self, images):
            return {"logits": Corner()(images)}

    assert torch.equal(occlusion(Wrapped(), IMAGES, (4, 4), 1, logits=lambda output: output["logits"]), expected)


def test_occlusion_keeps_no_graph_and_does_not_modify_the_images():
    images = IMAGES.clone().requires_grad_()
    assert not occlusion(Corner(), images.detach(), (2, 2), 1).requires_grad
    assert torch.equal(images, IMAGES)
