"""The notebooks run, as plain Python and in Jupyter, and their pages show their current source.

`python docs/make_notebooks.py` executes them and writes the pages.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.cli import main as cli
from clearhead.cli.options import Parser

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
PAGES = ROOT / "docs/notebooks"
MAX_SECONDS = 120
MAX_BYTES = 300_000
"""of a page with its images"""


def cells(path):
    """(kind, source) of each cell of the percent format, markdown without its comment marks."""
    for text in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        first, _, body = text.partition("\n")
        if "[markdown]" in first:
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
        else:
            yield "code", body.strip()


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "attention-from-scratch",
        "looking-into-a-model",
        "vision-transformer",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_as_plain_python(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_in_jupyter_within_two_minutes_of_processor_time(path, tmp_path):
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    make = runpy.run_path(str(ROOT / "docs/make_notebooks.py"))
    before = os.times()
    notebook = make["execute"](path, str(tmp_path))
    after = os.times()
    assert after.children_user - before.children_user + after.user - before.user < MAX_SECONDS
    page, images = make["render"](notebook, path.stem)
    assert images
    assert len(page) + sum(map(len, images.values())) < MAX_BYTES
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_page_shows_the_current_source(path):
    page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    stale = f"docs/notebooks/{path.stem}.md is stale; run `python docs/make_notebooks.py {path.stem}`"
    position = 0
    for number, (kind, source) in enumerate(cells(path)):
        shown = f"```python\n{source}\n```" if kind == "code" else source
        if number == 0:  # the link to the source follows the title
            shown = source.partition("\n")[2].strip()
        assert shown in page[position:], stale
        position = page.index(shown, position) + len(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_page_has_its_images_and_no_traces_of_the_machine(path):
    page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w-]+\.png)\)", page)
    assert sorted(linked) == sorted(image.name for image in PAGES.glob(f"{path.stem}-*.png"))
    assert len(page) + sum((PAGES / image).stat().st_size for image in linked) < MAX_BYTES
    assert "site-packages" not in page
    assert "0x" not in page  # an object that is shown by its address
    assert "Warning" not in page


class Parsed(BaseException):
    """The command line was accepted; nothing is executed."""


@pytest.mark.parametrize(
    "command",
    sorted(
        {
            command
            for path in NOTEBOOKS
            for kind, source in cells(path)
            if kind == "markdown"
            for command in re.findall(r"`(clearhead [a-z][^`]*)`", source.replace("\n", " "))
        }
    ),
)
def test_commands_in_the_text_parse(command, monkeypatch):
    parse = Parser.parse

    def stop(parser, argv):
        parse(parser, argv)
        raise Parsed

    monkeypatch.setattr(Parser, "parse", stop)
    argv = shlex.split(command)[1:]
    if argv == ["lab"]:
        return
    with pytest.raises(Parsed):
        cli.run(argv)
