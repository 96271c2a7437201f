"""README, docs and the generated list of commands: Python blocks run, `clearhead` lines parse, links lead somewhere.

A Python block after the line `<!-- not run: REASON -->` is compiled only. Blocks run in a folder that has small trained
runs of the names in RUNS and a folder of images, pets.
"""

import importlib
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import clearhead
from clearhead import recipes
from clearhead.cli import main as cli
from clearhead.cli import train as cli_train
from clearhead.cli.options import Parser
from clearhead.recipes import results_table, trial
from clearhead.tasks import TASKS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {"command-line (generated)": runpy.run_path(str(ROOT / "docs/make_reference.py"))["command_line"]()}
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES} | GENERATED
RUNS = {
    "mine": ("mnist", {"training.steps": 2, "data.limit": 600}),
    "words": ("words", {"training.steps": 2, "data.limit": 2000}),
    "pronounce": ("pronounce-fast", {"training.steps": 2, "data.limit": 600, "data.validation": 50}),
}
BLOCK = re.compile(r"(?P<marker><!-- not run: .+? -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
IN_BASH = re.compile(r"^(?:torchrun .* -m )?(clearhead .*)$")
IN_TEXT = re.compile(r"^\$ (clearhead .*)$")
INLINE = re.compile(r"(?<!`)`(clearhead [^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b|[{|]|\bparity\b")
"""in commands that stand for many, such as `clearhead train RECIPE`; the guide adds the recipe parity itself"""
NAMES = {"data get", "data show", "train folder", "train text"}
"""commands that need an option or a name, and are mentioned without it"""
VARIABLE = re.compile(r'^(\w+)="(.*)"$', re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def blocks(*languages):
    """(page:line, text, is_run) of each fenced block in one of these languages."""
    for page, text in TEXTS.items():
        for block in BLOCK.finditer(text):
            if block["language"] == "python" and page.startswith("docs/notebooks/"):
                continue  # cells that depend on each other: test_notebooks.py runs them together
            if block["language"] in languages:
                name = f"{page}:{text.count(chr(10), 0, block.start('text'))}"
                yield pytest.param(block["text"], block["marker"] is None, id=name)


def commands():
    """Every command of the bash blocks, and those after `$ ` in text blocks; a backslash continues a line."""
    for language, pattern in (("bash", IN_BASH), ("text", IN_TEXT)):
        for block in blocks(language):
            text = block.values[0].replace("\\\n", " ")
            for name, value in VARIABLE.findall(text):
                text = text.replace(f"${name}", value)
            for number, line in enumerate(text.splitlines()):
                for command in re.split(r"&&|;|&$", re.sub(r"\s#.*", "", line)):
                    if match := pattern.search(command.strip()):
                        yield pytest.param(match[1], id=f"{block.id}+{number}")


def inline_commands():
    """Every complete command in running text and in tables; `clearhead train` alone is only a name."""
    found = {}
    for page, text in TEXTS.items():
        for match in INLINE.findall(BLOCK.sub("", text)):
            for command in " ".join(match.split()).split("&&"):
                words = command.split()[1:]
                if len(words) > 1 and " ".join(words) not in NAMES and not PLACEHOLDER.search(command):
                    found.setdefault(command.strip(), page)
    return [pytest.param(command, id=f"{page}: {command}") for command, page in found.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs that the documentation uses, trained for two steps."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, (recipe, changes) in RUNS.items():
            clearhead.train(recipe, name, changes=changes, quiet=True)
        write_pets()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("text", "is_run"), list(blocks("python")))
def test_python_blocks_run(text, is_run, runs, tmp_path, monkeypatch):
    code = compile(text, "block", "exec")
    if not is_run:
        return
    if "timm" in text:
        name_torchvision_operators()
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    tasks = dict(TASKS)
    try:
        exec(code, {"__name__": "__main__"})
    finally:  # the guide adds a task
        TASKS.clear()
        TASKS.update(tasks)


def name_torchvision_operators():
    """timm imports torchvision, whose compiled operators do not load beside every build of torch; none is called."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Parsed(BaseException):
    """The command line was accepted; nothing is executed."""


def accept(*args, **options):
    raise Parsed


def write_inputs(line):
    """The user's own files that a command line names: a text, a word list or dictionary, a folder of images."""
    for file in re.findall(r"[\w-]+\.txt", line):
        Path(file).write_text("A line of a text file.\n" * 100)
    for file in re.findall(r"[\w-]+\.dict|\w+\.train", line):
        Path(file).write_text("".join(f"{a}{b} {a.upper()} {b.upper()}\n" for a in "bdfgklm" for b in "pstvz"))
    write_pets()


def write_pets():
    """The folder of images pets: ten of each of two classes."""
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (20 * i, 0, 0)).save(Path("pets", name, f"{i}.png"))


@pytest.mark.parametrize("line", [*commands(), *inline_commands()])
def test_command_lines_parse(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_inputs(line)
    argv = shlex.split(re.sub(r" >.*| \|.*|[;&].*$", "", line), comments=True)[1:]
    if argv[0] == "train":  # its settings are checked against each other, too
        monkeypatch.setattr(recipes, "train", accept)
        monkeypatch.setattr(cli_train, "load_parts", accept)
        monkeypatch.setattr(trial, "estimate", accept)
    else:
        parse = Parser.parse
        monkeypatch.setattr(Parser, "parse", lambda parser, argv: accept(parse(parser, argv)))
    if "--help" in argv:
        assert cli.run(argv) == 0
        return
    with pytest.raises(Parsed):
        cli.run(argv)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_to_files(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_blocks_and_commands_are_collected():
    assert len(list(blocks("python"))) >= 10
    assert len(list(commands())) >= 100
    assert len(inline_commands()) >= 30


def test_the_readme_is_short_and_its_results_are_current():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 9_000
    assert results_table().strip() in readme
