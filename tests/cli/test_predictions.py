import json

import pytest

from clearhead.cli.main import main


def told(capsys, *argv):
    assert main(["predictions", *map(str, argv)]) == 0
    return capsys.readouterr()


def test_images_are_listed_and_drawn(trained, capsys):
    out, err = told(capsys, trained / "mnist", "--n", 3)
    figure = trained / "mnist/figures/predictions.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert out.splitlines()[-1] == str(figure)
    assert err == "Evaluating the test set ...\nDrawing 1 figure ...\n"
    assert "The first 3 images of the test set:" in out
    assert "of 10,000 images, the most confident first:" in out
    assert f"clearhead look {trained / 'mnist'} --sample " in out


def test_the_numbers_are_those_of_evaluate(trained, capsys, tmp_path):
    for part in ("test", "validation"):
        assert main(["evaluate", str(trained / "mnist"), "--part", part]) == 0
        evaluated = capsys.readouterr().out
        out = told(capsys, trained / "mnist", "--part", part, "--out", tmp_path / "a.png").out
        assert out.startswith(evaluated)


def test_json_is_for_programs_and_the_figure_is_drawn_all_the_same(trained, capsys, tmp_path):
    out, _ = told(capsys, trained / "mnist", "--n", 2, "--out", tmp_path / "a.svg", "--json")
    found = json.loads(out)
    assert found["figure"] == str(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").is_file()
    assert len(found["first"]) == len(found["mistakes"]) == 2
    assert set(found["mistakes"][0]) == {"index", "input", "predicted", "actual", "probability", "correct"}
    assert found["accuracy"] == pytest.approx(1 - found["wrong"] / found["total"])


@pytest.mark.parametrize("run", ["reverse", "sum", "repeat", "words", "pronounce"])
def test_sequences_are_a_table_without_a_figure(trained, capsys, monkeypatch, run):
    monkeypatch.chdir(trained.parent)
    out, err = told(capsys, f"runs/{run}", "--n", 2)
    assert "predicted" in out
    assert "actual" in out
    assert "wrong" in out.lower()
    assert "Drawing" not in err
    assert not (trained / run / "figures/predictions.png").exists()


def test_a_text_is_judged_on_its_validation_part(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    assert "tokens, the most confident first:" in told(capsys, trained / "text", "--part", "validation").out
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
def test_mistakes_are_one_line(trained, capsys, argv, message):
    assert main(["predictions", *argv.replace("RUN", str(trained)).split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
