import shutil
from pathlib import Path

import pytest

from clearhead.cli.main import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "required: RUN"),
        (
            "nowhere",
            "a run is a folder with a config.json, got nowhere; `clearhead train RECIPE --name NAME` makes one",
        ),
        ("nowhere --training.steps 5", "resume has no option --training.steps"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["resume", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_run_that_has_ended_says_what_it_reached(capsys, trained):
    before = (trained / "reverse/metrics.jsonl").read_bytes()
    assert main(["resume", str(trained / "reverse")]) == 0
    assert f"{trained / 'reverse'} is trained: " in capsys.readouterr().out
    assert (trained / "reverse/metrics.jsonl").read_bytes() == before


def test_a_run_without_a_test_says_that_it_has_ended(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "text", "mine")
    shutil.copy(trained.parent / "gone.txt", "my.txt")
    assert main(["resume", "mine"]) == 0
    assert capsys.readouterr().out.endswith("mine is trained\n")


def test_a_run_does_not_go_on_with_another_dictionary(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "pronounce", "mine")
    for name in ("my.dict", "my.test"):
        shutil.copy(trained.parent / name, name)
    assert main(["resume", "mine"]) == 0
    capsys.readouterr()
    Path("my.dict").write_text(Path("my.dict").read_text().replace("ab AE B", "ab B AE"))
    assert main(["resume", "mine"]) == 2
    assert "the data that it began with, got other bytes in my.dict; put the old ones back" in capsys.readouterr().err
    for other in ("zebra Z IY B\n" * 3, Path("my.dict").read_text() + "zebra Z IY B\n", "no dictionary", ""):
        Path("my.dict").write_text(other)  # too short, with other letters, ...: that it is another one comes first
        assert main(["resume", "mine"]) == 2
        assert "got other bytes in my.dict; put the old ones back" in capsys.readouterr().err
