import math
from itertools import product

import pytest
import torch

from clearhead import LanguageModel
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Beam, Greedy

END = 2


def language(seed):
    torch.manual_seed(seed)
    config = LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=4, pos_embed="rotary", tie_weights=False)
    model = LanguageModel.from_config(config).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return model


def prompts(n=3):
    return torch.randint(0, 4, (n, 2), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def best_by_exhaustion(model, prompt, n_tokens, penalty):
    """Of all sequences that end, or are n_tokens long, and are as probable as the greedy one, the best by its rank."""
    greedy = model.generate(prompt[None], max_new_tokens=n_tokens, eos_id=END).scores.item()
    ranks = {}
    for ids in product(range(4), repeat=n_tokens):
        length = ids.index(END) + 1 if END in ids else n_tokens
        ids = (*ids[:length],)
        if ids in ranks:
            continue
        full = torch.cat([prompt, torch.tensor(ids)])
        log_p = model(full[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
        score = log_p.gather(-1, torch.tensor(ids)[:, None]).sum().item()
        ranks[ids] = score / length**penalty if score >= greedy - 1e-9 else -math.inf
    return max(ranks.items(), key=lambda item: item[1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("end", [None, END])
def test_a_beam_of_one_is_greedy(seed, end):
    def search(writers, prompt, n_tokens, end):
        return Beam(1).search(writers(1), prompt, n_tokens, end)

    greedy, beam, searched = (
        language(seed).generate(prompts(), strategy=how, max_new_tokens=6, eos_id=end)
        for how in (Greedy(), Beam(1), search)
    )
    assert torch.equal(greedy.candidates, beam.candidates)
    assert torch.equal(greedy.candidates, searched.candidates[..., : greedy.candidates.shape[-1]])
    assert torch.equal(greedy.lengths, searched.lengths)
    for other in (beam, searched):
        torch.testing.assert_close(greedy.scores, other.scores)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all(seed, penalty):
    model, n_tokens = language(seed), 3
    out = model.generate(prompts(), strategy=Beam(40, penalty), max_new_tokens=n_tokens, eos_id=END)
    for row, prompt in enumerate(prompts()):
        best, rank = best_by_exhaustion(model, prompt, n_tokens, penalty)
        length = out.lengths[row, 0].item()
        assert tuple(out.ids[row, :length].tolist()) == best
        assert out.scores[row, 0].item() / length**penalty == pytest.approx(rank)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_beam_is_never_worse_than_greedy(seed, size, penalty):
    how = Beam(size, penalty)
    greedy = language(seed).generate(prompts(), max_new_tokens=8, eos_id=END)
    beam = language(seed).generate(prompts(), strategy=how, max_new_tokens=8, eos_id=END)
    assert (how.rank(beam.scores, beam.lengths)[:, 0] >= how.rank(greedy.scores, greedy.lengths)[:, 0] - 1e-9).all()
    assert (beam.scores[:, 0] >= greedy.scores[:, 0] - 1e-9).all()


def test_longer_answers_that_are_less_probable_than_the_greedy_one_come_after_it():
    n_behind = 0
    for seed in range(12):
        how, model = Beam(5), language(seed)
        out, greedy = (model.generate(prompts(), strategy=way, max_new_tokens=6, eos_id=END) for way in (how, Greedy()))
        behind = out.scores < greedy.scores - 1e-9
        assert not behind[:, 0].any()
        assert (behind[:, :-1] <= behind[:, 1:]).all()
        ranks = how.rank(out.scores, out.lengths)
        assert ((ranks[:, :-1] >= ranks[:, 1:]) | (behind[:, :-1] != behind[:, 1:])).all()
        n_behind += int((behind[:, 1:] & (ranks[:, 1:] > ranks[:, :1])).sum())
    assert n_behind > 0


def test_candidates_are_different():
    out = language(3).generate(prompts(), strategy=Beam(5), max_new_tokens=6, eos_id=END)
    for candidates in out.candidates:
        assert len({tuple(ids) for ids in candidates.tolist()}) == 5


def test_a_beam_wider_than_all_there_is_marks_the_empty_places():
    out = language(0).generate(prompts(), strategy=Beam(9), max_new_tokens=1, eos_id=END)
    assert out.scores.isfinite().sum(1).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "size must be from 1 to 1000, got 0"),
        (lambda: Beam(10**20), "size must be from 1 to 1000, got 1000"),
        (lambda: Beam(2, -1), "length_penalty must be from 0 to 10"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
