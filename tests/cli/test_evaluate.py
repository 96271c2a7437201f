import json
import re
import shutil
from pathlib import Path

import pytest

from clearhead.cli.main import main


@pytest.fixture(autouse=True)
def in_the_folder_of_the_data(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)


def run_evaluate(capsys, *argv):
    assert main(["evaluate", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_word_and_phoneme_error_rates(capsys):
    out = run_evaluate(capsys, "runs/pronounce")
    assert "word error rate     " in out
    assert "phoneme error rate  " in out
    found = json.loads(run_evaluate(capsys, "runs/pronounce", "--part", "validation", "--beam", "2", "--json"))
    assert (found["part"], found["beam"], found["words"]) == ("validation", 2, 20)
    assert found["word_error_rate"] == found["wrong"] / 20


def test_evaluate_on_a_user_dictionary(capsys, tmp_path):
    (tmp_path / "own.dict").write_text("aaaaa AE1 B\nbbbbb B AE1\n")
    found = json.loads(run_evaluate(capsys, "runs/pronounce", "--test", str(tmp_path / "own.dict"), "--json"))
    assert (found["part"], found["words"], found["phones"]) == (str(tmp_path / "own.dict"), 2, 4)


def test_overlap_with_the_training_words_is_reported(capsys, tmp_path, monkeypatch):
    few, run = tmp_path / "few.dict", Path("runs/pronounce").resolve()
    few.write_text("\n".join(Path("my.dict").read_text().split("\n")[:12]))
    assert main(["evaluate", str(run), "--test", str(few), "--beam", "1"]) == 0
    match = re.fullmatch(
        r"warning: .*pronounce was trained on (\d+) of the words of .* \(12\): .*\n", capsys.readouterr().err
    )
    assert 0 < int(match[1]) <= 12
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run), "--test", str(few), "--beam", "1"]) == 0
    assert "its data is missing or has changed" in capsys.readouterr().err


def test_ensemble_of_a_run_with_itself_equals_the_run(capsys, tmp_path):
    alone, twice = (
        json.loads(run_evaluate(capsys, "runs/pronounce", *more, "--json"))
        for more in ((), ("--ensemble", "runs/pronounce"))
    )
    assert twice == alone


def test_overlap_with_the_training_words_of_an_ensemble_member_is_reported(capsys, tmp_path, forge):
    """Its split may differ: here it was trained on nearly all validation words of the first run."""
    other = tmp_path / "other"
    shutil.copytree("runs/pronounce", other)
    config = json.loads((other / "config.json").read_text())
    config["data"]["validation"] = 1
    (other / "config.json").write_text(json.dumps(config))
    forge(other, config=config)
    assert main(["evaluate", "runs/pronounce", "--part", "validation", "--ensemble", str(other)]) == 0
    assert re.match(r"warning: .*other was trained on 19 of the validation words \(20\)", capsys.readouterr().err)


