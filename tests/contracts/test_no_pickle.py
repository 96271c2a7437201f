"""A file from elsewhere is read, never run: no source of the package names anything that unpickles."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/clearhead").rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOADERS = re.compile(r"torch\.(serialization\.|jit\.|hub\.)?load(_state_dict_from_url)?|pandas\.read_pickle")
COLLECTIVES = re.compile(r"(broadcast|all_gather|gather|scatter|send|recv)_object(_list|s)?")
"""torch.distributed pickles what these carry"""
STARS = {"torch", "torch.serialization", "torch.distributed", "numpy"}
"""nobody sees what an asterisk brings from these"""


def unpicklers(source: str) -> list[str]:
    """Every name by which the source could unpickle something, written out: torch.serialization.load."""
    tree = ast.parse(source)
    known = imported(tree)
    for _ in range(2):  # loads = torch; load = loads.load
        known |= assigned(tree, known)
    found = [name for name in known.values() if unpickles(name)]
    for node in ast.walk(tree):
        name = written_out(node, known)
        if name and unpickles(name):
            found.append(name)
        if isinstance(node, ast.Attribute) and COLLECTIVES.fullmatch(node.attr):
            found.append(node.attr)
        if isinstance(node, ast.Call):
            found += of_call(node, known)
    return found


def unpickles(name: str) -> bool:
    root, home, last = name.partition(".")[0], *name.rpartition(".")[::2]
    is_star = last == "*" and home in STARS
    is_collective = root == "torch" and COLLECTIVES.fullmatch(last) is not None
    return root in MODULES or LOADERS.fullmatch(name) is not None or is_collective or is_star


def of_call(call: ast.Call, known: dict[str, str]) -> list[str]:
    """numpy.load unless it says allow_pickle=False or nothing of it; modules that are imported by a string."""
    called = written_out(call.func, known) or getattr(call.func, "id", "")
    found = [
        f"{called}(allow_pickle)"
        for keyword in call.keywords
        if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False
    ]
    if called == "numpy.load" and (len(call.args) > 2 or None in [keyword.arg for keyword in call.keywords]):
        found.append("numpy.load(allow_pickle)")
    if called in ("__import__", "importlib.import_module") and call.args:
        name = getattr(call.args[0], "value", "")
        found += [name] if isinstance(name, str) and name and unpickles(name) else []
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """What each name stands for that an import brings: {"np": "numpy", "load": "torch.load"}."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                known[alias.asname or root] = alias.name if alias.asname else root
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def assigned(tree: ast.AST, known: dict[str, str]) -> dict[str, str]:
    """Other names for what an import has brought."""
    more = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (name := written_out(node.value, known)):
            more |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}
    return more


def written_out(node: ast.AST, known: dict[str, str]) -> str | None:
    """torch.load for t.load after `import torch as t`, and for getattr(t, "load"); None for what was not imported."""
    match node:
        case ast.Name(id=name):
            return known.get(name)
        case (
            ast.Attribute(value=inner, attr=name)
            | ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name)), *_])
        ):
            home = written_out(inner, known)
            return f"{home}.{name}" if home else None
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle(path):
    assert unpicklers(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        *[f"import {name}" for name in sorted(MODULES)],
        "from pickle import loads",
        "import pickle as harmless",
        "def f():\n    import marshal",
        "import torch\ntorch.load('x')",
        "import torch\nread = torch.load",
        "import torch as t\nt.load('x')",
        "import torch\nt = torch\nt.load('x')",
        "import torch\ngetattr(torch, 'load')('x')",
        "from torch import load",
        "from torch import load as read",
        "from torch import *",
        "import torch\ntorch.serialization.load('x')",
        "import torch.serialization as s\ns.load('x')",
        "from torch import serialization\nserialization.load('x')",
        "from torch.serialization import load",
        "import torch\ntorch.jit.load('x')",
        "import torch\ntorch.hub.load_state_dict_from_url('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=trusted)",
        "import numpy as np\nnp.load('x', None, True)",
        "import numpy as np\nnp.load('x', **options)",
        "from numpy import load\nload('x', allow_pickle=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch\ntorch.distributed.all_gather_object([], 1)",
        "from torch.distributed import gather_object",
        "from torch.distributed import scatter_object_list as scatter",
        "import torch.distributed as dist\ndist.recv_object_list([])",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module('_pickle')",
        "__import__('shelve')",
    ],
)
def test_unpickling_code_is_detected(source):
    assert unpicklers(source)


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.load(file)",
        "import torch\ntorch.save({}, 'x')\nmodel.load_state_dict({})",
        "from safetensors.torch import load_file, load",
        "import numpy as np\nnp.load('x')\nnp.load('x', allow_pickle=False)",
        "import torch.distributed as dist\ndist.broadcast(t, src=0)\ndist.all_gather([], t)",
        "from clearhead.data import datasets\ndatasets.load(config, 0)",
        "from importlib import import_module\nimport_module(name)",
        "from . import pickles\nmarshal = 1",
    ],
)
def test_plain_reading_is_not_reported(source):
    assert unpicklers(source) == []
