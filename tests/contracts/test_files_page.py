"""docs/files.md lists every source file."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKE_FILES = ROOT / "docs/make_files.py"


def test_the_page_is_current():
    generated = runpy.run_path(str(MAKE_FILES))["render"]()
    assert (ROOT / "docs/files.md").read_text() == generated, "run `python docs/make_files.py`"


def test_the_page_links_every_module():
    page = (ROOT / "docs/files.md").read_text()
    modules = [path for path in (ROOT / "src/clearhead").rglob("*.py") if path.name != "__init__.py"]
    assert modules
    assert not [path for path in modules if f"(../{path.relative_to(ROOT)})" not in page]
