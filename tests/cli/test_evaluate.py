import json
import re
import shutil
from pathlib import Path

import pytest

from clearhead.cli.main import main


@pytest.fixture(autouse=True)
def beside_the_data(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)


def told(capsys, *argv):
    assert main(["evaluate", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_error_rates_of_words(capsys):
    out = told(capsys, "runs/pronounce")
    assert "word error rate     " in out
    assert "phoneme error rate  " in out
    found = json.loads(told(capsys, "runs/pronounce", "--part", "validation", "--beam", "2", "--json"))
    assert (found["part"], found["beam"], found["words"]) == ("validation", 2, 20)
    assert found["word_error_rate"] == found["wrong"] / 20


def test_a_dictionary_of_ones_own(capsys, tmp_path):
    (tmp_path / "own.dict").write_text("aaaaa AE1 B\nbbbbb B AE1\n")
    found = json.loads(told(capsys, "runs/pronounce", "--test", str(tmp_path / "own.dict"), "--json"))
    assert (found["part"], found["words"], found["phones"]) == (str(tmp_path / "own.dict"), 2, 4)


def test_words_that_were_learnt_are_told_of(capsys, tmp_path, monkeypatch):
    few, run = tmp_path / "few.dict", Path("runs/pronounce").resolve()
    few.write_text("\n".join(Path("my.dict").read_text().split("\n")[:12]))
    assert main(["evaluate", str(run), "--test", str(few), "--beam", "1"]) == 0
    told = re.fullmatch(
        r"warning: .*pronounce was trained on (\d+) of the words of .* \(12\): .*\n", capsys.readouterr().err
    )
    assert 0 < int(told[1]) <= 12
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run), "--test", str(few), "--beam", "1"]) == 0
    assert "its data is missing or has changed" in capsys.readouterr().err


def test_runs_answer_together(capsys, tmp_path):
    alone, twice = (
        json.loads(told(capsys, "runs/pronounce", *more, "--json")) for more in ((), ("--ensemble", "runs/pronounce"))
    )
    assert twice == alone


def test_words_that_another_run_learnt_are_told_of(capsys, tmp_path, forge):
    """Its parts may be other ones: here it has learnt nearly all that the first is validated on."""
    other = tmp_path / "other"
    shutil.copytree("runs/pronounce", other)
    config = json.loads((other / "config.json").read_text())
    config["data"]["validation"] = 1
    (other / "config.json").write_text(json.dumps(config))
    forge(other, config=config)
    assert main(["evaluate", "runs/pronounce", "--part", "validation", "--ensemble", str(other)]) == 0
    assert re.match(r"warning: .*other was trained on 19 of the validation words \(20\)", capsys.readouterr().err)


def test_a_long_wait_is_announced_beside_the_answer(capsys, monkeypatch):
    monkeypatch.setattr("clearhead.cli.evaluate.MANY_WORDS", 10)
    assert main(["evaluate", "runs/pronounce", "--part", "validation", "--beam", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["words"] == 20
    assert err.startswith("Evaluating 20 words")


def test_loss_and_accuracy_of_any_other_run(capsys):
    out = told(capsys, "runs/reverse")
    assert "accuracy  " in out
    assert set(json.loads(told(capsys, "runs/words", "--json"))) == {"part", "loss", "accuracy", "exact_match"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("runs/reverse --beam 3", "--test, --beam and --ensemble need a run of pronounce, got runs/reverse"),
        ("runs/pronounce --beam 0", "beam size must be from 1 to 1000, got 0"),
        ("runs/pronounce --part trian", "invalid choice: 'trian'"),
        ("runs/nothing", "a run is a folder with a config.json"),
        ("runs/pronounce --ensemble runs/nothing", "a run is a folder with a config.json"),
        ("runs/pronounce --ensemble runs/words", "an ensemble needs runs of the recipe pronounce, got runs/words"),
        ("runs/reverse --ensemble runs/reverse", "--ensemble need a run of pronounce, got runs/reverse"),
        (
            "runs/pronounce --part test --test my.test",
            "--part and --test exclude each other, got --part test and --test my.test",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert main(["evaluate", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["evaluate", "predictions"])
def test_a_run_that_has_not_ended_is_said_to_be_unfinished(capsys, tmp_path, command):
    run = tmp_path / "half"
    shutil.copytree("runs/reverse", run)
    config = json.loads((run / "config.json").read_text())
    config["training"]["steps"] = 30
    (run / "config.json").write_text(json.dumps(config))
    assert main([command, str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["part"] == "test"
    assert f"warning: {run} was interrupted at step 12 of 30; its best checkpoint so far is that of step 12" in err
    assert main([command, "runs/reverse", "--json"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "look"])
def test_predictions_of_a_run_that_has_not_ended_are_said_to_be_so(capsys, tmp_path, command):
    run = tmp_path / "half"
    shutil.copytree("runs/reverse", run)
    config = json.loads((run / "config.json").read_text())
    config["training"]["steps"] = 30
    (run / "config.json").write_text(json.dumps(config))
    ids = ["--ids", *"3141592653589793"]
    assert main([command, str(run), *ids]) == 0
    assert f"warning: {run} was interrupted at step 12 of 30" in capsys.readouterr().err
    assert main([command, "runs/reverse", *ids]) == 0
    assert "warning" not in capsys.readouterr().err
