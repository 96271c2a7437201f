import json
import re
import sys

import pytest

from clearhead.cli.main import main
from clearhead.models.presets import PRESETS
from clearhead.models.shapes import shapes
from clearhead.recipes import RECIPES, config_of
from clearhead.training.run_directory import RunDirectory

FILE = """
from torch import nn

print("the user's own words")

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

embedding = nn.Embedding(5, 3)
"""


def test_shapes_lists_presets_recipes_and_forms(run_cli):
    out = run_cli("shapes")
    assert all(name in out for name in ("attention", *PRESETS, *RECIPES, "runs/NAME", "FILE.py:NAME"))
    assert run_cli("shapes", "--help") == out
    assert not re.search(r"R\d\.\d", out)  # codes that a reader cannot look up
    assert max(map(len, out.splitlines())) <= 80


def test_help_of_a_model_shows_its_fields_and_defaults(run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run_cli("shapes", "bert_cifar10", "--help")
    assert "--num-heads N, --heads N" in out
    assert "(default: 8)" in out
    assert "normalize the embeddings, as BERT does (default: yes)" in " ".join(out.split())
    assert "--length" not in out
    assert "--source-length" in run_cli("shapes", "transformer_base", "--help")


def test_shapes_json_equals_the_function(run_cli):
    data = json.loads(run_cli("shapes", "reverse", "--batch", "3", "--length", "7", "--json"))
    assert data == json.loads(
        json.dumps({"name": "reverse", "source": "preset", **shapes("reverse", batch=3, length=7).to_dict()})
    )


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--width 96", "width", 96),
        ("--heads 2", "num_heads", 2),
        ("--num_heads=2", "num_heads", 2),
        ("--mlp-dim none", "mlp_dim", None),
        ("--beta inf", "beta", "inf"),
        ("--beta -0.5", "beta", -0.5),
        ("--norm post", "norm", "post"),
        ("--image-size 14x28", "image_size", [14, 28]),
        ("--image-size 14", "image_size", 14),
        ("--no-output-projection", "output_projection", False),
        ("--embed-norm", "embed_norm", True),
    ],
)
def test_any_config_field_can_be_changed(run_cli, argv, field, value):
    data = json.loads(run_cli("shapes", "vit-mnist", *argv.split(), "--depth", "1", "--json"))
    assert data["config"][field] == value
    assert data["config"]["depth"] == 1


def test_name_may_come_last(run_cli):
    assert run_cli("shapes", "--width", "16", "reverse") == run_cli("shapes", "reverse", "--width", "16")


def test_attention_shapes_on_the_command_line(run_cli):
    def attention(options):
        return run_cli("shapes", "attention", *options.split())

    heads = attention("--width 768 --heads 12 --tokens 5")
    assert all(shape in heads for shape in ("[1,5,768]", "[1,5,12,64]", "[1,12,5,5]"))
    single = attention("--width 256 --key-width 64 --value-width 256 --tokens 5")
    assert "[256,64]" in single
    columns = attention("--width 768 --tokens 6 --columns")
    assert "[6,6]" in columns
    assert "[1," not in columns


