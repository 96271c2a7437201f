import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead
from clearhead.inference.run import Run, open_run
from clearhead.models.generate import Sampling
from clearhead.recipes import train
from clearhead.tasks.images import read_pixels
from clearhead.tasks.pronunciation import pronounce
from clearhead.training.evaluation import evaluate
from clearhead.training.run_directory import RunDirectory


def test_load_returns_the_model_in_eval_mode(trained):
    model = clearhead.load(trained / "reverse")
    assert not model.training
    assert model(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 10)


@pytest.mark.parametrize("name", ["reverse", "mnist", "odd-one-out", "sum", "repeat"])
def test_the_loaded_model_has_the_metrics_of_the_test_record(trained, name):
    """The best checkpoint, and its averaged weights where there are any: the same numbers on the test set."""
    run = Run(trained / name)
    data = run.config.data.load(run.config.seed)
    result = evaluate(run.model, run.task.objective, data.test, data.normalize)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    assert record["best_step"] == run.step
    for key, value in result.items():
        assert value == pytest.approx(record[key], rel=1e-6)


def test_loading_preserves_the_random_state(trained):
    before = torch.get_rng_state()
    clearhead.load(trained / "reverse")
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_and_normalization_are_those_of_the_data(trained):
    run = Run(trained / "mnist")
    data = run.config.data.load(0)
    assert (run.classes, run.normalize) == (data.classes, data.normalize)
    assert Run(trained / "reverse").normalize is None


def test_image_files_and_tensors_have_the_same_predictions(trained, tmp_path):
    run = Run(trained / "mnist")
    images, _ = run.config.data.load(0).test.get_batch(torch.arange(5))
    paths = []
    for i, image in enumerate(images):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(image[0].numpy()).save(paths[-1])
    assert torch.equal(read_pixels(run, paths, 28, 1, "pad", invert=False), images)
    assert run.predict(paths) == run.predict(images)
    assert run.predict(255 - images, invert=True) == run.predict(images)


def test_images_of_any_size_and_color_are_accepted(trained, tmp_path):
    Image.fromarray(np.full((50, 31, 3), 200, np.uint8)).save(tmp_path / "large.jpg")
    (prediction,) = Run(trained / "mnist").predict([tmp_path / "large.jpg"])
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert prediction.probability == max(prediction.probabilities.values())
    assert prediction.label == next(iter(prediction.probabilities))


def test_predictions_do_not_depend_on_the_batch_size(trained):
    run = Run(trained / "mnist")
    images, _ = run.config.data.load(0).test.get_batch(torch.arange(7))
    expected = run.predict(images)
    run.config = replace(run.config, training=replace(run.config.training, eval_batch_size=3))
    for one, other in zip(run.predict(images), expected, strict=True):
        assert one.label == other.label
        assert one.probability == pytest.approx(other.probability, abs=1e-5)


