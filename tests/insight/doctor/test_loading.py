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
    """A folder with user files; their modules are removed from sys.modules afterwards."""
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
def test_classes_functions_and_instances_are_loaded(folder, target):
    """By the path of the file or by the import path."""
    assert isinstance(load(target, folder), nn.Linear)


def test_paths_outside_the_folder_are_loaded(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert isinstance(load(f"{folder}/users_file.py:Model", elsewhere), nn.Linear)
    assert isinstance(load(f"../{folder.name}/users_package/inner.py:Model", folder), nn.Linear)


def test_file_may_import_its_neighbors(folder):
    """By name from a plain folder, by relative imports from a package."""
    (folder / "users_folder").mkdir()
    (folder / "users_folder" / "users_layers.py").write_text(FILE)
    (folder / "users_folder" / "users_model.py").write_text("from users_layers import Model")
    assert isinstance(load("users_folder/users_model.py:Model", folder), nn.Linear)
    (folder / "users_package" / "__init__.py").write_text("")
    (folder / "users_package" / "users_model.py").write_text("from .inner import Model")
    assert isinstance(load("users_package/users_model.py:Model", folder), nn.Linear)


def test_file_may_have_any_name(folder):
    """Even that of a standard module, or one that is no identifier."""
    for name in ("token.py", "users-file 2.py"):
        (folder / name).write_text(FILE + "\nimport token\nassert hasattr(token, 'tok_name') or 'token' in __name__")
        assert isinstance(load(f"{name}:Model", folder), nn.Linear)
    assert hasattr(sys.modules["token"], "tok_name")


def test_files_of_the_same_name_are_distinguished(folder):
    (folder / "users_other").mkdir()
    (folder / "users_other" / "users_file.py").write_text(FILE.replace("(3, 3)", "(5, 5)"))
    assert load("users_file.py:Model", folder).in_features == 3
    assert load("users_other/users_file.py:Model", folder).in_features == 5


def test_weights_are_reproducible_and_random_state_is_untouched(folder):
    state = torch.get_rng_state()
    assert torch.equal(load("users_file:Model", folder).weight, load("users_file:Model", folder).weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("users_file", "expected FILE.py:NAME, got 'users_file'; users_file defines Model, Sized, build, broken, "),
        ("users_file.py", "leaves, three: try users_file.py:Model"),
        ("users_file.Model", "try users_file:Model"),
        ("users_flie.py", "try users_flie.py:MyModel"),
        (".users_package.inner:Model", "try users_package.inner:Model"),
        (
            "/home/nobody/users_file.py:Model",
            "no file /home/nobody/users_file.py: the folder /home/nobody does not exist",
        ),
        ("users_flie.py:Model", "no file users_flie.py; did you mean users_file.py?"),
        ("users_package/iner.py:Model", "no file users_package/iner.py; did you mean users_package/inner.py?"),
        ("users_package/zzz.py:Model", "no file users_package/zzz.py"),
        ("nowhere:Model", "no module 'nowhere' in this folder or installed; for a file elsewhere, give its path"),
        ("users_flie:Model", "no module 'users_flie' in this folder or installed; did you mean users_file.py?"),
        ("users_file:Modle", "users_file has no 'Modle'; did you mean Model?"),
        ("users_file.py:Modle", "users_file.py has no 'Modle'; did you mean Model?"),
        ("users_file:xyz", "users_file has no 'xyz'; it has Model, Sized, build, broken, leaves, three"),
        (
            "users_file:Sized",
            "requires arguments (width); write a function without any: def small(): return Sized(width=...)",
        ),
        ("users_file:broken", "could not be built: ZeroDivisionError: division by zero (users_file.py:17)"),
        ("users_file:leaves", "could not be built: SystemExit: enough (users_file.py:20)"),
        ("users_file:three", "must be an nn.Module or return one, got int"),
        ("users_file:number", "must be an nn.Module or return one, got int"),
    ],
)
def test_invalid_targets_are_one_line_errors(folder, target, message):
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
        ("raise SystemExit(3)", 'it exits Python; move its script under if __name__ == "__main__":'),
    ],
)
@pytest.mark.parametrize("target", ["users_bad:Model", "users_bad.py:Model"])
def test_import_errors_have_their_location(folder, text, message, target):
    (folder / "users_bad.py").write_text(text)
    with pytest.raises(ValueError, match=r"users_bad(.py)? could not be imported: ") as caught:
        load(target, folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "users_bad" not in sys.modules


def test_shadowed_import_path_is_an_error(folder):
    (folder / "token.py").write_text(FILE)  # shadowed by the standard module
    with pytest.raises(ValueError, match=r"token resolves to another installed module; name the file: token.py:NAME"):
        load("token:Model", folder)


def test_accelerators_are_unavailable_to_the_file(folder, monkeypatch):
    """Otherwise forward() would create tensors there, while the copy is on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (folder / "users_device.py").write_text(f"{FILE}\nready.where = 'cuda' if torch.cuda.is_available() else 'cpu'")
    assert load("users_device:ready", folder).where == "cpu"
    assert torch.cuda.is_available()


def test_error_in_a_lazy_attribute_is_reported(folder):
    (folder / "users_lazy.py").write_text("def __getattr__(name):\n    import not_installed_here\n")
    with pytest.raises(ValueError, match=r"could not provide 'GPT': ModuleNotFoundError: .*\(users_lazy.py:2\)"):
        load("users_lazy:GPT", folder)
