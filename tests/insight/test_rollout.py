import pytest
import torch

from clearhead.insight.attribution import max_attention, mean_attention, output_map, rollout, rollout_encoder_decoder
from clearhead.insight.trace import look
from clearhead.models.config import Seq2SeqConfig
from clearhead.models.seq2seq import Seq2Seq


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


def test_rollout_of_layers_that_look_at_themselves_is_the_identity():
    own = torch.eye(4).expand(1, 2, 4, 4)
    assert torch.equal(rollout([own, own])[0], torch.eye(4))


def test_rollout_passes_rows_without_weights_unchanged(layers):
    layers[0][:, :, 2] = 0
    assert torch.equal(rollout(layers[:1])[:, 2], torch.eye(5, dtype=torch.double)[2].expand(2, 5))
    assert torch.allclose(rollout(layers).sum(-1), torch.ones(2, 5, dtype=torch.double))


def test_a_causal_stack_never_rolls_out_to_the_future():
    causal = [torch.randn(1, 2, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)] * 3
    assert rollout(causal).triu(1).abs().max() == 0
    assert rollout(causal).tril(-1).min() >= 0


def test_a_pooling_query_has_no_residual_path(layers):
    pool = random_weights(2, 3, 1, 5)
    rolled = rollout([*layers, pool])
    assert torch.allclose(rolled, pool.mean(1) @ rollout(layers))
    assert torch.allclose(rolled.sum(-1), torch.ones(2, 1, dtype=torch.double))


def test_mean_and_maximum_over_all_layers_and_heads(layers):
    every = torch.stack(layers)  # (layers,B,H,Q,K)
    assert torch.allclose(mean_attention(layers), every.mean((0, 2)))
    assert torch.equal(max_attention(layers), every.amax((0, 2)))


def test_the_answer_is_the_class_tokens_row_or_the_mean_row(layers):
    matrix = rollout(layers)
    assert torch.equal(output_map(matrix, class_token=True), matrix[:, 0, 1:])
    assert torch.allclose(output_map(matrix, class_token=False).sum(-1), torch.ones(2, dtype=torch.double))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return {
        "encoder": [random_weights(2, 2, 4, 4) for _ in range(3)],
        "decoder": [random_weights(2, 2, 6, 6).tril() for _ in range(2)],
        "cross": [random_weights(2, 2, 6, 4) for _ in range(2)],
    }


def test_of_an_encoder_decoder_target_and_source_together_sum_to_one(pair):
    target, source = rollout_encoder_decoder(**pair)
    assert (target.shape, source.shape) == ((2, 6, 6), (2, 6, 4))
    assert torch.allclose(target.sum(-1) + source.sum(-1), torch.ones(2, 6, dtype=torch.double))
    assert source.min() > 0


def test_one_decoder_layer_is_half_encoder_rollout_through_cross_attention(pair):
    one = {"encoder": pair["encoder"], "decoder": pair["decoder"][:1], "cross": pair["cross"][:1]}
    target, source = rollout_encoder_decoder(**one)
    assert torch.allclose(source, pair["cross"][0].mean(1) @ rollout(pair["encoder"]) / 2)
    assert torch.allclose(target, rollout(pair["decoder"][:1]) / 2)


def test_layers_that_do_not_fit_are_refused(layers, pair):
    with pytest.raises(ValueError, match=r"as many queries as keys, .* got 6 x 4, 4 x 4"):
        rollout([pair["cross"][0], pair["encoder"][0]])
    with pytest.raises(ValueError, match="layers of one shape, got 4 x 4, 5 x 5"):
        mean_attention([layers[0], pair["encoder"][0]])
    with pytest.raises(ValueError, match="at least one layer is needed, got none"):
        rollout([])
    with pytest.raises(ValueError, match="got 3, 1 and 2"):
        rollout_encoder_decoder(pair["encoder"], pair["decoder"][:1], pair["cross"])


def test_from_what_look_saw_of_our_own_encoder_decoder():
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
