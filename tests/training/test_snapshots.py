import os

import pytest
import torch
from safetensors.torch import save

from clearhead.files import to_json
from clearhead.inference.run import Run
from clearhead.insight.trace import look
from clearhead.recipes import train
from clearhead.training import checkpoint, snapshots
from clearhead.training.snapshots import read_snapshots

FEW = {"training.steps": 6, "data.limit": 300, "data.validation": 50, "training.threads": 1, "training.batch_size": 16}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dropout = {"model.dropout": 0.2}
    train("reverse", "plain", changes=FEW | dropout, quiet=True)
    train("reverse", "watched", changes=FEW | dropout | {"snapshots.inputs": 2, "snapshots.every": 4}, quiet=True)
    return tmp_path / "runs"


def test_snapshots_are_taken_at_the_start_at_intervals_and_at_the_end(runs):
    steps, maps = read_snapshots(runs / "watched")
    assert steps == [0, 4, 6]
    (layer,) = maps.values()
    assert layer.shape == (3, 2, 1, 16, 16)
    assert torch.allclose(layer.sum(-1), torch.ones(3, 2, 1, 16), atol=2e-3)  # float16
    assert not torch.equal(layer[0], layer[2])


def test_snapshots_do_not_change_training(runs):
    plain, watched = (checkpoint.latest(runs / name, print).model for name in ("plain", "watched"))
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_last_snapshot_equals_the_attention_of_the_final_weights(runs):

    run = Run(runs / "watched")
    run.model.load_state_dict(checkpoint.latest(runs / "watched", print).model)
    inputs, _ = run.config.data.load(0).validation.get_batch(torch.arange(2))
    trace = look(run.model, inputs)
    _, maps = read_snapshots(runs / "watched")
    for name in trace:
        assert torch.allclose(trace[name].weights(), maps[name][-1], atol=1e-3)


def test_reading_a_run_without_snapshots_is_an_error(runs):
    with pytest.raises(LookupError, match="has no attention snapshots"):
        read_snapshots(runs / "plain")


def test_damaged_snapshot_is_named_and_foreign_names_are_ignored(runs):
    path = runs / "watched/snapshots/step-00000004.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit of one weight
    with pytest.raises(ValueError, match=r"step-00000004.safetensors .*do not match the digest"):
        read_snapshots(runs / "watched")
    path.write_bytes(content[:20])
    with pytest.raises(
        ValueError, match=r"step-00000004.safetensors is not an intact attention snapshot .*; delete it"
    ):
        read_snapshots(runs / "watched")
    path.rename(path.with_name("step-four.safetensors"))
    assert read_snapshots(runs / "watched")[0] == [0, 6]
    path.with_name("step-000000005.safetensors").write_bytes(b"not the name of a step")
    assert read_snapshots(runs / "watched")[0] == [0, 6]


MAPS = {"blocks.0.attn": torch.rand(2, 1, 4, 4).half(), "blocks.1.attn": torch.rand(2, 1, 4, 4).half()}


@pytest.fixture
def maps(tmp_path):
    """Attention snapshots of two steps, without a run."""
    (tmp_path / "snapshots").mkdir()
    for step in (0, 4):
        (tmp_path / f"snapshots/step-{step:08d}.safetensors").write_bytes(save(MAPS))
    return tmp_path


def test_any_changed_header_byte_is_harmless_or_a_value_error(maps):
    path, content = maps / "snapshots/step-00000004.safetensors", save(MAPS)
    refusals = []
    for at in range(8 + int.from_bytes(content[:8], "little")):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 7
        path.write_bytes(changed)
        try:
            read_snapshots(maps)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert all("step-00000004.safetensors" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"blocks.0.attn": MAPS["blocks.0.attn"]},
        MAPS | {"blocks.2.attn": torch.rand(2, 1, 4, 4).half()},
        MAPS | {"blocks.0.attn": torch.rand(2, 1, 4, 5).half()},
        MAPS | {"blocks.0.attn": torch.rand(4, 4).half()},
        MAPS | {"blocks.0.attn": torch.rand(2, 1, 4, 4)},
        MAPS | {"blocks.0.attn": torch.zeros(0, 1, 4, 4).half()},
    ],
)
def test_snapshots_with_inconsistent_layers_or_shapes_are_refused(maps, other):
    (maps / "snapshots/step-00000004.safetensors").write_bytes(save(other))
    with pytest.raises(ValueError, match=r"step-00000004\.safetensors"):
        read_snapshots(maps)


def test_large_sparse_snapshot_is_refused_before_it_is_read(maps, monkeypatch):
    path, content = maps / "snapshots/step-00000004.safetensors", save(MAPS)
    shape = [2**10, 2**6, 2**7, 2**7]
    header = to_json({"blocks.0.attn": {"dtype": "F16", "shape": shape, "data_offsets": [0, 2**31]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**31)
    with pytest.raises(OSError, match=f"at most {snapshots.MAX_FILE_BYTES:,} bytes"):
        snapshots.read_snapshot(path)
    with pytest.raises(ValueError, match=f"at most {snapshots.MAX_RUN_BYTES:,} bytes in all"):
        read_snapshots(maps)
    os.truncate(path, 8 + len(header) + 100)
    monkeypatch.setattr(snapshots, "read_regular", lambda *args: pytest.fail("the file was read"))
    with pytest.raises(ValueError, match="its header declares 2,147,"):
        snapshots.read_snapshot(path)
    assert len(content) < 10**4


def test_snapshots_of_holes_are_refused_before_they_are_read(maps, monkeypatch):
    path = maps / "snapshots/step-00000004.safetensors"
    header = to_json({"blocks.0.attn": {"dtype": "F16", "shape": [2, 8, 2**11, 2**11], "data_offsets": [0, 2**27]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**27)
    monkeypatch.setattr(snapshots, "read_regular", lambda *args: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"of [\d,]+ bytes only [\d,]+ are stored on disk"):
        read_snapshots(maps)


def test_snapshots_too_large_to_read_back_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshots, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"attention snapshots may take .* for 4 inputs.*; try --snapshots"):
        train("reverse", "watched", changes=FEW | {"snapshots.inputs": 4}, quiet=True)
