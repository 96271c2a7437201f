"""Promises about the package as a whole."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import clearhead

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/clearhead").rglob("*.py"))
PUBLIC = {
    *("softargmax", "attend_reference", "attend_fused", "MultiHeadAttention", "masks"),
    *("VisionTransformer", "SequencePredictor", "Seq2Seq", "LanguageModel", "list_presets", "shapes"),
    *("Greedy", "Sampling", "Beam"),
    *("look", "edit", "head_importance", "examine"),
    *("train", "resume", "fit", "open_run", "load", "report", "shipped_model"),
    *("nn", "models", "insight", "data", "lab", "tasks", "training"),
}
MODULES = {"masks", "nn", "models", "insight", "data", "lab", "tasks", "training"}
PACKAGES = (
    "clearhead",
    *(f"clearhead.{name}" for name in ("nn", "models", "insight", "data", "tasks", "training")),
)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_public_names_can_be_imported_from_clearhead():
    assert set(clearhead.__all__) == PUBLIC
    assert set(dir(clearhead)) >= PUBLIC
    for name in PUBLIC - MODULES:
        assert callable(getattr(clearhead, name))
    assert clearhead.masks.causal(3).shape == (3, 3)
    assert clearhead.lab.run("scaled-key", alpha=3).verdict == "holds"


def test_dir_shows_public_names_and_dunders_only():
    """Also after submodules were loaded, which Python binds to the package."""
    code = "import clearhead, clearhead.training.config; clearhead.softargmax; print(*dir(clearhead))"
    shown = set(run(code).stdout.split())
    assert {name for name in shown if not re.fullmatch(r"__\w+__", name)} == PUBLIC
    assert {"__version__", "__all__", "__doc__"} <= shown


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_is_visible_to_type_checkers(package):
    module = import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    typed = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    bound = {
        name
        for statement in tree.body
        for name in (
            [alias.asname or alias.name for alias in statement.names]
            if isinstance(statement, ast.ImportFrom)
            else [statement.name]
            if isinstance(statement, ast.ClassDef | ast.FunctionDef)
            else [statement.target.id]
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            else []
        )
    }
    assert typed <= set(module.__all__)
    assert set(module.__all__) - typed <= bound
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_an_exported_function_is_not_hidden_by_a_module_of_its_name():
    code = "import clearhead.insight.trace, clearhead.insight.heads, clearhead.insight as i; print(i.look, i.edit)"
    assert run(code).stdout.count("<function") == 2


def test_an_unknown_name_lists_the_public_names():
    with pytest.raises(AttributeError, match=r"clearhead has no 'atend_fused'; it has .*attend_fused"):
        clearhead.atend_fused  # noqa: B018


def test_importing_clearhead_does_not_import_torch():
    assert run("import sys, clearhead; sys.exit('torch' in sys.modules)").returncode == 0


IMPORT_EACH_ALONE = """
import os, sys, torch
for module in sys.argv[1:]:
    child = os.fork()  # torch is there already: each child imports one module of ours and nothing else
    if child == 0:
        __import__(module)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{module} does not import alone")
"""


def test_every_module_imports_alone():
    """No hidden order of imports: each file's imports resolve without another of ours having been loaded first."""
    modules = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in SOURCES]
    modules = [name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")]
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH_ALONE, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_type_hints_are_shipped():
    assert (ROOT / "src/clearhead/py.typed").exists()


def test_the_version_is_written_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", clearhead.__version__)
    assert clearhead.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_command_outputs_are_not_committed():
    """Commands write into runs/ and figures/ of the folder where they are run, which may be this one."""
    listed = subprocess.run(["git", "ls-files", "runs", "figures"], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout == ""
    assert {"/runs/", "/figures/"} <= set((ROOT / ".gitignore").read_text().split())
