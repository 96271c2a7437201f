"""clearhead resume and clearhead verify-resume."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clearhead.cli.main import main
from clearhead.recipes import train
from clearhead.recipes.trial import Verification
from clearhead.training.config import RunConfig
from clearhead.training.loop import lr_multiplier
from clearhead.training.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "required: RUN"),
        (
            "nowhere",
            "a run is a folder with a config.json, got nowhere; `clearhead train RECIPE --name NAME` creates one",
        ),
        ("nowhere --training.batch-size 5", "resume has no option --training.batch-size"),
        ("nowhere --training.steps 5 --epochs 1", "--epochs: not allowed with argument --steps"),
    ],
)
def test_resume_errors_are_one_line(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["resume", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_resuming_a_finished_run_prints_its_result(capsys, trained):
    before = (trained / "reverse/metrics.jsonl").read_bytes()
    assert main(["resume", str(trained / "reverse")]) == 0
    assert f"training of {trained / 'reverse'} is complete: " in capsys.readouterr().out
    assert (trained / "reverse/metrics.jsonl").read_bytes() == before


def test_resuming_a_finished_run_without_a_test_set(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "text", "mine")
    shutil.copy(trained.parent / "gone.txt", "my.txt")
    assert main(["resume", "mine"]) == 0
    assert capsys.readouterr().out.endswith("mine is complete\n")


@pytest.fixture
def mine(trained, tmp_path, monkeypatch):
    """A copy of a finished run of 12 steps."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "reverse", "runs/mine")
    return Path("runs/mine")


def training_of(path):
    return json.loads((path / "config.json").read_text())["training"]


def last_record(path):
    return json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_run_can_be_given_by_its_name_in_runs(capsys, mine):
    assert main(["resume", "mine"]) == 0
    assert "training of runs/mine is complete: " in capsys.readouterr().out
    assert main(["resume", "mien"]) == 2
    assert "did you mean runs/mine?" in capsys.readouterr().err


def test_extending_a_run_explains_the_new_schedule(capsys, mine):
    assert main(["resume", "mine", "--steps", "20"]) == 0
    captured = capsys.readouterr()
    assert "the run now ends after step 20 instead of 12: the cosine schedule now ends there, and the " in captured.out
    assert "learning rate continues at " in captured.out
    assert captured.err == ""  # the change of config.json was requested
    assert training_of(mine)["steps"] == 20
    assert (last_record(mine)["kind"], last_record(mine)["step"]) == ("test", 20)
    assert main(["resume", "mine"]) == 0  # as it was recorded
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [["--training.steps", "14"], ["--training.steps=14", "--training.threads=1"]])
def test_the_names_of_settings_are_accepted_as_options(capsys, mine, options):
    assert main(["resume", "mine", *options]) == 0
    assert (training_of(mine)["steps"], last_record(mine)["step"]) == (14, 14)
    assert main(["resume", "--help"]) == 0
    assert "--training" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--steps", "20"]])
@pytest.mark.parametrize(
    ("section", "name", "value"), [("model", "num_heads", 4), ("model", "beta", 5.0), ("data", "length", 9)]
)
def test_a_config_that_contradicts_the_checkpoint_is_refused(capsys, mine, section, name, value, options):
    config = json.loads((mine / "config.json").read_text())
    config[section][name] = value
    (mine / "config.json").write_text(edited := json.dumps(config))
    assert main(["resume", "mine", *options]) == 2
    assert f"does not match the checkpoint of step 12: {section}.{name} was " in capsys.readouterr().err
    assert (mine / "config.json").read_text() == edited


def test_a_model_that_does_not_match_the_data_is_refused(capsys, mine, forge):
    config = json.loads((mine / "config.json").read_text())
    config["model"]["context_length"] = 9
    (mine / "config.json").write_text(json.dumps(config))
    forge(mine, config=config)
    assert main(["resume", "mine", "--steps", "20"]) == 2
    assert "context_length is 16 for reverse, got context_length=9" in capsys.readouterr().err


def test_printed_learning_rates_match_the_records(capsys, mine):
    config = RunConfig.from_dict(json.loads((mine / "config.json").read_text()))
    config = replace(config, optimizer=replace(config.optimizer, warmup=0))  # in a warm-up the rate would be the same
    (mine / "config.json").write_text(json.dumps(config.to_dict()))
    assert main(["resume", "mine", "--steps", "40"]) == 0
    said = re.search(r"continues at (\S+) instead of (\S+), unlike", capsys.readouterr().out)
    new, old = (config.optimizer.lr * lr_multiplier(12, n, config.optimizer) for n in (40, 12))
    assert (float(said[1]), float(said[2])) == (pytest.approx(new, rel=1e-2), pytest.approx(old, rel=1e-2))


