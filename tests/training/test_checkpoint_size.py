"""Oversized and sparse checkpoint files are refused before they are read."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch

from clearhead.models.config import build_model
from clearhead.training import checkpoint
from clearhead.training.config import RunConfig


def sparse_checkpoint(run, header, size):
    """A checkpoint with a large sparse model.safetensors and a manifest that matches its size."""
    place = max((run / "checkpoints").glob("step-*"))
    start = json.dumps(header).encode()
    (place / "model.safetensors").write_bytes(len(start).to_bytes(8, "little") + start)
    os.truncate(place / "model.safetensors", 8 + len(start) + size)
    manifest = json.loads((place / "manifest.json").read_bytes())
    manifest["files"]["model.safetensors"]["size"] = 8 + len(start) + size
    (place / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return place


@pytest.mark.parametrize("shape", [[2**30], [2**20, 2**8], []])
def test_large_sparse_file_is_refused_before_it_is_read(trained, tmp_path, monkeypatch, shape):
    run = shutil.copytree(trained / "reverse", tmp_path / "run")
    header = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**32]}}
    place = sparse_checkpoint(run, header, 2**32)
    read = checkpoint.read_regular

    def read_all_but_the_model(path, *most):
        assert path.name != "model.safetensors", "the file was read"
        return read(path, *most)

    monkeypatch.setattr(checkpoint, "read_regular", read_all_but_the_model)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"model\.safetensors is not read"):
        checkpoint.load(place)


def forged_sparse_checkpoint(run, width):
    """A forged but consistent checkpoint: the config describes a wide model, model.safetensors has its shapes, and the
    manifest has the right digests. The weights are zeros in a sparse file, which take no disk space."""
    path = checkpoint.checkpoint_path(run, checkpoint.saved_steps(run)[-1])
    state = json.loads((path / "state.json").read_bytes())
    state["state"]["config"]["model"] |= {"width": width, "mlp_dim": width}
    with torch.device("meta"):
        model = build_model(RunConfig.from_dict(state["state"]["config"]).model)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + 4 * tensor.numel()]}
        end += 4 * tensor.numel()
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    (path / "model.safetensors").write_bytes(len(start).to_bytes(8, "little") + start)
    os.truncate(path / "model.safetensors", 8 + len(start) + end)
    (path / "optimizer.safetensors").write_bytes(safetensors.torch.save({}))
    (path / "state.json").write_text(json.dumps(state))
    contents = {name: (path / name).read_bytes() for name in checkpoint.FILES}
    (path / "manifest.json").write_bytes(checkpoint.manifest(contents))
    return path


def test_sparse_checkpoint_consistent_with_its_own_config_is_refused_before_it_is_read(trained, tmp_path, monkeypatch):
    path = forged_sparse_checkpoint(shutil.copytree(trained / "reverse", tmp_path / "run"), 2048)
    assert (path / "model.safetensors").stat().st_size > checkpoint.SMALL
    with monkeypatch.context() as patch:  # without the check it is read
        patch.setattr(checkpoint, "check_stored", lambda paths: None)
        assert checkpoint.load(path).model
    monkeypatch.setattr(checkpoint, "unpack", lambda contents: pytest.fail("the file was read"))
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"of [\d,]+ bytes only [\d,]+ are stored on disk"):
        checkpoint.load(path)


def test_large_checkpoint_that_matches_its_model_is_read(trained, monkeypatch):
    monkeypatch.setattr("clearhead.training.checkpoint.SMALL", 0)
    for name in ("reverse", "mnist", "pronounce", "text"):
        for step in checkpoint.saved_steps(trained / name):
            assert checkpoint.load(checkpoint.checkpoint_path(trained / name, step)).step == step


def test_checkpoint_above_the_memory_limit_is_refused_before_its_tensors_are_read(trained, monkeypatch):
    monkeypatch.setattr(checkpoint, "SMALL", 0)
    monkeypatch.setattr(checkpoint, "max_tensor_bytes", lambda: 10_000)
    step = checkpoint.saved_steps(trained / "mnist")[-1]
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"tensors have [\d,]+ bytes, .* \(10,000 bytes\)"):
        checkpoint.load(checkpoint.checkpoint_path(trained / "mnist", step))


def test_memory_limit_admits_every_recipe():
    assert checkpoint.max_tensor_bytes() > 2**28
