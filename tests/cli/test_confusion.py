from clearhead.cli.main import main


def test_a_picture_among_the_runs_figures_or_elsewhere(trained, tmp_path, capsys):
    assert main(["confusion", str(trained / "mnist")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{trained / 'mnist/figures/confusion.png'}\n"
    assert err == "Evaluating the test set, then drawing 1 figure ...\n"
    assert main(["confusion", str(trained / "mnist"), "--out", str(tmp_path / "c.svg")]) == 0
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_mistakes_are_one_line(trained, capsys):
    assert main(["confusion", str(trained / "sum")]) == 2
    assert "a confusion matrix needs classes" in capsys.readouterr().err
    assert main(["confusion", str(trained / "mnist"), "--out", "a.jpg"]) == 2
    assert "a figure is saved as .png, .svg, .pdf, got 'a.jpg'" in capsys.readouterr().err
