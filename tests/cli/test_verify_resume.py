import pytest

from clearhead.cli.main import main
from clearhead.training.verify_resume import Verification


@pytest.fixture
def verdict(monkeypatch):
    """Replaces the real verification, which tests/training covers."""
    configs = []

    def fake(differences):
        def verify(config, folder, report):
            configs.append(config)
            report("training without interruption ...")
            return Verification(config.training.steps, 15, 12, differences)

        monkeypatch.setattr("clearhead.training.verify_resume.verify_resume", verify)
        return configs

    return fake


def test_identical_runs_are_exact(verdict, capsys):
    configs = verdict(())
    assert main(["verify-resume", "mnist", "--model.width", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("killed at step 15 of 30, resumed from the checkpoint of step 12\nexact: ")
    assert captured.err == "training without interruption ...\n"
    assert (configs[0].training.epochs, configs[0].training.checkpoint_every, configs[0].model.width) == (0, 4, 16)


def test_a_difference_is_named_and_exits_with_code_1(verdict, capsys):
    verdict(("head.weight",))
    assert main(["verify-resume", "mnist"]) == 1
    assert "NOT EXACT: 1 difference: head.weight" in capsys.readouterr().out


def test_help_without_a_recipe_and_suggestion_for_a_misspelled_one(capsys):
    assert main(["verify-resume"]) == 0
    assert "usage: clearhead verify-resume RECIPE" in capsys.readouterr().out
    assert main(["verify-resume", "mnits"]) == 2
    assert "did you mean mnist?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_killed_run_resumes_exactly(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", "reverse", "--model.dropout", "0.1"]) == 0
    assert "exact" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