def test_source_and_target_lengths_may_differ(run_cli):
    argv = "shapes transformer_base --depth 1 --length 7 --source-length 9 --every-block"
    assert "[1,8,7,9]" in run_cli(*argv.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with an untrained run and a module of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shapes_users.py").write_text(FILE)
    config = config_of("mnist", {"model.width": 24, "model.depth": 1, "model.num_heads": 3})
    RunDirectory.create(tmp_path / "runs" / "mine", config.to_dict())
    yield tmp_path
    sys.modules.pop("shapes_users", None)


@pytest.mark.parametrize("name", ["mnist", "cifar10_bert", "pronounce-fast", "odd-one-out"])
def test_shapes_of_a_recipe(run_cli, name):
    data = json.loads(run_cli("shapes", name, "--json"))
    model = RECIPES[name.replace("_", "-")].make().model
    assert data["source"] == "recipe"
    assert data["parameters"] == shapes(model).parameters
    assert run_cli("shapes", name).startswith(f"{name.replace('_', '-')}: the model of the recipe\n")
    changed = json.loads(run_cli("shapes", name, "--depth", "1", "--json"))
    assert changed["config"]["depth"] == 1


def test_sizes_that_follow_from_data_are_noted(run_cli):
    for recipe, sizes in {"folder": "num_classes=2", "text": "vocab_size=96, context_length=64"}.items():
        printed = " ".join(run_cli("shapes", recipe).split())
        assert f"{sizes}, which depend on your data" in printed


@pytest.mark.parametrize("name", ["runs/mine", "mine", "./runs/mine/"])
def test_shapes_of_a_run_by_folder_or_name(run_cli, folder, name):
    data = json.loads(run_cli("shapes", name, "--json"))
    assert data["source"] == "run"
    assert data["config"]["width"] == 24
    assert "runs/mine: the model of the run" in run_cli("shapes", name)


def test_ambiguous_name_prefers_preset_then_recipe_then_run_and_is_noted(run_cli, folder, monkeypatch):
    (folder / "runs" / "mine").rename(folder / "runs" / "mnist")
    out = run_cli("shapes", "mnist")
    assert out.startswith(
        "mnist: the model of the recipe\nmnist is also a run, runs/mnist: clearhead shapes mnist --as run\n"
    )
    assert json.loads(run_cli("shapes", "mnist", "--as", "run", "--json"))["config"]["width"] == 24
    monkeypatch.setitem(RECIPES, "vit-mnist", RECIPES["mnist"])
    out = run_cli("shapes", "vit_mnist")
    assert out.startswith("vit_mnist: the preset\nvit_mnist is also a recipe: clearhead shapes vit_mnist --as recipe")
    assert json.loads(run_cli("shapes", "vit_mnist", "--as=recipe", "--json"))["source"] == "recipe"
    assert not run_cli("shapes", "reverse").startswith("reverse")  # preset and recipe are the same model


def test_shapes_of_a_user_module(capsys, folder):
    assert main(["shapes", "shapes_users.py:Encoder", "--batch", "3", "--length", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("shapes_users.py:Encoder, called with x [3, 4, 8]\n")
    assert "layers.1: same as above" in captured.out
    assert captured.err == "the user's own words\n"  # and not on stdout
    assert main(["shapes", "shapes_users:embedding", "--input", "2,6", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["source"] == "module"
    assert data["config"] == {"kind": "Embedding"}
    assert data["tensors"][-1]["rows"] == [2, 6, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpt2", "unknown model 'gpt2'; did you mean gpt2_small? Choose from the presets attention, reverse, "),
        ("mnsit", "unknown model 'mnsit'; did you mean mnist? Choose from the presets"),
        ("vit_tny", "unknown model 'vit_tny'; did you mean vit_tiny? Choose from the presets"),
        ("xyz", "unknown model 'xyz'; choose from the presets attention"),
        ("runs/mien", "did you mean runs/mine?"),
        ("mnist --as run", "there is no run 'mnist'; mnist is a recipe"),
        ("mnist --as model", "--as must be one of preset, recipe, run, got 'model'"),
        ("shapes_users.py:Encodre", "shapes_users.py has no 'Encodre'; did you mean Encoder?"),
        ("shapes_users.py", "shapes_users.py defines Encoder: try shapes_users.py:Encoder"),
        ("shapes_user.py:Encoder", "no file shapes_user.py; did you mean shapes_users.py?"),
        ("shapes_users.py:Encoder --input 2,x,8", "--input: must be positive integers, such as 2,16, got '2,x,8'"),
        ("shapes_users.py:Encoder --input 2,4,9", "Encoder does not take (2, 4, 9) float32: "),
        ("shapes_users.py:Encoder --dtype long", "--dtype needs --input"),
        ("shapes_users.py:Encoder --batch 0", "batch must be a positive integer, got 0"),
        ("shapes_users.py:Encoder --widht 8", "has no option --widht; did you mean --width?"),
    ],
)
def test_errors_are_one_line(capsys, folder, line, message):
    assert main(["shapes", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    err = captured.err.replace("the user's own words\n", "")
    assert err.count("\n") == 1
    assert message in err
