"""A task is one class in one file: no other module may test for the name of a task, of its objective or of its data."""

import ast
from pathlib import Path

import pytest

from clearhead.tasks import TASKS

SOURCES = Path(__file__).parents[2] / "src" / "clearhead"
OBJECTIVES = {
    *("classification", "token-classification", "binary-classification", "regression", "set-pointer"),
    *("seq2seq", "causal-lm"),
}
NAMES = {*TASKS, *OBJECTIVES, "images", "digits", "words", "sets"}


def names_compared(source: str) -> list[tuple[int, str]]:
    """The line and the name of each comparison with a name, and of each `case` of a name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        parts = [part for side in sides for part in (side.elts if isinstance(side, ast.Tuple | ast.List) else [side])]
        found += [(node.lineno, part.value) for part in parts if isinstance(part, ast.Constant) and part.value in NAMES]
    return found


@pytest.mark.parametrize(
    "source",
    ['if config.data.name == "mnist": ...', 'if kind in ("words", "text"): ...', 'match x:\n case "digits": ...'],
)
def test_comparison_with_a_task_name_is_found(source):
    assert names_compared(source)


def test_no_module_outside_tasks_compares_with_the_name_of_a_task():
    found = {
        f"{path.relative_to(SOURCES)}:{line}": name
        for path in sorted(SOURCES.rglob("*.py"))
        if path.parent.name != "tasks"
        for line, name in names_compared(path.read_text())
    }
    assert found == {}