def test_epochs_replace_steps(capsys, mine):
    per_epoch = round(last_record(mine)["step"] / last_record(mine)["epoch"])
    epochs = 12 // per_epoch + 1
    assert main(["resume", "mine", "--epochs", str(epochs)]) == 0
    assert (training_of(mine)["steps"], training_of(mine)["epochs"]) == (0, epochs)
    assert last_record(mine)["step"] == epochs * per_epoch


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--steps 11", "runs/mine has been trained for 12 steps, got --steps 11; a run cannot be shortened"),
        ("--steps 0", "got steps=0, epochs=0"),
        ("--threads -1", "threads must be a non-negative integer, got -1"),
        ("--steps 20 --epochs 3", "not allowed with argument --steps"),
        ("--epochs 1.5", "must be an integer, got '1.5'"),
    ],
)
def test_an_invalid_change_leaves_the_run_unchanged(capsys, mine, argv, message):
    before = (mine / "config.json").read_bytes()
    assert main(["resume", "mine", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert (mine / "config.json").read_bytes() == before


def test_a_running_run_is_not_changed(capsys, mine):
    before = (mine / "config.json").read_bytes()
    with RunDirectory.open("mine").lock():
        assert main(["resume", "mine", "--steps", "20"]) == 1
    assert "locked by" in capsys.readouterr().err
    assert (mine / "config.json").read_bytes() == before


def test_a_new_number_of_threads_is_recorded(capsys, mine):
    assert main(["resume", "mine", "--threads", "2", "--steps", "13"]) == 0
    assert "threads was 1, is 2" in capsys.readouterr().err
    assert training_of(mine)["threads"] == 2


def test_a_run_stopped_early_cannot_be_extended(capsys, mine):
    config = json.loads((mine / "config.json").read_text())
    config["training"]["patience"] = 1
    (mine / "config.json").write_text(json.dumps(config))
    run = RunDirectory.open("mine")
    found = run.latest_checkpoint()
    found.state["train_state"]["evals_since_best"] = 1
    with run.lock():
        run.save(found)
    assert main(["resume", "mine", "--steps", "20"]) == 2
    assert "stopped early, after 1 evaluations without improvement" in capsys.readouterr().err


def test_extending_does_not_affect_a_constant_learning_rate(tmp_path, monkeypatch, capsys):
    """Then a lengthened run has the weights of one that was that long from the beginning."""
    monkeypatch.chdir(tmp_path)
    changes = {"optimizer.schedule": "constant", "data.limit": 500, "data.validation": 50, "training.threads": 1}
    for name, steps in (("short", 4), ("long", 8)):
        train("reverse", name, changes=changes | {"training.steps": steps}, quiet=True)
    assert main(["resume", "short", "--steps", "8"]) == 0
    assert "step 8 instead of 4: the learning rate at each step is unaffected" in capsys.readouterr().out
    mine, whole = (RunDirectory.open(name).latest_checkpoint().model for name in ("short", "long"))
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


def test_train_with_resume_suggests_the_command_that_extends_a_run(mine, capsys):
    config = RunConfig.from_dict(json.loads((mine / "config.json").read_text()))
    longer = replace(config, training=replace(config.training, steps=20))
    with pytest.raises(ValueError, match=r"steps=20 \(was 12\).*clearhead resume runs/mine --steps 20$"):
        train(longer, "mine", resume=True, quiet=True)
    with pytest.raises(ValueError, match=r"seed=7 \(was 0\).*clearhead resume runs/mine$"):
        train(replace(longer, seed=7), "mine", resume=True, quiet=True)


def test_a_changed_dictionary_is_refused(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "pronounce", "mine")
    for name in ("my.dict", "my.test"):
        shutil.copy(trained.parent / name, name)
    assert main(["resume", "mine"]) == 0
    capsys.readouterr()
    Path("my.dict").write_text(Path("my.dict").read_text().replace("ab AE B", "ab B AE"))
    assert main(["resume", "mine"]) == 2
    assert "my.dict; restore the original file" in capsys.readouterr().err
    for other in ("zebra Z IY B\n" * 3, Path("my.dict").read_text() + "zebra Z IY B\n", "no dictionary", ""):
        Path("my.dict").write_text(other)  # too short, with other letters, ...: that it is another one comes first
        assert main(["resume", "mine"]) == 2
        assert "my.dict; restore the original file" in capsys.readouterr().err


def test_a_refused_resume_leaves_the_run_unchanged(capsys, pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    small = "--training.steps 2 --data.image-size 16 --model.width 16 --model.depth 1 --training.threads 1"
    assert main(["train", "folder", "--data.folder", "pictures", "--name", "mine", *small.split()]) == 0
    before = Path("runs/mine/config.json").read_bytes()
    (pictures / "red/9.png").unlink()
    capsys.readouterr()
    assert main(["resume", "mine", "--steps", "4"]) == 2
    out, err = capsys.readouterr()
    assert "pictures; restore the original files" in err
    assert out == ""
    assert Path("runs/mine/config.json").read_bytes() == before


@pytest.fixture
def verdict(monkeypatch):
    """Replaces the real verification, which tests/training covers."""
    configs = []

    def fake(differences):
        def verify(config, folder, report):
            configs.append(config)
            report("training without interruption ...")
            return Verification(config.training.steps, 15, 12, differences)

        monkeypatch.setattr("clearhead.recipes.trial.verify_resume", verify)
        return configs

    return fake


def test_identical_runs_are_exact(verdict, capsys):
    configs = verdict(())
    assert main(["verify-resume", "mnist", "--model.width", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("killed at step 15 of 30, resumed from the checkpoint of step 12\nexact: ")
    assert captured.err == "training without interruption ...\n"
    assert (configs[0].training.epochs, configs[0].training.checkpoint_every, configs[0].model.width) == (0, 4, 16)


def test_a_difference_is_named_and_exits_with_code_1(verdict, capsys):
    verdict(("head.weight",))
    assert main(["verify-resume", "mnist"]) == 1
    assert "NOT EXACT: 1 difference: head.weight" in capsys.readouterr().out


def test_help_without_a_recipe_and_suggestion_for_a_misspelled_one(capsys):
    assert main(["verify-resume"]) == 0
    assert "usage: clearhead verify-resume RECIPE" in capsys.readouterr().out
    assert main(["verify-resume", "mnits"]) == 2
    assert "did you mean mnist?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_killed_run_resumes_exactly(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", "reverse", "--model.dropout", "0.1"]) == 0
    assert "exact" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
