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
    "target", ["users_file:Model", "users_file:build", "users_package.inner:Model", "users_file:ready"]
)
def test_a_class_a_function_or_a_module_itself(folder, target):
    assert isinstance(load(target, folder), nn.Linear)


def test_the_same_weights_each_time_and_random_state_untouched(folder):
    state = torch.get_rng_state()
    assert torch.equal(load("users_file:Model", folder).weight, load("users_file:Model", folder).weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("users_file", "named as file:Class or file:function, got 'users_file'; try users_file:MyModel"),
        ("users_file.Model", "try users_file:Model"),
        ("users_file.py", "try users_file:MyModel"),
        ("users_file.py:Model", "as Python imports it, got 'users_file.py'; try users_file:Model"),
        ("./users_package/inner.py:Model", "try users_package.inner:Model"),
        (".users_package.inner:Model", "try users_package.inner:Model"),
        ("/home/me/users_file.py:Model", "go to /home/me and try users_file:Model"),
        ("../users_file.py:Model", "go to .. and try users_file:Model"),
        ("nowhere:Model", "got 'nowhere', which is in neither; go to the folder"),
        ("users_file:Modle", "users_file has no 'Modle'; did you mean Model?"),
        ("users_file:xyz", "users_file has no 'xyz'; there is Model, Sized, build, broken, leaves, three"),
        ("users_file:Sized", "got one that needs width; name a function: def small(): return Sized(width=...)"),
        ("users_file:broken", "got ZeroDivisionError: division by zero (users_file.py:17)"),
        ("users_file:leaves", "must return a module, got SystemExit: enough (users_file.py:20)"),
        ("users_file:three", "must be or return an nn.Module, got int"),
        ("users_file:number", "must be or return an nn.Module, got int"),
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
        ("import nothing_like_it", "must import what is installed, got ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", 'got one that ends the program; put what it runs below if __name__ == "__main__":'),
    ],
)
def test_errors_in_the_users_file_have_their_place(folder, text, message):
    (folder / "users_bad.py").write_text(text)
    with pytest.raises(ValueError, match="users_bad must") as caught:
        load("users_bad:Model", folder)
    assert message in str(caught.value)


def test_a_file_with_the_name_of_another_module_is_told(folder):
    (folder / "token.py").write_text(FILE)  # Python has imported its own long ago
    with pytest.raises(ValueError, match=r"a name that Python has no module of, got token.py; rename it"):
        load("token:Model", folder)


def test_a_file_that_asks_for_an_accelerator_gets_none(folder, monkeypatch):
    """Or else its forward() would make tensors there, while the copy is on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (folder / "users_device.py").write_text(f"{FILE}\nready.where = 'cuda' if torch.cuda.is_available() else 'cpu'")
    assert load("users_device:ready", folder).where == "cpu"
    assert torch.cuda.is_available()


def test_a_name_that_is_made_when_it_is_asked_for_may_break(folder):
    (folder / "users_lazy.py").write_text("def __getattr__(name):\n    import not_installed_here\n")
    with pytest.raises(ValueError, match=r"must have 'GPT', got ModuleNotFoundError: .*\(users_lazy.py:2\); install"):
        load("users_lazy:GPT", folder)
