"""Executes the notebooks of notebooks/ and writes them, with their outputs and figures, to docs/notebooks/.

python docs/make_notebooks.py                          all notebooks
python docs/make_notebooks.py attention-from-scratch   one of them

It needs jupytext, nbclient and ipykernel: pip install -c constraints.txt '.[notebooks]'
"""

import base64
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "notebooks"
PAGES = ROOT / "docs/notebooks"
TIMEOUT = 300
"""seconds for one cell"""

PROGRESS = re.compile(r"<progress .*</progress>.*")
VIEWER = re.compile(r'<div class="clearhead-viewer".*?</iframe></div>', re.DOTALL)
"""a page of its own, which is too large for the documentation"""
STYLE = re.compile(r' style="[^"]*"')

SETUP = """
import importlib, torch
try:
    importlib.import_module("torchvision")
except RuntimeError:  # its compiled operators do not load beside every build of torch; the notebooks call none
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
"""
"""runs before the first cell, and is not shown"""


def execute(source: Path, folder: str) -> Any:
    """The notebook with its outputs. It runs in `folder`, so that runs and figures do not stay."""
    notebook = jupytext.read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    os.environ.update(OMP_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    del notebook.cells[0]
    return notebook


def render(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """The page as Markdown, and its images by file name."""
    parts, images = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        if printed:
            parts.append(fenced(printed))
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                image = f"{name}-{number}.png"
                images[image] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({image})")
            elif "text/html" in data:
                if not PROGRESS.fullmatch(data["text/html"]):
                    parts.append(STYLE.sub("", VIEWER.sub("", data["text/html"])))
            elif "text/plain" in data:
                parts.append(fenced(data["text/plain"]))
    link = f"*Source: [notebooks/{name}.py](../../notebooks/{name}.py), a notebook for Jupyter with jupytext.*"
    title, *rest = parts
    heading, _, introduction = title.partition("\n")
    return "\n\n".join([heading, link, introduction.strip(), *rest]) + "\n", images


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def main(names: list[str]) -> None:
    PAGES.mkdir(exist_ok=True)
    for source in sorted(SOURCES.glob("*.py")):
        name = source.stem
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            page, images = render(execute(source, folder), name)
        for old in PAGES.glob(f"{name}-*.png"):
            old.unlink()
        for image, content in images.items():
            (PAGES / image).write_bytes(content)
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