def test_long_evaluation_is_announced_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr("clearhead.cli.evaluate.MANY_WORDS", 10)
    assert main(["evaluate", "runs/pronounce", "--part", "validation", "--beam", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["words"] == 20
    assert err.startswith("Evaluating 20 words")


def test_loss_and_accuracy_of_other_objectives(capsys):
    out = run_evaluate(capsys, "runs/reverse")
    assert "accuracy  " in out
    assert set(json.loads(run_evaluate(capsys, "runs/words", "--json"))) == {"part", "loss", "accuracy", "exact_match"}


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
def test_evaluate_errors_are_one_line(capsys, argv, message):
    assert main(["evaluate", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["evaluate", "predictions"])
def test_evaluating_an_interrupted_run_warns(capsys, tmp_path, command):
    run = tmp_path / "half"
    shutil.copytree("runs/reverse", run)
    config = json.loads((run / "config.json").read_text())
    config["training"]["steps"] = 30
    (run / "config.json").write_text(json.dumps(config))
    assert main([command, str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["part"] == "test"
    assert f"warning: {run} was interrupted at step 12 of 30; using its best checkpoint so far, of step 12" in err
    assert main([command, "runs/reverse", "--json"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "look"])
def test_predicting_with_an_interrupted_run_warns(capsys, tmp_path, command):
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


def test_confusion_figure_is_saved_in_the_run_or_at_out(trained, tmp_path, capsys):
    assert main(["confusion", str(trained / "mnist")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{trained / 'mnist/figures/confusion.png'}\n"
    assert err == "Evaluating the test set, then drawing 1 figure ...\n"
    assert main(["confusion", str(trained / "mnist"), "--out", str(tmp_path / "c.svg")]) == 0
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_confusion_errors_are_one_line(trained, capsys):
    assert main(["confusion", str(trained / "sum")]) == 2
    assert "a confusion matrix needs classes" in capsys.readouterr().err
    assert main(["confusion", str(trained / "mnist"), "--out", "a.jpg"]) == 2
    assert "a figure is saved as .png, .svg, .pdf, got 'a.jpg'" in capsys.readouterr().err


def run_predictions(capsys, *argv):
    assert main(["predictions", *map(str, argv)]) == 0
    return capsys.readouterr()


def test_predictions_on_images_are_listed_and_drawn(trained, capsys):
    out, err = run_predictions(capsys, trained / "mnist", "--n", 3)
    figure = trained / "mnist/figures/predictions.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert out.splitlines()[-1] == str(figure)
    assert err == "Evaluating the test set ...\nDrawing 1 figure ...\n"
    assert "The first 3 images of the test set:" in out
    assert "of 10,000 images, the most confident first:" in out
    assert f"clearhead look {trained / 'mnist'} --sample " in out


def test_predictions_metrics_equal_those_of_evaluate(trained, capsys, tmp_path):
    for part in ("test", "validation"):
        assert main(["evaluate", str(trained / "mnist"), "--part", part]) == 0
        evaluated = capsys.readouterr().out
        out = run_predictions(capsys, trained / "mnist", "--part", part, "--out", tmp_path / "a.png").out
        assert out.startswith(evaluated)


def test_predictions_json_names_the_figure_that_is_drawn(trained, capsys, tmp_path):
    out, _ = run_predictions(capsys, trained / "mnist", "--n", 2, "--out", tmp_path / "a.svg", "--json")
    found = json.loads(out)
    assert found["figure"] == str(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").is_file()
    assert len(found["first"]) == len(found["mistakes"]) == 2
    assert set(found["mistakes"][0]) == {"index", "input", "predicted", "actual", "probability", "correct"}
    assert found["accuracy"] == pytest.approx(1 - found["wrong"] / found["total"])


@pytest.mark.parametrize("run", ["reverse", "sum", "repeat", "words", "pronounce"])
def test_predictions_on_sequences_are_a_table_without_a_figure(trained, capsys, monkeypatch, run):
    monkeypatch.chdir(trained.parent)
    out, err = run_predictions(capsys, f"runs/{run}", "--n", 2)
    assert "predicted" in out
    assert "actual" in out
    assert "wrong" in out.lower()
    assert "Drawing" not in err
    assert not (trained / run / "figures/predictions.png").exists()


def test_predictions_of_a_text_run_need_the_validation_part(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    assert "tokens, the most confident first:" in run_predictions(capsys, trained / "text", "--part", "validation").out
    assert main(["predictions", str(trained / "text")]) == 2
    assert "has no test examples; try --part validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("RUN/reverse --out a.png", "--out needs a run on images, got"),
        ("RUN/mnist --out a.jpg", "a figure is saved as .png, .svg, .pdf, got 'a.jpg'"),
        ("RUN/mnist --beam 3", "--beam needs a run of pronounce, got"),
        ("RUN/mnist --n 0", "at least 1, got 0"),
        ("RUN/mnits", "did you mean"),
    ],
)
def test_predictions_errors_are_one_line(trained, capsys, argv, message):
    assert main(["predictions", *argv.replace("RUN", str(trained)).split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
