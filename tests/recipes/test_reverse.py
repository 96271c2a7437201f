import pytest

from clearhead.recipes.all import config_of
from clearhead.recipes.start import train


def test_the_length_is_also_the_models_context():
    config = config_of("reverse", {"data.length": 5})
    assert (config.data.length, config.model.context) == (5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_unseen_sequence_is_reversed(tmp_path, monkeypatch, seed):
    """R2.5: 100.00% of 10,000."""
    monkeypatch.chdir(tmp_path)
    outcome = train("reverse", changes={"seed": seed}, quiet=True)
    assert outcome.test["whole"] == 1
