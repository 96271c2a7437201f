"""config.json may be edited or damaged; the copy in a checkpoint is protected by its manifest."""

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch

import clearhead
from clearhead.cli.main import main
from clearhead.inference.run import Run
from clearhead.models.config import build_model
from clearhead.training.loop import resume, train
from clearhead.training.state import DataInfo, TrainState, check_model_matches


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained `reverse` run that a test may damage."""
    return shutil.copytree(trained / "reverse", tmp_path / "reverse")


def edit_config(run, section, **values):
    path = run / "config.json"
    config = json.loads(path.read_bytes())
    config[section] |= values
    path.write_text(json.dumps(config))


def test_edited_number_of_heads_is_overridden_by_the_config_in_the_checkpoint(trained, tmp_path, capsys):
    """All shapes match, but with the number of heads in config.json every output would differ."""
    run = shutil.copytree(trained / "mnist", tmp_path / "mnist")
    heads = json.loads((run / "config.json").read_bytes())["model"]["num_heads"]
    edit_config(run, "model", num_heads=2 * heads)
    images = torch.arange(28 * 28, dtype=torch.float32).reshape(1, 1, 28, 28) / 784
    assert Run(run).config.model.num_heads == heads
    assert torch.equal(clearhead.load(run)(images), clearhead.load(trained / "mnist")(images))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert f"own config: model.num_heads was {heads}, is {2 * heads}" in errors[0]
    with pytest.raises(ValueError, match=rf"config\.json.*model\.num_heads was {heads}, is {2 * heads}"):
        resume(run)


@pytest.mark.parametrize(
    "command", [["predict", "--ids", "3", "1", "4"], ["evaluate"], ["look", "--ids", "3", "1", "4"]]
)
def test_every_command_warns_about_an_edited_config_in_one_line(run, command, capsys):
    edit_config(run, "data", length=12)
    assert main([command[0], str(run), *command[1:]]) == 0
    errors = capsys.readouterr().err.splitlines()
    assert ["data.length was 16, is 12" in error for error in errors].count(True) == 1


def test_change_without_effect_on_the_outputs_is_reported(run, capsys):
    edit_config(run, "optimizer", lr=0.5)
    Run(run)
    assert "without effect on the outputs: optimizer.lr was 0.01, is 0.5" in capsys.readouterr().err


def test_changed_dropout_is_reported_but_accepted(run, capsys):
    edit_config(run, "model", dropout=0.25, drop_path=0.125)
    Run(run)
    error = capsys.readouterr().err
    assert "without effect on the outputs: " in error
    for change in ("model.dropout was 0.0, is 0.25", "model.drop_path was 0.0, is 0.125"):
        assert change in error


def test_changes_made_by_resume_are_not_reported(run, capsys):
    edit_config(run, "training", steps=500, threads=1)
    Run(run)
    assert capsys.readouterr().err == ""


def test_enormous_config_is_refused_before_the_model_is_built(run, forge, monkeypatch):
    """Also if the checkpoint's copy of the config agrees, and on resume."""
    built = []
    for home in ("clearhead.inference.run", "clearhead.training.context"):
        monkeypatch.setattr(f"{home}.build_model", lambda config: built.append(config) or build_model(config))
    edit_config(run, "model", width=20_000, num_heads=1)
    forge(run, config=json.loads((run / "config.json").read_bytes()))
    for use in (Run, resume):
        with pytest.raises(ValueError, match=r"20000"):
            use(run)
    assert built == []


def test_the_spy_on_build_model_detects_a_built_model(run, monkeypatch):
    built = []
    monkeypatch.setattr(
        "clearhead.inference.run.build_model", lambda config: built.append(config) or build_model(config)
    )
    Run(run)
    assert len(built) == 1


@pytest.mark.parametrize("sizes", [{"depth": 10**9}, {"width": 2**40, "num_heads": 1}])
def test_sizes_that_cannot_be_allocated_are_refused_at_once(run, sizes):
    loaded = Run(run)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"config\.json"):
        check_model_matches(replace(loaded.config.model, **sizes), loaded.model.state_dict())
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["reverse", "mnist", "odd-one-out", "pronounce", "words", "text"])
def test_every_model_matches_its_own_checkpoint(trained, name):
    loaded = Run(trained / name)
    check_model_matches(loaded.config.model, loaded.model.state_dict())


