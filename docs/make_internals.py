"""Draws the diagrams of docs/internals.md as SVG: the layers, and the path of `train` and of `look`.

python docs/make_internals.py    writes docs/diagrams/*.svg

The colors follow the theme where a diagram is part of a page of the site, and the reader's light or dark preference
where it is an image. The layers come from the contract in pyproject.toml that import-linter enforces.
"""

import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from make_files import first_sentence

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/clearhead"
FOLDER = ROOT / "docs/diagrams"

WIDTH, MARGIN, PADDING, GAP = 440, 10, 12, 18
LINE, SMALL_LINE = 19, 16

STYLE = """\
.clearhead-diagram { --ink: var(--md-default-fg-color, #1f2328); --box: var(--md-code-bg-color, #f4f4f6);
  --line: var(--md-default-fg-color--lighter, #8c959f); --name: var(--md-typeset-a-color, #4051b5);
  --soft: color-mix(in srgb, var(--ink) 78%, transparent); }
@media (prefers-color-scheme: dark) { .clearhead-diagram { --ink: var(--md-default-fg-color, #e6edf3);
  --box: var(--md-code-bg-color, #21262d); --line: var(--md-default-fg-color--lighter, #6e7681);
  --name: var(--md-typeset-a-color, #8ea2ff); } }
.clearhead-diagram text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.clearhead-diagram .name { font: 600 13px ui-monospace, monospace; fill: var(--name); }
.clearhead-diagram .file, .clearhead-diagram .note { font-size: 12px; fill: var(--soft); }
.clearhead-diagram .box { fill: var(--box); stroke: var(--line); }
.clearhead-diagram .group { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
.clearhead-diagram .arrow { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.clearhead-diagram .head { fill: var(--soft); }"""


@dataclass(frozen=True)
class Step:
    """One box: what happens, and where in the code."""

    text: str
    function: str
    file: str


@dataclass(frozen=True)
class Repeat:
    """Steps inside a dashed frame."""

    title: str
    steps: tuple[Step, ...]


TRAIN = (
    Step("Parse the options into changes of the recipe's settings", "train", "cli/train.py"),
    Step("Build and validate the configuration of the run", "config_of", "recipes/__init__.py"),
    Step("Name the run and start", "train", "recipes/__init__.py"),
    Step("Read the data; build the model, the optimizers and the batches", "build_context", "training/context.py"),
    Step("Create the run directory, or open it and take its lock", "open_or_create", "training/run_directory.py"),
    Step("Load the latest intact checkpoint, if there is one", "restore", "training/state.py"),
    Repeat(
        "for each step, until the last one or a signal",
        (
            Step("Take batch number i, a pure function of seed and i", "Batches.at", "data/batches.py"),
            Step("Forward, loss, backward, clip, update", "train_step", "training/loop.py"),
            Step("Every few steps: evaluate on the validation set", "validate", "training/loop.py"),
            Step("Write a temporary folder, sync it, rename it", "save", "training/checkpoint.py"),
        ),
    ),
    Step("Score the best checkpoint on the test set, once", "test_best_checkpoint", "training/loop.py"),
)
LOOK = (
    Step("Take a model and its inputs", "look", "insight/trace.py"),
    Step("Intercept torch functions for the time of one pass", "capture_attention", "insight/capture.py"),
    Step("Note which module is running, for the names", "ModuleStack", "interception.py"),
    Repeat(
        "for each torch function that the forward pass calls",
        (
            Step("Run it unchanged; decide whether it is attention", "Capture.handle", "insight/capture.py"),
            Step("The fused kernel: keep q, k, v, mask, scale, output", "SDPACall", "insight/calls.py"),
            Step("A softmax whose result multiplies values: keep both", "SoftmaxTracker", "insight/softmaxes.py"),
        ),
    ),
    Step("Return the output, and a record for each layer", "AttentionTrace", "insight/trace.py"),
    Step("Only when asked: compute the weights of these heads and rows", "AttentionRecord.weights", "insight/trace.py"),
)


