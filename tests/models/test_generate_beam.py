import math
from itertools import product

import pytest
import torch

from clearhead import LanguageModel
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Beam, Greedy

EOS = 2


def language_model(seed):
    torch.manual_seed(seed)
    config = LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=4, pos_embed="rotary", tie_weights=False)
    model = LanguageModel.from_config(config).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return model


def prompts(n=3):
    return torch.randint(0, 4, (n, 2), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def exhaustive_best(model, prompt, max_new_tokens, penalty):
    """The best-ranked of all sequences that end or are max_new_tokens long and are at least as probable as greedy."""
    greedy = model.generate(prompt[None], max_new_tokens=max_new_tokens, eos_id=EOS).scores.item()
    ranks = {}
    for ids in product(range(4), repeat=max_new_tokens):
        length = ids.index(EOS) + 1 if EOS in ids else max_new_tokens
        ids = (*ids[:length],)
        if ids in ranks:
            continue
        full = torch.cat([prompt, torch.tensor(ids)])
        log_p = model(full[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
        score = log_p.gather(-1, torch.tensor(ids)[:, None]).sum().item()
        ranks[ids] = score / length**penalty if score >= greedy - 1e-9 else -math.inf
    return max(ranks.items(), key=lambda item: item[1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("eos_id", [None, EOS])
def test_beam_size_one_equals_greedy(seed, eos_id):
    def search(states, prompt, max_new_tokens, eos_id):
        return Beam(1).search(states(1), prompt, max_new_tokens, eos_id)

    greedy, beam, searched = (
        language_model(seed).generate(prompts(), strategy=strategy, max_new_tokens=6, eos_id=eos_id)
        for strategy in (Greedy(), Beam(1), search)
    )
    assert torch.equal(greedy.candidates, beam.candidates)
    assert torch.equal(greedy.candidates, searched.candidates[..., : greedy.candidates.shape[-1]])
    assert torch.equal(greedy.lengths, searched.lengths)
    for other in (beam, searched):
        torch.testing.assert_close(greedy.scores, other.scores)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_exhaustive_optimum(seed, penalty):
    model, max_new_tokens = language_model(seed), 3
    out = model.generate(prompts(), strategy=Beam(40, penalty), max_new_tokens=max_new_tokens, eos_id=EOS)
    for row, prompt in enumerate(prompts()):
        best, rank = exhaustive_best(model, prompt, max_new_tokens, penalty)
        length = out.lengths[row, 0].item()
        assert tuple(out.ids[row, :length].tolist()) == best
        assert out.scores[row, 0].item() / length**penalty == pytest.approx(rank)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_beam_search_is_never_worse_than_greedy(seed, size, penalty):
    strategy = Beam(size, penalty)
    greedy = language_model(seed).generate(prompts(), max_new_tokens=8, eos_id=EOS)
    beam = language_model(seed).generate(prompts(), strategy=strategy, max_new_tokens=8, eos_id=EOS)
    assert (
        strategy.rank(beam.scores, beam.lengths)[:, 0] >= strategy.rank(greedy.scores, greedy.lengths)[:, 0] - 1e-9
    ).all()
    assert (beam.scores[:, 0] >= greedy.scores[:, 0] - 1e-9).all()


def test_candidates_less_probable_than_greedy_are_ranked_after_it():
    n_after_greedy = 0
    for seed in range(12):
        strategy, model = Beam(5), language_model(seed)
        out, greedy = (
            model.generate(prompts(), strategy=s, max_new_tokens=6, eos_id=EOS) for s in (strategy, Greedy())
        )
        after_greedy = out.scores < greedy.scores - 1e-9
        assert not after_greedy[:, 0].any()
        assert (after_greedy[:, :-1] <= after_greedy[:, 1:]).all()
        ranks = strategy.rank(out.scores, out.lengths)
        assert ((ranks[:, :-1] >= ranks[:, 1:]) | (after_greedy[:, :-1] != after_greedy[:, 1:])).all()
        n_after_greedy += int((after_greedy[:, 1:] & (ranks[:, 1:] > ranks[:, :1])).sum())
    assert n_after_greedy > 0


def test_candidates_are_distinct():
    out = language_model(3).generate(prompts(), strategy=Beam(5), max_new_tokens=6, eos_id=EOS)
    for candidates in out.candidates:
        assert len({tuple(ids) for ids in candidates.tolist()}) == 5


def test_unused_beam_slots_have_infinite_negative_scores():
    out = language_model(0).generate(prompts(), strategy=Beam(9), max_new_tokens=1, eos_id=EOS)
    assert out.scores.isfinite().sum(1).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "size must be from 1 to 1000, got 0"),
        (lambda: Beam(10**20), "size must be from 1 to 1000, got 1000"),
        (lambda: Beam(2, -1), "length_penalty must be from 0 to 10"),
    ],
)
def test_invalid_beam_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
