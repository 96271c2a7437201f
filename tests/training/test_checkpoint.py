import errno
import os
from pathlib import Path

import pytest
import torch

from clearhead.training.checkpoint import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    clean,
    latest,
    load,
    remove,
    save,
    saved_steps,
)
from support.runs import equal_checkpoints, equal_tensors, fail_on_report, make_checkpoint

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)


class TestRoundTrip:
    def test_every_dtype_and_layout_round_trips_bit_for_bit(self, tmp_path):
        table = torch.randn(3, 4)
        given = Checkpoint(
            step=7,
            model={
                "number": torch.tensor(1.5),
                "half": torch.randn(3).bfloat16(),
                "bool": torch.tensor([True, False]),
                "nothing": torch.empty(0, 3),
                "turned": table.t(),
                "whole": table,
                "tied": table,
                "slice": table[1:, ::2],
                "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
                "double": torch.randn(2, dtype=torch.float64),
                "parameter": torch.nn.Parameter(torch.randn(2)),
            },
            optimizer={"random.rank0": torch.get_rng_state(), "step": torch.tensor(3, dtype=torch.int64)},
            state={"a": 0.1 + 0.2, "b": [1, None, True, "ä"], "c": {"d": -0.0}},
        )
        back = load(save(tmp_path, given))
        assert equal_checkpoints(given, back)
        assert str(back.state["c"]["d"]) == "-0.0"
        back.model["whole"].mul_(2)  # it owns its memory and is writable
        assert equal_tensors({"t": back.model["turned"]}, {"t": table.t()})

    def test_empty_checkpoint_round_trips(self, tmp_path):
        assert equal_checkpoints(load(save(tmp_path, Checkpoint(0, {}, {}, {}))), Checkpoint(0, {}, {}, {}))

    def test_equal_checkpoints_have_identical_bytes(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        a, b = save(tmp_path / "a", make_checkpoint(3)), save(tmp_path / "b", make_checkpoint(3))
        assert all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)

    def test_folder_names_sort_by_step(self, tmp_path):
        places = [save(tmp_path, make_checkpoint(step)).name for step in (1000, 9, 120)]
        assert places == ["step-00001000", "step-00000009", "step-00000120"]
        assert saved_steps(tmp_path) == [9, 120, 1000]
        assert [f"step-{step:08d}" for step in saved_steps(tmp_path)] == sorted(places)

    @pytest.mark.parametrize("state", [{"a": (1, 2)}, {"a": {1: 2}}])
    def test_state_that_json_would_change_is_refused(self, tmp_path, state):
        with pytest.raises(ValueError, match=r"state must survive JSON unchanged, got a change in \['a'\]"):
            save(tmp_path, Checkpoint(1, {}, {}, state))
        assert os.listdir(tmp_path) == []

    def test_nan_in_the_state_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="JSON"):
            save(tmp_path, Checkpoint(1, {}, {}, {"loss": float("nan")}))
        assert os.listdir(tmp_path) == []

    def test_saving_a_step_again_replaces_its_checkpoint(self, tmp_path):
        save(tmp_path, make_checkpoint(1, 0.25))
        save(tmp_path, make_checkpoint(1, 0.75))
        assert equal_checkpoints(latest(tmp_path, fail_on_report), make_checkpoint(1, 0.75))
        assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


