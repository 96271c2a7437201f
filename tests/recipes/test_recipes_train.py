from dataclasses import replace
from pathlib import Path

import pytest

import clearhead
from clearhead.recipes import check_run_name, config_of, train, with_changes
from clearhead.training.run_directory import RunDirectory

TINY = {"training.steps": 2, "data.limit": 200, "data.validation": 10}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_default_run_names_combine_recipe_and_seed_and_never_overwrite():
    for _ in range(2):
        train("reverse", changes=TINY | {"seed": 5}, quiet=True)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["reverse-5", "reverse-5-2"]


def test_an_existing_run_is_rejected_and_left_unchanged():
    train("reverse", "mine", changes=TINY, quiet=True)
    before = Path("runs/mine/config.json").read_bytes()
    with pytest.raises(ValueError, match="a new run needs a new folder, got runs/mine, which exists"):
        train("reverse", "mine", changes=TINY | {"seed": 1}, quiet=True)
    assert Path("runs/mine/config.json").read_bytes() == before


def test_resume_continues_an_existing_run_or_starts_a_new_one():
    assert train("reverse", "mine", changes=TINY, resume=True, quiet=True).step == 2
    n = len(RunDirectory.open("runs/mine").records())
    assert train("reverse", "mine", changes=TINY, resume=True, quiet=True).step == 2
    assert len(RunDirectory.open("runs/mine").records()) == n


def test_resume_with_changed_settings_raises():
    train("reverse", "mine", changes=TINY, quiet=True)
    with pytest.raises(ValueError, match=r"got training.steps=3 \(was 2\) for runs/mine; choose another name"):
        train("reverse", "mine", changes=TINY | {"training.steps": 3}, resume=True, quiet=True)


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", ".hidden", "a b", "-x"])
def test_run_names_must_not_be_paths(name):
    with pytest.raises(ValueError, match="a run name must have at most 60 letters, digits"):
        check_run_name(name)


def test_custom_recipe_names_must_not_be_paths(working_directory):
    with pytest.raises(ValueError, match=r"a run name must have at most 60 letters, digits .*, got '\.\./mine-0'"):
        train(replace(config_of("reverse", TINY), recipe="../mine"), quiet=True)
    assert list(working_directory.iterdir()) == []


def test_a_config_can_be_trained_and_loaded_from_python(working_directory):
    config = config_of("reverse", TINY)
    outcome = clearhead.train(replace(config, seed=4), "python", quiet=True)
    assert outcome.reason == "finished"
    assert not clearhead.load("runs/python").training
    with pytest.raises(ValueError, match="changes apply to the name of a recipe"):
        clearhead.train(config, changes={"seed": 1})


def test_an_invalid_config_creates_no_run_folder(working_directory):
    with pytest.raises(ValueError, match="out_features is 10 for reverse, got out_features=9"):
        clearhead.train(with_changes(config_of("reverse"), {"model.out_features": 9}), quiet=True)
    assert not (working_directory / "runs").exists()


def test_resume_accepts_an_empty_run_folder(working_directory):
    (working_directory / "runs/mine").mkdir(parents=True)
    assert train("reverse", "mine", changes=TINY, resume=True, quiet=True).reason == "finished"


def test_an_existing_run_name_raises_before_loading_the_data(working_directory, monkeypatch):
    (working_directory / "runs/mine").mkdir(parents=True)
    (working_directory / "runs/mine/letter.txt").write_text("mine")
    monkeypatch.setattr(
        "clearhead.training.loop.build_context", lambda *args, **named: pytest.fail("the data is loaded")
    )
    with pytest.raises(ValueError, match="which exists; choose another name"):
        train("reverse", "mine", quiet=True)
