import pytest
import torch

from clearhead.data import datasets
from clearhead.inference.evaluate import error_rates, loss_and_accuracy, words_to_score
from clearhead.inference.predictions import confusion, outputs_on, read_outputs, report
from clearhead.inference.run import Run
from clearhead.models.generate import Beam
from clearhead.training.run_directory import RunDirectory


@pytest.mark.parametrize(("name", "n"), [("mnist", 10_000), ("reverse", 160_000), ("repeat", 10_000)])
def test_the_diagonal_is_the_accuracy_of_the_test(trained, name, n):
    run = Run(trained / name)
    matrix = confusion(run)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    assert matrix.shape == (len(run.classes),) * 2
    assert matrix.sum() == n
    assert matrix.trace().item() / n == record["accuracy"]


def test_numbers_cannot_be_confused(trained):
    with pytest.raises(
        ValueError, match=r"a confusion matrix needs classes, got .*sum, .*; measure it with: clearhead evaluate"
    ):
        confusion(Run(trained / "sum"))


@pytest.mark.parametrize("name", ["mnist", "reverse", "repeat"])
def test_the_confusion_matrix_and_evaluate_agree_to_the_last_digit(trained, name):
    run = Run(trained / name)
    matrix = confusion(run)
    assert matrix.trace().item() / matrix.sum().item() == loss_and_accuracy(run, "test")["accuracy"]


@pytest.mark.parametrize("part", ["test", "validation"])
@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "sum", "repeat", "words"])
def test_predictions_and_evaluate_agree_to_the_last_digit(trained, monkeypatch, name, part):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / name)
    found, metrics = report(run, part, n=3), loss_and_accuracy(run, part)
    assert found.metrics == metrics
    key = "exact_match" if name == "reverse" else "accuracy"
    assert 1 - found.wrong / found.total == pytest.approx(metrics[key], abs=1e-12)


def test_two_logits_whose_probabilities_are_rounded_to_one_number_are_told_apart():
    logits = torch.tensor([[0.0, 1e-8, -50.0]])
    assert logits.softmax(-1)[0, 0] == logits.softmax(-1)[0, 1]
    assert read_outputs("classification", logits, torch.tensor([0]))[0].tolist() == [1]


@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "repeat"])
def test_mistakes_are_wrong_the_most_confident_first_and_none_that_is_surer_is_left_out(trained, name):
    run = Run(trained / name)
    outputs, found = outputs_on(run), report(run, n=5)
    assert [row.index for row in found.first] == list(range(5))
    assert all(not row.correct and row.predicted != row.actual for row in found.mistakes)
    sure = [row.probability for row in found.mistakes]
    assert sure == sorted(sure, reverse=True)
    others = set(range(found.total)) - {row.index for row in found.mistakes}
    wrong = [i for i in others if not outputs.correct[i].all()]
    assert max(float(outputs.probability[i].prod()) for i in wrong) <= sure[-1]


def test_of_numbers_the_largest_error_comes_first(trained):
    rows = report(Run(trained / "sum"), n=4).mistakes
    errors = [abs(float(row.predicted) - float(row.actual)) for row in rows]
    assert errors == pytest.approx(sorted(errors, reverse=True), abs=0.1)
    assert all(row.probability is None for row in rows)


def test_the_context_of_a_mistake_is_what_the_model_had_read(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "words")
    data = datasets.load_dataset(run.config.data, run.config.seed)
    found = report(run, n=5)
    assert found.unit == "tokens"
    for row in found.mistakes:
        inputs, targets = data.test.get_batch(torch.tensor([row.index]))
        word = "".join(run.vocab[i] for i in inputs[0].tolist())
        assert word.startswith(row.input)
        n_read = 1 + len(row.input.removeprefix("<bos>"))
        assert run.vocab[int(targets[0, n_read - 1])] == row.actual != row.predicted
        logits = run.logits(inputs)[0, n_read - 1]
        assert run.vocab[int(logits.argmax())] == row.predicted


def test_of_words_the_error_rates_are_those_of_evaluate(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    found = report(run, "validation", n=3, how=Beam(2))
    rates = error_rates(run, words_to_score(run, "validation"), Beam(2))
    assert (found.wrong, found.total) == (rates.wrong, rates.words)
    assert found.metrics["word_error_rate"] == rates.word_error_rate
    assert all(row.correct == (row.predicted in row.actual.split(" or ")) for row in found.first)


def test_no_predictions_are_refused(trained):
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        report(Run(trained / "mnist"), n=0)