@pytest.mark.parametrize(
    "forged",
    [
        {"data": []},
        {"data": {"classes": [1, 2]}},
        {"data": {"classes": [], "normalize": {"mean": [0.5], "std": []}}},
        {"data": {"classes": [], "normalize": {"mean": ["x"], "std": ["y"]}}},
        {"data": {"classes": [], "files": {"a": 3}}},
        {"train_state": {}},
        {"train_state": None},
        {"environment": 3},
    ],
)
def test_forged_state_is_a_one_line_error(run, forge, forged, capsys):
    forge(run, **forged)
    edit_config(run, "training", steps=500)
    code = main(["evaluate", str(run)]) if "data" in forged else main(["resume", str(run)])
    assert code == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in errors if not line.startswith("warning: ")] == ["clearhead"]


@pytest.mark.parametrize("command", ["evaluate", "predictions", "confusion"])
def test_too_few_class_names_in_a_checkpoint_are_a_one_line_error(trained, tmp_path, forge, command, capsys):
    run = shutil.copytree(trained / "mnist", tmp_path / "mnist")
    forge(run, data=lambda state: state["data"] | {"classes": ["0", "1"]})
    assert main([command, str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == ["clearhead: classes in the checkpoint must have 10 entries, as its model has, got 2"]


@pytest.mark.parametrize(
    "change", [{"step": "7"}, {"step": -1}, {"best_score": [None]}, {"sums": [0.0]}, {"seconds": 1e999}]
)
def test_train_state_is_validated(change):
    values = TrainState().to_json()
    assert TrainState.from_json(values).step == 0
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainState.from_json(values | change)


def test_data_info_without_optional_fields_is_accepted():
    info = DataInfo.from_state({"data": {"classes": ["a"], "normalize": {"mean": [0], "std": [1]}}})
    assert (info.classes, info.vocab, info.files) == (("a",), (), {})


def test_divergence_found_only_by_the_test_has_exit_code_4(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--training.steps", "1", "--optimizer.lr", "1e30", "--data.validation", "0", "--data.limit", "256"]
    assert main(["train", "mnist-plain", "--name", "far", *options, "--optimizer.grad-clip", "0"]) == 4
    assert "test loss is" in capsys.readouterr().err
    assert main(["evaluate", "runs/far", "--json"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["loss"] is None


def test_non_finite_optimizer_state_is_not_saved(config, tmp_path, monkeypatch):
    from clearhead.training.optim import Optimizers

    states = Optimizers.state_tensors

    def with_nan(self):
        return {name: torch.full_like(tensor, torch.nan) for name, tensor in states(self).items()}

    monkeypatch.setattr(Optimizers, "state_tensors", with_nan)
    with pytest.raises(ArithmeticError, match="optimizer state"):
        train(config, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


def test_optimizer_state_of_other_parameters_is_refused(config, tmp_path):
    from clearhead.training.config import OptimizerConfig
    from clearhead.training.optim import Optimizers

    optimizers = Optimizers(build_model(config.model), OptimizerConfig(name="adamw"))
    name, weight = next(iter(optimizers.weights.items()))
    good = {f"{name}.{what}": torch.zeros_like(weight) for what in ("exp_avg", "exp_avg_sq")}
    good |= {f"{name}.step": torch.tensor(1.0)}
    for bad in (
        {"x.exp_avg": weight},
        {f"{name}.exp_avg": weight},
        good | {f"{name}.exp_avg": torch.zeros(3)},
        {"": weight},
    ):
        with pytest.raises(ValueError, match="optimizer state"):
            optimizers.load_state_tensors(bad)
        assert not optimizers.state_tensors()
    optimizers.load_state_tensors(good)
    assert optimizers.state_tensors().keys() == good.keys()


@pytest.mark.parametrize("objective", ["regression", "binary-classification"])
def test_objective_that_does_not_fit_the_model_is_a_one_line_error(run, forge, objective, capsys):
    path = run / "config.json"
    config = json.loads(path.read_bytes()) | {"objective": objective}
    path.write_text(json.dumps(config))
    forge(run, config=config)
    assert main(["predict", str(run), "--ids", "3", "1", "4"]) == 2
    assert capsys.readouterr().err.count("clearhead: ") == 1
