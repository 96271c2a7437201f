import json

from clearhead.cli.main import main


def test_steps_from_a_file_with_options(told, tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"q": [[1, 0], [0, 1]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "beta": 0}))
    shared = json.loads(told("steps", "--file", str(path), "--json"))
    assert shared["steps"][-1]["matrices"]["z"]["numbers"] == [[2, 3], [2, 3]]
    sharp = json.loads(told("steps", "--file", str(path), "--beta", "inf", "--json"))
    assert sharp["steps"][-1]["matrices"]["z"]["numbers"] == [[1, 2], [3, 4]]
    causal = json.loads(told("steps", "--file", str(path), "--causal", "--json"))
    assert causal["steps"][-1]["matrices"]["z"]["numbers"] == [[1, 2], [2, 3]]


def test_a_negative_beta_needs_no_equals_sign(capsys):
    assert main(["steps", "--beta", "-inf"]) == 0
    assert main(["steps", "--beta", "-1e5"]) == 0
