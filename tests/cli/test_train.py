"""clearhead train and clearhead demo, from the command line to the run directory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clearhead.cli.main import COMMANDS, EXIT_CODES, main
from clearhead.recipes.trial import compare
from clearhead.training import checkpoint, progress
from clearhead.training.loop import DivergedError, TrainResult
from clearhead.training.run_directory import RunDirectory

TINY = ["--training.steps", "3", "--data.limit", "300", "--data.validation", "20"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_at(path):
    return json.loads((Path(path) / "config.json").read_text())


def test_train_saves_the_run_in_its_folder(capsys):
    assert main(["train", "reverse", "--name", "mine", "--seed", "7", *TINY]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "test of the best checkpoint (step 3)" in captured.out
    digits = config_at("runs/mine")["data"]["length"] * " [0-9]"
    suggested = captured.out.partition("saved in runs/mine; next:\n")[2].splitlines()
    assert re.fullmatch(f"  clearhead predict runs/mine --ids{digits}", suggested[0])
    assert suggested[1:] == ["  clearhead look runs/mine --sample 0", "  clearhead curves runs/mine"]
    assert config_at("runs/mine")["seed"] == 7
    assert (checkpoint.saved_steps(Path("runs/mine"))) == [3]
    assert Path("runs/mine/checkpoints/step-00000003/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        ("reverse --training.steps 9", "training.steps", 9),
        ("reverse --steps 9", "training.steps", 9),
        ("reverse --threads=1", "training.threads", 1),
        ("reverse --training.epochs 2", "training.steps", 0),
        ("reverse --epochs 2", "training.steps", 0),
        ("reverse --training.checkpoint-every 5", "training.checkpoint_every", 5),
        ("reverse --training.checkpoint_every=5", "training.checkpoint_every", 5),
        ("reverse --optimizer.lr 1e-3", "optimizer.lr", 1e-3),
        ("reverse --optimizer.name muon", "optimizer.name", "muon"),
        ("reverse --model.heads 2", "model.num_heads", 2),
        ("reverse --model.mlp-dim none", "model.mlp_dim", None),
        ("reverse --data.length 5", "model.context_length", 5),
        ("mnist --data.augmentation.flip true", "data.augmentation.flip", True),
        ("mnist --data.augmentation.flip", "data.augmentation.flip", True),
        ("fashion-mnist --data.augmentation.flip false", "data.augmentation.flip", False),
        ("fashion-mnist --no-data.augmentation.flip", "data.augmentation.flip", False),
        ("digits --data.question sum", "model.out_features", 1),
        ("mnist_plain --seed 4", "seed", 4),
        ("reverse --compile on", "training.compile", "on"),
        ("reverse --compile=off", "training.compile", "off"),
        ("reverse --training.compile on", "training.compile", "on"),
        ("reverse --seed 1", "training.compile", "auto"),
    ],
)
def test_any_setting_can_be_changed(monkeypatch, argv, path, value):
    seen = []

    def train(config, name, **options):
        seen.append(config)
        return type("TrainResult", (), {"exit_code": 0})

    monkeypatch.setattr("clearhead.recipes.train", train)
    assert main(["train", *argv.split()]) == 0
    found = seen[0].to_dict()
    for name in path.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("revers", "unknown recipe 'revers'; did you mean reverse? Choose from reverse, "),
        ("reverse --heads 2", "train reverse has no option --heads; did you mean --model.heads?"),
        ("reverse --training.precision fp32", "got 'fp32'; did you mean float32?"),
        ("--name x", "train needs a recipe as its first argument, got '--name'; one of reverse, "),
        ("reverse --lr 1", "train reverse has no option --lr; did you mean --optimizer.lr?"),
        ("reverse --stpes 1", "has no option --stpes; did you mean --training.steps?"),
        ("reverse --steps many", "--training.steps: must be an integer, got 'many'"),
        ("reverse --optimiser.lr 1", "has no option --optimiser.lr; did you mean --optimizer.lr?"),
        ("reverse --training.check-point-every 1", "did you mean --training.checkpoint-every?"),
        ("reverse --training.seed 1", "has no option --training.seed; did you mean --seed?"),
        ("reverse --training.lr 1", "has no option --training.lr; did you mean --optimizer.lr?"),
        ("reverse --model.witdh 1", "did you mean --model.width?"),
        ("reverse --training.steps many", "--training.steps: must be an integer, got 'many'"),
        ("mnist --data.augmentation.flip perhaps", "--data.augmentation.flip: must be true or false, got 'perhaps'"),
        ("pronounce --data.augmentation.flip true", "train pronounce has no option --data.augmentation.flip"),
        ("text", "data.file is empty; run: clearhead train text --data.file PATH"),
        ("reverse --training.steps 0", "set one of steps and epochs above 0"),
        ("reverse --model.width 33 --model.heads 2", "width must be a multiple of num_heads"),
        ("reverse --name a/b", "a run name must have at most 60 letters, digits"),
        ("reverse extra", "unexpected argument 'extra'"),
        ("digits --model.out-features 3", "train digits has no option --model.out-features"),
        ("mnist --data.question sum", "train mnist has no option --data.question"),
        ("folder", "data.folder is empty; run: clearhead train folder --data.folder PATH"),
        ("reverse --training.steps " + "9" * 30, "steps must be at most 1,000,000,000,000, got 999"),
        ("reverse --name " + "x" * 300, "a run name must have at most 60 letters, digits"),
        ("cifar10-bert", "cifar10 has not been downloaded"),
        ("reverse --compile perhaps", "compile must be one of auto, on, off, got 'perhaps'"),
        ("reverse --optimizer.lr nan", "lr must be a finite number >= 0, got nan; try lr=0.001"),
        ("reverse --training.steps -5", "got -5; set one of steps and epochs above 0 and the other to 0"),
    ],
)
def test_errors_are_one_line_and_create_no_files(capsys, here, monkeypatch, argv, message):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(here / "none"))
    assert main(["train", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("clearhead: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(here.iterdir()) == []


def test_an_existing_run_is_resumed_only_with_resume(capsys):
    argv = ["train", "reverse", "--name", "mine", *TINY]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "which exists; continue it with `clearhead resume runs/mine`" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert main(["resume", "runs/mine"]) == 0
    assert "training of runs/mine is complete: " in capsys.readouterr().out


def test_help_shows_the_recipe_and_its_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "mnist", "--help"]) == 0
    out = capsys.readouterr().out
    assert "MNIST with a small vision transformer" in out
    for option in (
        "--name",
        "--seed",
        "--dry-run",
        "--resume",
        "--shard",
        "--compile {auto,on,off}",
        "--training.steps",
        "--data.augmentation.crop",
    ):
        assert option in out
    assert "--recipe" not in out
    for group in ("run", "model", "data", "data.augmentation", "optimizer", "training"):
        assert f"\n{group} settings:\n" in out
    assert "(default: 64)" in " ".join(out.split())
    assert main(["train", "words", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--data.file" in out
    assert "augmentation" not in out
    assert "--training.tta" not in out
    assert main(["train"]) == 0
    assert "cifar10-bert" in capsys.readouterr().out


def test_dry_run_prints_an_estimate_and_creates_no_files(capsys, here, monkeypatch):
    monkeypatch.setattr("clearhead.recipes.trial.TIMED_STEPS", 1)
    assert main(["train", "reverse", "--dry-run", *TINY]) == 0
    out = capsys.readouterr().out
    for word in ("parameters         10,282", "memory ", "time per epoch", "it ends at"):
        assert word in out
    assert list(here.iterdir()) == []


def test_a_diverged_run_exits_with_code_4(capsys, monkeypatch):
    assert (
        main(["train", "reverse", *TINY, "--optimizer.lr", "1e30", "--optimizer.warmup", "0"]) == progress.DIVERGED == 4
    )
    err = capsys.readouterr().err
    assert err.startswith("clearhead: loss and gradient norm must be finite")
    assert err.count("\n") == 1
    assert DivergedError.exit_code == progress.DIVERGED


def test_help_lists_the_exit_codes_of_training():
    for code in (progress.FINISHED, progress.STOPPED, progress.DIVERGED):
        assert f"\n    {code}  " in EXIT_CODES


def test_an_unwritable_folder_is_reported_in_one_line(capsys, here):
    (here / "runs").write_text("a file where a folder should be")
    assert main(["train", "reverse", "--name", "x", *TINY]) == 1
    err = capsys.readouterr().err
    assert err.startswith("clearhead: the run was not created")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_and_resumed_equals_an_uninterrupted_run(here):
    steps = ["--training.steps", "60", "--training.checkpoint-every", "25", "--training.log-every", "1"]
    argv = ["train", "reverse", *steps, "--name"]
    assert main([*argv, "whole"]) == 0
    child = subprocess.Popen(
        [sys.executable, "-m", "clearhead", *argv, "stopped"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    records = here / "runs/stopped/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (records.exists() and records.read_bytes().count(b"\n") > 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert child.returncode == progress.STOPPED == 3
    assert "continue with: clearhead resume runs/stopped" in out
    assert "SIGTERM: stopping after this step" in err
    assert "Traceback" not in err
    assert main(["resume", "runs/stopped"]) == 0
    assert compare(here / "runs/whole", here / "runs/stopped") == []


@pytest.mark.slow
def test_sharded_training_equals_training_in_one_process(here):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]

    def said(*argv):
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*torchrun, "clearhead", *argv], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # one process speaks for both
    assert said("train", "reverse", "--shard", "--name", "two", *TINY).count("saved in runs/two") == 1
    assert said("resume", "runs/two").count("training of runs/two is complete: ") == 1
    assert main(["train", "reverse", "--name", "one", *TINY]) == 0
    two, one = (RunDirectory.open(here / "runs" / name) for name in ("two", "one"))
    environment = two.latest_checkpoint().state["environment"]
    assert (environment["world_size"], environment["sharded"]) == (2, True)
    assert [r["loss"] for r in two.records()] == pytest.approx([r["loss"] for r in one.records()], rel=1e-5)


def test_header_of_a_short_run_does_not_show_0_epochs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "reverse", "--training.steps", "1", "--training.threads", "1"]) == 0
    assert "training   1 step (less than 0.01 epochs), batch size 128" in capsys.readouterr().out


PICTURES = [(Path(f"runs/demo/figures/{name}.png"), f"about {name}") for name in ("curves", "look/aggregates")]


def test_demo_prints_accuracy_figures_and_next_commands(capsys, monkeypatch):
    def run_demo(steps, announce):
        announce()
        return TrainResult("finished", 9, 9, {"accuracy": 0.9876, "seconds": 61.2}), PICTURES

    monkeypatch.setattr("clearhead.inference.explain.run_demo", run_demo)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("Drawing figures ...\n")
    assert "Test accuracy: 98.76% on 10,000 digits after 61 s of training." in out
    assert all(str(path) in out and what in out for path, what in PICTURES)
    assert "\nNext:\n  clearhead open runs/demo" in out
    assert max(map(len, out.splitlines())) <= 90
    suggested = [line.split() for line in out[out.index("\nNext:\n") :].splitlines() if "clearhead " in line]
    assert len(suggested) > 3
    assert all(words[0] == "clearhead" and words[1] in COMMANDS for words in suggested)


def test_a_stopped_demo_exits_with_code_3(monkeypatch, capsys):
    monkeypatch.setattr(
        "clearhead.inference.explain.run_demo", lambda steps, announce: (TrainResult("stopped", 9, None, None), [])
    )
    assert main(["demo"]) == 3
    assert "Figures:" not in capsys.readouterr().out
