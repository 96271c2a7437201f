import math
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from clearhead.data.vocab import BEGIN, END, Vocabulary
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
def session(trained):
    return Run(trained / "pronounce")


def test_letters_and_phones_are_the_dictionarys(session):
    assert session.symbols[3:] == tuple("abcd")
    assert session.classes[3:] == ("AE", "B", "D", "K")


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_many_words_are_said_like_one_at_a_time(session, monkeypatch, at_once):
    at_one_time = pronounce(session, WORDS)
    monkeypatch.setattr(g2p, "AT_ONCE", at_once)
    for word, expected in zip(WORDS, at_one_time, strict=True):
        (alone,) = pronounce(session, [word])
        assert [way.phones for way in alone] == [way.phones for way in expected]
        assert [way.score for way in alone] == pytest.approx([way.score for way in expected], abs=1e-4)


def test_64_words_at_once_are_said_like_one_at_a_time(session):
    words = ["".join(letters) for letters in product("abcd", repeat=3)]
    assert len(words) == 64
    for word, expected in zip(words, pronounce(session, words), strict=True):
        (alone,) = pronounce(session, [word])
        assert alone[0].phones == expected[0].phones
        assert alone[0].score == pytest.approx(expected[0].score, abs=1e-4)


def test_of_wide_beams_fewer_words_are_said_at_once(session, monkeypatch):
    sizes, generate = [], session.model.generate
    monkeypatch.setattr(
        session.model, "generate", lambda source, *a, **k: sizes.append(len(source)) or generate(source, *a, **k)
    )
    monkeypatch.setattr(g2p, "AT_ONCE", 4)
    for how in (Beam(1), BEAM, Beam(10), Beam(100)):
        pronounce(session, WORDS, how)
    assert sizes == [4, 2, 4, 2, 2, 2, 2, *[1] * 6]


def test_a_score_is_the_models_own_logarithm_of_the_probability(session):
    letters, phones = Vocabulary(session.symbols), Vocabulary(session.classes)
    for way in pronounce(session, ["cab"])[0]:
        ended = len(way.phones) < g2p.MOST_PHONES  # or broken off
        target = [*phones.ids(way.phones), END] if ended else phones.ids(way.phones)
        logits = session.model(torch.tensor([letters.ids("cab")]), torch.tensor([[BEGIN, *target[:-1]]]))
        logs = logits.log_softmax(-1)[0, range(len(target)), target]
        assert way.score == pytest.approx(logs.sum().item(), abs=1e-4)


@pytest.mark.parametrize("how", [BEAM, Beam(3, length_penalty=0)])
def test_the_best_is_never_less_likely_than_the_greedy_answer(session, how):
    for word in WORDS:
        ids = torch.tensor([Vocabulary(session.symbols).ids(word)])
        greedy = session.model.generate(ids, Greedy(), begin=BEGIN, end=END, n_tokens=g2p.MOST_PHONES)
        assert pronounce(session, [word], how)[0][0].score >= greedy.scores.item() - 1e-5


def test_runs_say_words_together(session, trained):
    other = copy(session)
    other.model = Seq2Seq(replace(session.model.config, width=8))
    both = pronounce(ensemble([session, other]), WORDS)
    assert pronounce(ensemble([session, session]), WORDS)[0][0].score == pytest.approx(
        pronounce(session, WORDS)[0][0].score, abs=1e-4
    )
    assert both not in (pronounce(session, WORDS), pronounce(other, WORDS))
    assert isinstance(session.model, Seq2Seq)  # the session itself is as before
    with pytest.raises(ValueError, match=r"runs of pronounce answer together, got .*reverse; leave it out"):
        ensemble([session, Run(trained / "reverse")])
    other.classes = session.classes[::-1]
    with pytest.raises(ValueError, match="know the same letters and phones, got other ones in"):
        ensemble([session, other])


def test_capitals_and_blanks_do_not_matter(session):
    assert pronounce(session, [" CaB "]) == pronounce(session, ["cab"])


def test_what_cannot_be_said(session, trained):
    with pytest.raises(LookupError, match="a symbol is one of those learnt, 'abcd', got 'z' in 'zeb'"):
        pronounce(session, ["Zeb"])
    with pytest.raises(ValueError, match="a word has letters, got ' '"):
        pronounce(session, [" "])
    with pytest.raises(ValueError, match="at most 100 letters, got 101: 'aaaaaaaaaaaaaaaaaaaa'"):
        pronounce(session, ["a" * 101])
    with pytest.raises(ValueError, match="says no words, got 'cab'; ask a run of the recipe pronounce"):
        pronounce(Run(trained / "words"), ["cab"])


def test_probabilities_of_different_answers_add_up_to_less_than_one(session):
    ways = pronounce(session, ["ab"], Beam(8))[0]
    assert len({way.phones for way in ways}) == len(ways)
    assert sum(math.exp(way.score) for way in ways) < 1


def test_a_short_table_of_places_ends_the_answer(session, monkeypatch):
    model = Seq2Seq(replace(session.config.model, positions="learned", context=5)).eval()
    monkeypatch.setattr(session, "model", model)
    assert all(len(way.phones) <= 5 for way in pronounce(session, ["cab"])[0])
