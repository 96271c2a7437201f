"""Checkpoints and the metrics log of a run directory: retention, the best checkpoint, faults, and missing records."""

import errno

import pytest
import torch

from clearhead.training import checkpoint, metrics_log
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.run_directory import RunDirectory

CONFIG = {"recipe": "reverse", "seed": 7, "optimizer": {"lr": 0.1 + 0.2}}


def snapshot(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, {})


def record(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 1 / (step + 1)}


@pytest.fixture
def reports():
    return []


@pytest.fixture
def run(tmp_path, reports):
    return RunDirectory.create(tmp_path / "runs/mine", CONFIG, reports.append)


class TestCheckpoints:
    def test_the_last_ones_and_the_best_are_kept(self, run):
        with run.lock():
            for step in range(1, 10):
                run.save(snapshot(step), keep=2)
                if step == 3:
                    run.mark_best(3)
        assert checkpoint.saved_steps(run.path) == [3, 8, 9]
        assert run.best_checkpoint().step == run.best_step() == 3
        assert run.latest_checkpoint().step == 9

    def test_the_one_that_was_the_best_before_is_deleted_with_the_new_mark(self, run):
        with run.lock():
            run.save(snapshot(1), keep=1)
            run.mark_best(1)
            run.save(snapshot(2), keep=1)
            assert checkpoint.saved_steps(run.path) == [1, 2]
            run.mark_best(2)
        assert checkpoint.saved_steps(run.path) == [2]

    def test_the_one_just_saved_is_always_kept(self, run):
        with run.lock():
            run.save(snapshot(5), keep=0)
            run.save(snapshot(4), keep=0)
        assert checkpoint.saved_steps(run.path) == [4, 5]

    def test_without_a_mark_the_newest_is_the_best(self, run):
        with run.lock():
            run.save(snapshot(1))
        assert run.best_checkpoint().step == 1

    def test_a_damaged_best_one_is_reported_and_the_newest_taken(self, run, reports):
        with run.lock():
            for step in (1, 2):
                run.save(snapshot(step))
            run.mark_best(1)
        (run.path / "checkpoints/step-00000001/state.json").unlink()
        assert run.best_checkpoint().step == 2
        assert "the best checkpoint, of step 1, cannot be used: state.json is missing" in reports[0]

    @pytest.mark.parametrize(
        "content",
        [
            '{"stap": 2}',
            '{"step": 1e999}',
            '{"step": -1}',
            '{"step": true}',
            '{"step": 1.0}',
            '{"step": "1"}',
            '{"step": 1%s}' % ("0" * 40),
            "[1]",
            "{",
            "",
            "\0",
            "[" * 100_000,
        ],
    )
    def test_a_damaged_mark_is_reported_once_and_the_newest_taken(self, run, reports, content):
        with run.lock():
            for step in (1, 2):
                run.save(snapshot(step))
            run.mark_best(1)
        (run.path / "best.json").write_text(content)
        assert run.best_checkpoint().step == 2
        assert run.best_step() is None
        assert len(reports) == 1
        assert reports[0].startswith(f"{run.path / 'best.json'} cannot be used: ")
        assert reports[0].endswith("; the latest checkpoint is used as the best")

    def test_without_a_mark_nothing_is_reported(self, run, reports):
        with run.lock():
            run.save(snapshot(1))
        assert run.best_checkpoint().step == 1
        assert reports == []

    def test_while_nobody_knows_which_is_the_best_none_is_deleted(self, run):
        with run.lock():
            run.save(snapshot(1), keep=1)
            run.mark_best(1)
            (run.path / "best.json").write_text("{")
            for step in (2, 3):
                run.save(snapshot(step), keep=1)
            assert checkpoint.saved_steps(run.path) == [1, 2, 3]
            run.mark_best(1)
            run.save(snapshot(4), keep=1)
        assert checkpoint.saved_steps(run.path) == [1, 4]

    def test_a_best_one_that_is_not_finite_is_reported_and_the_newest_taken(self, run, reports):
        with run.lock():
            run.save(Checkpoint(1, {"w": torch.tensor(float("nan"))}, {}, {}))
            run.save(snapshot(2))
            run.mark_best(1)
        assert run.best_checkpoint().step == 2
        assert "the best checkpoint, of step 1, cannot be used: 'w' in model.safetensors is not finite" in reports[0]

    def test_one_that_a_killed_owner_had_no_time_to_delete_is_deleted(self, tmp_path):
        run = RunDirectory.create(tmp_path / "mine", {"training": {"keep_checkpoints": 2}}, pytest.fail)
        with run.lock():
            for step in range(1, 6):
                run.save(snapshot(step), keep=9)
            run.mark_best(2)
        again = RunDirectory.open(run.path, pytest.fail)
        assert again.latest_checkpoint().step == 5
        assert checkpoint.saved_steps(run.path) == [1, 2, 3, 4, 5]  # only the owner deletes
        with again.lock():
            assert again.latest_checkpoint().step == 5
        assert checkpoint.saved_steps(run.path) == [2, 4, 5]

    def test_it_is_not_deleted_where_a_newer_one_is_damaged(self, tmp_path):
        run = RunDirectory.create(tmp_path / "mine", {"training": {"keep_checkpoints": 1}}, lambda message: None)
        with run.lock():
            for step in (1, 2):
                run.save(snapshot(step), keep=9)
            (run.path / "checkpoints/step-00000002/state.json").unlink()
            assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1]

    def test_the_best_one_must_have_been_saved(self, run):
        with run.lock(), pytest.raises(LookupError, match=r"must have a checkpoint, got step 4 in .*; save it first"):
            run.mark_best(4)

    def test_only_the_owner_renames_damaged_ones(self, run, reports):
        with run.lock():
            for step in (1, 2):
                run.save(snapshot(step))
        (run.path / "checkpoints/step-00000002/state.json").unlink()
        assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1, 2]
        with run.lock():
            assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1]
        assert len(reports) == 2

    def test_an_old_one_that_cannot_be_deleted_is_reported_and_the_new_one_is_saved(self, run, reports, monkeypatch):
        def fail(place):
            raise OSError(errno.EACCES, "Permission denied")

        with run.lock():
            run.save(snapshot(1), keep=1)
            monkeypatch.setattr(checkpoint, "remove", lambda place: None if "replaced" in place.name else fail(place))
            run.save(snapshot(2), keep=1)
        assert reports == ["the old checkpoint of step 1 was not deleted: Permission denied"]
        assert run.latest_checkpoint().step == 2

    def test_records_are_durable_before_the_checkpoint_that_counts_on_them(self, run, faults):
        with run.lock():
            run.log(record(1))
            faults.during(lambda: run.save(snapshot(1)), faults.NEVER)
        calls = [(call, str(args[0])) for call, *args in faults.trace]
        assert calls[0] == ("open", str(run.path / "metrics.jsonl"))
        assert calls[1][0] == "fsync"

    @pytest.mark.parametrize("once", [True, False])
    def test_whichever_call_fails_nothing_is_lost_and_nothing_falsely_saved(self, tmp_path, faults, once):
        for at in range(200):
            run = RunDirectory.create(tmp_path / str(at), CONFIG, lambda message: None)
            with run.lock():
                for step in (1, 2):
                    run.log(record(step))
                    run.save(snapshot(step), keep=2)
                run.mark_best(1)
                failure, reached = faults.during(lambda r=run: r.save(snapshot(3), keep=1), at, once)
            again = RunDirectory.open(run.path, lambda message: pytest.fail(message))
            with again.lock():
                found = again.latest_checkpoint()
                assert found.step == 3 if failure is None else found.step in (2, 3)
                assert again.best_checkpoint().step == 1
                assert again.records() == [record(1), record(2)]
            if not reached:
                break
            assert failure is None or failure.errno == errno.ENOSPC
        assert at > 25


