import json
import re
import subprocess
import sys

import pytest
import torch

from clearhead.data import Augmentation
from clearhead.messages import duration
from clearhead.models.config import build_model
from clearhead.recipes import (
    RECIPES,
    check_run,
    config_of,
    find,
    measurements,
    results_table,
    with_changes,
)
from clearhead.training.config import RunConfig
from clearhead.training.context import build_context, isolated_torch_state
from clearhead.training.distributed import Ranks
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState

WITHOUT_USER_FILES = [name for name in RECIPES if name not in ("folder", "text")]
"""recipes that need no user file"""


def test_the_registry_contains_all_documented_recipes():
    assert set(RECIPES) == {
        "reverse", "reverse-uva", "digits", "odd-one-out", "mnist", "mnist-plain", "cifar10-fast", "cifar10-vit",
        "cifar10-bert", "fashion-mnist", "folder", "pronounce", "pronounce-fast", "words", "text",
    }  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_docstring_has_command_time_and_accuracy(name):
    header, measured = sys.modules[find(name).make.__module__].__doc__, find(name).measured
    assert f"clearhead train {name}" in header
    assert re.search("^Time: ", header, re.MULTILINE)
    assert re.search("^Test accuracy: ", header, re.MULTILINE)
    if measured:
        assert measured.command in header
        assert f"\nTime: {duration(measured.seconds)} on {measured.machine}" in header
        assert f"\nTest accuracy: {measured.accuracy:.2%}" in header


def test_measured_results_belong_to_recipes_and_fill_the_results_table():
    assert measurements().keys() <= RECIPES.keys()
    table = results_table()
    for name, measured in measurements().items():
        assert 0 < measured.accuracy <= 1
        assert f"| `{measured.command}` | {duration(measured.seconds)} | {measured.accuracy:.2%}" in table
        assert (measured.epochs is None) == (RECIPES[name].make().training.epochs == 0)
    assert "| 32.88% after 1 of 43 epochs |" in table
    assert "mean of 6 views" in table


@pytest.mark.parametrize("name", WITHOUT_USER_FILES)
def test_a_recipe_config_has_its_name_and_round_trips_through_json(name):
    config = config_of(name)
    assert config.recipe == name
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "name",
    ["reverse", "reverse-uva", "digits", "odd-one-out", "mnist", "mnist-plain", "pronounce", "pronounce-fast", "words"],
)
def test_the_first_training_step_of_a_recipe_updates_the_weights(name):
    """Uses the data sets that are embedded or generated."""
    config = config_of(name, {"training.batch_size": 4})
    with isolated_torch_state(threads=1):
        ctx = build_context(config, Ranks(), shard=False, report=pytest.fail)
        before = [weight.clone() for weight in ctx.model.parameters()]
        train_step(ctx, TrainState(), StopRequest())
    same = [torch.equal(weight, old) for weight, old in zip(ctx.model.parameters(), before, strict=True)]
    assert sum(same) < len(same) / 10  # the gradient of key biases is zero up to rounding


