import pytest
import torch
from torch import nn

from clearhead.data.dataset import SequencePairs
from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, PAD
from clearhead.lab import recurrence
from clearhead.lab.lstm import DIGITS, LSTM, LSTM_ATTENTION, MODEL_NAMES, TRANSFORMER
from clearhead.lab.recurrence import LETTERS, ConcatenatedInputs, accuracies, pronunciation, reversal

LETTER, PHONE = 7, 5


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def test_reversal_task_reverses_the_digits(random):
    rows, targets = reversal(5)(random, 40)
    assert torch.equal(rows[:, :5].flip(1), targets)
    assert (rows[:, 5] == BOS).all()
    assert torch.equal(rows[:, 6:], targets[:, :-1])
    assert len(targets.unique()) == DIGITS
    assert targets.min() > EOS


def test_pronunciation_task_selects_words_of_one_length(random):
    words = [[LETTER] * n for n in (LETTERS - 1, LETTERS, LETTERS, LETTERS + 1)]
    phones = [[PHONE] * n + [EOS] for n in (1, 3, 2, 9)]
    rows, targets = pronunciation(SequencePairs.of(words, phones))(random, 20)
    assert rows.shape[1] == LETTERS + targets.shape[1]
    assert (rows[:, :LETTERS] == LETTER).all()
    assert {tuple(row) for row in targets.tolist()} == {(PHONE, PHONE, PHONE, EOS), (PHONE, PHONE, EOS, IGNORE_INDEX)}
    assert {tuple(row) for row in rows[:, LETTERS:].tolist()} == {
        (BOS, PHONE, PHONE, PHONE),
        (BOS, PHONE, PHONE, EOS),
    }
    assert PAD not in rows


class Echo(nn.Module):
    """Predicts the source tokens, whatever the target; its parameter exists only for the optimizer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, source, target):
        return nn.functional.one_hot(source, 20).float() + self.weight


def test_concatenated_inputs_are_split_at_the_source_length():
    rows = torch.tensor([[3, 4, 5, BOS, 6, 7]])
    assert ConcatenatedInputs(Echo(), 3)(rows).argmax(-1).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(("targets", "expected"), [([3, 4, 5], 1.0), ([3, 9, 9], 1 / 3), ([3, 9, IGNORE_INDEX], 1 / 2)])
def test_accuracy_ignores_padding_targets(targets, expected):
    def task(random, n):
        return torch.tensor([[3, 4, 5, BOS, 6, 7]] * n), torch.tensor([targets] * n)

    assert accuracies(Echo(), 3, task, task, budgets=[2], seed=0) == [pytest.approx(expected)]


def stub(monkeypatch, digits, short_accuracy=0.99):
    """Replaces training by given accuracies; those of the LSTM are for the larger budgets too."""
    phones = {TRANSFORMER: 0.85, LSTM_ATTENTION: 0.82, LSTM: 0.75}

    def digit_accuracy(name, length, width, budgets, seed):
        return [short_accuracy] if len(budgets) == 1 else digits[name]

    monkeypatch.setattr(recurrence, "digit_accuracy", digit_accuracy)
    monkeypatch.setattr(recurrence, "phone_accuracy", lambda words, name, width, steps, seed: [phones[name]])
    monkeypatch.setattr(recurrence, "load_pronounce", lambda *_: None)
    monkeypatch.setattr(recurrence, "untrained_curves", lambda *_: ())


LSTM_ACCURACIES = [0.3, 0.5, 0.65, 0.75, 0.9]
ACCURACIES = {TRANSFORMER: [0.5, 0.9, 1.0], LSTM_ATTENTION: [0.5, 0.8, 0.97], LSTM: LSTM_ACCURACIES}


def test_verdict_requires_a_gain_from_attention_that_more_training_narrows(monkeypatch):
    stub(monkeypatch, ACCURACIES)
    assert recurrence.run_recurrence().verdict == "holds"
    stub(monkeypatch, ACCURACIES | {LSTM: [1.0] * 5})
    assert recurrence.run_recurrence().verdict == "refuted"
    stub(monkeypatch, ACCURACIES | {LSTM: [0.1] * 5}, short_accuracy=0.1)  # it learns nothing, not even short sequences
    assert recurrence.run_recurrence().verdict == "refuted"
    stub(monkeypatch, ACCURACIES | {LSTM: [0.3, 0.5, 0.65, 0.65, 0.65]})  # more training does not help
    assert recurrence.run_recurrence().verdict == "refuted"


def test_lstm_without_attention_is_trained_with_larger_budgets(monkeypatch):
    stub(monkeypatch, ACCURACIES)
    curves = {
        curve.name: curve for curve in recurrence.run_recurrence(steps=300).curves if curve.quantity == "digit accuracy"
    }
    assert curves[TRANSFORMER].x == (75, 150, 300)
    assert curves[LSTM].x == (75, 150, 300, 600, 1800)
    assert curves[LSTM].y == tuple(LSTM_ACCURACIES)


@pytest.mark.slow
def test_same_seed_gives_the_same_curves_except_time():
    one, same, other = (
        recurrence.run_recurrence(seed=seed, num_seeds=1, width=16, length=8, steps=3).curves for seed in (0, 0, 1)
    )
    assert {curve.name for curve in one} == set(MODEL_NAMES)
    assert {curve.quantity for curve in one} == {"digit accuracy", "phoneme accuracy", "gradient", "milliseconds"}
    timeless = [curve for curve in one if curve.quantity != "milliseconds"]
    assert timeless == [curve for curve in same if curve.quantity != "milliseconds"]
    assert timeless != [curve for curve in other if curve.quantity != "milliseconds"]
