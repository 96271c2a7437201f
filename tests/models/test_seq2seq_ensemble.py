import itertools

import pytest
import torch

from clearhead.models.config import Seq2SeqConfig
from clearhead.models.generate import Beam, Greedy, Sampling
from clearhead.models.seq2seq import Ensemble, Seq2Seq

BOS, EOS = 0, 1
LENGTHS = torch.tensor([2, 6, 4])
STRATEGIES = [Greedy(), Sampling(seed=3), Beam(4)]


def build(seed, width=8, pos_embed="sinusoidal", tgt_vocab_size=5, context_length=10):
    torch.manual_seed(seed)
    config = Seq2SeqConfig(
        width=width,
        depth=1,
        num_heads=2,
        src_vocab_size=6,
        tgt_vocab_size=tgt_vocab_size,
        pos_embed=pos_embed,
        context_length=context_length,
    )
    return Seq2Seq.from_config(config).double()


@pytest.fixture
def source():
    return torch.randint(0, 6, (3, 6), generator=torch.Generator().manual_seed(1))


def generate(model, source, strategy, **options):
    return model.generate(
        source, strategy=strategy, bos_id=BOS, eos_id=EOS, max_new_tokens=6, source_lengths=LENGTHS, **options
    )


def mean_probabilities(models, source, target):
    """(B,Q,V): the mean of the models' own probabilities, computed without the generation code."""
    with torch.no_grad():
        return torch.stack([m.eval()(source, target, source_lengths=LENGTHS).softmax(-1) for m in models]).mean(0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_ensemble_of_identical_models_equals_the_model(source, strategy):
    model = build(0)
    single, ensemble = generate(model, source, strategy), generate(Ensemble([model, model]), source, strategy)
    assert torch.equal(single.candidates, ensemble.candidates)
    torch.testing.assert_close(single.scores, ensemble.scores)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_scores_are_log_mean_probabilities(source, strategy, use_cache):
    models = [build(0), build(1, width=12, pos_embed="rotary"), build(2)]
    out = generate(Ensemble(models), source, strategy, use_cache=use_cache)
    for n in range(out.candidates.shape[1]):
        ids, lengths = out.candidates[:, n], out.lengths[:, n]
        decoder_inputs = torch.cat([torch.full((3, 1), BOS), ids[:, :-1]], dim=1)
        log_probabilities = mean_probabilities(models, source, decoder_inputs).gather(-1, ids[..., None])[..., 0].log()
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        torch.testing.assert_close(out.scores[:, n], log_probabilities.masked_fill(~valid, 0).sum(1))


def test_a_wide_beam_finds_the_exhaustive_optimum_of_the_mean(source):
    models = [build(0), build(1)]
    out = Ensemble(models).generate(
        source, strategy=Beam(85, 0), bos_id=BOS, eos_id=EOS, max_new_tokens=3, source_lengths=LENGTHS
    )  # 1 + 4 + 16 finished and 64 unfinished sequences: the beam is exhaustive
    best = torch.full((3,), -torch.inf, dtype=torch.double)
    for ids in itertools.product(range(5), repeat=3):
        n = ids.index(EOS) + 1 if EOS in ids else 3
        target = torch.tensor([[BOS, *ids[: n - 1]]]).expand(3, -1)
        probabilities = mean_probabilities(models, source, target)[:, range(n), list(ids[:n])]
        best = best.maximum(probabilities.log().sum(1))
    torch.testing.assert_close(out.scores[:, 0], best)


def test_training_mode_is_restored(source):
    models = [build(0).train(), build(1).eval()]
    generate(Ensemble(models), source, Greedy())
    assert [model.training for model in models] == [True, False]


def test_incompatible_models_raise(source):
    with pytest.raises(ValueError, match=r"have the same vocabularies, got sizes \[\(6, 5\), \(6, 7\)\]"):
        Ensemble([build(0), build(1, tgt_vocab_size=7)])
    with pytest.raises(ValueError, match="learned position table of 4 rows, got 6"):
        generate(Ensemble([build(0), build(1, pos_embed="learned", context_length=4)]), source, Greedy())
