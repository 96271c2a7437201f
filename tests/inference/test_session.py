import json

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead
from clearhead.data import datasets
from clearhead.inference.run import Run
from clearhead.recipes.launch import train
from clearhead.training.objectives import OBJECTIVES, evaluate
from clearhead.training.run_directory import RunDirectory


def test_reverse_takes_ids_and_answers_logits(trained):
    model = clearhead.load(trained / "reverse")
    assert not model.training
    assert model(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 10)


@pytest.mark.parametrize("name", ["reverse", "mnist", "odd-one-out", "sum", "repeat"])
def test_what_is_loaded_is_what_was_tested(trained, name):
    """The best checkpoint, and its averaged weights where there are any: the same numbers on the test set."""
    run = Run(trained / name)
    data = datasets.load_dataset(run.config.data, run.config.seed)
    result = evaluate(run.model, OBJECTIVES[run.config.objective], data.test, data.normalize)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    assert record["best_step"] == run.step
    for key, value in result.items():
        assert value == pytest.approx(record[key], rel=1e-6)


def test_loading_leaves_the_random_state_alone(trained):
    before = torch.get_rng_state()
    clearhead.load(trained / "reverse")
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_and_normalisation_are_the_datas(trained):
    run = Run(trained / "mnist")
    data = datasets.load_dataset(run.config.data, 0)
    assert (run.classes, run.normalize) == (data.classes, data.normalize)
    assert Run(trained / "reverse").normalize is None


def test_pictures_from_files_and_from_tensors_get_the_same_answers(trained, tmp_path):
    run = Run(trained / "mnist")
    images, _ = datasets.load_dataset(run.config.data, 0).test.get_batch(torch.arange(5))
    paths = []
    for i, image in enumerate(images):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(image[0].numpy()).save(paths[-1])
    assert torch.equal(run.read(paths), images)
    assert run.predict(paths) == run.predict(images)
    assert run.predict(255 - images, invert=True) == run.predict(images)


def test_pictures_of_any_size_and_colour_fit(trained, tmp_path):
    Image.fromarray(np.full((50, 31, 3), 200, np.uint8)).save(tmp_path / "large.jpg")
    (answer,) = Run(trained / "mnist").predict([tmp_path / "large.jpg"])
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    assert answer.probability == max(answer.probabilities.values())
    assert answer.label == next(iter(answer.probabilities))


def test_many_pictures_are_answered_in_portions(trained, monkeypatch):
    run = Run(trained / "mnist")
    images, _ = datasets.load_dataset(run.config.data, 0).test.get_batch(torch.arange(7))
    whole = run.predict(images)
    monkeypatch.setattr("clearhead.inference.run.AT_ONCE", 3)
    for one, other in zip(run.predict(images), whole, strict=True):
        assert one.label == other.label
        assert one.probability == pytest.approx(other.probability, abs=1e-5)


def test_mirror_images_are_asked_too_if_the_run_was_tested_so(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    changes = {"data.folder": "pictures", "training.steps": 2, "training.batch_size": 8, "model.width": 8}
    train("folder", "mine", changes=changes, quiet=True)
    run = Run("runs/mine")
    assert run.config.training.tta == "flip"
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(run.logits(x), run.logits(x.flip(-1)), atol=1e-6)
    assert not torch.allclose(run.model(x), run.model(x.flip(-1)), atol=1e-6)


def test_digits_get_one_answer_each_or_one_for_all(trained):
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert len(Run(trained / "reverse").predict_ids(ids)) == 8
    (answer,) = Run(trained / "repeat").predict_ids(ids)
    assert set(answer.probabilities) == {"no repeat", "repeat"}
    (number,) = Run(trained / "sum").predict_ids(ids)
    assert number.probability is None
    float(number.label)


def test_one_of_a_set_is_the_odd_one(trained):
    images, _ = datasets.load_dataset(Run(trained / "mnist").config.data, 0).test.get_batch(torch.arange(4))
    answers = Run(trained / "odd-one-out").predict(images)
    assert sum(answer.label == "odd" for answer in answers) == 1
    same = Run(trained / "odd-one-out").predict(images[:1].expand(4, -1, -1, -1))
    assert [answer.label for answer in same] == ["odd", "-", "-", "-"]
    with pytest.raises(ValueError, match="a set has 3 pictures or more, got 2; name the others too"):
        Run(trained / "odd-one-out").predict(images[:2])
    assert sum(answer.probability for answer in answers) == pytest.approx(1)


def test_the_wrong_kind_of_question_is_refused(trained):
    with pytest.raises(ValueError, match="takes digits, got images"):
        Run(trained / "reverse").predict(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    with pytest.raises(ValueError, match="takes images, got digits"):
        Run(trained / "mnist").predict_ids([1])
    with pytest.raises(ValueError, match="ids must be from 0 to 9, got 11"):
        Run(trained / "reverse").predict_ids([11])
    with pytest.raises(ValueError, match=r"ids must be from 0 to 9, got 9{30}; ask about digits"):
        Run(trained / "reverse").predict_ids([3, 10**30 - 1])


def test_another_number_of_digits_than_in_training_is_told(trained):
    run = Run(trained / "repeat")
    assert run.length_warning([3] * 8) == ""
    assert "has learnt from sequences of 8 digits, got 3" in run.length_warning([3, 1, 4])


def test_a_run_without_a_checkpoint_cannot_be_asked(tmp_path, trained):
    RunDirectory.create(tmp_path / "new", json.loads((trained / "reverse/config.json").read_text()))
    with pytest.raises(LookupError, match="must have a checkpoint, got none yet"):
        clearhead.load(tmp_path / "new")
    with pytest.raises(LookupError, match=r"a run is a folder with a config\.json"):
        clearhead.load(tmp_path / "nowhere")
