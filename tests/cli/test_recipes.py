import json
from dataclasses import replace

import pytest

from clearhead.cli.main import main
from clearhead.models.shapes import shapes
from clearhead.recipes.registry import RECIPES


def test_every_recipe_is_listed_with_its_measurements(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in RECIPES)
    assert "100.00%" in out
    assert "10,282" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        assert (rows[name]["seconds"] is None) == (recipe.measured is None)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.parameters is not None])
def test_number_of_parameters(name):
    assert RECIPES[name].parameters == shapes(RECIPES[name].make().model).parameters


def test_number_of_parameters_of_own_data_is_unknown():
    unknown = [name for name, recipe in RECIPES.items() if recipe.parameters is None]
    assert unknown == ["text", "folder"]


def test_partial_and_missing_measurements_are_labeled(capsys, monkeypatch):
    fashion = RECIPES["fashion-mnist"]
    monkeypatch.setitem(
        RECIPES, "fashion-mnist", replace(fashion, measured=replace(fashion.measured, accuracy=0.5, epochs=1))
    )
    monkeypatch.setitem(RECIPES, "mnist", replace(RECIPES["mnist"], measured=None))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["recipes"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    epochs = RECIPES["fashion-mnist"].make().training.epochs
    assert lines["fashion-mnist"].endswith(f"50.00%, epoch 1 of {epochs}, mean of 2 views")
    assert lines["mnist"].endswith("not measured yet")
    assert lines["folder"].endswith("depends on data")


def test_accuracy_with_tta_names_the_number_of_views(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["recipes"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["cifar10-fast"].endswith("%, mean of 6 views")
    assert lines["mnist"].endswith("%")


def test_a_narrow_terminal_keeps_all_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    assert any("91.18%" in line for line in lines)
