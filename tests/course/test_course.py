"""Every question of the course has an answer, and its numbers come from recorded results."""

import json
import re
import runpy
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from clearhead import course

ROOT = Path(__file__).parents[2]
ANSWERS = list(course.answers().values())
QUESTIONS = {
    1: "self-attention",
    2: "multi-head-attention",
    3: "single-or-multi-head",
    4: "projection-shapes",
    5: "causal-mask",
    6: "column-shapes",
    7: "attention-steps",
    8: "applications",
    9: "tensor-shapes",
    10: "query-key-value",
    11: "attention-map",
    12: "cross-attention",
    13: "graph-network",
    14: "dot-product-attention",
    15: "beta",
    16: "hard-attention",
    17: "soft-attention",
    18: "perturbed-key",
    19: "scaled-key",
    20: "multi-head-output",
    21: "convolutional-analogue",
    22: "multi-head-self-attention",
    23: "positional-encoding",
    24: "permutation",
    25: "running-linear-layer",
    26: "attention-as-convolution",
    27: "transformer-layers",
    28: "layer-norm",
    29: "train-and-eval-mode",
    30: "skip-connections",
    31: "number-of-heads",
    32: "in-proj-weight",
    33: "recurrence",
    34: "encoder-and-decoder",
    35: "feed-forward",
    36: "multi-head-benefits",
    37: "sequence-reversal",
    38: "sequence-level-prediction",
    39: "image-classification",
    40: "encoder-input-output",
    41: "which-augmentations",
    42: "preprocessing",
    43: "augmentation",
    44: "cifar10-pipeline",
    45: "learning-curves",
    46: "transformer-or-cnn",
    47: "convolution-in-vit",
    48: "vit-or-transformer",
    49: "position-embeddings",
    50: "class-token",
    51: "plain-vit",
}
each_answer = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.slug)


def test_every_question_has_an_answer():
    assert {answer.number: answer.slug for answer in ANSWERS} == QUESTIONS
    assert [answer.number for answer in ANSWERS] == sorted(QUESTIONS)


@each_answer
def test_an_answer_is_complete(answer):
    kinds = [block.kind for block in answer.body]
    assert answer.question.endswith("?")
    assert kinds[0] in ("paragraph", "list")
    assert "formula" in kinds, "an answer has a formula"
    assert answer.evidence
    assert answer.misconception
    assert answer.commands
    assert all(command.startswith("clearhead ") for command in answer.commands)


@each_answer
def test_texts_have_no_unfilled_placeholders(answer):
    texts = [*(block.text for block in answer.body), *(e.text for e in answer.evidence), answer.misconception]
    for text in texts:
        assert not re.search(r"\{\w+:", text)
        assert text.strip() == text or text.startswith(" "), "no stray blank"


@each_answer
def test_lines_of_formulas_fit_into_a_terminal(answer):
    lines = [line for block in answer.body if block.kind in ("formula", "python") for line in block.text.splitlines()]
    assert max(map(len, lines)) <= 76


@each_answer
def test_the_recorded_verdict_of_every_cited_claim_is_the_one_that_the_text_assumes(answer):
    for evidence in answer.evidence:
        assert evidence.verdict == "holds"


@each_answer
def test_figures_exist(answer):
    for block in answer.body:
        if block.kind == "figure":
            assert (ROOT / "docs" / block.path).exists()
            assert block.text, "a figure has a caption"


@pytest.mark.parametrize(
    "text",
    [
        "{value:scaled-key|no such check}",
        "{value:scaled-key|difference between formula and measurement}",  # two checks
        "{percent:no-such-claim|accuracy}",
        "{recipe:no-such-recipe|accuracy}",
        "{run:no-such-run|test accuracy}",
    ],
)
def test_a_placeholder_without_a_value_is_an_error(text):
    with pytest.raises(LookupError):
        course.fill(text)


def test_placeholders_are_filled(monkeypatch):
    values = {"one: accuracy": 0.9969, "one: accuracy and more": 0.5, "error": 1e-15, "zero": 0, "difference": 0.12345}
    checks = [SimpleNamespace(name=name, value=value) for name, value in values.items()]
    monkeypatch.setattr(course, "recorded", lambda: {"claim": SimpleNamespace(checks=checks)})
    monkeypatch.setattr(course, "recipe_results", lambda: {"mnist": {"accuracy": 0.9905, "seconds": 75, "epochs": 1}})
    monkeypatch.setattr(course, "run_results", lambda: {"short": {"epochs": 10.0, "test accuracy": 0.789}})
    filled = {
        "{value:claim|one: accuracy}": "0.997",
        "{percent:claim|one: accuracy}": "99.7%",
        "{points:claim|one: accuracy and}": "50.0",
        "{value:claim|error}": "below 1e-12",
        "{error:claim|error}": "up to rounding errors (below 1e-12)",
        "{error:claim|zero}": "exactly",
        "{error:claim|diff}": "up to 0.123",
        "{recipe:mnist|accuracy} in {recipe:mnist|time}": "99.05% in 75 s",
        "{run:short|test accuracy}": "78.90%",
        "{run:short|epochs}": "10",
    }
    assert {text: course.fill(text) for text in filled} == filled


def test_the_page_is_current():
    make_course = runpy.run_path(str(ROOT / "docs/make_course.py"))
    recorded = files("clearhead.course").joinpath("runs.json").read_text()
    assert make_course["run_results"]() == recorded, "run `python docs/make_course.py`"
    assert (ROOT / "docs/course.md").read_text() == make_course["render"](), "run `python docs/make_course.py`"


def test_the_page_has_a_section_for_each_question():
    page = (ROOT / "docs/course.md").read_text()
    for answer in ANSWERS:
        assert f"\n### {answer.number}. {answer.question}\n" in page
        assert f"(#{answer.slug})" in page


@pytest.mark.parametrize("name", ["encoder-block", "decoder-block", "vision-transformer", "causal-mask"])
def test_diagrams_are_current(name):
    diagrams = runpy.run_path(str(ROOT / "docs/make_diagrams.py"))["DIAGRAMS"]
    assert (ROOT / f"docs/figures/{name}.svg").read_text() == diagrams[name](), "run `python docs/make_diagrams.py`"


def test_the_files_are_package_data():
    """setuptools copies the files that match these patterns into the wheel."""
    project = (ROOT / "pyproject.toml").read_text()
    patterns = json.loads(re.search(r"(?m)^clearhead = (\[.*\])$", project)[1])
    package = ROOT / "src/clearhead"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    needed = {*(package / "course").glob("*.md"), package / "course/runs.json", package / "lab/results.json"}
    assert len(needed) == len(course.TOPICS) + 2
    assert needed <= shipped


@pytest.mark.parametrize(
    ("name", "slug"), [("5", "causal-mask"), ("causal_mask", "causal-mask"), ("Causal mask", "causal-mask")]
)
def test_an_answer_is_found_by_slug_number_or_words(name, slug):
    assert course.find(name).slug == slug


@pytest.mark.parametrize(
    ("name", "suggestion"), [("casual-mask", "causal-mask"), ("masks", "causal-mask"), ("cross", "cross-attention")]
)
def test_unknown_questions_are_answered_with_suggestions(name, suggestion):
    with pytest.raises(LookupError, match=rf"no question named '{name}'; did you mean .*{suggestion}"):
        course.find(name)


def test_a_question_without_any_similarity_is_refused():
    with pytest.raises(LookupError, match=r"no question named 'xyzzy'; run clearhead ask to list all \d+"):
        course.find("xyzzy")
