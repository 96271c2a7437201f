import pytest
import torch
from PIL import Image

from clearhead.cli.main import main
from clearhead.data.images import read_image, resize
from clearhead.inference.run import Run
from clearhead.recipes import config_of, train
from clearhead.recipes.folder import BATCH_SIZE, folder
from clearhead.tasks.images import read_pixels
from clearhead.training.run_directory import RunDirectory

TINY = {"data.image_size": 16, "model.width": 8, "model.depth": 1, "training.steps": 2, "training.precision": "float32"}


def test_num_classes_and_image_size_follow_the_folder(pictures):
    config = config_of("folder", {"data.folder": str(pictures), "data.image_size": 16})
    assert config.model.num_classes == 3
    assert config.model.image_shape == (16, 16)


def test_batch_size_is_limited_by_the_number_of_training_images(pictures):
    config = config_of("folder", {"data.folder": str(pictures)})
    assert config.training.batch_size == len(config.data.load(config.seed).train) < BATCH_SIZE
    assert folder().training.batch_size == BATCH_SIZE


def test_a_trained_run_predicts_without_its_data_folder(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    small = {
        "data.image_size": 16,
        "model.width": 16,
        "model.depth": 1,
        "training.batch_size": 8,
        "training.precision": "float32",
    }
    outcome = train("folder", "mine", changes={"data.folder": "pictures", "training.steps": 30, **small}, quiet=True)
    assert outcome.test["accuracy"] == 1
    elsewhere = pictures.rename(pictures.parent / "elsewhere")
    run = Run("runs/mine")
    assert run.classes == ("blue", "green", "red")
    predictions = run.predict([elsewhere / "red/9.png", elsewhere / "green/3.png", elsewhere / "blue/0.png"])
    assert [prediction.label for prediction in predictions] == ["red", "green", "blue"]


def test_a_missing_folder_raises():
    with pytest.raises(ValueError, match=r"folder must be a folder .*, got 'nowhere'"):
        config_of("folder", {"data.folder": "nowhere"})


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
def test_prediction_uses_the_fit_mode_of_training(pictures, monkeypatch, fit):
    monkeypatch.chdir(pictures.parent)
    train("folder", "mine", changes={"data.folder": "pictures", "data.fit": fit, **TINY}, quiet=True)
    wide = pictures / "red/wide.png"
    Image.linear_gradient("L").rotate(90).resize((90, 30)).save(wide)
    run = Run("runs/mine")
    seen = read_pixels(run, [wide], 16, 3, run.task.fit, invert=False)
    assert torch.equal(seen[0], resize(read_image(wide), 16, fit))
    others = {"pad", "crop", "stretch"} - {fit}
    assert not any(torch.equal(seen[0], resize(read_image(wide), 16, other)) for other in others)


def test_training_and_dry_run_print_the_dataset_notes(pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures.parent)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    command = ["train", "folder", "--data.folder", "pictures", "--name", "mine", *options]
    # all are 24 wide; those of 20, 21, 27, 28 and 29 high lose more than 10%
    note = "30 images, 3 classes (train 20, validation 4, test 6). Center-cropping would discard more than 10% of 15 "
    for extra in ([], ["--dry-run"]):
        assert main([*command, *extra]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(note)
        assert lines[1].endswith("clearhead data show folder --data.folder pictures --data.image-size 16")
    assert main(["resume", "runs/mine"]) == 0
    assert note not in capsys.readouterr().out


def test_skipped_files_are_reported_recorded_and_not_counted(pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures.parent)
    for name in ("red/x.png", "blue/y.jpg"):
        (pictures / name).write_bytes(b"no picture")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    command = ["train", "folder", "--data.folder", "pictures", "--name", "mine", *options]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "2 of 32 image files in pictures cannot be read: blue/y.jpg (" in err
    assert main([*command, "--data.skip-invalid"]) == 0
    assert "Skipped 2 image files that cannot be read: blue/y.jpg, red/x.png.\n" in capsys.readouterr().out
    best = RunDirectory.open("runs/mine").best_checkpoint()
    assert best.state["data"]["skipped"] == ["blue/y.jpg", "red/x.png"]
    config = Run("runs/mine").config
    assert config.training.batch_size == len(config.data.load(config.seed).train)
    for name in ("red/x.png", "blue/y.jpg"):  # the run has never used them
        (pictures / name).unlink()
    assert main(["resume", "runs/mine"]) == 0


@pytest.mark.parametrize("option", ["--data.image-size", "--data.skip-invalid"])
def test_folder_options_are_rejected_for_other_recipes(capsys, option):
    assert main(["train", "mnist", option, "8"]) == 2
    assert f"train mnist has no option {option}" in capsys.readouterr().err
    assert main(["train", "folder", "--help"]) == 0
    assert option in capsys.readouterr().out
