import json

import pytest

from clearhead.cli.main import main
from clearhead.lab import all_claims, claim_summaries
from clearhead.lab import run as run_claim
from clearhead.lab.claim import Curve, Result, equals

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}


@pytest.mark.parametrize("argv", [["lab"], ["lab", "--run"]])
def test_table_lists_every_claim_and_next_commands(capsys, argv):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(slug in out for slug in CLAIMS)
    assert out.count("    demonstration  ") == sum(claim.kind == "demonstration" for claim in CLAIMS.values())
    assert out.count("    experiment  ") == sum(claim.kind == "experiment" for claim in CLAIMS.values())
    assert "clearhead lab temperature --help" in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("  holds  ") == (0 if argv == ["lab"] else sum(not claim.trains for claim in ALL))


def test_list_agrees_with_the_claims():
    fields = ("slug", "lesson", "statement", "kind", "trains")
    assert [[getattr(claim, name) for name in fields] for claim in claim_summaries()] == [
        [getattr(claim, name) for name in fields] for claim in ALL
    ]


JSON_KEYS = {
    *("slug", "lesson", "kind", "statement", "conditions", "misconception", "formula"),
    *("settings", "changed", "expected", "verdict", "checks"),
}


def test_json_lists_settings_and_changes(capsys):
    assert main(["lab", "hard-and-soft", "--beta", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["settings"] == {"seed": 0, "width": 8, "num_queries": 12, "num_keys": 6, "beta": 2.0}
    assert row["changed"] == ["beta"]
    assert row["verdict"] == "refuted"
    assert main(["lab", "hard-and-soft", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["settings"]["beta"] == "inf"  # JSON has no number for it


def test_json_keys(capsys):
    assert main(["lab", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["slug"] for row in rows] == list(CLAIMS)
    for row in rows:
        assert set(row) - {"curves"} == JSON_KEYS  # curves: only of claims that measured some
        assert row["kind"] in ("demonstration", "experiment")
        assert row["misconception"] == CLAIMS[row["slug"]].misconception
        assert row["formula"] == CLAIMS[row["slug"]].formula
        assert row["changed"] == []
        if CLAIMS[row["slug"]].trains:
            assert (row["verdict"], row["checks"]) == ("not run", [])
        else:
            assert row["verdict"] == row["expected"]
            assert row["checks"]


def test_training_claims_run_only_with_all(capsys, monkeypatch):
    asked = []

    def instead(slug):
        asked.append(slug)
        return Result((equals("one", 1, 1, 0),)) if CLAIMS[slug].expected == "holds" else run_claim(slug)

    monkeypatch.setattr("clearhead.lab.run", instead)
    assert main(["lab", "--run"]) == 0
    assert "positions                 not run" in capsys.readouterr().out
    assert asked == [slug for slug in CLAIMS if not CLAIMS[slug].trains]
    asked.clear()
    assert main(["lab", "--all"]) == 0
    assert "not run" not in capsys.readouterr().out
    assert asked == list(CLAIMS)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("slug", [slug for slug in CLAIMS if not CLAIMS[slug].trains])
def test_report_of_one_claim(capsys, elsewhere, slug):
    assert main(["lab", slug]) == 0
    out = capsys.readouterr().out
    assert f"expected: {CLAIMS[slug].expected}" in out
    assert f"{slug}: a" in out
    assert "Misconception:" in out
    figure = elsewhere / "figures" / f"{slug}.png"
    assert figure.exists()
    assert f"Figure:   figures/{slug}.png" in out


def test_training_claim_with_fewer_steps(capsys, elsewhere):
    assert main(["lab", "several-heads", "--steps", "2", "--num-seeds", "1", "--no-figure"]) == 0
    assert "The claim does not hold with these settings." in capsys.readouterr().out


def test_figure_path(capsys, elsewhere):
    assert main(["lab", "temperature", "--figure", "a/b.svg"]) == 0
    assert (elsewhere / "a" / "b.svg").read_text().startswith("<?xml")
    assert main(["lab", "temperature", "--json"]) == 0
    assert main(["lab", "temperature", "--no-figure"]) == 0
    assert not (elsewhere / "figures").exists()
    assert main(["lab", "temperature", "--figure", "b.gif"]) == 2
    assert main(["lab", "column-convention", "--figure", "c.png"]) == 0
    assert (elsewhere / "c.png").exists()


def test_json_contains_curves(capsys, monkeypatch):
    curve = Curve("right digits", "transformer", (4, 8), (1.0, 0.5))
    monkeypatch.setattr("clearhead.lab.run", lambda slug, **_: Result((equals("one", 1, 1, 0),), (curve,)))
    assert main(["lab", "recurrence", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["curves"] == [{"quantity": "right digits", "name": "transformer", "x": [4, 8], "y": [1.0, 0.5]}]


def test_write_errors_are_one_line(capsys, elsewhere):
    (elsewhere / "file").write_text("")
    (elsewhere / "folder.md").mkdir()
    assert main(["lab", "temperature", "--figure", "file/a.png"]) == 1
    assert main(["lab", "--page", "folder.md"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_training_claim_announces_its_duration(capsys, elsewhere):
    main(["lab", "several-heads", "--steps", "1", "--num-seeds", "1", "--json"])
    seconds = CLAIMS["several-heads"].seconds
    assert f"several-heads trains small models: about {seconds} seconds" in capsys.readouterr().err


@pytest.mark.parametrize("slug", CLAIMS)
def test_help_lists_the_settings(capsys, slug):
    assert main(["lab", slug, "--help"]) == 0
    out = capsys.readouterr().out
    assert "seed of the random inputs and weights" in " ".join(out.split())
    assert f'clearhead.lab.run("{slug}", seed=0' in out
    assert "--figure" in out
    assert max(map(len, out.splitlines())) <= 80


def test_table_and_help_mention_all_options(capsys):
    assert main(["lab", "--help"]) == 0
    assert main(["lab"]) == 0
    assert main(["lab", "--run"]) == 0
    out = capsys.readouterr().out
    for way in ("--run", "--all", "--json", "--page", 'clearhead.lab.run("temperature")', "--num-keys 3"):
        assert way in out


@pytest.mark.parametrize(
    ("argv", "holds"),
    [
        (["scaled-key", "--alpha", "10", "--seed", "4"], True),
        (["scaled-key", "--alpha", "1"], True),
        (["perturbed-key", "--width", "512"], True),
        (["hard-and-soft", "--beta", "50"], True),
        (["saturation", "--num-keys", "256"], True),
        (["hard-and-soft", "--beta", "1"], False),
        (["additive-mask", "--mask-value", "-10"], False),
        (["convolution", "--beta", "2"], False),
    ],
)
def test_changed_settings_exit_0(capsys, argv, holds):
    assert main(["lab", *argv, "--no-figure"]) == 0
    out = capsys.readouterr().out
    assert f"The claim {'holds' if holds else 'does not hold'} with these settings." in out
    assert "(default: " in out
    assert "Verdict" not in out


def test_unexpected_verdict_exits_1(capsys, monkeypatch):
    monkeypatch.setattr("clearhead.lab.run", lambda slug, **_: Result((equals("two", 2, 1, 0),)))
    assert main(["lab", "additive-mask", "--mask-value", "-10000", "--no-figure"]) == 1
    assert "Verdict:  refuted (expected: holds)" in capsys.readouterr().out
    assert main(["lab", "additive-mask", "--mask-value", "-10", "--no-figure"]) == 0
    assert main(["lab", "--run"]) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lab", "elongated-key"], "did you mean scaled-key?"),
        (["lab", "mask"], "no claim named 'mask'; did you mean additive-mask"),
        (["lab", "scaled-key", "--alhpa", "3"], "did you mean --alpha?"),
        (["lab", "scaled-key", "--alpha", "much"], "--alpha: invalid float value: 'much'"),
        (["lab", "self-weight", "--same-projection", "maybe"], "--same-projection: must be true or false, got 'maybe'"),
        (["lab", "temperature", "--num-keys", "0"], "num_keys of temperature must be from 1 to 10000, got 0"),
        (["lab", "positions", "--width", "7"], "width of positions must be a multiple of 2, got 7"),
        (["lab", "several-heads", "--steps", "0"], "steps of several-heads must be from 1 to 10000, got 0"),
        (["lab", "positions", "--figure", "a.gif"], "a figure is saved as .png, .svg, .pdf, got 'a.gif'; try a.png"),
        (["lab", "--page", "hand-out"], "--page must be a file that ends in .md, got 'hand-out'; try hand-out.md"),
    ],
)
def test_errors_are_one_line(capsys, argv, message):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
