"""A run has one test accuracy: training's own test, `evaluate`, `confusion` and `predict` agree to the last digit."""

from dataclasses import replace

import pytest
import torch

from clearhead.inference.evaluate import confusion, loss_and_accuracy
from clearhead.inference.run import Run
from clearhead.recipes import train

SMALL = {
    "model.patch_size": 7,
    "model.width": 32,
    "model.patch_embed": "patch",
    "data.validation": 100,
    "data.limit": 2_000,
    "training.steps": 60,
    "training.threads": 1,
}


@pytest.mark.parametrize(
    ("precision", "tta", "eval_batch_size"), [("float32", "none", 512), ("bf16", "flip", 512), ("float32", "flip", 77)]
)
def test_training_evaluate_confusion_and_predict_report_the_same_accuracy(
    tmp_path, monkeypatch, precision, tta, eval_batch_size
):
    monkeypatch.chdir(tmp_path)
    changes = {"training.precision": precision, "training.tta": tta, "training.eval_batch_size": eval_batch_size}
    tested = train("mnist", "run", changes=SMALL | changes, quiet=True)
    session = Run("runs/run")
    data = session.config.data.load(session.config.seed)
    images, labels = data.test.get_batch(torch.arange(len(data.test)))
    answers = [answer.label for answer in session.predict(images)]
    n_right = sum(answer == session.classes[label] for answer, label in zip(answers, labels.tolist(), strict=True))
    assert 0.3 < tested.test["accuracy"] < 0.99  # there is something to disagree about
    assert n_right / len(labels) == tested.test["accuracy"]
    found = loss_and_accuracy(session, "test")
    assert (found["accuracy"], found["loss"]) == (tested.test["accuracy"], tested.test["loss"])
    matrix = confusion(session)
    assert int(matrix.trace()) / int(matrix.sum()) == tested.test["accuracy"]


def test_the_batch_size_of_evaluations_changes_at_most_the_last_digits(trained):
    for name, others in {"mnist": (1, 7, 10**6), "sum": (33,)}.items():
        session = Run(trained / name)
        expected = loss_and_accuracy(session, "validation")
        for size in others:
            session.config = replace(session.config, training=replace(session.config.training, eval_batch_size=size))
            found = loss_and_accuracy(session, "validation")
            assert found["accuracy"] == expected["accuracy"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
