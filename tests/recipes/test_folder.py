import pytest

from clearhead.data import datasets
from clearhead.recipes.all import config_of
from clearhead.recipes.folder import BATCH_SIZE, folder
from clearhead.recipes.start import train
from clearhead.serving.session import Session


def test_classes_and_size_follow_the_pictures(pictures):
    config = config_of("folder", {"data.folder": str(pictures), "data.image_size": 16})
    assert config.model.n_classes == 3
    assert config.model.image_shape == (16, 16)


def test_few_pictures_make_one_batch_and_many_do_not(pictures):
    config = config_of("folder", {"data.folder": str(pictures)})
    assert config.training.batch_size == len(datasets.load(config.data, config.seed).train) < BATCH_SIZE
    assert folder().training.batch_size == BATCH_SIZE


def test_own_pictures_are_learned_and_then_predicted_without_their_folder(pictures, monkeypatch):
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
    session = Session("runs/mine")
    assert session.classes == ("blue", "green", "red")
    answers = session.predict([elsewhere / "red/9.png", elsewhere / "green/3.png", elsewhere / "blue/0.png"])
    assert [answer.answer for answer in answers] == ["red", "green", "blue"]


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="folder must be a folder of pictures, got 'nowhere'"):
        config_of("folder", {"data.folder": "nowhere"})
