import gzip
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from clearhead.cli.main import main
from clearhead.data import image_datasets
from clearhead.models.shapes import shapes
from clearhead.recipes import RECIPES
from clearhead.tasks import TASKS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fake_fashion_mnist(folder, monkeypatch):
    """Stands in for Fashion-MNIST: the embedded MNIST test files under the names of all four files."""
    folder.mkdir()
    for name in image_datasets.FASHION_DIGESTS:
        source = name.replace("train", "t10k")
        (folder / f"{name}.gz").write_bytes(gzip.compress(image_datasets.read_embedded(source), 1))
        monkeypatch.setitem(image_datasets.FASHION_DIGESTS, name, image_datasets.MNIST_DIGESTS[source])
    return folder


def test_list_shows_every_data_set_and_whether_it_is_downloaded(capsys):
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert "not downloaded" in next(line for line in lines if line.startswith("cifar10"))
    assert max(map(len, lines)) <= 80


def test_get_from_a_folder_then_show(capsys, elsewhere, monkeypatch):
    mine = fake_fashion_mnist(elsewhere / "mine", monkeypatch)
    assert main(["data", "get", "fashion-mnist", "--from", str(mine)]) == 0
    captured = capsys.readouterr()
    assert "clearhead data show fashion-mnist" in captured.out
    assert captured.err == f"fashion-mnist from {mine}\n"
    assert main(["data", "list"]) == 0
    assert re.search("fashion-mnist +downloaded  ", capsys.readouterr().out)
    assert main(["data", "show", "fashion-mnist", "--out", "sheet.png"]) == 0
    assert capsys.readouterr().out == "wrote sheet.png\n"
    with Image.open("sheet.png") as sheet:
        assert sheet.format == "PNG"


