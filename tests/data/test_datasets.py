from importlib import import_module

import pytest

from clearhead.data.datasets import DATASETS, DataConfig, changed_files, digests, load_dataset


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_loaded_by_its_home(name):
    module, function = DATASETS[name].home.split(":")
    assert callable(getattr(import_module(module), function))
    assert DATASETS[name].what
    assert DATASETS[name].origin in ("made", "embedded", "fetched", "yours")


def test_own_files_are_remembered_by_their_bytes(tmp_path):
    one, other = tmp_path / "my.dict", tmp_path / "other.dict"
    one.write_text("ab\tB\nba\tB\nbb\tB\n")
    other.write_text("a\tB\n")
    config = DataConfig(name="pronounce", train_file=str(one), test_file=str(other), validation=1)
    before = load_dataset(config, seed=0).files
    assert set(before) == {str(one), str(other)}
    assert changed_files(before, digests(config)) == []
    one.write_text("ab\tB\nba\tB\nbb\tD\n")
    assert changed_files(before, digests(config)) == [str(one)]
    assert changed_files({}, digests(config)) == []  # nothing is known of a run of before


def test_files_that_a_data_set_does_not_read_are_left_alone():
    assert load_dataset(DataConfig(name="reverse", file="nowhere", train_file="nowhere"), seed=0).files == {}
