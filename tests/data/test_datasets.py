from importlib import import_module

import pytest

from clearhead.data.datasets import DATASETS, DataConfig, changed_files, digests, load_dataset


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


def test_files_of_other_data_sets_are_not_read():
    assert load_dataset(DataConfig(name="reverse", file="nowhere", train_file="nowhere"), seed=0).files == {}