def test_get_of_cached_data_contacts_no_source(capsys, elsewhere, monkeypatch):
    mine = fake_fashion_mnist(elsewhere / "mine", monkeypatch)
    assert main(["data", "get", "fashion-mnist", "--from", str(mine)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("clearhead.data.downloads.obtain", lambda *_: pytest.fail("a source was contacted"))
    for again in (["data", "get", "fashion-mnist"], ["data", "get", "fashion-mnist", "--from", str(mine)]):
        assert main(again) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(f"fashion-mnist is already in {elsewhere}/cache/fashion-mnist, verified")
        assert captured.err == ""


def test_get_of_damaged_data_fetches_it_again(capsys, elsewhere, monkeypatch):
    mine = fake_fashion_mnist(elsewhere / "mine", monkeypatch)
    assert main(["data", "get", "fashion-mnist", "--from", str(mine)]) == 0
    (elsewhere / "cache/fashion-mnist/t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    assert main(["data", "get", "fashion-mnist", "--from", str(mine)]) == 0
    assert f"fashion-mnist from {mine}" in capsys.readouterr().err
    assert main(["data", "show", "fashion-mnist"]) == 0


def test_show_augmented_uses_the_augmentation_of_the_recipe_or_of_the_options(capsys, elsewhere, monkeypatch):
    """The mnist recipe only crops, so that crop 0 leaves the image unchanged."""
    assert main(["data", "show", "mnist", "--augmented"]) == 0
    assert capsys.readouterr().out == "wrote mnist-augmented.png\n"
    others = {"none": ["--data.augmentation.crop", "0"], "flipped": ["--data.augmentation.flip"], "seed": ["--seed=1"]}
    for name, options in others.items():
        assert main(["data", "show", "mnist", "--augmented", "--out", f"{name}.png", *options]) == 0
    sheets = [(elsewhere / f"{name}.png").read_bytes() for name in ("mnist-augmented", *others)]
    assert len(set(sheets)) == 4


def test_show_folder_applies_fit_and_augmentation(pictures, elsewhere):
    mine = ["data", "show", "folder", "--data.folder", str(pictures)]
    shown = {}
    for name, options in {"pad": [], "crop": ["--data.fit", "crop"], "augmented": ["--augmented"]}.items():
        assert main([*mine, "--out", f"{name}.png", *options]) == 0
        shown[name] = (elsewhere / f"{name}.png").read_bytes()
    assert len(set(shown.values())) == 3


@pytest.mark.parametrize("name", ["mnist", "odd-one-out"])
def test_show_embedded_data_needs_no_download(capsys, name):
    assert main(["data", "show", name]) == 0
    with Image.open(f"{name}.png") as sheet:
        assert sheet.width > 300


def test_show_folder_of_user_images(capsys, elsewhere):
    for name in ("cat", "dog"):
        (elsewhere / "mine" / name).mkdir(parents=True)
        for i in range(3):
            shade = np.full((8, 8, 3), 50 * i, np.uint8)
            Image.fromarray(shade).save(elsewhere / "mine" / name / f"{i}.png")
    assert main(["data", "show", "folder", "--data.folder", "mine"]) == 0
    assert capsys.readouterr().out == "6 images, 2 classes (train 4, validation 0, test 2).\nwrote folder.png\n"


def test_show_folder_splits_as_training_does(capsys, pictures, tmp_path):
    """Also with the command that training suggests."""
    for changes in ([], ["--data.validation", "3", "--data.limit", "20"]):
        own = ["--data.folder", str(pictures), *changes]
        small = ["--model.width", "16", "--model.depth", "1", "--training.steps", "1"]
        assert main(["train", "folder", *own, *small, "--name", f"run-{len(changes)}"]) == 0
        trained = capsys.readouterr().out
        split = re.search(r"30 images, 3 classes \(train .*?\)", trained).group()
        (command,) = re.findall("To see them as the model does: clearhead (.*)", trained)
        for argv in (["data", "show", "folder", *own], shlex.split(command)):
            assert main(argv) == 0
            assert split in capsys.readouterr().out


def test_show_digits_as_text(capsys):
    assert main(["data", "show", "reverse"]) == 0
    for line in capsys.readouterr().out.splitlines():
        digits, answer = (side.split() for side in line.split("->"))
        assert digits == answer[::-1]
    assert main(["data", "show", "digits", "--data.question", "sum"]) == 0
    for line in capsys.readouterr().out.splitlines():
        digits, answer = line.split("->")
        assert sum(map(int, digits.split())) == int(answer)
    assert main(["data", "show", "digits", "--data.question", "repeat"]) == 0


@pytest.mark.parametrize("argv", ["data", "data --help", "data get --help", "data show -h", "data get cifar10 --help"])
def test_help_shows_the_usage(capsys, argv):
    assert main(argv.split()) == 0
    assert "usage: clearhead data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("data fetch mnist", "data needs list, get NAME or show NAME, got 'fetch'"),
        ("data get", "data get needs the name of a data set; clearhead data list"),
        ("data show --out x.png", "data show needs the name of a data set"),
        ("data get minst", "unknown data set 'minst'; did you mean mnist?"),
        ("data get cifar10 --form here", "did you mean --from?"),
        (
            "data get cifar10 --from nowhere",
            "cifar10 could not be fetched: nowhere: no such file or folder; if you have the files, run:",
        ),
        ("data get cifar10 --from ~nobody-here/x", "there is no home directory for '~nobody-here/x'"),
        ("data show folder --data.folder ~nobody-here/x", "there is no home directory for '~nobody-here/x'"),
        ("data show cifar10", "run: clearhead data get cifar10"),
        ("data show mnist --out x.jpg", "--out must be a .png file, got 'x.jpg'; try --out x.png"),
        ("data show folder", "--data.folder PATH is required for folder"),
        ("data show folder --from mine", "data show folder has no option --from; did you mean --data.folder?"),
        ("data show folder --folder mine", "data show folder has no option --folder; did you mean --data.folder?"),
        ("data show text --from my.txt", "did you mean --data.file?"),
        ("data show pronounce --from my.dict", "did you mean --data.train-file?"),
        ("data show digits --question sum", "did you mean --data.question?"),
        ("data show mnist --from x", "data show mnist has no option --from; see clearhead data show mnist --help"),
        ("train folder --folder mine", "train folder has no option --folder; did you mean --data.folder?"),
        ("data show mnist --data.augmentation.crop 4", "--data.augmentation.* needs --augmented"),
        ("data show odd-one-out --augmented", "data show odd-one-out has no option --augmented"),
        ("data show digits --data.question why", "question must be one of most-common, repeat, sum, got 'why'"),
        ("data list --all", "data list has no option --all"),
        ("data get cifar10 --from=", "--from must be the path of a folder or an archive, got ''"),
        ("train cifar10-vit --data.augmentation.crop 1000000000", "crop must be at most 2,048, got"),
        ("data show mnist --augmented --data.augmentation.crop 99", "crop must be at most the 28 pixels"),
        ("train reverse --data.length 1000000000", "length must be at most 65,536, got 1000000000"),
        ("train reverse --data.limit 100000000000", "limit must be at most 10,000,000, got"),
    ],
)
def test_errors_are_one_line(capsys, argv, message, monkeypatch):
    monkeypatch.setattr("clearhead.data.downloads.HttpSource.read", lambda *args: pytest.fail("a server was contacted"))
    assert main(argv.split()) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1]
    assert err[-1].startswith("clearhead: ")