class TestFailures:
    """Every system call fails in turn: no saved checkpoint is lost, and no failed save is reported as a success."""

    @pytest.mark.parametrize("once", [True, False])
    @pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
    @pytest.mark.parametrize("step", [2, 3], ids=["same step", "new step"])
    def test_failed_save_raises_and_loses_no_checkpoint(self, tmp_path, faults, kind, once, step):
        for at in range(200):
            folder = tmp_path / str(at)
            folder.mkdir()
            for before in (1, 2):
                save(folder, make_checkpoint(before))
            job, error = lambda f=folder: save(f, make_checkpoint(step, 0.75)), lambda: OSError(kind, os.strerror(kind))
            failure, reached = faults.during(job, at, once, error)
            if once:  # then the save cleans up after itself
                assert saved_steps(folder)[:2] == [1, 2]
                assert not list(folder.glob("checkpoints/saving-*"))
            clean(folder)
            found = latest(folder, fail_on_report)
            if not reached:
                break
            if failure is None:
                assert equal_checkpoints(found, make_checkpoint(step, 0.75))
            else:
                assert failure.errno == kind
                assert f"the checkpoint of step {step} was not saved: {os.strerror(kind)}" in str(failure)
                assert equal_checkpoints(found, make_checkpoint(2)) or equal_checkpoints(
                    found, make_checkpoint(step, 0.75)
                )
            remove(folder / "checkpoints" / f"step-{found.step:08d}")
            assert equal_checkpoints(latest(folder, fail_on_report), make_checkpoint(1 if found.step == 2 else 2))
        assert at > 15
        assert failure is None

    @pytest.mark.parametrize("step", [2, 3], ids=["same step", "new step"])
    def test_kill_at_any_call_of_a_save_loses_no_checkpoint(self, tmp_path, faults, step):
        for at in range(200):
            folder = tmp_path / str(at)
            folder.mkdir()
            for before in (1, 2):
                save(folder, make_checkpoint(before))
            job = lambda f=folder: save(f, make_checkpoint(step, 0.75))  # noqa: E731
            _, reached = faults.during(job, at, once=False, error=faults.KILLED)
            clean(folder)
            found = latest(folder, fail_on_report)
            assert equal_checkpoints(found, make_checkpoint(step, 0.75)) or (
                reached and equal_checkpoints(found, make_checkpoint(2))
            )
            assert all(name.startswith("step-") for name in os.listdir(folder / "checkpoints"))
            if not reached:
                break
        assert at > 15

    def test_kill_at_any_call_of_a_deletion_leaves_an_intact_checkpoint_or_none(self, tmp_path, faults):
        for at in range(200):
            folder = tmp_path / str(at)
            folder.mkdir()
            for before in (1, 2):
                save(folder, make_checkpoint(before))
            job = lambda f=folder: remove(f / "checkpoints/step-00000002")  # noqa: E731
            _, reached = faults.during(job, at, once=False, error=faults.KILLED)
            assert latest(folder, fail_on_report).step in (1, 2)
            clean(folder)
            assert set(os.listdir(folder / "checkpoints")) <= {"step-00000001", "step-00000002"}
            if not reached:
                break
        assert at > 5
        assert saved_steps(folder) == [1]

    def test_files_are_fsynced_before_the_rename_and_the_folder_after_it(self, tmp_path, faults):
        faults.during(lambda: save(tmp_path, make_checkpoint(1)), faults.NEVER)
        calls = [call for call, *_ in faults.trace]
        assert calls[calls.index("rename") :] == ["rename", "open", "fsync"]
        before = faults.trace[: calls.index("rename")]
        opened = [Path(args[0]).name for call, *args in before if call == "open"]
        assert opened == [*FILES, "saving-step-00000001"]
        assert [call for call, *_ in before].count("fsync") == len(opened)
        assert before[-1][0] == "fsync"

    def test_leftovers_of_a_killed_save_are_ignored_and_cleaned(self, tmp_path):
        save(tmp_path, make_checkpoint(1))
        for prefix in ("saving-", "deleting-"):
            (tmp_path / "checkpoints" / f"{prefix}step-00000002").mkdir()
            (tmp_path / "checkpoints" / f"{prefix}step-00000002" / MODEL).write_bytes(b"half")
        assert latest(tmp_path, fail_on_report).step == 1
        save(tmp_path, make_checkpoint(2))
        assert latest(tmp_path, fail_on_report).step == 2
        clean(tmp_path)
        assert set(os.listdir(tmp_path / "checkpoints")) == {"step-00000001", "step-00000002"}

    def test_file_in_place_of_the_checkpoints_folder_is_an_error(self, tmp_path):
        (tmp_path / "checkpoints").write_bytes(b"")
        with pytest.raises(OSError, match="the checkpoint of step 1 was not saved"):
            save(tmp_path, make_checkpoint(1))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere: simulated above by EACCES and EROFS")
    def test_read_only_folder_is_an_error(self, tmp_path):
        (tmp_path / "checkpoints").mkdir(mode=0o555)
        with pytest.raises(PermissionError, match="the checkpoint of step 1 was not saved"):
            save(tmp_path, make_checkpoint(1))
