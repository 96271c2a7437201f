import math
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from clearhead.data.vocab import BOS, EOS, Vocabulary
from clearhead.inference import g2p
from clearhead.inference.g2p import BEAM, ensemble, pronounce
from clearhead.inference.run import Run
from clearhead.models.generate import Beam, Greedy
from clearhead.models.seq2seq import Seq2Seq

WORDS = ["cab", "a", "dddd", "bad", "abcabc", "ba"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(g2p, "MOST_PHONES", 12)  # a model that has hardly learnt does not end by itself


@pytest.fixture(scope="module")
def run(trained):
    return Run(trained / "pronounce")


def test_letters_and_phones_are_the_dictionarys(run):
    assert run.vocab[3:] == tuple("abcd")
    assert run.classes[3:] == ("AE", "B", "D", "K")


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_many_words_are_said_like_one_at_a_time(run, monkeypatch, at_once):
    at_one_time = pronounce(run, WORDS)
    monkeypatch.setattr(g2p, "AT_ONCE", at_once)
    for word, expected in zip(WORDS, at_one_time, strict=True):
        (alone,) = pronounce(run, [word])
        assert [way.phones for way in alone] == [way.phones for way in expected]
        assert [way.score for way in alone] == pytest.approx([way.score for way in expected], abs=1e-4)


def test_64_words_at_once_are_said_like_one_at_a_time(run):
    words = ["".join(letters) for letters in product("abcd", repeat=3)]
    assert len(words) == 64
    for word, expected in zip(words, pronounce(run, words), strict=True):
        (alone,) = pronounce(run, [word])
        assert alone[0].phones == expected[0].phones
        assert alone[0].score == pytest.approx(expected[0].score, abs=1e-4)


def test_of_wide_beams_fewer_words_are_said_at_once(run, monkeypatch):
    sizes, generate = [], run.model.generate
    monkeypatch.setattr(
        run.model, "generate", lambda source, *a, **k: sizes.append(len(source)) or generate(source, *a, **k)
    )
    monkeypatch.setattr(g2p, "AT_ONCE", 4)
    for how in (Beam(1), BEAM, Beam(10), Beam(100)):
        pronounce(run, WORDS, how)
    assert sizes == [4, 2, 4, 2, 2, 2, 2, *[1] * 6]


def test_a_score_is_the_models_own_logarithm_of_the_probability(run):
    letters, phones = Vocabulary(run.vocab), Vocabulary(run.classes)
    for way in pronounce(run, ["cab"])[0]:
        ended = len(way.phones) < g2p.MOST_PHONES  # or broken off
        target = [*phones.encode(way.phones), EOS] if ended else phones.encode(way.phones)
        logits = run.model(torch.tensor([letters.encode("cab")]), torch.tensor([[BOS, *target[:-1]]]))
        logs = logits.log_softmax(-1)[0, range(len(target)), target]
        assert way.score == pytest.approx(logs.sum().item(), abs=1e-4)


@pytest.mark.parametrize("how", [BEAM, Beam(3, length_penalty=0)])
def test_the_best_is_never_less_likely_than_the_greedy_answer(run, how):
    for word in WORDS:
        ids = torch.tensor([Vocabulary(run.vocab).encode(word)])
        greedy = run.model.generate(ids, strategy=Greedy(), bos_id=BOS, eos_id=EOS, max_new_tokens=g2p.MOST_PHONES)
        assert pronounce(run, [word], how)[0][0].score >= greedy.scores.item() - 1e-5


def test_runs_say_words_together(run, trained):
    other = copy(run)
    other.model = Seq2Seq(replace(run.model.config, width=8))
    both = pronounce(ensemble([run, other]), WORDS)
    assert pronounce(ensemble([run, run]), WORDS)[0][0].score == pytest.approx(
        pronounce(run, WORDS)[0][0].score, abs=1e-4
    )
    assert both not in (pronounce(run, WORDS), pronounce(other, WORDS))
    assert isinstance(run.model, Seq2Seq)  # the run itself is as before
    with pytest.raises(ValueError, match=r"runs of pronounce answer together, got .*reverse; leave it out"):
        ensemble([run, Run(trained / "reverse")])
    other.classes = run.classes[::-1]
    with pytest.raises(ValueError, match="know the same letters and phones, got other ones in"):
        ensemble([run, other])


def test_capitals_and_blanks_do_not_matter(run):
    assert pronounce(run, [" CaB "]) == pronounce(run, ["cab"])


def test_what_cannot_be_said(run, trained):
    with pytest.raises(LookupError, match="a symbol is one of those learnt, 'abcd', got 'z' in 'zeb'"):
        pronounce(run, ["Zeb"])
    with pytest.raises(ValueError, match="a word has letters, got ' '"):
        pronounce(run, [" "])
    with pytest.raises(ValueError, match="at most 100 letters, got 101: 'aaaaaaaaaaaaaaaaaaaa'"):
        pronounce(run, ["a" * 101])
    with pytest.raises(ValueError, match="says no words, got 'cab'; ask a run of the recipe pronounce"):
        pronounce(Run(trained / "words"), ["cab"])


def test_probabilities_of_different_answers_add_up_to_less_than_one(run):
    ways = pronounce(run, ["ab"], Beam(8))[0]
    assert len({way.phones for way in ways}) == len(ways)
    assert sum(math.exp(way.score) for way in ways) < 1


def test_a_short_table_of_places_ends_the_answer(run, monkeypatch):
    model = Seq2Seq(replace(run.config.model, pos_embed="learned", context_length=5)).eval()
    monkeypatch.setattr(run, "model", model)
    assert all(len(way.phones) <= 5 for way in pronounce(run, ["cab"])[0])
