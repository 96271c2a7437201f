import pytest

from clearhead.cli.main import main
from clearhead.training.verify_resume import Verification


@pytest.fixture
def verdict(monkeypatch):
    """Answers for the real thing, which tests/training/test_verify.py is about."""
    asked = []

    def answer(differences):
        def verify(config, folder, report):
            asked.append(config)
            report("training undisturbed ...")
            return Verification(config.training.steps, 15, 12, differences)

        monkeypatch.setattr("clearhead.training.verify_resume.verify_resume", verify)
        return asked

    return answer


def test_exact(verdict, capsys):
    asked = verdict(())
    assert main(["verify-resume", "mnist", "--model.width", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("killed at step 15 of 30, resumed from the checkpoint of step 12\nexact: ")
    assert captured.err == "training undisturbed ...\n"
    assert (asked[0].training.epochs, asked[0].training.checkpoint_every, asked[0].model.width) == (0, 4, 16)


def test_different(verdict, capsys):
    verdict(("head.weight",))
    assert main(["verify-resume", "mnist"]) == 1
    assert "DIFFERENT in 1 places: head.weight" in capsys.readouterr().out


def test_help_and_mistakes(capsys):
    assert main(["verify-resume"]) == 0
    assert "usage: clearhead verify-resume RECIPE" in capsys.readouterr().out
    assert main(["verify-resume", "mnits"]) == 2
    assert "did you mean mnist?" in capsys.readouterr().err


@pytest.mark.slow
def test_for_real(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", "reverse", "--model.dropout", "0.1"]) == 0
    assert "exact" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
