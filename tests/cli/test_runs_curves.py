import json

import pytest

from clearhead.cli.main import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, n_epochs in (("short", 2), ("long", 5)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
        records = [
            {"kind": k, "epoch": e, "loss": 1 / e} for e in range(1, n_epochs + 1) for k in ("train", "validation")
        ]
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_figure_of_one_run_is_saved_in_its_figures_folder(runs, capsys):
    assert main(["curves", "runs/long"]) == 0
    assert capsys.readouterr().out == "runs/long/figures/curves.png\n"
    assert (runs / "runs/long/figures/curves.png").stat().st_size > 1000


def test_several_runs_and_windows_are_drawn_in_any_format(runs, capsys):
    assert main(["curves", "runs/short", "runs/long"]) == 0
    assert (runs / "curves.png").exists()
    assert main(["curves", "runs/short", "runs/long", "--epochs", "2", "5", "--out", "a/b.svg"]) == 0
    assert (runs / "a/b.svg").read_text().startswith("<?xml")


def test_bare_name_is_found_in_runs(runs, capsys):
    assert main(["curves", "long"]) == 0
    assert capsys.readouterr().out == "runs/long/figures/curves.png\n"


def test_figure_of_bare_records_is_saved_in_the_current_folder(runs, capsys):
    (runs / "docs/runs/kept").mkdir(parents=True)
    (runs / "runs/long/metrics.jsonl").rename(runs / "docs/runs/kept/metrics.jsonl")
    for given in ("docs/runs/kept", "docs/runs/kept/metrics.jsonl"):
        assert main(["curves", given, "--epochs", "2", "4"]) == 0
        assert capsys.readouterr().out == "curves.png\n"
    assert [path.name for path in (runs / "docs/runs/kept").iterdir()] == ["metrics.jsonl"]


def test_window_beyond_the_end_is_clipped_with_a_warning(runs, capsys):
    assert main(["curves", "long", "--epochs", "3", "10", "30"]) == 0
    expected = "warning: the run has 5 epochs so far; panels up to epoch 10, 30 end there\n"
    assert capsys.readouterr().err == expected
    assert main(["curves", "short", "long", "--epochs", "3", "5", "--panels", "--log", "--smooth", "0.5"]) == 0
    assert capsys.readouterr().err == ""


def test_csv_is_printed_or_written_instead_of_a_figure(runs, capsys):
    assert main(["curves", "short", "long", "--csv", "-"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["run,kind,step,epoch,loss,accuracy", "short,train,,1,1.0,"]
    assert len(out.splitlines()) == 1 + 4 + 10
    assert main(["curves", "short", "long", "--csv", "a/numbers.csv"]) == 0
    assert (runs / "a/numbers.csv").read_text() == out
    assert not (runs / "curves.png").exists()
    assert main(["curves", "long", "--epochs", "2", "--csv", "-"]) == 0
    assert (
        len(capsys.readouterr().out.splitlines()) == 1 + 1 + 4
    )  # the file name printed by the command before, then the table


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["runs/lnog"], "did you mean runs/long?"),
        ([], "required: RUN"),
        (["runs/long", "--out", "a.jpg"], "a figure is saved as .png, .svg, .pdf, got 'a.jpg'; try a.png"),
        (["--epochs", "10", "runs/long"], "got 'runs/long'; name the runs before --epochs"),
        (["runs/long", "--epochs", "0"], "from 1 to 999999999, got '0'"),
        (["runs/long", "--epochs", "9" * 400], "from 1 to 999999999, got '999"),
        (["runs/long", "--epoch", "3"], "did you mean --epochs?"),
        (["lnog"], "did you mean runs/long?"),
        (["runs/long", "--smooth", "0"], "must be a positive number of epochs, got '0'"),
        (["runs/long", "--smooth", "nan"], "must be a positive number of epochs, got 'nan'"),
    ],
)
def test_errors_are_one_line(runs, capsys, argv, message):
    assert main(["curves", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_unwritable_figure_is_a_one_line_error(runs, capsys):
    (runs / "a").write_text("in the way")
    assert main(["curves", "runs/long", "--out", "a/b.png"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_csv_does_not_overwrite_the_records_of_a_run(runs, capsys):
    records = (runs / "runs/short/metrics.jsonl").read_bytes()
    assert main(["curves", "long", "--csv", "runs/short/metrics.jsonl"]) == 2
    assert "must be a .csv file, or - for stdout, got 'runs/short/metrics.jsonl'" in capsys.readouterr().err
    assert (runs / "runs/short/metrics.jsonl").read_bytes() == records