def diagram(title: str, steps: tuple[Step | Repeat, ...]) -> str:
    """Boxes from top to bottom, joined by arrows."""
    parts: list[str] = []
    y = MARGIN
    for number, step in enumerate(steps):
        if number:
            parts.append(arrow(y, y + GAP))
            y += GAP
        if isinstance(step, Repeat):
            top, inner = y, y + 30
            frame: list[str] = []
            for i, part in enumerate(step.steps):
                if i:
                    frame.append(arrow(inner, inner + GAP))
                    inner += GAP
                drawn, inner = box(part, inner, inset=12)
                frame += drawn
            y = inner + 12
            size = f'x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{y - top}"'
            parts += [f'<rect class="group" {size} rx="8"/>', label(MARGIN + 12, top + 20, step.title, "note"), *frame]
        else:
            drawn, y = box(step, y)
            parts += drawn
    return svg(title, parts, y + MARGIN)


def box(step: Step, y: int, inset: int = 0) -> tuple[list[str], int]:
    """A box with the text of a step above its function and file; returns its parts and its lower edge."""
    lines = wrap(step.text, 58 - inset // 3)
    height = 2 * PADDING + LINE * len(lines) + SMALL_LINE
    x = MARGIN + inset
    parts = [f'<rect class="box" x="{x}" y="{y}" width="{WIDTH - 2 * x}" height="{height}" rx="6"/>']
    baseline = y + PADDING + 13
    for line in lines:
        parts.append(label(x + PADDING, baseline, line))
        baseline += LINE
    parts.append(
        f'<text x="{x + PADDING}" y="{baseline}"><tspan class="name">{escape(step.function)}</tspan>'
        f'<tspan class="file" dx="10">{escape(step.file)}</tspan></text>'
    )
    return parts, y + height


def layers() -> list[tuple[str, ...]]:
    """The layers of pyproject.toml from top to bottom; names on one line do not import each other."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [
        tuple(part.strip(" ()").removeprefix("clearhead.") for part in layer.split("|")) for layer in contract["layers"]
    ]


def layers_diagram() -> str:
    """A stack of packages; each may import those below it."""
    parts: list[str] = []
    y = MARGIN
    for number, names in enumerate(layers()):
        if number:
            parts.append(arrow(y, y + GAP))
            y += GAP
        entries = [(name, wrap(first_sentence(module_path(name)).replace("`", ""), 62)) for name in names]
        height = 2 * PADDING - 4 + sum(LINE + SMALL_LINE * len(lines) for _, lines in entries) + 6 * (len(entries) - 1)
        parts.append(f'<rect class="box" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="6"/>')
        baseline = y + PADDING + 10
        for name, lines in entries:
            parts.append(label(MARGIN + PADDING, baseline, name, "name"))
            for line in lines:
                baseline += SMALL_LINE
                parts.append(label(MARGIN + PADDING, baseline, line, "note"))
            baseline += LINE + 6
        y += height
    return svg("The layers of the package: imports point down only", parts, y + MARGIN)


def module_path(name: str) -> Path:
    package = PACKAGE / name / "__init__.py"
    return package if package.exists() else PACKAGE / f"{name}.py"


def label(x: int, y: int, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x}" y="{y}">{escape(text)}</text>'


def arrow(top: int, bottom: int) -> str:
    x = WIDTH // 2
    return (
        f'<path class="arrow" d="M{x} {top}V{bottom - 5}"/>'
        f'<path class="head" d="M{x - 4} {bottom - 7}L{x} {bottom}L{x + 4} {bottom - 7}Z"/>'
    )


def svg(title: str, parts: list[str], height: int) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{escape(title)}"'
    opening = f'<svg class="clearhead-diagram" xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([opening, f"<style>\n{STYLE}\n</style>", *parts, "</svg>\n"])


def render() -> dict[str, str]:
    """The SVG of each diagram, by the name of its file."""
    return {
        "layers.svg": layers_diagram(),
        "train.svg": diagram("The path of clearhead train, from the command line to the test", TRAIN),
        "look.svg": diagram("The path of clearhead.look, from a model to attention weights", LOOK),
    }


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()
