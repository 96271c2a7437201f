"""Untrusted names, values and texts: no command passes a control character to the terminal."""

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image
from rich.table import Table
from rich.text import Text

from clearhead.cli.main import main
from clearhead.cli.options import show
from clearhead.messages import printable, safe_console

TITLE = "\x1b]0;t\x07"
"""the escape sequence that sets the title of a terminal"""
CLASSES = (TITLE, "a\nclearhead: forged", "[red]b[/red]\x9b31m\u202egnp", "$\\frac{ 猫")
RUN = "\x1b[2Jrun$\\frac{\nforged"
FILE = "\x1b[31mfile\r.png"
MODULE = """
import torch

class Hostile(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("\\x1b]0;t\\x07\\nforged", torch.nn.Linear(4, 4))

    def forward(self, x):
        print("\\x1b[2J")
        return self.get_submodule("\\x1b]0;t\\x07\\nforged")(x)

class Broken(Hostile):
    def forward(self, x):
        raise RuntimeError("\\x1b]0;t\\x07")
"""


def one_line(name):
    """Folder names with line breaks are refused, but an untrusted run may still contain such a class name."""
    return name.replace("\n", " ")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, forge):
    """A folder with images in hostile classes, a run trained on them under a hostile name, and hostile files."""
    home = tmp_path_factory.mktemp("hostile")
    noise = np.random.default_rng(0)
    for name in CLASSES:
        (home / "pictures" / one_line(name)).mkdir(parents=True)
        for i in range(8):
            pixels = noise.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "pictures" / one_line(name) / f"{i}.png")
    Image.fromarray(pixels).save(home / FILE)
    (home / "mymodel.py").write_text(MODULE)
    (home / "my.dict").write_text("".join(f"{w} K\x1b[31m AE B\n" for w in ("cab", "c\x1b[2Jb", "bac", "abc") * 9))
    (home / "my.words").write_text("".join(f"a\x1b[2J{chr(97 + i)}\x9b\n" for i in range(26)) * 4)
    (home / "matrices.json").write_text(json.dumps({TITLE: [[1.0]]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("CLEARHEAD_CACHE", str(home / "cache"))
        few = "--training.steps 2 --training.threads 1 --training.precision float32 --training.batch-size 4"
        small = "--model.width 8 --model.depth 1 --model.num-heads 2"
        images = "--data.folder pictures --data.image-size 16 --model.patch-size 8 --name run"
        assert main(["train", "folder", *few.split(), *small.split(), *images.split()]) == 0
        words = "--data.file my.words --data.validation 4 --name words"
        assert main(["train", "words", *few.split(), *small.split(), *words.split()]) == 0
    forge(home / "runs/run", data=lambda state: state["data"] | {"classes": sorted(CLASSES)})
    (home / "runs/run").rename(home / "runs" / RUN)
    config = json.loads((home / "runs" / RUN / "config.json").read_text())
    (home / "bad" / RUN).mkdir(parents=True)
    (home / "bad" / RUN / "config.json").write_text(json.dumps(config | {TITLE: TITLE}))
    return home


def is_safe(text):
    return printable(text, keep="\n\t") == text


@pytest.mark.parametrize(
    "argv",
    [
        ["runs"],
        ["runs", "--json"],
        ["runs", "bad"],
        ["curves", f"runs/{RUN}"],
        ["curves", f"runs/{RUN}", "--csv", "-"],
        ["curves", f"runs/{RUN}", "--csv", f"{TITLE}.csv"],
        ["confusion", f"runs/{RUN}"],
        ["confusion", f"runs/{RUN}", "--out", f"{TITLE}.jpg"],
        ["predictions", f"runs/{RUN}"],
        ["predictions", f"runs/{RUN}", "--json"],
        ["predict", f"runs/{RUN}", FILE, "pictures"],
        ["predict", f"runs/{RUN}", FILE, "--json"],
        ["predict", f"runs/{RUN}", f"{TITLE}.png"],
        ["evaluate", f"runs/{RUN}"],
        ["evaluate", f"runs/{RUN}", "--beam", "2"],
        ["look", f"runs/{RUN}", "--sample", "0"],
        ["look", f"runs/{RUN}", "--image", FILE],
        ["resume", f"runs/{RUN}"],
        ["resume", f"bad/{RUN}"],
        ["resume", f"{TITLE}"],
        ["sample", "runs/words", "--n", "3"],
        ["sample", "runs/words", "--n", "3", "--json"],
        ["sample", "runs/words", "--prompt", TITLE],
        ["shapes", f"runs/{RUN}"],
        ["shapes", "mymodel.py:Hostile"],
        ["shapes", "mymodel.py:Broken"],
        ["shapes", f"mymodel.py:{TITLE}"],
        ["shapes", "vit_tiny", "--norm", TITLE],
        ["doctor", "mymodel.py:Hostile", "--width", "4"],
        ["doctor", "mymodel.py:Broken"],
        ["doctor", f"{TITLE}.py:{TITLE}"],
        ["data", "show", "folder", "--data.folder", "pictures", "--out", f"{TITLE}.png"],
        ["data", "show", "words", "--data.file", "my.words"],
        ["data", "show", "pronounce", "--data.train-file", "my.dict", "--data.test-file", "my.dict"],
        ["data", "get", TITLE],
        ["steps", "--file", "matrices.json"],
        ["steps", "--figure", f"{TITLE}.png"],
        ["mask", TITLE],
        ["lab", TITLE],
        ["train", TITLE],
        ["train", "reverse", "--name", TITLE],
        ["train", "folder", "--data.folder", TITLE],
        ["verify-resume", TITLE],
        [TITLE],
        ["runs", TITLE],
        ["recipes", TITLE],
        ["recipes", f"--{TITLE}={TITLE}"],
    ],
    ids=lambda argv: ascii(" ".join(argv))[1:-1],
)
def test_no_control_character_reaches_the_terminal(hostile, monkeypatch, capsys, argv):
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(hostile / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(argv) in (0, 1, 2)
    out, err = capsys.readouterr()
    assert out + err
    assert is_safe(out)
    assert is_safe(err)
    assert not any(line.startswith(("forged", "clearhead: forged")) for line in (out + err).splitlines())
    if "--json" in argv:
        json.loads(out)


def test_hostile_names_are_shown_as_escapes(hostile, monkeypatch, capsys):
    monkeypatch.chdir(hostile)
    assert main(["predict", f"runs/{RUN}", FILE, *(f"pictures/{one_line(name)}" for name in CLASSES)]) == 0
    out = capsys.readouterr().out
    assert "pictures/\\x1b]0;t\\x07/0.png" in out
    assert "a\nclearhead" not in out
    assert "pictures/[red]b[/red]\\x9b31m\\u202egnp/0.png" in out
    assert "\\x1b[31mfile\\r.png" in out
    assert len(out.splitlines()) == 33
    assert main(["runs"]) == 0
    assert "\\x1b[2Jrun$\\frac{\\nforged" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_gets_our_color_codes_and_no_others(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    table = Table(header_style="bold")
    table.add_column("[link=http://x]name")
    table.add_row(Text("\x1b]0;t\x07", style="red"))
    monkeypatch.setattr("clearhead.cli.main.run", lambda argv: show(table) or print("\x1b[31m") or 0)
    assert main([]) == 0
    out = sys.stdout.getvalue()
    assert "\x1b[31m\\x1b]0;t" in out
    assert "\x1b]" not in out
    assert "\x07" not in out
    assert "[link=http://x]name" in out
    assert out.endswith("\\x1b[31m\n")


def test_console_shows_markup_as_text_and_keeps_unicode():
    console = safe_console(width=80)
    with console.capture() as captured:
        console.print("[red]kᵀ ü 猫 👩‍💻[/red] :smile: \x1b[2J")
    assert captured.get() == "[red]kᵀ ü 猫 👩‍💻[/red] :smile: \\x1b[2J\n"


def test_generated_text_keeps_its_line_breaks(trained, monkeypatch, capsys):
    monkeypatch.setattr("clearhead.tasks.language.LanguageTask.sample", lambda *args, **options: ["one\ntwo\x1b[2J"])
    assert main(["sample", str(trained / "text")]) == 0
    assert capsys.readouterr().out == "one\ntwo\\x1b[2J\n"
    assert main(["sample", str(trained / "words")]) == 0
    assert capsys.readouterr().out == "one\\ntwo\\x1b[2J\n"
