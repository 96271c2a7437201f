"""Writes docs/files.md: every source file with the first sentence of its docstring.

python docs/make_files.py
"""

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/clearhead"
PAGE = ROOT / "docs/files.md"

HEADER = """\
# Source files

Every module of `src/clearhead` with the first sentence of its docstring. `make pages` generates this page.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line; an error if there is no docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def render() -> str:
    """The page as Markdown: one section for each package, in alphabetical order, with the top level first."""
    sources = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    sections = [HEADER]
    for folder, paths in groupby(sources, key=lambda path: path.parent):
        title = ".".join(("clearhead", *folder.relative_to(PACKAGE).parts))
        own, *others = paths  # __init__.py comes first
        files = others or [own]
        rows = [f"| [`{path.name}`](../{path.relative_to(ROOT)}) | {cell(first_sentence(path))} |" for path in files]
        summary = first_sentence(folder / "__init__.py")
        sections.append("\n".join([f"## {title}", summary, "", "| file | contents |", "|---|---|", *rows]) + "\n")
    return "\n".join(sections)


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render())
    from make_internals import write  # the diagram of the layers contains the same sentences

    write()
