import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.data.batches import evaluation_batches
from clearhead.data.dataset import Subset
from clearhead.data.vocab import BYTES
from clearhead.inference import explain
from clearhead.inference.explain import (
    dataset_example,
    entropies,
    explain_input,
    figures_of,
    in_layer_order,
    most_changed_head,
    uniform_entropy,
)
from clearhead.inference.run import Run
from clearhead.recipes import train
from clearhead.tasks import pronunciation
from clearhead.tasks.pronunciation import Pronunciation
from clearhead.tasks.report import Example

ALWAYS = ["wall.png", "head.png"]


def run_example(run, inputs):
    return run.task.example(run, inputs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist", [*ALWAYS, "heads.png", "patches.png", "aggregates.png"]),
        ("reverse", [*ALWAYS, "tokens.png", "heads.png"]),
        ("odd-one-out", [*ALWAYS, "tokens.png", "heads.png"]),
        ("sum", [*ALWAYS, "tokens.png", "heads.png"]),
    ],
)
def test_figures_of_each_task(trained, tmp_path, name, expected):
    run = Run(trained / name)
    pictures = explain_input(run, dataset_example(run, 1), tmp_path)
    assert [path.name for path, _ in pictures] == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path, _ in pictures)
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize(("pooling", "num_maps"), [("cls", 5), ("mean", 5), ("attention", 3)])
def test_maps_of_a_model_with_register_tokens_cover_the_patches(tmp_path, monkeypatch, pooling, num_maps):
    """The occlusion map, and one for each aggregate; rollout and relevance do not reach through removed tokens."""
    monkeypatch.chdir(tmp_path)
    modern = {"num_register_tokens": 2, "norm_layer": "rmsnorm", "activation": "swiglu", "num_kv_heads": 1}
    sizes = {"patch_size": 14, "width": 16, "depth": 1, "patch_embed": "patch", "pooling": pooling}
    changes = {f"model.{name}": value for name, value in (modern | sizes).items()}
    fast = {"data.validation": 50, "data.limit": 200, "training.steps": 2, "training.threads": 1}
    train("mnist", "registers", changes=changes | fast, quiet=True)
    shown = []
    monkeypatch.setattr(
        explain, "draw_attributions", lambda image, cells, occluded, *_, **__: shown.append((cells, occluded))
    )
    run = Run(tmp_path / "runs/registers")
    assert [name for name, _, _ in figures_of(run, dataset_example(run, 1))][-2:] == ["patches.png", "aggregates.png"]
    ((cells, occluded),) = shown
    assert len(cells) + 1 == num_maps
    assert all(one.shape == occluded.shape == (2, 2) for one in cells.values())


def test_dataset_example_is_from_the_test_set(trained):
    run = Run(trained / "mnist")
    pixels, _ = run.config.data.load(0).test.get_batch(torch.tensor([3]))
    example = dataset_example(run, 3)
    assert torch.equal(example.image, pixels[0])
    assert torch.equal(example.inputs, run.normalize(pixels))
    assert example.prediction.startswith(run.predict(pixels)[0].label)
    with pytest.raises(LookupError, match="from 0 to 9999, got 10000"):
        dataset_example(run, 10_000)


def test_examples_from_image_files_and_digits(trained, tmp_path):
    run = Run(trained / "mnist")
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(tmp_path / "a.png")
    plain, inverted = (run.task.example(run, tmp_path / "a.png", invert=invert) for invert in (False, True))
    assert torch.equal(plain.image, 255 - inverted.image)
    reverse = Run(trained / "reverse")
    example = reverse.task.example(reverse, [3, 1, 4])
    assert (example.tokens, example.inputs.tolist()) == (("3", "1", "4"), [[3, 1, 4]])
    for name, kind in {"reverse": "digits", "text": "text"}.items():
        with pytest.raises(ValueError, match=f"takes {kind}, got .*a.png"):
            run_example(Run(trained / name), tmp_path / "a.png")
    with pytest.raises(ValueError, match="a set needs at least 3 images, got 1"):
        run_example(Run(trained / "odd-one-out"), tmp_path / "a.png")


def test_long_text_is_cut_to_the_context(trained):
    run = Run(trained / "text")
    run.config = replace(run.config, model=replace(run.config.model, context_length=5))
    assert run_example(run, "To be, or not").tokens == ("r", "space", "n", "o", "t")
    with pytest.raises(ValueError, match="--text is empty"):
        run_example(run, "")


@pytest.mark.parametrize(("ended", "expected"), [(True, "K AE"), (False, "K AE ...")])
def test_an_unfinished_pronunciation_is_marked(trained, monkeypatch, ended, expected):
    monkeypatch.setattr(pronunciation, "pronounce", lambda run, words: [[Pronunciation(("K", "AE"), -1.0, ended)]])
    assert run_example(Run(trained / "pronounce"), "cab").prediction == expected


def test_bytes_of_a_longer_character_are_escaped(trained):
    run = Run(trained / "text")
    run.vocab, run.model = BYTES, lambda ids: torch.eye(256)[ids].roll(1, -1)
    run.config = replace(run.config, data=replace(run.config.data, level="byte"))
    example = run_example(run, "a ü")
    assert example.tokens == ("a", "space", "\\xc3", "\\xbc")
    assert example.prediction == r"'\xbd' after '\xbc'"


