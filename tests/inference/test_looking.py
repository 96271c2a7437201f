from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.data import datasets
from clearhead.data.batches import evaluation_batches
from clearhead.data.dataset import Subset
from clearhead.data.vocab import BYTES
from clearhead.inference import explain
from clearhead.inference.explain import digits, explain_input, file, sample, text
from clearhead.inference.g2p import Pronunciation
from clearhead.inference.run import Run
from clearhead.training.objectives import OBJECTIVES

ALWAYS = ["wall.png", "head.png"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("mnist", [*ALWAYS, "heads.png", "patches.png", "aggregates.png"]),
        ("reverse", [*ALWAYS, "tokens.png", "heads.png"]),
        ("odd-one-out", [*ALWAYS, "tokens.png", "heads.png"]),
        ("sum", [*ALWAYS, "tokens.png", "heads.png"]),
    ],
)
def test_pictures_of_every_kind_of_run(trained, tmp_path, run, expected):
    run = Run(trained / run)
    pictures = explain_input(run, sample(run, 1), tmp_path)
    assert [path.name for path, _ in pictures] == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path, _ in pictures)
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_sample_is_the_test_sets(trained):
    run = Run(trained / "mnist")
    pixels, _ = datasets.load_dataset(run.config.data, 0).test.get_batch(torch.tensor([3]))
    example = sample(run, 3)
    assert torch.equal(example.image, pixels[0])
    assert torch.equal(example.inputs, run.normalize(pixels))
    assert example.prediction.startswith(run.predict(pixels)[0].label)
    with pytest.raises(LookupError, match="a number from 0 to 9999, got 10000"):
        sample(run, 10_000)


def test_files_and_digits(trained, tmp_path):
    run = Run(trained / "mnist")
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(tmp_path / "a.png")
    plain, inverted = (file(run, tmp_path / "a.png", invert=invert) for invert in (False, True))
    assert torch.equal(plain.image, 255 - inverted.image)
    reverse = Run(trained / "reverse")
    example = digits(reverse, [3, 1, 4])
    assert (example.tokens, example.inputs.tolist()) == (("3", "1", "4"), [[3, 1, 4]])
    ways = {"reverse": "--ids 3 1 4", "pronounce": "--text WORD", "text": "--text TEXT", "odd-one-out": "--sample 0"}
    for name, way in ways.items():
        with pytest.raises(ValueError, match=f"takes no single picture, got .*a.png; try {way}"):
            file(Run(trained / name), tmp_path / "a.png")


def test_of_a_long_text_the_end_is_drawn_as_far_as_the_model_reads(trained):
    run = Run(trained / "text")
    run.config = replace(run.config, model=replace(run.config.model, context_length=5))
    assert text(run, "To be, or not").tokens == ("r", "space", "n", "o", "t")
    with pytest.raises(ValueError, match="--text is empty"):
        text(run, "")


@pytest.mark.parametrize(("ended", "answer"), [(True, "K AE"), (False, "K AE ...")])
def test_a_word_is_answered_as_predict_answers_it(trained, monkeypatch, ended, answer):
    monkeypatch.setattr(explain, "pronounce", lambda run, words: [[Pronunciation(("K", "AE"), -1.0, ended)]])
    assert text(Run(trained / "pronounce"), "cab").prediction == answer


def test_half_of_a_letter_is_no_other_letter(trained):
    run = Run(trained / "text")
    run.vocab, run.model = BYTES, lambda ids: torch.eye(256)[ids].roll(1, -1)
    run.config = replace(run.config, data=replace(run.config.data, level="byte"))
    example = text(run, "a ü")
    assert example.tokens == ("a", "space", "\\xc3", "\\xbc")
    assert example.prediction == r"'\xbd' after '\xbc'"


def test_an_example_of_a_file_that_has_changed_is_not_taken_for_one_of_the_test_set(trained, monkeypatch, tmp_path):
    """Its letters would have other ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.words").write_text("".join(f"{a}{b}{a}\n" for a in "bcdefghé" for b in "abcdefgh"))
    with pytest.raises(ValueError, match=r"got other bytes in my\.words; put the old ones back"):
        sample(Run(trained / "words"), 0)


def test_a_run_without_a_test_set_has_no_sample(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(LookupError, match="has no test examples, got --sample 0; try --text instead"):
        sample(Run(trained / "text"), 0)


@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "sum", "repeat"])
def test_a_test_example_has_its_truth_and_is_judged_as_the_accuracy_counts_it(trained, name):
    run = Run(trained / name)
    data = datasets.load_dataset(run.config.data, run.config.seed)
    for number in range(8):
        batch = next(evaluation_batches(Subset(data.test, torch.tensor([number])), data.normalize, 1))
        example = sample(run, number)
        right = OBJECTIVES[run.config.objective].correct(run.logits(batch.inputs), batch)
        assert example.correct == bool(right.all())
        names = {"odd-one-out": [f"image {i}" for i in range(10)], "sum": list(map(str, range(200)))}.get(
            name, run.classes
        )
        assert example.truth == " ".join(names[int(target)] for target in batch.targets.flatten())


def test_a_sentence_and_a_heading_say_prediction_truth_and_agreement():
    wrong = explain.Example(torch.zeros(1), "horse (31%)", truth="cat", correct=False)
    assert wrong.sentence == "Predicted: horse (31%). Actual: cat. The prediction is wrong."
    assert wrong.heading == "predicted: horse (31%) · actual: cat · wrong"
    right = replace(wrong, truth="horse", correct=True)
    assert right.sentence == "Predicted: horse (31%). Actual: horse. The prediction is correct."
    digits = "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3"
    long = explain.Example(torch.zeros(1), digits, truth=digits, correct=True)
    assert long.heading == f"predicted: {digits}\nactual: {digits} · correct"  # not broken within a sequence
    own = explain.Example(torch.zeros(1), "horse (31%)")
    assert (own.sentence, own.heading) == ("Predicted: horse (31%).", "predicted: horse (31%)")


@pytest.mark.parametrize("run", ["mnist", "reverse", "pronounce", "words"])
def test_every_figure_of_a_test_example_says_its_verdict(trained, run, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / run)
    example = sample(run, 1)
    assert ("correct" in example.heading) != ("wrong" in example.heading)
    for _, _, figure in explain.pictures_of(run, example):
        assert example.heading.replace("\n", " ") in figure._suptitle.get_text().replace("\n", " ")


def test_a_test_word_is_correct_if_one_of_its_pronunciations_is_written(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    for phones, correct in ((("K", "AE", "D"), True), (("K", "AE", "B"), True), (("K",), False)):
        monkeypatch.setattr(explain, "pronounce", lambda s, w, phones=phones: [[Pronunciation(phones, -1.0)]])
        example = sample(run, 0)
        assert (example.word, example.truth, example.correct) == ("cab", "K AE B or K AE D", correct)


def test_the_end_of_a_test_word_is_what_comes_after_its_letters(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "words")
    example = sample(run, 2)
    assert example.truth == "'<eos>'"
    assert example.correct == (run.vocab[example.predicted] == "<eos>")


def test_maps_are_of_the_predicted_class_even_where_other_views_outvoted_the_image(trained, monkeypatch):
    run = Run(trained / "mnist")
    example = replace(sample(run, 0), predicted=7)
    asked = []
    monkeypatch.setattr(explain, "occlusion", lambda m, x, grid, c, **o: asked.append(c) or torch.zeros(1, *grid))
    list(explain.pictures_of(run, example))
    assert asked == [7]
