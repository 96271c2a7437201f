"""The site: its checker finds what it must, its diagrams and its navigation agree with the code.

`make docs` builds the site and checks the result; these tests need neither.
"""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/clearhead"
PROJECT = {"index.md", "changelog.md", "contributing.md", "security.md"}
"""pages that the build makes of README.md and its neighbors"""
NEWCOMER = {
    "the lab": r"claims",
    "every check of the doctor": r"### causality",
    "training on a folder": r"clearhead train folder --data\.folder",
    "resuming": r"clearhead resume",
    "what beta is": r"`beta` is the inverse temperature",
}


def load(name):
    """The module docs/NAME.py; its neighbors can be imported while it loads."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return runpy.run_path(str(ROOT / "docs" / name))
    finally:
        sys.path.remove(str(ROOT / "docs"))


def site(folder, body, **others):
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>")
    for name, text in others.items():
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "another server"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "another server"),
        ('<img src="http://example/x.png">', "another server"),
        ('<p style="background: url(https://example/x.png)">x</p>', "another server"),
        ("<style>@import 'https://example/x.css';</style>", "another server"),
        ('<a href="missing.html">x</a>', "dead link"),
        ('<img src="missing.png">', "dead link"),
        ('<a href="other.html#missing">x</a>', "no anchor"),
        ("<p>a list:\n- one</p>", "unrendered"),
        ("<p>| a | b |\n|---|---|</p>", "unrendered"),
    ],
)
def test_the_checker_finds(body, problem, tmp_path):
    found = load("check_site.py")["problems"](site(tmp_path, body, other="<h1 id='known'>x</h1>"))
    assert len(found) >= 1
    assert all(problem in line for line in found)


def test_the_checker_accepts_a_sound_site(tmp_path):
    body = '<a href="other.html#known">x</a> <a href="https://example">a link is no request</a> <p>1 - 2 | 3</p>'
    assert not load("check_site.py")["problems"](site(tmp_path, body, other="<h1 id='known'>x</h1>"))


def test_an_empty_site_is_a_problem(tmp_path):
    assert load("check_site.py")["problems"](tmp_path)


def test_the_diagrams_are_current():
    for name, text in load("make_internals.py")["render"]().items():
        assert (ROOT / "docs/diagrams" / name).read_text() == text, "run `python docs/make_files.py`"


@pytest.mark.parametrize("path", ["TRAIN", "LOOK"])
def test_the_diagrams_name_functions_that_exist(path):
    steps = [step for part in load("make_internals.py")[path] for step in getattr(part, "steps", (part,))]
    for step in steps:
        body = ast.parse((PACKAGE / step.file).read_text()).body
        for name in step.function.split("."):
            (node,) = [node for node in body if getattr(node, "name", None) == name]
            body = node.body


def test_the_layers_are_those_of_the_package():
    names = {name for layer in load("make_internals.py")["layers"]() for name in layer}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= names


def test_every_page_is_in_the_navigation():
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r"[:-] (\S+\.md)$", navigation, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert "- lab/*" in navigation
    lessons = set(re.findall(r"\((lab/[\w-]+\.md)", (ROOT / "docs/lab.md").read_text()))
    assert lessons == {f"lab/{path.name}" for path in (ROOT / "docs/lab").glob("*.md")}
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - lessons
    reference = load("make_reference.py")
    generated = PROJECT | {"reference/settings.md"} | {f"reference/api/{page}.md" for page in reference["API"]}
    assert set(listed) == written | generated, "list every page of docs/ in the nav of mkdocs.yml"


def test_search_from_a_file_uses_a_script_of_our_own():
    """The theme's offline plugin loads a script from another server unless one of this name is configured."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  - offline\b", config, re.MULTILINE)
    (script,) = re.findall(r"polyfills: \[([^\],]+)\]", config)
    assert "iframe-worker" in script
    assert "//" not in re.sub(r"/\*.*?\*/", "", (ROOT / "docs" / script).read_text(), flags=re.DOTALL)


def test_settings_list_every_option_of_train():
    reference = load("make_reference.py")
    page = reference["settings"]()
    parser = reference["help_of"](["train", "mnist"])
    paths = {action.dest for action in parser._actions if "." in action.dest}
    assert len(paths) > 40
    assert not [path for path in paths if f"`{path}`" not in page]


@pytest.mark.parametrize("topic", NEWCOMER)
def test_a_newcomer_finds_it_within_two_clicks_of_the_readme(topic):
    pages, reached = {ROOT / "README.md"}, set()
    for _ in range(3):
        reached |= pages
        links = (
            (page.parent / link).resolve()
            for page in pages
            for link in re.findall(r"\]\(([^)#]+\.md)", page.read_text())
        )
        pages = {link for link in links if link.exists()} - reached
    assert any(re.search(NEWCOMER[topic], page.read_text()) for page in reached)