def test_changed_data_files_have_no_test_example(trained, monkeypatch, tmp_path):
    """Its letters would have other ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.words").write_text("".join(f"{a}{b}{a}\n" for a in "bcdefghé" for b in "abcdefgh"))
    with pytest.raises(ValueError, match=r"changed since training: my\.words"):
        dataset_example(Run(trained / "words"), 0)


def test_a_run_without_a_test_set_has_no_test_example(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(LookupError, match="has no test examples; try --text instead of --sample 0"):
        dataset_example(Run(trained / "text"), 0)


@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "sum", "repeat"])
def test_a_test_example_has_its_target_and_agrees_with_the_accuracy(trained, name):
    run = Run(trained / name)
    data = run.config.data.load(run.config.seed)
    for number in range(8):
        batch = next(evaluation_batches(Subset(data.test, torch.tensor([number])), data.normalize, 1))
        example = dataset_example(run, number)
        correct = run.task.objective.correct(run.logits(batch.inputs), batch)
        assert example.correct == bool(correct.all())
        names = {"odd-one-out": [f"image {i}" for i in range(10)], "sum": list(map(str, range(200)))}.get(
            name, run.classes
        )
        assert example.target == " ".join(names[int(target)] for target in batch.targets.flatten())


def test_sentence_and_heading_name_prediction_target_and_agreement():
    wrong = Example(torch.zeros(1), "horse (31%)", target="cat", correct=False)
    assert wrong.sentence == "Predicted: horse (31%). Actual: cat. The prediction is wrong."
    assert wrong.heading == "predicted: horse (31%) · actual: cat · wrong"
    right = replace(wrong, target="horse", correct=True)
    assert right.sentence == "Predicted: horse (31%). Actual: horse. The prediction is correct."
    digits = "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3"
    long = Example(torch.zeros(1), digits, target=digits, correct=True)
    assert long.heading == f"predicted: {digits}\nactual: {digits} · correct"  # not broken within a sequence
    own = Example(torch.zeros(1), "horse (31%)")
    assert (own.sentence, own.heading) == ("Predicted: horse (31%).", "predicted: horse (31%)")


@pytest.mark.parametrize("name", ["mnist", "reverse", "pronounce", "words"])
def test_every_figure_has_the_heading_of_its_example(trained, name, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / name)
    example = dataset_example(run, 1)
    assert ("correct" in example.heading) != ("wrong" in example.heading)
    for _, _, figure in figures_of(run, example):
        assert example.heading.replace("\n", " ") in figure._suptitle.get_text().replace("\n", " ")


def test_any_pronunciation_of_a_test_word_is_correct(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    for phones, correct in ((("K", "AE", "D"), True), (("K", "AE", "B"), True), (("K",), False)):
        monkeypatch.setattr(pronunciation, "pronounce", lambda s, w, phones=phones: [[Pronunciation(phones, -1.0)]])
        example = dataset_example(run, 0)
        assert (example.word, example.target, example.correct) == ("cab", "K AE B or K AE D", correct)


def test_the_target_after_a_test_word_is_its_end(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "words")
    example = dataset_example(run, 2)
    assert example.target == "'<eos>'"
    assert example.correct == (run.vocab[example.predicted] == "<eos>")


def test_occlusion_is_of_the_predicted_class_with_tta(trained, monkeypatch):
    run = Run(trained / "mnist")
    example = replace(dataset_example(run, 0), predicted=7)
    asked = []
    monkeypatch.setattr(explain, "occlusion", lambda m, x, grid, c, **o: asked.append(c) or torch.zeros(1, *grid))
    list(figures_of(run, example))
    assert asked == [7]


def test_entropies_of_each_layer_and_head():
    uniform, sharp = torch.full((3, 2, 4, 5, 8), 1 / 8), torch.eye(8)[:5].expand(3, 2, 1, 5, 8)
    table = entropies([uniform, sharp])
    assert table.shape == (3, 2, 4)
    assert torch.allclose(table[:, 0], torch.full((3, 4), math.log(8)))
    assert table[:, 1, 0].tolist() == [0, 0, 0]
    assert table[:, 1, 1:].isnan().all()


def test_layer_order_compares_numbers_as_numbers():
    ordered = ["blocks.0.attn", "blocks.2.attn", "blocks.10.attn", "pool"]
    assert in_layer_order({ordered[i] for i in (3, 1, 0, 2)}) == ordered
    assert in_layer_order(reversed(ordered)) == ordered


def test_uniform_entropy_is_over_the_visible_keys():
    """A query of a causal model sees no later key: entropies reach the mean of log 1, log 2 ... log K, not log K."""
    weights = torch.ones(2, 3, 4, 5, 5).tril()
    alike = weights / weights.sum(-1, keepdim=True)
    assert uniform_entropy(alike) == pytest.approx(entropies([alike]).max().item())
    sharp = alike.clone()
    sharp[0] = torch.eye(5)  # what is seen at one step may be seen
    assert uniform_entropy(sharp) == pytest.approx(uniform_entropy(alike))
    assert uniform_entropy(torch.full((2, 3, 4, 5, 8), 1 / 8)) == pytest.approx(math.log(8))


@pytest.mark.parametrize("index", [(0, 1), (1, 0)])
def test_most_changed_head_finds_the_layer_and_head(index):
    table = torch.ones(3, 2, 2)
    table[1, index[0], index[1]] = 3
    table[2, 1, 1] = math.nan
    assert most_changed_head(table) == index