@pytest.mark.parametrize("name", ["mnist", "mnist-plain", "fashion-mnist", "cifar10-fast", "cifar10-bert"])
def test_the_model_accepts_the_images_of_its_dataset(name):
    config = config_of(name)
    channels, size = config.data.in_channels, config.data.image_size
    assert build_model(config.model)(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_importing_recipes_does_not_import_torch():
    code = "import sys; from clearhead.recipes import RECIPES; [recipe.make() for recipe in RECIPES.values()]"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_any_field_can_be_overridden_by_its_path():
    config = config_of("mnist", {"seed": 3, "optimizer.lr": 0.5, "data.augmentation.flip": True, "data.limit": 7})
    assert (config.seed, config.optimizer.lr, config.data.limit) == (3, 0.5, 7)
    assert config.data.augmentation == Augmentation(crop=config_of("mnist").data.augmentation.crop, flip=True)


def test_dependent_fields_are_overridden_together():
    model = with_changes(config_of("mnist"), {"model.width": 30, "model.num_heads": 5}).model
    assert (model.width, model.num_heads) == (30, 5)


@pytest.mark.parametrize(("field", "other"), [("epochs", "steps"), ("steps", "epochs")])
@pytest.mark.parametrize("name", ["mnist", "reverse"])
def test_overriding_steps_or_epochs_resets_the_other(name, field, other):
    training = config_of(name, {f"training.{field}": 3}).training
    assert (getattr(training, field), getattr(training, other)) == (3, 0)


def test_steps_and_epochs_together_raise():
    with pytest.raises(ValueError, match="got steps=3, epochs=4"):
        config_of("mnist", {"training.steps": 3, "training.epochs": 4})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("revers", {}, r"unknown recipe 'revers'; did you mean reverse\? Choose from reverse, "),
        ("reverse", {"trainin.steps": 1}, "unknown field of RunConfig 'trainin'; did you mean training"),
        ("reverse", {"training.stps": 1}, "unknown field of TrainingConfig 'stps'; did you mean steps"),
    ],
)
def test_errors_for_unknown_names_suggest_the_closest_name(name, changes, message):
    with pytest.raises(LookupError, match=message):
        config_of(name, changes)


def test_recipe_names_may_use_underscores():
    assert config_of("mnist_plain") == config_of("mnist-plain")


@pytest.mark.parametrize(
    ("path", "message"), [("training", "has fields, which are set as training.NAME"), ("seed.x", "has no fields")]
)
def test_paths_must_end_at_a_field_without_subfields(path, message):
    with pytest.raises(LookupError, match=message):
        config_of("reverse", {path: 3})


MNIST = config_of("mnist")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("digits", {"model.pooling": "none"}, "needs pooling=mean, cls or attention, got none"),
        ("reverse", {"model.pooling": "mean"}, "reverse needs pooling=none, got mean"),
        ("digits", {"model.out_features": 1}, "model.out_features is determined by the data, which gives 10, got 1"),
        ("reverse", {"model.in_features": 9}, "model.in_features is determined by the data, which gives 10, got 9"),
        ("mnist", {"model.image_size": 32}, "model.image_size is determined by the data, which gives 28, got 32"),
        ("mnist", {"model.in_channels": 3}, "model.in_channels is determined by the data, which gives 1, got 3"),
        ("mnist", {"model.num_classes": 5}, "model.num_classes is determined by the data, which gives 10, got 5"),
        ("folder", {}, "data.folder is empty; run: clearhead train folder --data.folder PATH"),
        ("text", {}, "data.file is empty; run: clearhead train text --data.file PATH"),
    ],
)
def test_a_model_that_does_not_match_the_data_raises(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(name, changes)


def test_a_model_config_of_the_wrong_type_raises():
    with pytest.raises(ValueError, match="mnist needs a VisionConfig, got a PredictorConfig"):
        check_run(with_changes(MNIST, {"model": config_of("reverse").model}))
    with pytest.raises(ValueError, match="pronounce needs a Seq2SeqConfig, got a LanguageConfig"):
        check_run(with_changes(config_of("pronounce"), {"model": config_of("words").model}))
    with pytest.raises(ValueError, match="reverse needs a PredictorConfig, got a VisionConfig"):
        check_run(with_changes(config_of("reverse"), {"model": MNIST.model}))


def test_context_length_of_a_text_is_that_of_its_windows(tmp_path):
    (tmp_path / "my.txt").write_text("words, words, words. " * 50)
    changes = {"data.file": str(tmp_path / "my.txt"), "model.pos_embed": "learned"}
    assert config_of("text", changes | {"data.length": 20}).model.context_length == 20
    with pytest.raises(ValueError, match=r"model.context_length is determined by the data, which gives 64, got 32"):
        config_of("text", changes | {"model.context_length": 32})
    assert config_of("words", {"model.pos_embed": "learned", "model.context_length": 9}).model.context_length == 9
