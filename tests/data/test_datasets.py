from importlib import import_module

import pytest

from clearhead.data.datasets import DATASETS


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_loaded_by_its_home(name):
    assert callable(import_module(DATASETS[name].home).load)
    assert DATASETS[name].what
    assert DATASETS[name].origin in ("made", "embedded", "fetched", "yours")
