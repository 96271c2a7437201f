import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args

import pytest

from clearhead.data import Augmentation
from clearhead.recipes import RECIPES
from clearhead.tasks import TASKS, find_task
from clearhead.tasks.images import Folder, Mnist
from clearhead.tasks.language import Text, Words
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.sequences import Digits, OddOneOut, Reverse
from clearhead.tasks.task import Origin, changed_files


@pytest.mark.parametrize(("name", "task"), TASKS.items())
def test_every_task_describes_itself(name, task):
    assert task.name == name
    assert task.description
    assert task.origin in get_args(Origin)
    assert (task.download() is not None) == (task.origin == "downloaded")
    assert all(hasattr(task(), field) for field in task.derived)
    assert {*task.derived} <= {field.name for field in fields(task.model_config)}
    assert {*task.file_fields} <= {field.name for field in fields(task)}


@pytest.mark.parametrize("task", [task for task in TASKS.values() if task.derived])
def test_sizes_of_the_model_are_those_of_the_data(task):
    """The model of the first recipe for a task is accepted, and refused if one of the derived sizes is changed."""
    config = next(config for config in (recipe.make() for recipe in RECIPES.values()) if type(config.data) is task)
    config.task.check_model(config.model)
    for field in task.derived:
        size = getattr(config.model, field)
        with pytest.raises(ValueError, match=f"{field} is {size} for {task.name}, got {field}={2 * size}"):
            config.task.check_model(replace(config.model, **{field: 2 * size}))


def test_user_files_are_identified_by_digest(tmp_path):
    one, other = tmp_path / "my.dict", tmp_path / "other.dict"
    one.write_text("ab\tB\nba\tB\nbb\tB\n")
    other.write_text("a\tB\n")
    config = Pronounce(train_file=str(one), test_file=str(other), validation=1)
    before = config.load(0).files
    assert set(before) == {str(one), str(other)}
    assert changed_files(before, config.digests()) == []
    one.write_text("ab\tB\nba\tB\nbb\tD\n")
    assert changed_files(before, config.digests()) == [str(one)]
    assert changed_files({}, config.digests()) == []  # no digests recorded


def test_config_round_trips_through_a_dict():
    config = Mnist(augmentation=Augmentation(crop=2, flip=True, cutout=4, mixup=0.2), limit=7)
    values = config.to_dict()
    assert values.pop("name") == "mnist"
    assert Mnist(**{**values, "augmentation": Augmentation(**values["augmentation"])}) == config


def test_importing_tasks_does_not_import_torch():
    code = "import sys, clearhead.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("task", "field", "value", "message"),
    [
        (Digits, "question", "median", "question must be one of most-common, repeat, sum, got 'median'"),
        (Reverse, "length", 0, "length must be a positive integer, got 0"),
        (OddOneOut, "set_size", 2, "set_size must be an integer >= 3, got 2"),
        (Folder, "image_size", True, "image_size must be a positive integer, got True"),
        (Mnist, "validation", -1, "validation must be a non-negative integer, got -1"),
        (Mnist, "limit", 1.5, "limit must be a non-negative integer, got 1.5"),
        (Folder, "folder", None, "folder must be a path as a string, got None"),
        (Pronounce, "train_file", 3, "train_file must be a path as a string, got 3"),
        (Pronounce, "stress", 1, "stress must be True or False, got 1"),
        (Mnist, "fit", "squeeze", "fit must be one of pad, crop, stretch, got 'squeeze'"),
        (Folder, "skip_invalid", "yes", "skip_invalid must be True or False, got 'yes'"),
        (Text, "level", "word", "level must be one of character, byte, got 'word'"),
        (Words, "window", -1, "window must be a non-negative integer, got -1"),
        (Reverse, "length", 65_537, "length must be at most 65,536, got 65537"),
        (Mnist, "limit", 10_000_001, "limit must be at most 10,000,000, got 10000001"),
        (Mnist, "validation", 10**12, "validation must be at most 10,000,000, got 1000000000000"),
        (Words, "window", 10**12, "window must be at most 10,000,000, got 1000000000000"),
        (Folder, "image_size", 2049, "image_size must be at most 2,048, got 2049"),
        (OddOneOut, "set_size", 10**9, "set_size must be at most 65,536, got 1000000000"),
        (Mnist, "augmentation", Augmentation(crop=29), "crop must be at most the 28 pixels .*, got 29; try"),
        (Folder, "folder", "a\0b", r"folder must be a valid path, got 'a\\x00b'"),
        (Text, "file", "\ud800", r"file must be a valid path, got '\\ud800'"),
        (Mnist, "fit", [[1]] * 100, r"fit must be one of pad, crop, stretch, got \[\[1\], .{0,60}\.\.\.$"),
        (Mnist, "augmentation", {"crop": 4}, "augmentation must be an Augmentation, got"),
    ],
)
def test_invalid_options_raise(task, field, value, message):
    with pytest.raises(ValueError, match=message):
        task(**{field: value})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minst", r"unknown data set 'minst'; did you mean mnist\? Choose from reverse, "),
        ([], r"unknown data set '\[\]'; choose from reverse, "),
    ],
)
def test_unknown_task_names_raise(name, message):
    with pytest.raises(LookupError, match=message):
        find_task(name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop", -1, "crop must be a non-negative integer, got -1"),
        ("flip", 1, "flip must be True or False, got 1"),
        ("cutout", 0.5, "cutout must be a non-negative integer, got 0.5"),
        ("crop", 10**9, "crop must be at most 2,048, got 1000000000"),
        ("cutout", 10**9, "cutout must be at most 2,048, got 1000000000"),
        ("mixup", 1e308, r"mixup must be a number of at most 1000, got 1e[+]308"),
        ("mixup", float("nan"), "mixup must be a number of at least 0, got nan"),
        ("mixup", float("inf"), "mixup must be a number of at least 0, got inf"),
    ],
)
def test_invalid_augmentation_values_raise(field, value, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**{field: value})


def test_the_repeat_question_requires_at_most_10_digits():
    assert Digits(question="repeat", length=10).length == 10
    assert Digits(question="repeat").context_length == 8
    with pytest.raises(ValueError, match=r"2 to 10 digits.*got length=16; try length=8"):
        Digits(question="repeat", length=16)


def test_augmentation_is_on_if_any_transform_is():
    assert not Augmentation().is_on
    assert Augmentation(flip=True).is_on


ARBITRARY_VALUES = (
    None,
    True,
    -1,
    0.5,
    10**30,
    10**5000,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\0",
    [],
    [1],
    {},
    {"x": 1},
    [[]] * 9,
)


@pytest.mark.parametrize(("task", "name"), [(task, field.name) for task in TASKS.values() for field in fields(task)])
def test_options_of_any_type_are_accepted_or_raise_a_one_line_error(task, name):
    for value in ARBITRARY_VALUES:
        try:
            task(**{name: value})
        except ValueError as error:
            assert not isinstance(error, UnicodeError)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", [field.name for field in fields(Augmentation)])
def test_augmentation_values_of_any_type_are_accepted_or_raise_a_one_line_error(name):
    for value in ARBITRARY_VALUES:
        try:
            Mnist(augmentation=Augmentation(**{name: value}))
        except ValueError as error:
            assert not isinstance(error, UnicodeError)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


def test_crop_is_limited_by_the_resized_image_size():
    assert Folder(image_size=64, augmentation=Augmentation(crop=64))
    with pytest.raises(ValueError, match="crop must be at most the 8 pixels"):
        Folder(image_size=8, augmentation=Augmentation(crop=9))