def test_predictions_apply_the_tta_of_the_run(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    changes = {"data.folder": "pictures", "training.steps": 2, "training.batch_size": 8, "model.width": 8}
    train("folder", "mine", changes=changes, quiet=True)
    run = Run("runs/mine")
    assert run.config.training.tta == "flip"
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(run.logits(x), run.logits(x.flip(-1)), atol=1e-6)
    assert not torch.allclose(run.model(x), run.model(x.flip(-1)), atol=1e-6)


def test_digits_have_a_prediction_each_or_one_for_the_sequence(trained):
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert len(Run(trained / "reverse").predict(2 * ids)) == 16
    (prediction,) = Run(trained / "repeat").predict(ids)
    assert set(prediction.probabilities) == {"no repeat", "repeat"}
    (number,) = Run(trained / "sum").predict(2 * ids)
    assert number.probability is None
    float(number.label)


def test_exactly_one_image_of_a_set_is_odd(trained):
    images, _ = Run(trained / "mnist").config.data.load(0).test.get_batch(torch.arange(4))
    predictions = Run(trained / "odd-one-out").predict(images)
    assert sum(prediction.label == "odd" for prediction in predictions) == 1
    same = Run(trained / "odd-one-out").predict(images[:1].expand(4, -1, -1, -1))
    assert [prediction.label for prediction in same] == ["odd", "-", "-", "-"]
    with pytest.raises(ValueError, match="at least 3 images, got 2"):
        Run(trained / "odd-one-out").predict(images[:2])
    assert sum(prediction.probability for prediction in predictions) == pytest.approx(1)


def test_other_kinds_of_input_are_refused(trained):
    with pytest.raises(ValueError, match="takes digits, got images"):
        Run(trained / "reverse").predict(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    with pytest.raises(ValueError, match="takes images, got digits"):
        Run(trained / "mnist").predict([1])
    with pytest.raises(ValueError, match="ids must be from 0 to 9, got 11"):
        Run(trained / "reverse").predict([11])
    with pytest.raises(ValueError, match=r"ids must be from 0 to 9, got 9{30}"):
        Run(trained / "reverse").predict([3, 10**30 - 1])


def test_length_warning_names_both_lengths(trained):
    run = Run(trained / "repeat")
    assert run.task.input_warning(run, [3] * 8) == ""
    assert "trained on sequences of 8 digits, got 3" in run.task.input_warning(run, [3, 1, 4])
    with pytest.warns(UserWarning, match="trained on sequences of 8 digits, got 3"):
        run.predict([3, 1, 4])


def test_a_run_without_a_checkpoint_is_refused(tmp_path, trained):
    RunDirectory.create(tmp_path / "new", json.loads((trained / "reverse/config.json").read_text()))
    with pytest.raises(LookupError, match="has no checkpoint yet"):
        clearhead.load(tmp_path / "new")
    with pytest.raises(LookupError, match=r"a run is a folder with a config\.json"):
        clearhead.load(tmp_path / "nowhere")


def test_open_run_has_the_model_and_its_config(trained):
    run = open_run(trained / "reverse")
    assert (run.path, run.config.recipe) == (trained / "reverse", "reverse")
    assert run.model.config == run.config.model
    assert not run.model.training
    assert repr(run) == f"Run({str(run.path)!r}, recipe='reverse', step={run.step})"


def test_open_run_finds_a_name_in_runs(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    assert open_run("reverse").step == open_run("runs/reverse").step


def test_metrics_are_the_records_in_their_order(trained):
    metrics = open_run(trained / "mnist").metrics
    assert metrics == RunDirectory.open(trained / "mnist").records()
    assert {"train", "validation", "test"} <= {record["kind"] for record in metrics}
    assert all(isinstance(record["step"], int) for record in metrics)


@pytest.mark.parametrize("name", ["mnist", "reverse", "sum", "words"])
def test_evaluate_returns_the_metrics_of_the_test_record(trained, monkeypatch, name):
    monkeypatch.chdir(trained.parent)
    run = open_run(trained / name)
    metrics = run.evaluate("test")
    for key, value in metrics.items():
        assert value == pytest.approx(run.metrics[-1][key], rel=1e-5)
    assert run.evaluate("validation").keys() == metrics.keys()


def test_evaluate_returns_error_rates_for_words(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    metrics = open_run("pronounce").evaluate("validation")
    assert metrics["words"] == 20
    assert metrics["word_error_rate"] == metrics["wrong"] / 20


def test_predict_takes_one_path_or_several(trained, tmp_path):
    Image.fromarray(np.full((28, 28), 100, np.uint8)).save(tmp_path / "a.png")
    run = open_run(trained / "mnist")
    (one,) = run.predict(str(tmp_path / "a.png"))
    assert [other.label for other in run.predict([tmp_path / "a.png"] * 2)] == [one.label] * 2


def test_predict_pronounces_words(trained):
    run = open_run(trained / "pronounce")
    (prediction,) = run.predict("cab")
    best, *others = pronounce(run, ["cab"])[0]
    assert (prediction.label, prediction.probability) == (str(best), pytest.approx(math.exp(best.score)))
    assert list(prediction.probabilities) == [str(best), *map(str, others)]
    assert run.predict(["bad", "cab"])[1].label == prediction.label


def test_predict_refuses_text_and_empty_inputs(trained):
    with pytest.raises(ValueError, match=r"words takes text, got 'un'; generate text with: clearhead sample"):
        open_run(trained / "words").predict("un")
    with pytest.raises(ValueError, match="at least one input"):
        open_run(trained / "mnist").predict([])


def test_sample_continues_a_prompt(trained):
    run = open_run(trained / "text")
    (text,) = run.sample("To be", max_new_tokens=20, strategy=Sampling(seed=1))
    assert text.startswith("To be")
    assert len(text) == 5 + 20
    assert run.sample("To be", max_new_tokens=20, strategy=Sampling(seed=1)) == [text]
    assert len(open_run(trained / "words").sample("un", n=3)) == 3
    with pytest.raises(ValueError, match="needs a language model"):
        open_run(trained / "mnist").sample("To")


def test_look_traces_an_image(trained, tmp_path):
    run = open_run(trained / "mnist")
    images, _ = run.config.data.load(0).test.get_batch(torch.arange(1))
    Image.fromarray(images[0, 0].numpy()).save(tmp_path / "a.png")
    from_file, from_tensor = run.look(tmp_path / "a.png"), run.look(images[0])
    assert torch.equal(from_file.output, from_tensor.output)
    assert torch.equal(from_file.output, run.model(run.normalize(images)))
    assert all(torch.equal(record.weights(), from_tensor[name].weights()) for name, record in from_file.items())


@pytest.mark.parametrize(
    ("name", "example"), [("reverse", [3, 1, 4]), ("words", "un"), ("text", "to be"), ("repeat", [1])]
)
def test_look_traces_digits_and_text(trained, name, example):
    for record in open_run(trained / name).look(example).values():
        assert torch.allclose(record.weights().sum(-1), torch.ones(()))


def test_look_traces_a_word_with_its_pronunciation(trained):
    run = open_run(trained / "pronounce")
    trace = run.look("cab")
    assert {record.num_keys for name, record in trace.items() if "cross" in name} == {3}


def test_look_traces_a_set_of_images(trained, tmp_path):
    for i in range(3):
        Image.fromarray(np.full((28, 28), 80 * i, np.uint8)).save(tmp_path / f"{i}.png")
    trace = open_run(trained / "odd-one-out").look([tmp_path / f"{i}.png" for i in range(3)])
    assert all(record.num_keys == 3 for record in trace.values())


@pytest.mark.parametrize("part", ["tset", "train", "val", ""])
def test_an_unknown_part_is_refused(trained, part):
    with pytest.raises(ValueError, match=r"part must be one of validation, test, got '.*'"):
        open_run(trained / "reverse").evaluate(part)


def test_several_sequences_of_digits_at_once_are_refused(trained):
    run = open_run(trained / "reverse")
    for inputs in ([[3, 1, 4]], torch.tensor([[3, 1, 4]])):
        with pytest.raises(ValueError, match=r"\[3, 1, 4\]"):
            run.predict(inputs)
