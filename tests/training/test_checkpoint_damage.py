"""Damaged and forged checkpoints are detected, reported and skipped."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.training import checkpoint
from clearhead.training.checkpoint import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    DamagedCheckpointError,
    NoIntactCheckpointError,
    clean,
    is_finite,
    latest,
    load,
    manifest,
    remove,
    save,
    saved_steps,
)
from support.runs import equal_checkpoints, fail_on_report, make_checkpoint

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)


class TestDamage:
    def test_latest_is_none_before_the_first_checkpoint(self, tmp_path):
        assert latest(tmp_path, fail_on_report) is None

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 8), st.integers(1, 2))
    def test_flipped_bit_or_truncation_anywhere_falls_back_to_the_previous_checkpoint(
        self, name, where, bit, n_damaged
    ):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda file: None)
            for step in range(3):
                place = save(Path(folder), make_checkpoint(step))
                if step >= 3 - n_damaged:
                    content = bytearray((place / name).read_bytes())
                    at = int(where * len(content))
                    if bit < 8:
                        content[at] ^= 1 << bit
                    (place / name).write_bytes(content if bit < 8 else content[:at])
            reports: list[str] = []
            found = latest(Path(folder), reports.append)
            assert found is not None
            assert equal_checkpoints(found, make_checkpoint(2 - n_damaged))
            assert len(reports) == n_damaged
            assert len(list(Path(folder).glob("checkpoints/damaged-step-*"))) == n_damaged
            assert equal_checkpoints(latest(Path(folder), fail_on_report), found)

    @pytest.mark.parametrize("name", FILES)
    def test_missing_file_is_named(self, tmp_path, name):
        place = save(tmp_path, make_checkpoint(1))
        (place / name).unlink()
        with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
            load(place)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (MODEL, b"", "model.safetensors has 0 bytes instead of"),
            (STATE, b"null", "state.json has 4 bytes instead of"),
            (MANIFEST, b"{}", "manifest.json has changed since it was saved"),
            (MANIFEST, b'{"files": []}', "manifest.json has changed since it was saved"),
            (MANIFEST, b"[" * 10_000, "manifest.json has changed since it was saved"),
        ],
    )
    def test_error_says_what_is_damaged(self, tmp_path, name, content, message):
        place = save(tmp_path, make_checkpoint(1))
        (place / name).write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=message):
            load(place)

    def test_checkpoint_renamed_to_another_step_is_refused(self, tmp_path):
        save(tmp_path, make_checkpoint(1)).rename(tmp_path / "checkpoints/step-00000009")
        with pytest.raises(NoIntactCheckpointError, match="step 9: it holds step 1"):
            latest(tmp_path, print)

    def test_repeatedly_damaged_step_keeps_every_damaged_copy(self, tmp_path):
        save(tmp_path, make_checkpoint(1))
        for _ in range(3):
            (save(tmp_path, make_checkpoint(2)) / STATE).unlink()
            assert latest(tmp_path, lambda message: None).step == 1
        names = {"damaged-step-00000002", "damaged-step-00000002-2", "damaged-step-00000002-3", "step-00000001"}
        assert set(os.listdir(tmp_path / "checkpoints")) == names

    @pytest.mark.parametrize("set_aside", [True, False])
    def test_no_intact_checkpoint_is_an_error_and_renames_nothing(self, tmp_path, set_aside):
        for step in (1, 2):
            (save(tmp_path, make_checkpoint(step)) / STATE).unlink()
        for _ in range(2):  # a second attempt must not start a new run either
            with pytest.raises(NoIntactCheckpointError, match=r"can be used \(step 2: .*; step 1: .*\)"):
                latest(tmp_path, print, set_aside=set_aside)
        assert saved_steps(tmp_path) == [1, 2]

    def test_reader_renames_nothing(self, tmp_path):
        save(tmp_path, make_checkpoint(1))
        (save(tmp_path, make_checkpoint(2)) / STATE).unlink()
        reports: list[str] = []
        assert latest(tmp_path, reports.append, set_aside=False).step == 1
        assert saved_steps(tmp_path) == [1, 2]
        assert len(reports) == 1

    def test_checkpoint_deleted_while_it_is_read_is_not_damage(self, tmp_path, monkeypatch):
        first = save(tmp_path, make_checkpoint(1))
        read_regular = checkpoint.read_regular

        def read_late(path, *most):
            if path.parent == first and path.name == STATE:
                save(tmp_path, make_checkpoint(2))
                remove(first)
            return read_regular(path, *most)

        monkeypatch.setattr(checkpoint, "read_regular", read_late)
        assert latest(tmp_path, fail_on_report, set_aside=False).step == 2

    @pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO])
    @pytest.mark.parametrize("name", FILES)
    def test_unreadable_checkpoint_is_skipped_and_its_file_named(self, tmp_path, monkeypatch, kind, name):
        for step in (1, 2):
            save(tmp_path, make_checkpoint(step))
        fail_to_read(monkeypatch, kind, lambda path: path == tmp_path / "checkpoints/step-00000002" / name)
        reports: list[str] = []
        assert latest(tmp_path, reports.append).step == 1
        assert f"step 2 is skipped: {name} cannot be read: {os.strerror(kind)}; it is kept in " in reports[0]
        assert (tmp_path / "checkpoints/damaged-step-00000002" / name).exists()

    @pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO])
    def test_unreadable_disk_is_an_error_and_changes_nothing(self, tmp_path, monkeypatch, kind):
        save(tmp_path, make_checkpoint(1))
        fail_to_read(monkeypatch, kind, lambda path: True)
        with pytest.raises(OSError, match=f"step 1: manifest.json cannot be read: {os.strerror(kind)}"):
            latest(tmp_path, fail_on_report)
        assert saved_steps(tmp_path) == [1]

    def test_damaged_checkpoint_that_cannot_be_renamed_is_skipped(self, tmp_path, monkeypatch):
        for step in (1, 2):
            save(tmp_path, make_checkpoint(step))
        (tmp_path / "checkpoints/step-00000002" / STATE).unlink()
        monkeypatch.setattr(os, "rename", lambda *names: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        reports: list[str] = []
        assert latest(tmp_path, reports.append).step == 1
        assert reports[0].endswith(f"kept in {tmp_path / 'checkpoints/step-00000002'}")

    def test_file_larger_than_its_manifest_entry_is_not_read(self, tmp_path, monkeypatch):
        place = save(tmp_path, make_checkpoint(1))
        os.truncate(place / MODEL, 2**33)  # sparse: takes no disk space
        monkeypatch.setattr(checkpoint, "sha256", lambda content: pytest.fail("the file was read"))
        with pytest.raises(DamagedCheckpointError, match="has 8589934592 bytes instead of"):
            load(place)


class TestNames:
    """Only a folder with the exact name that save() gives a step is a checkpoint."""

    @pytest.mark.parametrize(
        "name", ["step-000000099", "step-99", "step-1" + 30 * "0", "step-٠٠٠٠٠٠٩٩", "step-0000009a", "step-00000099 "]
    )
    def test_other_folder_names_are_not_checkpoints(self, tmp_path, name):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        assert latest(tmp_path, fail_on_report) is None
        save(tmp_path, make_checkpoint(1))
        assert latest(tmp_path, fail_on_report).step == 1
        assert (tmp_path / "checkpoints" / name).is_dir()

    def test_empty_folder_of_a_high_step_is_skipped(self, tmp_path):
        save(tmp_path, make_checkpoint(1))
        (tmp_path / "checkpoints/step-999999999").mkdir()
        reports: list[str] = []
        assert latest(tmp_path, reports.append).step == 1
        assert "step 999999999 is skipped: manifest.json is missing" in reports[0]

    def test_clean_leaves_unknown_names_alone(self, tmp_path):
        names = {"saving-step-x", "deleting-step-99", "replaced-step-000000001"}
        for name in names:
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
        clean(tmp_path)
        assert set(os.listdir(tmp_path / "checkpoints")) == names


class TestNonFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("where", ["model", "optimizer"])
    def test_latest_finite_checkpoint_is_used_and_the_skipped_ones_reported(self, tmp_path, value, dtype, where):
        for step in (1, 2):
            save(tmp_path, make_checkpoint(step))
        bad = {"w": torch.ones(2), "m.moment": torch.tensor([0.5, value], dtype=dtype)}
        tensors = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.tensor(3)}} | {where: bad}
        for step in (3, 4):
            save(tmp_path, Checkpoint(step, **tensors, state={}))
        reports: list[str] = []
        assert latest(tmp_path, reports.append).step == 2
        assert len(reports) == 2
        assert f"step 4 is skipped: 'm.moment' in {where}.safetensors is not finite" in reports[0]
        assert equal_checkpoints(latest(tmp_path, fail_on_report), make_checkpoint(2))

    def test_no_finite_checkpoint_is_an_error(self, tmp_path):
        save(tmp_path, Checkpoint(1, {"w": torch.tensor(float("nan"))}, {}, {}))
        with pytest.raises(NoIntactCheckpointError, match=r"step 1: 'w' in model.safetensors is not finite"):
            latest(tmp_path, fail_on_report)
        assert saved_steps(tmp_path) == [1]

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.complex64, torch.uint8, torch.bool])
    def test_is_finite_accepts_every_dtype(self, dtype):
        assert is_finite(torch.zeros(2).to(dtype))
        assert is_finite(torch.empty(0).to(dtype))


class TestForgery:
    """A forged checkpoint may have a valid manifest."""

    @pytest.mark.parametrize(
        "state",
        [
            b'{"step": "1", "state": {}}',
            b'{"step": true, "state": {}}',
            b'{"step": -1, "state": {}}',
            b'{"step": 1.0, "state": {}}',
            b'{"step": 1, "state": []}',
            b'{"step": 1}',
            b"[]",
            b"1e999",
            b'{"step": 1, "state": {"a": 1e999}}',
            b'{"step": 1, "state": {}, "records": 3}',
            b'{"step": 1, "state": {}, "records": {"count": -1, "sha256": ""}}',
            b"[" * 100_000,
            b"\xff",
        ],
    )
    def test_forged_state_is_damage(self, tmp_path, state):
        place = save(tmp_path, make_checkpoint(1))
        forge(place, STATE, state)
        with pytest.raises(DamagedCheckpointError, match="not written by this version of Clearhead"):
            load(place)

    @pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
    def test_forged_tensor_files_are_damage(self, tmp_path, name):
        header = b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
        for content in (b"", b"\xff" * 8, len(header).to_bytes(8, "little") + header + bytes(8)):
            place = save(tmp_path, make_checkpoint(1))
            forge(place, name, content)
            with pytest.raises(DamagedCheckpointError, match="not written by this version of Clearhead"):
                load(place)

    def test_manifest_with_a_non_numeric_size_is_damage(self, tmp_path):
        place = save(tmp_path, make_checkpoint(1))
        written = (place / MANIFEST).read_bytes()
        (place / MANIFEST).write_bytes(written.replace(b'"size": ', b'"size": "many" , "x": '))
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json has changed since it was saved"):
            load(place)


def forge(place: Path, name: str, content: bytes) -> None:
    (place / name).write_bytes(content)
    contents = {name: (place / name).read_bytes() for name in (MODEL, OPTIMIZER, STATE)}
    (place / MANIFEST).write_bytes(manifest(contents))


def fail_to_read(monkeypatch, kind, fails) -> None:
    """Makes reading these files raise an OSError."""
    read_regular = checkpoint.read_regular

    def read(path, *most):
        if fails(path):
            raise OSError(kind, os.strerror(kind), str(path))
        return read_regular(path, *most)

    monkeypatch.setattr(checkpoint, "read_regular", read)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_folder_in_place_of_a_file_damages_only_that_checkpoint(tmp_path, name):
    for step in (1, 2):
        checkpoint.save(tmp_path, Checkpoint(step, {"w": torch.ones(2)}, {}, {}))
    path = checkpoint.checkpoint_path(tmp_path, 2) / name
    path.unlink()
    path.mkdir()
    reports = []
    assert checkpoint.latest(tmp_path, reports.append, set_aside=False).step == 1
    assert len(reports) == 1
    assert "the checkpoint of step 2 is skipped" in reports[0]
