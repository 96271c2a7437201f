"""Checkpoints and the metrics log of a run directory: retention, the best checkpoint, faults, and missing records."""

import errno

import pytest
import torch

from clearhead.training import checkpoint, metrics_log
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.run_directory import RunDirectory
from support.runs import RUN_CONFIG, make_checkpoint, make_record


class TestCheckpoints:
    def test_latest_and_best_checkpoints_are_kept(self, run):
        with run.lock():
            for step in range(1, 10):
                run.save(make_checkpoint(step), keep=2)
                if step == 3:
                    run.mark_best(3)
        assert checkpoint.saved_steps(run.path) == [3, 8, 9]
        assert run.best_checkpoint().step == run.best_step() == 3
        assert run.latest_checkpoint().step == 9

    def test_previous_best_is_deleted_when_a_new_best_is_marked(self, run):
        with run.lock():
            run.save(make_checkpoint(1), keep=1)
            run.mark_best(1)
            run.save(make_checkpoint(2), keep=1)
            assert checkpoint.saved_steps(run.path) == [1, 2]
            run.mark_best(2)
        assert checkpoint.saved_steps(run.path) == [2]

    def test_checkpoint_just_saved_is_always_kept(self, run):
        with run.lock():
            run.save(make_checkpoint(5), keep=0)
            run.save(make_checkpoint(4), keep=0)
        assert checkpoint.saved_steps(run.path) == [4, 5]

    def test_without_best_json_the_latest_is_the_best(self, run):
        with run.lock():
            run.save(make_checkpoint(1))
        assert run.best_checkpoint().step == 1

    def test_damaged_best_checkpoint_falls_back_to_the_latest(self, run, reports):
        with run.lock():
            for step in (1, 2):
                run.save(make_checkpoint(step))
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
    def test_damaged_best_json_is_reported_once_and_falls_back_to_the_latest(self, run, reports, content):
        with run.lock():
            for step in (1, 2):
                run.save(make_checkpoint(step))
            run.mark_best(1)
        (run.path / "best.json").write_text(content)
        assert run.best_checkpoint().step == 2
        assert run.best_step() is None
        assert len(reports) == 1
        assert reports[0].startswith(f"{run.path / 'best.json'} cannot be used: ")
        assert reports[0].endswith("; the latest checkpoint is used as the best")

    def test_missing_best_json_is_not_reported(self, run, reports):
        with run.lock():
            run.save(make_checkpoint(1))
        assert run.best_checkpoint().step == 1
        assert reports == []

    def test_no_checkpoint_is_deleted_while_the_best_step_is_unknown(self, run):
        with run.lock():
            run.save(make_checkpoint(1), keep=1)
            run.mark_best(1)
            (run.path / "best.json").write_text("{")
            for step in (2, 3):
                run.save(make_checkpoint(step), keep=1)
            assert checkpoint.saved_steps(run.path) == [1, 2, 3]
            run.mark_best(1)
            run.save(make_checkpoint(4), keep=1)
        assert checkpoint.saved_steps(run.path) == [1, 4]

    def test_non_finite_best_checkpoint_falls_back_to_the_latest(self, run, reports):
        with run.lock():
            run.save(Checkpoint(1, {"w": torch.tensor(float("nan"))}, {}, {}))
            run.save(make_checkpoint(2))
            run.mark_best(1)
        assert run.best_checkpoint().step == 2
        assert "the best checkpoint, of step 1, cannot be used: 'w' in model.safetensors is not finite" in reports[0]

    def test_surplus_checkpoints_of_a_killed_owner_are_deleted_by_the_next_owner(self, tmp_path):
        run = RunDirectory.create(tmp_path / "mine", {"training": {"keep_checkpoints": 2}}, pytest.fail)
        with run.lock():
            for step in range(1, 6):
                run.save(make_checkpoint(step), keep=9)
            run.mark_best(2)
        again = RunDirectory.open(run.path, pytest.fail)
        assert again.latest_checkpoint().step == 5
        assert checkpoint.saved_steps(run.path) == [1, 2, 3, 4, 5]  # only the owner deletes
        with again.lock():
            assert again.latest_checkpoint().step == 5
        assert checkpoint.saved_steps(run.path) == [2, 4, 5]

    def test_surplus_checkpoint_is_kept_if_a_newer_one_is_damaged(self, tmp_path):
        run = RunDirectory.create(tmp_path / "mine", {"training": {"keep_checkpoints": 1}}, lambda message: None)
        with run.lock():
            for step in (1, 2):
                run.save(make_checkpoint(step), keep=9)
            (run.path / "checkpoints/step-00000002/state.json").unlink()
            assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1]

    def test_mark_best_requires_a_saved_checkpoint(self, run):
        with run.lock(), pytest.raises(LookupError, match=r"must have a checkpoint, got step 4 in .*; save it first"):
            run.mark_best(4)

    def test_only_the_owner_renames_damaged_checkpoints(self, run, reports):
        with run.lock():
            for step in (1, 2):
                run.save(make_checkpoint(step))
        (run.path / "checkpoints/step-00000002/state.json").unlink()
        assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1, 2]
        with run.lock():
            assert run.latest_checkpoint().step == 1
        assert checkpoint.saved_steps(run.path) == [1]
        assert len(reports) == 2

    def test_failed_deletion_is_reported_and_the_new_checkpoint_saved(self, run, reports, monkeypatch):
        def fail(place):
            raise OSError(errno.EACCES, "Permission denied")

        with run.lock():
            run.save(make_checkpoint(1), keep=1)
            monkeypatch.setattr(checkpoint, "remove", lambda place: None if "replaced" in place.name else fail(place))
            run.save(make_checkpoint(2), keep=1)
        assert reports == ["the old checkpoint of step 1 was not deleted: Permission denied"]
        assert run.latest_checkpoint().step == 2

    def test_log_is_fsynced_before_the_checkpoint_that_refers_to_it(self, run, faults):
        with run.lock():
            run.log(make_record(1))
            faults.during(lambda: run.save(make_checkpoint(1)), faults.NEVER)
        calls = [(call, str(args[0])) for call, *args in faults.trace]
        assert calls[0] == ("open", str(run.path / "metrics.jsonl"))
        assert calls[1][0] == "fsync"

    @pytest.mark.parametrize("once", [True, False])
    def test_failed_call_at_any_point_of_a_save_loses_nothing(self, tmp_path, faults, once):
        for at in range(200):
            run = RunDirectory.create(tmp_path / str(at), RUN_CONFIG, lambda message: None)
            with run.lock():
                for step in (1, 2):
                    run.log(make_record(step))
                    run.save(make_checkpoint(step), keep=2)
                run.mark_best(1)
                failure, reached = faults.during(lambda r=run: r.save(make_checkpoint(3), keep=1), at, once)
            again = RunDirectory.open(run.path, lambda message: pytest.fail(message))
            with again.lock():
                found = again.latest_checkpoint()
                assert found.step == 3 if failure is None else found.step in (2, 3)
                assert again.best_checkpoint().step == 1
                assert again.records() == [make_record(1), make_record(2)]
            if not reached:
                break
            assert failure is None or failure.errno == errno.ENOSPC
        assert at > 25


