import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from clearhead.data.config import Augmentation, DataConfig


def test_a_config_survives_a_round_through_a_dict():
    config = DataConfig(name="mnist", augmentation=Augmentation(crop=2, flip=True, cutout=4, mixup=0.2), limit=7)
    fields = asdict(config)
    assert DataConfig(**{**fields, "augmentation": Augmentation(**fields["augmentation"])}) == config


def test_importing_it_does_not_import_torch():
    code = "import sys, clearhead.data.config, clearhead.data.datasets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "minst", r"unknown data set 'minst'; did you mean mnist\? Choose from reverse, "),
        ("question", "median", "question must be one of commonest, repeat, sum, got 'median'"),
        ("length", 0, "length must be a whole number of at least 1, got 0"),
        ("set_size", 2, "set_size must be a whole number of at least 3, got 2"),
        ("image_size", True, "image_size must be a whole number of at least 1, got True"),
        ("validation", -1, "validation must be a whole number of at least 0, got -1"),
        ("limit", 1.5, "limit must be a whole number of at least 0, got 1.5"),
        ("folder", None, "folder must be a path as text, got None"),
        ("train_file", 3, "train_file must be a path as text, got 3"),
        ("stress", 1, "stress must be True or False, got 1"),
        ("fit", "squeeze", "fit must be one of pad, crop, stretch, got 'squeeze'"),
        ("skip_invalid", "yes", "skip_invalid must be True or False, got 'yes'"),
        ("level", "word", "level must be one of character, byte, got 'word'"),
        ("window", -1, "window must be a whole number of at least 0, got -1"),
        ("length", 10**20, "length must be a whole number of at most 1000000000000, got 1000"),
        ("limit", 10**20, "limit must be a whole number of at most 1000000000000, got 1000"),
        ("augmentation", {"crop": 4}, "augmentation must be an Augmentation, got"),
    ],
)
def test_what_does_not_fit_is_refused(field, value, message):
    with pytest.raises((ValueError, LookupError), match=message):
        replace(DataConfig(name="mnist"), **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop", -1, "crop must be a whole number of at least 0, got -1"),
        ("flip", 1, "flip must be True or False, got 1"),
        ("cutout", 0.5, "cutout must be a whole number of at least 0, got 0.5"),
        ("mixup", float("nan"), "mixup must be a number of at least 0, got nan"),
        ("mixup", float("inf"), "mixup must be a number of at least 0, got inf"),
    ],
)
def test_augmentation_that_does_not_fit_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**{field: value})


def test_a_repeat_can_only_be_asked_where_both_answers_exist():
    assert DataConfig(name="whole", question="repeat", length=10).length == 10
    with pytest.raises(ValueError, match=r"2 to 10 digits .*got length=16; try length=8"):
        DataConfig(name="whole", question="repeat")


def test_augmentation_is_on_when_anything_is():
    assert not Augmentation().is_on
    assert Augmentation(flip=True).is_on
