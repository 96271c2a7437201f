import json

import pytest

from clearhead.cli.main import main
from clearhead.lab.claims import CLAIMS


def test_the_table_names_every_claim_and_what_to_do_next(capsys):
    assert main(["lab"]) == 0
    out = capsys.readouterr().out
    assert all(slug in out for slug in CLAIMS)
    assert "clearhead lab temperature --help" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_the_promised_keys(capsys):
    assert main(["lab", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == list(CLAIMS)
    for row in rows:
        assert set(row) == {"id", "rows", "claim", "expected", "verdict", "numbers"}
        assert row["verdict"] == row["expected"]
        assert row["numbers"]


@pytest.mark.parametrize("slug", CLAIMS)
def test_one_claim_in_depth(capsys, slug):
    assert main(["lab", slug]) == 0
    out = capsys.readouterr().out
    assert f"expected: {CLAIMS[slug].expected}" in out
    assert "The mistake:" in out


def test_a_reader_may_play_and_an_unexpected_verdict_exits_1(capsys):
    assert main(["lab", "elongated-key", "--alpha", "10", "--seed", "4"]) == 0
    assert main(["lab", "additive-mask", "--low", "-10"]) == 1
    assert "Verdict: refuted (expected: holds)" in capsys.readouterr().out
    assert main(["lab", "own-token", "--same-projection", "true"]) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lab", "elongated"], "did you mean elongated-key?"),
        (["lab", "elongated-key", "--alhpa", "3"], "did you mean --alpha?"),
        (["lab", "elongated-key", "--alpha", "much"], "--alpha: invalid float value: 'much'"),
        (["lab", "own-token", "--same-projection", "maybe"], "--same-projection: invalid yes_or_no value"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
