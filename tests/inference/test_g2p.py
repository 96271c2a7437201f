import math
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from clearhead.data.vocab import BOS, EOS, Vocabulary
from clearhead.inference import generation as g2p
from clearhead.inference.generation import (
    BEAM,
    Pronunciation,
    ensemble,
    predicted_phones,
    pronounce,
    sharpest,
    word_figures,
)
from clearhead.inference.run import Run
from clearhead.models.generate import Beam, Greedy
from clearhead.models.seq2seq import Seq2Seq

WORDS = ["cab", "a", "dddd", "bad", "abcabc", "ba"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(g2p, "MAX_PHONES", 12)  # a model that has hardly learnt does not end by itself


@pytest.fixture(scope="module")
def run(trained):
    return Run(trained / "pronounce")


def test_letters_and_phones_come_from_the_dictionary(run):
    assert run.vocab[3:] == tuple("abcd")
    assert run.classes[3:] == ("AE", "B", "D", "K")


def with_eval_batch_size(run, size):
    return replace(run.config, training=replace(run.config.training, eval_batch_size=size))


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_batched_words_equal_single_words(run, monkeypatch, at_once):
    at_one_time = pronounce(run, WORDS)
    monkeypatch.setattr(run, "config", with_eval_batch_size(run, at_once))
    for word, expected in zip(WORDS, at_one_time, strict=True):
        (alone,) = pronounce(run, [word])
        assert [way.phones for way in alone] == [way.phones for way in expected]
        assert [way.score for way in alone] == pytest.approx([way.score for way in expected], abs=1e-4)


def test_a_batch_of_64_words_equals_single_words(run):
    words = ["".join(letters) for letters in product("abcd", repeat=3)]
    assert len(words) == 64
    for word, expected in zip(words, pronounce(run, words), strict=True):
        (alone,) = pronounce(run, [word])
        assert alone[0].phones == expected[0].phones
        assert alone[0].score == pytest.approx(expected[0].score, abs=1e-4)


def test_wide_beams_have_smaller_batches(run, monkeypatch):
    sizes, generate = [], run.model.generate
    monkeypatch.setattr(
        run.model, "generate", lambda source, *a, **k: sizes.append(len(source)) or generate(source, *a, **k)
    )
    monkeypatch.setattr(run, "config", with_eval_batch_size(run, 4))
    for how in (Beam(1), BEAM, Beam(10), Beam(100)):
        pronounce(run, WORDS, how)
    assert sizes == [4, 2, 4, 2, 2, 2, 2, *[1] * 6]


def test_a_score_is_the_log_probability_under_the_model(run):
    letters, phones = Vocabulary(run.vocab), Vocabulary(run.classes)
    for way in pronounce(run, ["cab"])[0]:
        ended = len(way.phones) < g2p.MAX_PHONES  # or broken off
        target = [*phones.encode(way.phones), EOS] if ended else phones.encode(way.phones)
        logits = run.model(torch.tensor([letters.encode("cab")]), torch.tensor([[BOS, *target[:-1]]]))
        logs = logits.log_softmax(-1)[0, range(len(target)), target]
        assert way.score == pytest.approx(logs.sum().item(), abs=1e-4)


@pytest.mark.parametrize("how", [BEAM, Beam(3, length_penalty=0)])
def test_the_best_candidate_is_at_least_as_probable_as_the_greedy_one(run, how):
    for word in WORDS:
        ids = torch.tensor([Vocabulary(run.vocab).encode(word)])
        greedy = run.model.generate(ids, strategy=Greedy(), bos_id=BOS, eos_id=EOS, max_new_tokens=g2p.MAX_PHONES)
        assert pronounce(run, [word], how)[0][0].score >= greedy.scores.item() - 1e-5


def test_an_ensemble_averages_runs(run, trained):
    other = copy(run)
    other.model = Seq2Seq.from_config(replace(run.model.config, width=8))
    both = pronounce(ensemble([run, other]), WORDS)
    assert pronounce(ensemble([run, run]), WORDS)[0][0].score == pytest.approx(
        pronounce(run, WORDS)[0][0].score, abs=1e-4
    )
    assert both not in (pronounce(run, WORDS), pronounce(other, WORDS))
    assert isinstance(run.model, Seq2Seq)  # the run itself is as before
    with pytest.raises(ValueError, match=r"needs runs of the recipe pronounce, got .*reverse"):
        ensemble([run, Run(trained / "reverse")])
    other.classes = run.classes[::-1]
    with pytest.raises(ValueError, match="same letters and phones, got others in"):
        ensemble([run, other])


def test_case_and_surrounding_spaces_are_ignored(run):
    assert pronounce(run, [" CaB "]) == pronounce(run, ["cab"])


def test_invalid_words_are_refused(run, trained):
    with pytest.raises(LookupError, match="unknown token 'z' in 'zeb'; the vocabulary is 'abcd'"):
        pronounce(run, ["Zeb"])
    with pytest.raises(ValueError, match="must have letters, got ' '"):
        pronounce(run, [" "])
    with pytest.raises(ValueError, match="at most 100 letters, got 101: 'aaaaaaaaaaaaaaaaaaaa'"):
        pronounce(run, ["a" * 101])
    with pytest.raises(ValueError, match=r"needs a run of the recipe pronounce, got .*words"):
        pronounce(Run(trained / "words"), ["cab"])


def test_probabilities_of_candidates_sum_to_at_most_one(run):
    ways = pronounce(run, ["ab"], Beam(8))[0]
    assert len({way.phones for way in ways}) == len(ways)
    assert sum(math.exp(way.score) for way in ways) < 1


def test_learned_positions_limit_the_length(run, monkeypatch):
    model = Seq2Seq.from_config(replace(run.config.model, pos_embed="learned", context_length=5)).eval()
    monkeypatch.setattr(run, "model", model)
    assert all(len(way.phones) <= 5 for way in pronounce(run, ["cab"])[0])


@pytest.mark.parametrize(("ended", "last"), [(True, ("<eos>",)), (False, ())])
def test_predicted_phones_have_the_end_token_if_it_was_reached(trained, monkeypatch, ended, last):
    monkeypatch.setattr(g2p, "pronounce", lambda run, words: [[Pronunciation(("K", "AE"), -1.0, ended)]])
    assert predicted_phones(Run(trained / "pronounce"), "cab") == ("K", "AE", *last)


def test_figures_of_a_word(trained):
    run = Run(trained / "pronounce")
    found = {name: figure for name, _, figure in word_figures(run, "Cab")}
    assert list(found) == ["alignment.png", "cross.png", "encoder.png", "decoder.png", "heads.png"]
    axes = found["alignment.png"].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("cab")
    assert [label.get_text() for label in axes.get_yticklabels()] == list(predicted_phones(run, "cab"))


def test_sharpest_finds_the_layer_of_lowest_entropy():
    sharp, blurred = torch.eye(4).expand(1, 2, 4, 4), torch.full((1, 2, 4, 4), 0.25)
    name, weights = sharpest({"one": blurred, "two": sharp})
    assert name == "two"
    assert torch.equal(weights, torch.eye(4))