def test_output_folder_is_created_or_a_one_line_error(capsys):
    assert main(["data", "show", "mnist", "--out", "absent/x.png"]) == 0
    assert main(["data", "show", "mnist", "--out", "absent/x.png/y.png"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("clearhead: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["data", "list"], ["data", "get", "x"], ["data", "show", "x"]])
def test_list_and_errors_do_not_import_torch(argv):
    code = f"import sys; from clearhead.cli.main import main; main({argv}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_show_words_and_texts_as_text(capsys, elsewhere):
    assert main(["data", "show", "pronounce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all("   ->   " in line for line in lines)
    (elsewhere / "my.dict").write_text("".join(f"{a}{b} B D\n" for a in "abcdef" for b in "xyz"))
    assert main(["data", "show", "pronounce", "--data.train-file", "my.dict"]) == 0
    assert {line.partition(" ")[2].strip() for line in capsys.readouterr().out.splitlines()} == {"->   B D"}
    (elsewhere / "names.txt").write_text("".join(f"{a}{b}\n" for a in "abcdef" for b in "xyz"))
    assert main(["data", "show", "words", "--data.file", "names.txt"]) == 0
    assert set(capsys.readouterr().out.split()) < {a + b for a in "abcdef" for b in "xyz"}
    (elsewhere / "my.txt").write_text("Être, ou ne pas être.\n" * 40, "utf-8")
    assert main(["data", "show", "text", "--data.file", "my.txt"]) == 0
    assert "ne pas être.\\nÊtre" in capsys.readouterr().out
    assert main(["data", "show", "text"]) == 2
    assert "--data.file PATH is required for text" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "why"), [("mnist", "part of the package"), ("reverse", "generated on the fly")])
def test_get_of_data_without_download_explains_why(capsys, name, why):
    assert main(["data", "get", name]) == 0
    assert capsys.readouterr().out == f"{name} does not need a download: it is {why}\n"


def test_recipes_lists_every_recipe_with_its_measurements(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in RECIPES)
    assert "100.00%" in out
    assert "10,282" in out
    assert max(map(len, out.splitlines())) <= 100


def test_recipes_json_equals_the_measurements(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        assert (rows[name]["seconds"] is None) == (recipe.measured is None)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.parameters is not None])
def test_recipes_have_the_listed_number_of_parameters(name):
    assert RECIPES[name].parameters == shapes(RECIPES[name].make().model).parameters


def test_recipes_without_a_number_of_parameters_depend_on_user_data():
    unknown = [name for name, recipe in RECIPES.items() if recipe.parameters is None]
    assert unknown == ["text", "folder"]


def test_recipes_labels_partial_and_missing_measurements(capsys, monkeypatch):
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


def test_recipes_name_the_number_of_tta_views(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["recipes"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["cifar10-fast"].endswith("%, mean of 6 views")
    assert lines["mnist"].endswith("%")


def test_recipes_keep_all_numbers_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    assert any("91.18%" in line for line in lines)