class TestRecords:
    """A checkpoint knows the records that were there when it was saved."""

    @pytest.fixture
    def trained(self, run):
        with run.lock():
            for step in range(1, 70):
                run.log(record(step))
                if step % 23 == 0:
                    run.save(snapshot(step), keep=9)
            run.log({"kind": "test", "step": 69})
        return run

    def continued(self, run):
        """As training does it."""
        reports = []
        again = RunDirectory.open(run.path, reports.append)
        with again.lock():
            again.drop_after(again.latest_checkpoint().step)
        return reports

    def rewrite(self, run, change):
        path = run.path / "metrics.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    def test_where_all_are_there_nothing_is_reported(self, trained):
        assert self.continued(trained) == []
        assert len(trained.records()) == 70

    def test_missing_ones_are_reported_with_their_number(self, trained):
        self.rewrite(trained, lambda lines: lines[:20] + lines[51:])
        (report,) = self.continued(trained)
        assert "metrics.jsonl has changed since the checkpoint of step 69 was saved: " in report
        assert report.endswith("30 of 69 records are missing")  # that of the test is one more

    def test_a_missing_file_is_reported(self, trained):
        (trained.path / "metrics.jsonl").unlink()
        (report,) = self.continued(trained)
        assert report.endswith("69 of 69 records are missing")

    def test_changed_ones_are_reported(self, trained):
        self.rewrite(trained, lambda lines: [line.replace(b"0.5,", b"0.4,") for line in lines[1:]] + lines[:1])
        (report,) = self.continued(trained)
        assert report.endswith("some of the first 69 records were changed")

    def test_an_older_checkpoint_knows_its_own(self, trained):
        (trained.path / "checkpoints/step-00000069/state.json").unlink()
        reports = self.continued(trained)
        assert ["is skipped" in report for report in reports] == [True]
        assert len(trained.records()) == 46
        with trained.lock():  # and so does one that is saved after going back
            trained.drop_after(46)
            trained.log(record(47))
            trained.save(snapshot(47))
        assert self.continued(trained) == []
        assert checkpoint.load(checkpoint.checkpoint_path(trained.path, 47)).records.count == 47

    def test_a_checkpoint_that_counts_none_is_taken_as_it_is(self, trained):
        checkpoint.save(trained.path, snapshot(70))
        assert checkpoint.load(checkpoint.checkpoint_path(trained.path, 70)).records is None
        self.rewrite(trained, lambda lines: lines[:20])
        assert self.continued(trained) == []

    def test_half_a_line_is_cut_without_a_word_but_damaged_lines_are_reported(self, trained):
        path = trained.path / "metrics.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"kind": "tr')
        assert self.continued(trained) == []
        path.write_bytes(whole + b'{"kind": "tr\n\0\0\n{"ki')
        assert self.continued(trained) == [f"{path}: 2 damaged lines were removed from its end"]
        path.write_bytes(whole + b"\n")
        assert self.continued(trained) == [f"{path}: 1 damaged line was removed from its end"]
        assert path.read_bytes() == whole

    def test_a_save_does_not_read_them(self, trained, monkeypatch):
        with trained.lock():
            monkeypatch.setattr(metrics_log, "lines", lambda path: pytest.fail("they are read"))
            trained.log(record(70))
            trained.save(snapshot(70))
        monkeypatch.undo()
        assert self.continued(trained) == []
