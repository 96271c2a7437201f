import pytest
import torch
from torch import nn

from clearhead.data.pairs import Pairs
from clearhead.data.tokens import BEGIN, END, IGNORED, PAD
from clearhead.lab import recurrence
from clearhead.lab.recurrence import LETTERS, SideBySide, learnt, pronouncing, reversal
from clearhead.lab.rivals import DIGITS, NAMES, TRANSFORMER, WITH, WITHOUT

LETTER, PHONE = 7, 5


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def test_the_last_answer_is_the_first_digit_read(random):
    rows, targets = reversal(5)(random, 40)
    assert torch.equal(rows[:, :5].flip(1), targets)
    assert (rows[:, 5] == BEGIN).all()
    assert torch.equal(rows[:, 6:], targets[:, :-1])
    assert len(targets.unique()) == DIGITS
    assert targets.min() > END


def test_words_are_all_of_one_length_and_their_phones_need_not_be(random):
    words = [[LETTER] * n for n in (LETTERS - 1, LETTERS, LETTERS, LETTERS + 1)]
    phones = [[PHONE] * n + [END] for n in (1, 3, 2, 9)]
    rows, targets = pronouncing(Pairs.of(words, phones))(random, 20)
    assert rows.shape[1] == LETTERS + targets.shape[1]
    assert (rows[:, :LETTERS] == LETTER).all()
    assert {tuple(row) for row in targets.tolist()} == {(PHONE, PHONE, PHONE, END), (PHONE, PHONE, END, IGNORED)}
    assert {tuple(row) for row in rows[:, LETTERS:].tolist()} == {
        (BEGIN, PHONE, PHONE, PHONE),
        (BEGIN, PHONE, PHONE, END),
    }
    assert PAD not in rows


class Echo(nn.Module):
    """Says every source token again, whatever the target; its one weight has no effect."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, source, target):
        return nn.functional.one_hot(source, 20).float() + self.weight


def test_a_row_is_divided_into_source_and_target():
    rows = torch.tensor([[3, 4, 5, BEGIN, 6, 7]])
    assert SideBySide(Echo(), 3)(rows).argmax(-1).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(("targets", "share"), [([3, 4, 5], 1.0), ([3, 9, 9], 1 / 3), ([3, 9, IGNORED], 1 / 2)])
def test_right_tokens_are_counted_where_one_is_asked_for(targets, share):
    def task(random, n):
        return torch.tensor([[3, 4, 5, BEGIN, 6, 7]] * n), torch.tensor([targets] * n)

    assert learnt(Echo(), 3, task, task, steps=2, seed=0) == pytest.approx(share)


def test_the_verdict_is_about_what_attention_adds(monkeypatch):
    """The numbers of the three models in the place of their training."""
    digits = {TRANSFORMER: [1.0, 1.0, 1.0], WITH: [1.0, 1.0, 0.97], WITHOUT: [0.99, 0.9, 0.6]}
    phones = {TRANSFORMER: 0.85, WITH: 0.82, WITHOUT: 0.75}
    monkeypatch.setattr(recurrence, "digits_right", lambda *_: digits)
    monkeypatch.setattr(recurrence, "phones_right", lambda *_: phones)
    monkeypatch.setattr(recurrence, "curves", lambda *_: ())
    assert recurrence.run().verdict == "holds"
    as_good = digits | {WITHOUT: [1.0, 1.0, 1.0]}
    monkeypatch.setattr(recurrence, "digits_right", lambda *_: as_good)
    assert recurrence.run().verdict == "refuted"
    never = digits | {WITHOUT: [0.1, 0.1, 0.1]}  # it learns nothing at all: that is no matter of length
    monkeypatch.setattr(recurrence, "digits_right", lambda *_: never)
    assert recurrence.run().verdict == "refuted"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_curves_but_for_the_time():
    one, same, other = (recurrence.run(seed=seed, width=16, length=8, steps=3).curves for seed in (0, 0, 1))
    assert {curve.name for curve in one} == set(NAMES)
    assert {curve.what for curve in one} == {"right digits", "right phones", "gradient", "milliseconds"}
    timeless = [curve for curve in one if curve.what != "milliseconds"]
    assert timeless == [curve for curve in same if curve.what != "milliseconds"]
    assert timeless != [curve for curve in other if curve.what != "milliseconds"]
