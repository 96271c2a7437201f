"""The five steps of attention as text and as LaTeX."""

import math
import re

import pytest
import torch

from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS, five_steps
from clearhead.models.steps_render import steps_latex, steps_text

QKV = {
    "q": [[0.3367, 0.1288], [0.2345, 0.2303], [-1.1229, -0.1863]],
    "k": [[2.2082, -0.6380], [0.4617, 0.2674], [0.5349, 0.8094]],
    "v": [[1.1103, -1.6898], [-0.9890, 0.9580], [1.3221, 0.8172]],
}


def matrices(steps):
    return {name: matrix for step in steps for name, matrix in step.matrices.items()}


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_the_terminal(width):
    torch.manual_seed(0)
    large = [torch.randn(*size) * 1e6 for size in [(20, 64), (64, 16), (64, 16), (64, 16)]]
    for inputs in (
        EXAMPLE,
        QKV,
        EXAMPLE_HEADS | {"heads": 4},
        dict(zip(EXAMPLE, large, strict=True)),
        dict(zip(EXAMPLE, large, strict=True)) | {"heads": 8},
    ):
        lines = steps_text(five_steps(**inputs), width).plain.splitlines()
        assert max(map(len, lines)) <= width


def test_text_shows_every_matrix_with_shape_and_values():
    text = steps_text(five_steps(**EXAMPLE)).plain
    for title in ("x [3,4]", "W_Q [4,2]", "q [3,2]", "scores [3,3]", "weights [3,3]", "weighted [3,3,3]", "z [3,3]"):
        assert title in text
    first = matrices(five_steps(**EXAMPLE))["z"][0]
    assert "  ".join(f"{n:.3f}" for n in first.tolist()) in text


def test_text_shows_every_head():
    text = steps_text(five_steps(**EXAMPLE_HEADS, heads=2)).plain
    for title in ("2 heads", "scores, head 2 [3,3]", "head 2, query 3 [3,2]", "z, head 1 [3,2]", "output [3,4]"):
        assert title in text


def latex(**inputs):
    return steps_latex(five_steps(**inputs))


@pytest.mark.parametrize(
    "inputs",
    [EXAMPLE, QKV, EXAMPLE_HEADS | {"heads": 2, "causal": True}, EXAMPLE | {"beta": math.inf}],
    ids=["example", "given q k v", "two heads", "infinite beta"],
)
def test_latex_is_balanced_and_contains_every_value(inputs):
    """Checks environments, braces, display brackets, and the rows and columns of every matrix."""
    tex = latex(**inputs)
    assert tex.startswith(r"\documentclass")
    assert tex.endswith("\\end{document}\n")
    opened = re.findall(r"\\begin\{(\w+)\}", tex)
    assert sorted(opened) == sorted(re.findall(r"\\end\{(\w+)\}", tex))
    assert set(opened) == {"document", "bmatrix"}
    assert tex.count(r"\[") == tex.count(r"\]")
    depth = 0
    for sign in re.sub(r"\\[{}]", "", tex):
        depth += (sign == "{") - (sign == "}")
        assert depth >= 0
    assert depth == 0
    assert tex.isascii()
    displays = re.findall(r"\\\[\n(.*?)\n\\\]", tex, re.DOTALL)
    assert all("\n\n" not in display for display in displays)  # an empty line is an error in a display
    outside = re.sub(r"\\\[.*?\\\]", "", tex, flags=re.DOTALL).replace(r"$-\infty$", "")
    assert not re.search(r"[_^&$%#]", outside)
    expected = [panel.matrix for step in five_steps(**inputs) for name in step.matrices for panel in step.panels(name)]
    found = re.findall(r"\\begin\{bmatrix\} (.*?) \\end\{bmatrix\}", tex)
    shapes = [(body.count(r"\\") + 1, body.split(r"\\")[0].count("&") + 1) for body in found]
    assert sorted(shapes) == sorted(tuple(m.shape) for m in expected)


def test_latex_truncates_large_matrices_and_writes_powers_of_ten():
    torch.manual_seed(0)
    large = [torch.randn(*size) * 1e6 for size in [(20, 64), (64, 16), (64, 16), (64, 16)]]
    tex = latex(**dict(zip(EXAMPLE, large, strict=True)))
    assert r"\cdots" in tex
    assert r"\ddots" in tex
    assert re.search(r"\d\.\d\d \\cdot 10\^\{6\}", tex)
    columns = max(line.split(r"\\")[0].count("&") + 1 for line in re.findall(r"\{bmatrix\}(.*?)\\end", tex))
    assert int(re.search(r"MaxMatrixCols\}\{(\d+)\}", tex)[1]) >= columns > 10


def test_latex_shows_masked_scores_as_minus_infinity():
    assert latex(**EXAMPLE, causal=True).count(r"& -\infty") == 3