class TestMetricsLog:
    """A checkpoint stores the number and the digest of the records logged before it."""

    @pytest.fixture
    def trained(self, run):
        with run.lock():
            for step in range(1, 70):
                run.log(make_record(step))
                if step % 23 == 0:
                    run.save(make_checkpoint(step), keep=9)
            run.log({"kind": "test", "step": 69})
        return run

    def resume_reports(self, run):
        """Reports of a resume: opens and locks the run, then drops the records after its latest checkpoint."""
        reports = []
        again = RunDirectory.open(run.path, reports.append)
        with again.lock():
            again.drop_after(again.latest_checkpoint().step)
        return reports

    def rewrite(self, run, change):
        path = run.path / "metrics.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    def test_intact_log_is_not_reported(self, trained):
        assert self.resume_reports(trained) == []
        assert len(trained.records()) == 70

    def test_missing_records_are_counted(self, trained):
        self.rewrite(trained, lambda lines: lines[:20] + lines[51:])
        (report,) = self.resume_reports(trained)
        assert "metrics.jsonl has changed since the checkpoint of step 69 was saved: " in report
        assert report.endswith("30 of 69 records are missing")  # the test record is the 70th

    def test_missing_log_is_reported(self, trained):
        (trained.path / "metrics.jsonl").unlink()
        (report,) = self.resume_reports(trained)
        assert report.endswith("69 of 69 records are missing")

    def test_changed_records_are_reported(self, trained):
        self.rewrite(trained, lambda lines: [line.replace(b"0.5,", b"0.4,") for line in lines[1:]] + lines[:1])
        (report,) = self.resume_reports(trained)
        assert report.endswith("some of the first 69 records were changed")

    def test_older_checkpoint_has_the_digest_of_its_own_records(self, trained):
        (trained.path / "checkpoints/step-00000069/state.json").unlink()
        reports = self.resume_reports(trained)
        assert ["is skipped" in report for report in reports] == [True]
        assert len(trained.records()) == 46
        with trained.lock():  # and so does a checkpoint saved after rewinding
            trained.drop_after(46)
            trained.log(make_record(47))
            trained.save(make_checkpoint(47))
        assert self.resume_reports(trained) == []
        assert checkpoint.load(checkpoint.checkpoint_path(trained.path, 47)).records.count == 47

    def test_checkpoint_without_a_digest_is_accepted(self, trained):
        checkpoint.save(trained.path, make_checkpoint(70))
        assert checkpoint.load(checkpoint.checkpoint_path(trained.path, 70)).records is None
        self.rewrite(trained, lambda lines: lines[:20])
        assert self.resume_reports(trained) == []

    def test_partial_line_is_truncated_silently_but_damaged_lines_are_reported(self, trained):
        path = trained.path / "metrics.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"kind": "tr')
        assert self.resume_reports(trained) == []
        path.write_bytes(whole + b'{"kind": "tr\n\0\0\n{"ki')
        assert self.resume_reports(trained) == [f"{path}: 2 damaged lines were removed from its end"]
        path.write_bytes(whole + b"\n")
        assert self.resume_reports(trained) == [f"{path}: 1 damaged line was removed from its end"]
        assert path.read_bytes() == whole

    def test_save_does_not_read_the_log(self, trained, monkeypatch):
        with trained.lock():
            monkeypatch.setattr(metrics_log, "lines", lambda path: pytest.fail("the log was read"))
            trained.log(make_record(70))
            trained.save(make_checkpoint(70))
        monkeypatch.undo()
        assert self.resume_reports(trained) == []
