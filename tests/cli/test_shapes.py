import json

import pytest

from clearhead.models.presets import PRESETS
from clearhead.models.shapes import shapes


def test_shapes_lists_what_can_be_asked_for(told):
    out = told("shapes")
    assert all(name in out for name in ("attention", *PRESETS))
    assert told("shapes", "--help") == out
    assert max(map(len, out.splitlines())) <= 80


def test_help_of_a_model_shows_its_fields_words_and_values(told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = told("shapes", "bert_cifar", "--help")
    assert "--n-heads N, --heads N" in out
    assert "(now 8)" in out
    assert "layer norm on the embeddings, as BERT does (now yes)" in " ".join(out.split())
    assert "--length" not in out
    assert "--source-length" in told("shapes", "transformer_base", "--help")


def test_shapes_json_equals_the_function(told):
    data = json.loads(told("shapes", "reverse", "--batch", "3", "--length", "7", "--json"))
    assert data == json.loads(json.dumps({"name": "reverse", **shapes("reverse", batch=3, length=7).to_dict()}))


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--width 96", "width", 96),
        ("--heads 2", "n_heads", 2),
        ("--n_heads=2", "n_heads", 2),
        ("--hidden none", "hidden", None),
        ("--beta inf", "beta", "inf"),
        ("--beta -0.5", "beta", -0.5),
        ("--norm post", "norm", "post"),
        ("--image-size 14x28", "image_size", [14, 28]),
        ("--image-size 14", "image_size", 14),
        ("--no-output-projection", "output_projection", False),
        ("--embedding-norm", "embedding_norm", True),
    ],
)
def test_any_field_can_be_changed(told, argv, field, value):
    data = json.loads(told("shapes", "small-mnist", *argv.split(), "--depth", "1", "--json"))
    assert data["config"][field] == value
    assert data["config"]["depth"] == 1


def test_the_name_may_come_last(told):
    assert told("shapes", "--width", "16", "reverse") == told("shapes", "reverse", "--width", "16")


def test_r1_3_and_r0_1_on_the_command_line(told):
    def attention(options):
        return told("shapes", "attention", *options.split())

    heads = attention("--width 768 --heads 12 --tokens 5")
    assert all(shape in heads for shape in ("[1,5,768]", "[1,5,12,64]", "[1,12,5,5]"))
    single = attention("--width 256 --key-width 64 --value-width 256 --tokens 5")
    assert "[256,64]" in single
    columns = attention("--width 768 --tokens 6 --columns")
    assert "[6,6]" in columns
    assert "[1," not in columns


def test_source_and_target_may_differ(told):
    argv = "shapes transformer_base --depth 1 --length 7 --source-length 9 --every-block"
    assert "[1,8,7,9]" in told(*argv.split())
