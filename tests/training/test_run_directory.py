import os
import signal
import subprocess
import sys
import time

import pytest

from clearhead.training.run_directory import RunDirectory
from support.runs import RUN_CONFIG, make_checkpoint, make_record


class TestCreate:
    def test_open_returns_the_config_of_create(self, run):
        assert run.config == RUN_CONFIG
        assert RunDirectory.open(run.path).config == RUN_CONFIG
        assert run.latest_checkpoint() is run.best_checkpoint() is None
        assert run.records() == []
        assert os.listdir(run.path.parent) == ["mine"]

    def test_existing_run_is_never_overwritten(self, run):
        with pytest.raises(ValueError, match=r"a new run needs a new folder, got .*mine.*`clearhead resume .*mine`"):
            RunDirectory.create(run.path, {"other": 1})
        assert RunDirectory.open(run.path).config == RUN_CONFIG

    def test_existing_file_is_never_overwritten(self, tmp_path):
        (tmp_path / "mine").write_text("poem")
        with pytest.raises(ValueError, match="needs a new folder"):
            RunDirectory.create(tmp_path / "mine", RUN_CONFIG)
        assert (tmp_path / "mine").read_text() == "poem"

    def test_empty_folder_can_become_a_run(self, tmp_path):
        (tmp_path / "mine").mkdir()
        assert RunDirectory.create(tmp_path / "mine", RUN_CONFIG).config == RUN_CONFIG

    def test_concurrent_creation_succeeds_only_once(self, tmp_path, monkeypatch):
        rename = os.rename

        def rename_after_a_rival(old, new):
            monkeypatch.setattr(os, "rename", rename)
            RunDirectory.create(tmp_path / "mine", {"faster": 1})
            rename(old, new)

        monkeypatch.setattr(os, "rename", rename_after_a_rival)
        with pytest.raises(ValueError, match="needs a new folder"):
            RunDirectory.create(tmp_path / "mine", RUN_CONFIG)
        assert RunDirectory.open(tmp_path / "mine").config == {"faster": 1}
        assert os.listdir(tmp_path) == ["mine"]

    def test_creation_is_atomic_at_every_system_call(self, tmp_path, faults):
        for at in range(100):
            path = tmp_path / f"run{at}"
            failure, reached = faults.during(lambda p=path: RunDirectory.create(p, RUN_CONFIG), at)
            if not reached:
                break
            if failure is not None:
                assert "the run was not created: No space left on device" in str(failure)
            assert RunDirectory.open(path).config == RUN_CONFIG if path.exists() else failure is not None
        assert at > 8
        assert RunDirectory.open(path).config == RUN_CONFIG

    def test_file_in_place_of_the_parent_folder_is_an_error(self, tmp_path):
        (tmp_path / "runs").write_text("")
        with pytest.raises(OSError, match="the run was not created"):
            RunDirectory.create(tmp_path / "runs/mine", RUN_CONFIG)


