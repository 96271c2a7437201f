"""A run has one test accuracy: training's own test, `evaluate`, `confusion` and `predict` agree to the last digit."""

import pytest
import torch

from clearhead.inference.evaluate import loss_and_accuracy
from clearhead.inference.predictions import confusion
from clearhead.inference.run import Run
from clearhead.recipes.launch import train

SMALL = {
    "model.patch_size": 7,
    "model.width": 32,
    "model.patch_embed": "patch",
    "data.validation": 100,
    "data.limit": 2_000,
    "training.steps": 60,
    "training.threads": 1,
}


@pytest.mark.parametrize(("precision", "tta"), [("float32", "none"), ("bf16", "flip")])
def test_all_four_agree_whatever_the_precision_of_training(tmp_path, monkeypatch, precision, tta):
    monkeypatch.chdir(tmp_path)
    tested = train("mnist", "run", changes=SMALL | {"training.precision": precision, "training.tta": tta}, quiet=True)
    session = Run("runs/run")
    data = session.config.data.load(session.config.seed)
    images, labels = data.test.get_batch(torch.arange(len(data.test)))
    answers = [answer.label for answer in session.predict(images)]
    n_right = sum(answer == session.classes[label] for answer, label in zip(answers, labels.tolist(), strict=True))
    assert 0.3 < tested.test["accuracy"] < 0.99  # there is something to disagree about
    assert n_right / len(labels) == tested.test["accuracy"]
    assert loss_and_accuracy(session, "test")["accuracy"] == tested.test["accuracy"]
    matrix = confusion(session)
    assert int(matrix.trace()) / int(matrix.sum()) == tested.test["accuracy"]
