import subprocess
import sys
from dataclasses import asdict, fields, replace
from importlib import import_module

import pytest

from clearhead.data.datasets import DATASETS, Augmentation, DataConfig, changed_files, digests, load_dataset


@pytest.mark.parametrize("name", DATASETS)
def test_every_loader_can_be_imported(name):
    module, function = DATASETS[name].loader.split(":")
    assert callable(getattr(import_module(module), function))
    assert DATASETS[name].description
    assert DATASETS[name].origin in ("generated", "embedded", "downloaded", "your own")


def test_user_files_are_identified_by_digest(tmp_path):
    one, other = tmp_path / "my.dict", tmp_path / "other.dict"
    one.write_text("ab\tB\nba\tB\nbb\tB\n")
    other.write_text("a\tB\n")
    config = DataConfig(name="pronounce", train_file=str(one), test_file=str(other), validation=1)
    before = load_dataset(config, seed=0).files
    assert set(before) == {str(one), str(other)}
    assert changed_files(before, digests(config)) == []
    one.write_text("ab\tB\nba\tB\nbb\tD\n")
    assert changed_files(before, digests(config)) == [str(one)]
    assert changed_files({}, digests(config)) == []  # no digests recorded


def test_files_of_other_datasets_are_not_read():
    assert load_dataset(DataConfig(name="reverse", file="nowhere", train_file="nowhere"), seed=0).files == {}


def test_config_round_trips_through_a_dict():
    config = DataConfig(name="mnist", augmentation=Augmentation(crop=2, flip=True, cutout=4, mixup=0.2), limit=7)
    fields = asdict(config)
    assert DataConfig(**{**fields, "augmentation": Augmentation(**fields["augmentation"])}) == config


def test_importing_datasets_does_not_import_torch():
    code = "import sys, clearhead.data.datasets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "minst", r"unknown data set 'minst'; did you mean mnist\? Choose from reverse, "),
        ("question", "median", "question must be one of most-common, repeat, sum, got 'median'"),
        ("length", 0, "length must be a positive integer, got 0"),
        ("set_size", 2, "set_size must be an integer >= 3, got 2"),
        ("image_size", True, "image_size must be a positive integer, got True"),
        ("validation", -1, "validation must be a non-negative integer, got -1"),
        ("limit", 1.5, "limit must be a non-negative integer, got 1.5"),
        ("folder", None, "folder must be a path as a string, got None"),
        ("train_file", 3, "train_file must be a path as a string, got 3"),
        ("stress", 1, "stress must be True or False, got 1"),
        ("fit", "squeeze", "fit must be one of pad, crop, stretch, got 'squeeze'"),
        ("skip_invalid", "yes", "skip_invalid must be True or False, got 'yes'"),
        ("level", "word", "level must be one of character, byte, got 'word'"),
        ("window", -1, "window must be a non-negative integer, got -1"),
        ("length", 65_537, "length must be at most 65,536, got 65537"),
        ("limit", 10_000_001, "limit must be at most 10,000,000, got 10000001"),
        ("validation", 10**12, "validation must be at most 10,000,000, got 1000000000000"),
        ("window", 10**12, "window must be at most 10,000,000, got 1000000000000"),
        ("image_size", 2049, "image_size must be at most 2,048, got 2049"),
        ("set_size", 10**9, "set_size must be at most 65,536, got 1000000000"),
        ("augmentation", Augmentation(crop=29), "crop must be at most the 28 pixels .*, got 29; try"),
        ("folder", "a\0b", r"folder must be a valid path, got 'a\\x00b'"),
        ("file", "\ud800", r"file must be a valid path, got '\\ud800'"),
        ("name", [], r"unknown data set '\[\]'; choose from reverse, "),
        ("fit", [[1]] * 100, r"fit must be one of pad, crop, stretch, got \[\[1\], .{0,60}\.\.\.$"),
        ("augmentation", {"crop": 4}, "augmentation must be an Augmentation, got"),
    ],
)
def test_invalid_data_config_values_raise(field, value, message):
    with pytest.raises((ValueError, LookupError), match=message):
        replace(DataConfig(name="mnist"), **{field: value})


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
    assert DataConfig(name="digits", question="repeat", length=10).length == 10
    with pytest.raises(ValueError, match=r"2 to 10 digits.*got length=16; try length=8"):
        DataConfig(name="digits", question="repeat")


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


@pytest.mark.parametrize("name", [field.name for field in fields(DataConfig)])
def test_data_config_values_of_any_type_are_accepted_or_raise_a_one_line_error(name):
    for value in ARBITRARY_VALUES:
        try:
            DataConfig(**{"name": "mnist", name: value})
        except (ValueError, LookupError) as error:
            assert not isinstance(error, UnicodeError | KeyError | IndexError)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", [field.name for field in fields(Augmentation)])
def test_augmentation_values_of_any_type_are_accepted_or_raise_a_one_line_error(name):
    for value in ARBITRARY_VALUES:
        try:
            DataConfig(name="mnist", augmentation=Augmentation(**{name: value}))
        except ValueError as error:
            assert not isinstance(error, UnicodeError)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


def test_crop_is_limited_by_the_resized_image_size():
    assert DataConfig(name="folder", image_size=64, augmentation=Augmentation(crop=64))
    with pytest.raises(ValueError, match="crop must be at most the 8 pixels"):
        DataConfig(name="folder", image_size=8, augmentation=Augmentation(crop=9))
