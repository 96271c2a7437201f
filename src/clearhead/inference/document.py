"""A document of facts, tables, commands and figures, written as one HTML file or as Markdown.

Its texts come from runs and from the user's files, which may come from a stranger. Both renderers escape every text,
and the HTML page carries a content security policy that allows no script and no request.
"""

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from clearhead.drawing import METADATA
from clearhead.files import write_atomic
from clearhead.messages import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".md")
MAX_TEXT = 2000
"""characters of one text; a longer one is cut off"""
MIME_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
PIXELS_PER_INCH = 96
"""of CSS"""


@dataclass(frozen=True)
class Paragraph:
    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Preformatted:
    """Lines of text, such as a command to copy."""

    text: str
    language: str = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values. The most important ones of a document are highlighted."""

    items: Sequence[tuple[str, str]]
    is_highlighted: bool = False


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    right_aligned: Sequence[str] = ()
    """names of columns of numbers"""
    is_code: bool = False
    """whether the cells contain names and values, which are set in a monospaced font"""


@dataclass(frozen=True)
class Picture:
    name: str
    """file name for Markdown, with the suffix .png"""
    figure: "Figure"
    title: str
    caption: str = ""
    is_vector: bool = False
    """whether HTML contains it as SVG. Markdown always has PNG, because most programs refuse SVG in it"""

    def content(self, suffix: str) -> bytes:
        import matplotlib

        content = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
            self.figure.savefig(content, format=suffix[1:], metadata=METADATA[suffix], facecolor="white")
        return content.getvalue()

    def data_uri(self, suffix: str) -> str:
        return f"data:{MIME_TYPES[suffix]};base64,{base64.b64encode(self.content(suffix)).decode()}"


Block = Paragraph | Preformatted | Facts | Table | Picture


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    level: int = 2


@dataclass(frozen=True)
class Document:
    title: str
    sections: Sequence[Section]
    introduction: Sequence[Block] = ()
    footer: str = ""


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a report is saved as .html or .md, got {path.name!r}; try {path.stem or 'report'}.html")


def save(document: Document, path: Path, *, embed: bool = False) -> Path:
    """Write HTML or Markdown, by the suffix of the path. The figures of Markdown are saved in NAME-figures/ beside it,
    or inside the file if `embed`."""
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".html":
        write_atomic(path, to_html(document).encode())
        return path
    folder = path.with_name(f"{path.stem}-figures")
    if not embed:
        for each in pictures(document):
            folder.mkdir(exist_ok=True)
            write_atomic(folder / each.name, each.content(".png"))
    write_atomic(path, to_markdown(document, "" if embed else folder.name).encode())
    return path


def pictures(document: Document) -> Iterator[Picture]:
    for section in document.sections:
        yield from (block for block in section.blocks if isinstance(block, Picture))


def shown(text: str) -> str:
    """One line without control characters, of limited length."""
    line = " ".join(printable(text, keep="\n\t").split())
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} ..."


# HTML

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #57606a; --line: #d0d7de; --page: #ffffff; --card: #f6f8fa;
  --accent: #0072b2; --warning: #9a3d00; --warning-card: #fff4e5; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --dim: #9da7b3; --line: #3d444d; --page: #12161c; --card: #1c222a; --accent: #56b4e9;
    --warning: #ffb877; --warning-card: #33210f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 3rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .5rem 0 1rem; max-width: 46rem; overflow-wrap: anywhere; }
nav { margin: 1.5rem 0; font-size: .9rem; line-height: 1.9; }
nav a { color: var(--accent); text-decoration: none; margin-right: 1.1em; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
.warning { background: var(--warning-card); color: var(--warning); border-left: 4px solid currentColor;
  padding: .6rem .9rem; border-radius: 4px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  margin: .5rem 0 1rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
pre, .code td { font: .8rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: .5rem 0 1rem; }
dt { color: var(--dim); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
dl.highlights { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1rem 0 1.5rem; }
.highlights div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }
.highlights dt { font-size: .8rem; }
.highlights dd { font-size: 1.25rem; font-weight: 600; line-height: 1.3; }
.scroll { overflow-x: auto; margin: .5rem 0 1.25rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .35rem; }
th, td { text-align: left; vertical-align: top; padding: .28rem 1.1rem .28rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
td { max-width: 36rem; overflow-wrap: break-word; }
th.right, td.right { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0 1.75rem; }
figcaption { color: var(--dim); font-size: .9rem; margin-bottom: .4rem; max-width: 46rem; overflow-wrap: anywhere; }
figcaption b { color: var(--text); }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; padding: 6px; }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--line); color: var(--dim);
  font-size: .85rem; }
@media (max-width: 34rem) {
  body { padding-top: 1.25rem; }
  h1 { font-size: 1.6rem; }
  dl:not(.highlights) { grid-template-columns: 1fr; gap: 0; }
  dl:not(.highlights) dd { margin-bottom: .5rem; }
}
@media print {
  :root { color-scheme: light; --text: #000; --dim: #444; --line: #bbb; --page: #fff; --card: #f4f4f4; --accent: #000;
    --warning: #7a3000; --warning-card: #fff; }
  @page { margin: 16mm 14mm; }
  html { font-size: 12px; }
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav { display: none; }
  h2, h3, h2 + p, h3 + p, figcaption, caption { break-after: avoid; }
  figure, pre, dl, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  th, td { padding: .15rem .8rem .15rem 0; }
  img { max-height: 120mm; width: auto; border: 0; padding: 0; }
}
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(document: Document) -> str:
    links = [
        f'<a href="#section-{number}">{escaped(section.title)}</a>'
        for number, section in enumerate(document.sections, 1)
        if section.level == 2
    ]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escaped(document.title)}</h1>",
        *map(html_of, document.introduction),
        f'<nav aria-label="Contents">{chr(10).join(links)}</nav>\n<main>',
    ]
    for number, section in enumerate(document.sections, 1):
        tag = f"h{section.level}"
        parts.append(f'<{tag} id="section-{number}">{escaped(section.title)}</{tag}>')
        parts += map(html_of, section.blocks)
    footer = f"<footer>{escaped(document.footer)}</footer>\n" if document.footer else ""
    return "\n".join([*parts, f"</main>\n{footer}</body>\n</html>\n"])


def escaped(text: str) -> str:
    return html.escape(shown(text))


def html_of(block: Block) -> str:
    match block:
        case Paragraph(text, is_warning):
            return f'<p class="warning">{escaped(text)}</p>' if is_warning else f"<p>{escaped(text)}</p>"
        case Preformatted(text):
            return f"<pre><code>{html.escape(printable(text, keep=chr(10)))}</code></pre>"
        case Facts(items, is_highlighted):
            if is_highlighted:
                cells = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in items)
                return f'<dl class="highlights">{"".join(cells)}</dl>'
            return f"<dl>{''.join(f'<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>' for name, value in items)}</dl>"
        case Picture():
            caption = f"<b>{escaped(block.title)}</b>" + (f"<br>{escaped(block.caption)}" if block.caption else "")
            width = round(block.figure.get_figwidth() * PIXELS_PER_INCH)
            source = block.data_uri(".svg" if block.is_vector else ".png")
            image = f'<img src="{source}" width="{width}" alt="{escaped(block.title)}">'
            return f"<figure>\n<figcaption>{caption}</figcaption>\n{image}\n</figure>"
        case Table():
            return html_table(block)


def html_table(table: Table) -> str:
    classes = [' class="right"' if name in table.right_aligned else "" for name in table.columns]
    header = "".join(f"<th{kind}>{escaped(name)}</th>" for name, kind in zip(table.columns, classes, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{kind}>{escaped(cell)}</td>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in table.rows
    ]
    caption = f"<caption>{escaped(table.caption)}</caption>" if table.caption else ""
    body = "\n".join(rows)
    kind = ' class="code"' if table.is_code else ""
    head = f"<thead><tr>{header}</tr></thead>"
    return f'<div class="scroll"><table{kind}>{caption}{head}\n<tbody>\n{body}\n</tbody></table></div>'


# Markdown

SPECIAL = re.compile(r"([\\`*_{}\[\]()#!|~$^=@])")
"""characters that begin a construct of Markdown or of one of its extensions"""
LIST_MARKER = re.compile(r"^(\d+)([.)])|^([-+>])")
LINK = re.compile(r"(?i)(www|https?|ftp|mailto)([.:])")
"""the beginning of an address that becomes a link without any brackets"""


def to_markdown(document: Document, folder: str) -> str:
    """`folder` contains the figures; if it is empty, they are embedded as data URIs."""
    parts = [f"# {markdown(document.title)}", *(markdown_of(block, folder) for block in document.introduction)]
    for section in document.sections:
        parts.append(f"{'#' * section.level} {markdown(section.title)}")
        parts += [markdown_of(block, folder) for block in section.blocks]
    if document.footer:
        parts += ["---", markdown(document.footer)]
    return "\n\n".join(parts) + "\n"


def markdown(text: str) -> str:
    """A text in which nothing is markup: neither that of Markdown nor HTML."""
    text = SPECIAL.sub(r"\\\1", shown(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return LIST_MARKER.sub(r"\1\\\2\3", LINK.sub(r"\1\\\2", text))


def markdown_of(block: Block, folder: str) -> str:
    match block:
        case Paragraph(text, is_warning):
            return f"**{markdown(text)}**" if is_warning else markdown(text)
        case Preformatted(text, language):
            text = printable(text, keep="\n")
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}{language}\n{text}\n{fence}"
        case Facts(items):
            return "\n".join(f"- {markdown(name)}: {markdown(value)}" for name, value in items)
        case Picture():
            address = f"{quote(folder)}/{quote(block.name)}" if folder else block.data_uri(".png")
            caption = f"\n\n{markdown(block.caption)}" if block.caption else ""
            return f"**{markdown(block.title)}**\n\n![{markdown(block.title)}]({address}){caption}"
        case Table():
            marks = ["---:" if name in block.right_aligned else "---" for name in block.columns]
            lines = [list(map(markdown, block.columns)), marks, *(list(map(markdown, row)) for row in block.rows)]
            caption = f"{markdown(block.caption)}\n\n" if block.caption else ""
            return caption + "\n".join(f"| {' | '.join(line)} |" for line in lines)
