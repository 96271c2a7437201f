import pytest
import torch

from clearhead.insight.look import look
from clearhead.recipes.start import train
from clearhead.serving.session import Session
from clearhead.training import checkpoint
from clearhead.training.probe import read_maps

FEW = {"training.steps": 6, "data.limit": 300, "data.validation": 50, "training.threads": 1, "training.batch_size": 16}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dropout = {"model.dropout": 0.2}
    train("reverse", "plain", changes=FEW | dropout, quiet=True)
    train("reverse", "watched", changes=FEW | dropout | {"probe.inputs": 2, "probe.every": 4}, quiet=True)
    return tmp_path / "runs"


def test_maps_of_the_start_the_end_and_between(runs):
    steps, maps = read_maps(runs / "watched")
    assert steps == [0, 4, 6]
    (layer,) = maps.values()
    assert layer.shape == (3, 2, 1, 16, 16)
    assert torch.allclose(layer.sum(-1), torch.ones(3, 2, 1, 16), atol=2e-3)  # float16
    assert not torch.equal(layer[0], layer[2])


def test_a_watched_run_is_the_same_run(runs):
    plain, watched = (checkpoint.newest(runs / name, print).model for name in ("plain", "watched"))
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_the_last_maps_are_those_of_the_last_weights(runs):
    from clearhead.data import datasets

    session = Session(runs / "watched")
    session.model.load_state_dict(checkpoint.newest(runs / "watched", print).model)
    inputs, _ = datasets.load(session.config.data, 0).validation.take(torch.arange(2))
    seen = look(session.model, inputs)
    _, maps = read_maps(runs / "watched")
    for address in seen:
        assert torch.allclose(seen[address].weights(), maps[address][-1], atol=1e-3)


def test_a_run_without_a_probe_has_no_maps(runs):
    with pytest.raises(LookupError, match="has no maps of its training; train it with a probe"):
        read_maps(runs / "plain")


def test_damaged_maps_are_named(runs):
    path = runs / "watched/probe/step-00000004.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(
        ValueError, match=r"step-00000004.safetensors must be the maps that a probe wrote, .*; delete it"
    ):
        read_maps(runs / "watched")
    path.rename(path.with_name("step-four.safetensors"))
    assert read_maps(runs / "watched")[0] == [0, 6]