class TestOpen:
    def test_unknown_run_suggests_the_nearest_name(self, run):
        with pytest.raises(
            LookupError, match=r"a run is a folder with a config.json, got .*mime; did you mean .*mine\?"
        ):
            RunDirectory.open(run.path.with_name("mime"))
        with pytest.raises(LookupError, match="`clearhead train RECIPE --name NAME` creates one"):
            RunDirectory.open(run.path.with_name("other"))

    @pytest.mark.parametrize("content", ["{", "[1]", '{"a": NaN}'])
    def test_malformed_config_is_an_error(self, run, content):
        (run.path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config.json must be "):
            RunDirectory.open(run.path)


class TestLock:
    def test_only_the_lock_owner_writes(self, run):
        for write in (
            lambda: run.log(make_record(1)),
            lambda: run.save(make_checkpoint(1)),
            lambda: run.drop_after(1),
            lambda: run.mark_best(1),
        ):
            with pytest.raises(AssertionError, match="only the owner writes"):
                write()

    def test_second_lock_is_refused_and_the_lock_is_released(self, run):
        with run.lock():
            with pytest.raises(OSError, match=f"locked by process {os.getpid()}.*mine"):
                RunDirectory.open(run.path).lock().__enter__()
            assert run.is_owned
        with RunDirectory.open(run.path).lock():
            pass

    def test_exception_of_the_owner_propagates_and_releases_the_lock(self, run):
        with pytest.raises(OSError, match=r"^mine$") as caught, run.lock():
            raise OSError("mine")
        assert caught.value.filename is None
        assert not run.is_owned
        with run.lock():
            pass

    def test_system_without_flock_is_an_error(self, run, monkeypatch):
        monkeypatch.setitem(sys.modules, "fcntl", None)
        with pytest.raises(OSError, match="flock"):
            run.lock().__enter__()

    @pytest.mark.slow
    def test_lock_excludes_other_processes_until_the_owner_is_killed(self, run):
        code = (
            "import sys, time; from clearhead.training.run_directory import RunDirectory\n"
            "with RunDirectory.open(sys.argv[1]).lock(): print('mine', flush=True); time.sleep(100)"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout.readline() == "mine\n"
            with pytest.raises(OSError, match=f"locked by process {owner.pid}"):
                run.lock().__enter__()
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            with run.lock():
                pass

    def test_lock_cleans_up_after_a_killed_owner(self, run):
        with run.lock():
            run.log(make_record(1))
            run.save(make_checkpoint(1))
        (run.path / "checkpoints/saving-step-00000002").mkdir()
        (run.path / ".metrics.jsonl.0123.part").write_text("half")
        (run.path / "snapshots").mkdir()
        (run.path / "snapshots/.step-00000004.safetensors.0123.part").write_text("half")
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "tr')
        with run.lock():
            assert os.listdir(run.path / "checkpoints") == ["step-00000001"]
            assert not [*run.path.glob(".*"), *run.path.glob("snapshots/.*")]
            run.log(make_record(2))
        assert run.records() == [make_record(1), make_record(2)]


class TestLeftovers:
    """Files that a killed process left beside a run or among its figures."""

    OLD = 1e9
    """seconds since 1970"""

    def abandon(self, run, name, age=OLD):
        folder = run.path.parent / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text("{")
        os.utime(folder, (age, age))
        return folder

    @pytest.mark.parametrize("when", ["create", "lock"])
    def test_abandoned_creations_are_deleted(self, run, when):
        for name in (".other.new-0123abcd", ".mine.new-00000000"):
            self.abandon(run, name)
        if when == "create":
            RunDirectory.create(run.path.with_name("second"), RUN_CONFIG)
        else:
            with run.lock():
                pass
        assert not list(run.path.parent.glob(".*"))

    def test_recent_creation_in_progress_is_kept(self, run):
        folder = self.abandon(run, ".other.new-0123abcd", time.time() - 60)
        with run.lock():
            assert folder.is_dir()

    def test_folders_of_others_are_kept(self, run, tmp_path):
        full = self.abandon(run, ".a.new-0123abcd")
        (full / "thesis.tex").write_text("precious")
        other = self.abandon(run, ".b.new-0123")
        saved = self.abandon(run, ".c.new-0123abcd")
        (saved / "checkpoints/step-00000001").mkdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "config.json").write_text("precious")
        link = run.path.parent / ".d.new-0123abcd"
        link.symlink_to(elsewhere)
        os.utime(link, (self.OLD, self.OLD), follow_symlinks=False)
        for folder in (full, saved):
            os.utime(folder, (self.OLD, self.OLD))
        with run.lock():
            pass
        assert (full / "thesis.tex").exists()
        assert (full / "config.json").exists()
        assert (other / "config.json").exists()
        assert (saved / "config.json").exists()
        assert (elsewhere / "config.json").exists()

    def test_old_partial_figures_are_deleted(self, run):
        (run.path / "figures/look").mkdir(parents=True)
        new = run.path / "figures/.curves.png.0123.part"
        old = [run.path / "figures/.old.png.0123.part", run.path / "figures/look/.old.png.0123.part"]
        for path in (new, *old):
            path.write_text("half")
        for path in old:
            os.utime(path, (self.OLD, self.OLD))
        with run.lock():
            assert new.exists()
            assert not any(path.exists() for path in old)

    def test_folder_named_like_a_partial_file_is_kept(self, run):
        (run.path / ".mine.part").mkdir()
        with run.lock():
            pass
        assert (run.path / ".mine.part").is_dir()


def test_lock_message_shows_no_foreign_text(run):
    with run.lock():
        (run.path / "lock").write_text("\x1b]0;t\x07")
        with pytest.raises(OSError, match="locked by another process"):
            RunDirectory.open(run.path).lock().__enter__()


def test_run_that_cannot_save_checkpoints_is_refused_before_training(run):
    (run.path / "checkpoints").rmdir()
    (run.path / "checkpoints").write_text("in the way")
    with pytest.raises(FileExistsError), run.lock():
        pytest.fail("the run was locked for training")
