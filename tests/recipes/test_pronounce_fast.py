from itertools import islice

import pytest

from clearhead.data.sequences import load_splits
from clearhead.inference.run import Run
from clearhead.recipes import train
from clearhead.tasks.pronunciation import error_rates, words_to_score


@pytest.mark.slow
def test_unseen_words_are_pronounced_better_than_chance(tmp_path, monkeypatch):
    """A small model trained for seconds predicts most phones of unseen words."""
    monkeypatch.chdir(tmp_path)
    small = {"model.width": 48, "model.mlp_dim": 96, "model.depth": 1, "data.limit": 10_000, "data.validation": 200}
    brief = {"training.steps": 240, "training.batch_size": 64, "training.evaluate_every": 240, "training.threads": 1}
    train("pronounce-fast", "run", changes=small | brief, quiet=True)
    run = Run("runs/run")
    unseen = words_to_score(run.task, run, "test")
    assert not unseen.keys() & load_splits(run.config.data)["train"].keys()
    rates = error_rates(run, dict(islice(unseen.items(), 200)))
    assert rates.words == 200
    assert rates.phoneme_error_rate < 0.5
