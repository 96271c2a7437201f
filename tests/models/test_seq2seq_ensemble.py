import itertools

import pytest
import torch

from clearhead.models.config import Seq2SeqConfig
from clearhead.models.generate import Beam, Greedy, Sampling
from clearhead.models.seq2seq import Ensemble, Seq2Seq

BEGIN, END = 0, 1
LENGTHS = torch.tensor([2, 6, 4])
WAYS = [Greedy(), Sampling(seed=3), Beam(4)]


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


def answers(model, source, how, **options):
    return model.generate(
        source, strategy=how, bos_id=BEGIN, eos_id=END, max_new_tokens=6, source_lengths=LENGTHS, **options
    )


def mean_probabilities(models, source, target):
    """(B,Q,V): the mean of what each says by itself, without any of the machinery of writing."""
    with torch.no_grad():
        return torch.stack([m.eval()(source, target, source_lengths=LENGTHS).softmax(-1) for m in models]).mean(0)


@pytest.mark.parametrize("how", WAYS)
def test_a_model_and_itself_answer_like_the_model(source, how):
    model = build(0)
    alone, twice = answers(model, source, how), answers(Ensemble([model, model]), source, how)
    assert torch.equal(alone.candidates, twice.candidates)
    torch.testing.assert_close(alone.scores, twice.scores)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_score_is_the_logarithm_of_the_mean_probabilities(source, how, use_cache):
    models = [build(0), build(1, width=12, pos_embed="rotary"), build(2)]
    out = answers(Ensemble(models), source, how, use_cache=use_cache)
    for n in range(out.candidates.shape[1]):
        written, lengths = out.candidates[:, n], out.lengths[:, n]
        begun = torch.cat([torch.full((3, 1), BEGIN), written[:, :-1]], dim=1)
        each = mean_probabilities(models, source, begun).gather(-1, written[..., None])[..., 0].log()
        real = torch.arange(written.shape[1]) < lengths[:, None]
        torch.testing.assert_close(out.scores[:, n], each.masked_fill(~real, 0).sum(1))


def test_a_wide_beam_finds_the_likeliest_under_the_mean(source):
    models = [build(0), build(1)]
    out = Ensemble(models).generate(
        source, strategy=Beam(85, 0), bos_id=BEGIN, eos_id=END, max_new_tokens=3, source_lengths=LENGTHS
    )  # 1 + 4 + 16 ways that end, and 64 that do not: no other is left
    found = torch.full((3,), -torch.inf, dtype=torch.double)
    for ids in itertools.product(range(5), repeat=3):
        n = ids.index(END) + 1 if END in ids else 3
        target = torch.tensor([[BEGIN, *ids[: n - 1]]]).expand(3, -1)
        shares = mean_probabilities(models, source, target)[:, range(n), list(ids[:n])]
        found = found.maximum(shares.log().sum(1))
    torch.testing.assert_close(out.scores[:, 0], found)


def test_stages_are_put_back(source):
    models = [build(0).train(), build(1).eval()]
    answers(Ensemble(models), source, Greedy())
    assert [model.training for model in models] == [True, False]


def test_mistakes_are_named(source):
    with pytest.raises(ValueError, match=r"have the same vocabularies, got sizes \[\(6, 5\), \(6, 7\)\]"):
        Ensemble([build(0), build(1, tgt_vocab_size=7)])
    with pytest.raises(ValueError, match="learned position table of 4 rows, got 6"):
        answers(Ensemble([build(0), build(1, pos_embed="learned", context_length=4)]), source, Greedy())
