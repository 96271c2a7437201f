from itertools import islice

import pytest

from clearhead.data.pronounce import load_splits
from clearhead.inference.evaluate import error_rates, words_to_score
from clearhead.inference.run import Run
from clearhead.recipes.launch import train


@pytest.mark.slow
def test_words_that_were_never_seen_are_said_better_than_by_chance(tmp_path, monkeypatch):
    """The embedded split, with few words and a small model: most phones of unseen words are right after seconds."""
    monkeypatch.chdir(tmp_path)
    small = {"model.width": 48, "model.mlp_dim": 96, "model.depth": 1, "data.limit": 10_000, "data.validation": 200}
    brief = {"training.steps": 240, "training.batch_size": 64, "training.evaluate_every": 240, "training.threads": 1}
    train("pronounce-fast", "run", changes=small | brief, quiet=True)
    session = Run("runs/run")
    unseen = words_to_score(session, "test")
    assert not unseen.keys() & load_splits(session.config.data)["train"].keys()
    rates = error_rates(session, dict(islice(unseen.items(), 200)))
    assert rates.words == 200
    assert rates.phoneme_error_rate < 0.5
