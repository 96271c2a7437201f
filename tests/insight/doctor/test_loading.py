import sys

import pytest
import torch
from torch import nn

from clearhead.insight.doctor.loading import load

FILE = """
import torch
from torch import nn

class Model(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

class Sized(nn.Linear):
    def __init__(self, width, depth=2):
        super().__init__(width, width)

def build():
    return Sized(4)

def broken():
    return 1 / 0

def leaves():
    raise SystemExit("enough")

ready = nn.Linear(2, 2)
number = 3
def three():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the user's files; what is imported from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "users_file.py").write_text(FILE)
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "inner.py").write_text(FILE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    [
        "users_file:Model",
        "users_file:build",
        "users_package.inner:Model",
        "users_file:ready",
        "users_file.py:Model",
        "users_file.py:ready",
        "users_package/inner.py:build",
        "./users_package/inner.py:Model",
        "users_package/inner:Model",
    ],
)
def test_a_class_a_function_or_a_module_itself(folder, target):
    """By the file's path or as Python imports it."""
    assert isinstance(load(target, folder), nn.Linear)


def test_an_absolute_path_or_one_of_another_folder(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert isinstance(load(f"{folder}/users_file.py:Model", elsewhere), nn.Linear)
    assert isinstance(load(f"../{folder.name}/users_package/inner.py:Model", folder), nn.Linear)


def test_a_file_may_import_its_neighbours(folder):
    """From a folder without __init__.py by their names, from a package by relative imports."""
    (folder / "users_folder").mkdir()
    (folder / "users_folder" / "users_layers.py").write_text(FILE)
    (folder / "users_folder" / "users_model.py").write_text("from users_layers import Model")
    assert isinstance(load("users_folder/users_model.py:Model", folder), nn.Linear)
    (folder / "users_package" / "__init__.py").write_text("")
    (folder / "users_package" / "users_model.py").write_text("from .inner import Model")
    assert isinstance(load("users_package/users_model.py:Model", folder), nn.Linear)


def test_a_file_loaded_by_its_path_may_have_any_name(folder):
    """Also one that Python has a module of, or that no import statement could name."""
    for name in ("token.py", "users-file 2.py"):
        (folder / name).write_text(FILE + "\nimport token\nassert hasattr(token, 'tok_name') or 'token' in __name__")
        assert isinstance(load(f"{name}:Model", folder), nn.Linear)
    assert hasattr(sys.modules["token"], "tok_name")


def test_two_files_of_one_name_are_two_files(folder):
    (folder / "users_other").mkdir()
    (folder / "users_other" / "users_file.py").write_text(FILE.replace("(3, 3)", "(5, 5)"))
    assert load("users_file.py:Model", folder).in_features == 3
    assert load("users_other/users_file.py:Model", folder).in_features == 5


def test_the_same_weights_each_time_and_random_state_untouched(folder):
    state = torch.get_rng_state()
    assert torch.equal(load("users_file:Model", folder).weight, load("users_file:Model", folder).weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("users_file", "named as FILE.py:NAME, got 'users_file'; users_file defines Model, Sized, build, broken, "),
        ("users_file.py", "leaves, three: try users_file.py:Model"),
        ("users_file.Model", "try users_file:Model"),
        ("users_flie.py", "try users_flie.py:MyModel"),
        (".users_package.inner:Model", "try users_package.inner:Model"),
        ("/home/nobody/users_file.py:Model", "no file /home/nobody/users_file.py: there is no folder /home/nobody"),
        ("users_flie.py:Model", "no file users_flie.py; did you mean users_file.py?"),
        ("users_package/iner.py:Model", "no file users_package/iner.py; did you mean users_package/inner.py?"),
        ("users_package/zzz.py:Model", "no file users_package/zzz.py"),
        ("nowhere:Model", "no module 'nowhere' in this folder or installed; a file elsewhere is named with its path"),
        ("users_flie:Model", "no module 'users_flie' in this folder or installed; did you mean users_file.py?"),
        ("users_file:Modle", "users_file has no 'Modle'; did you mean Model?"),
        ("users_file.py:Modle", "users_file.py has no 'Modle'; did you mean Model?"),
        ("users_file:xyz", "users_file has no 'xyz'; it has Model, Sized, build, broken, leaves, three"),
        ("users_file:Sized", "it needs width; name a function instead: def small(): return Sized(width=...)"),
        ("users_file:broken", "could not be built: ZeroDivisionError: division by zero (users_file.py:17)"),
        ("users_file:leaves", "could not be built: SystemExit: enough (users_file.py:20)"),
        ("users_file:three", "must be an nn.Module or return one, got int"),
        ("users_file:number", "must be an nn.Module or return one, got int"),
    ],
)
def test_mistakes_are_one_line(folder, target, message):
    with pytest.raises((ValueError, LookupError)) as caught:
        load(target, folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "SyntaxError: '(' was never closed (users_bad.py:1)"),
        ("import torch\ntorch.nope", "AttributeError: module 'torch' has no attribute 'nope' (users_bad.py:2)"),
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (users_bad.py:1)"),
        ("raise SystemExit(3)", 'it ends the program; move what it runs below if __name__ == "__main__":'),
    ],
)
@pytest.mark.parametrize("target", ["users_bad:Model", "users_bad.py:Model"])
def test_errors_in_the_users_file_have_their_place(folder, text, message, target):
    (folder / "users_bad.py").write_text(text)
    with pytest.raises(ValueError, match=r"users_bad(.py)? could not be imported: ") as caught:
        load(target, folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "users_bad" not in sys.modules


def test_a_name_hidden_by_another_module_is_loaded_by_its_file(folder):
    (folder / "token.py").write_text(FILE)  # Python has imported its own long ago
    with pytest.raises(ValueError, match=r"token resolves to another installed module; name the file: token.py:NAME"):
        load("token:Model", folder)


def test_a_file_that_asks_for_an_accelerator_gets_none(folder, monkeypatch):
    """Or else its forward() would make tensors there, while the copy is on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (folder / "users_device.py").write_text(f"{FILE}\nready.where = 'cuda' if torch.cuda.is_available() else 'cpu'")
    assert load("users_device:ready", folder).where == "cpu"
    assert torch.cuda.is_available()


def test_a_name_that_is_made_when_it_is_asked_for_may_break(folder):
    (folder / "users_lazy.py").write_text("def __getattr__(name):\n    import not_installed_here\n")
    with pytest.raises(ValueError, match=r"could not provide 'GPT': ModuleNotFoundError: .*\(users_lazy.py:2\)"):
        load("users_lazy:GPT", folder)
