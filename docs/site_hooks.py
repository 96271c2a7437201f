"""What the site needs beyond Markdown, at build time: generated pages, links to sources, inline diagrams, formulas.

mkdocs calls the functions named on_*. Nothing here or in the built pages makes a request to another server.
"""

import os
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS), str(ROOT / "src")]

import make_reference as reference  # noqa: E402 - found through the path above

PROJECT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""pages of the repository's top folder, and their names in the site"""
COMMANDS = re.compile(r"<!-- commands: .* -->")
"""where docs/reference/command-line.md shows every command"""
LINK = re.compile(r"(?P<text>\]\()(?P<path>(?!https?://|#|mailto:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
DIAGRAM = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]*diagrams/[\w-]+\.svg)\)$", re.MULTILINE)
FORMULA = re.compile(r'<(?P<tag>span|div|pre) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', re.DOTALL)
SHORT_CELL = re.compile(r"<td(?P<style>[^>]*)>(?P<text>[^<]{2,16})</td>")
"""a cell of a table that stays on one line, such as `5 min 32 s`"""
INDENTATION = re.compile(r"(?<=<td>) +")
PIPE_IN_CODE = re.compile(r"(?<=<code>)[^<]*\\\|[^<]*(?=</code>)")
"""a backslash before a pipe in a table, which Python-Markdown leaves in code, and GitHub does not"""
VERBATIM = re.compile(r"<(?P<end>/?)(?:code|pre|math)\b")
SUBSCRIPT = re.compile(
    r"(?<!\w)(?P<name>[^\W\d_]{1,2}'?|softargmax)_(?P<index>\{[^}]+\}|[^\W_ᵀ]+(?:,[^\W_ᵀ]+)*)(?![^\Wᵀ])"
)
SUPERSCRIPT = re.compile(r"\^\(((?:[^()]|\([^()]*\))+)\)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> None:
    """Anchors as on GitHub; a folder in the navigation stands for its pages."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.nav = expanded(config.nav)


def expanded(entry: Any) -> Any:
    """Replaces "lab/*" by the pages that docs/lab.md links, in this order."""
    if isinstance(entry, dict):
        return {title: expanded(value) for title, value in entry.items()}
    if not isinstance(entry, list):
        return entry
    pages: list[Any] = []
    for value in entry:
        if isinstance(value, str) and value.endswith("/*"):
            folder = value.removesuffix("/*")
            links = re.findall(rf"\(({folder}/[\w-]+\.md)", (DOCS / f"{folder}.md").read_text())
            pages += dict.fromkeys(links)
        else:
            pages.append(expanded(value))
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are generated, the project's own pages, and one page for each source that a page links."""
    generated = {f"reference/api/{page}.md": reference.api(page) for page in reference.API}
    generated["reference/settings.md"] = reference.settings()
    generated |= {page: (ROOT / name).read_text() for name, page in PROJECT.items()}
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()} | generated
    for page, text in texts.items():
        for source in filter(None, (target_of(match["path"], page) for match in LINK.finditer(text))):
            for path in [source, *sorted(source.glob("*.py"))] if source.exists() else []:
                if source_page(path) not in texts:
                    generated[source_page(path)] = source_text(path)
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    return files


def target_of(path: str, page: str) -> Path | None:
    """The file outside of docs/ that a link leads to, or None for a link inside of docs/."""
    folder = ROOT if page in PROJECT.values() else (DOCS / page).parent
    target = Path(os.path.normpath(folder / path))
    return target if ROOT in target.parents and DOCS not in target.parents else None


def source_page(source: Path) -> str:
    """The page of the site that shows a file of the repository."""
    name = source.relative_to(ROOT).as_posix()
    return PROJECT.get(name, f"source/{name.removeprefix('src/')}.md")


def source_text(source: Path) -> str:
    """A page with the text of a file, or with the list of files of a folder, left out of the search."""
    name, fence = source.relative_to(ROOT), "`" * 8
    if source.is_dir():
        links = [f"- [{path.name}]({source.name}/{path.name}.md)" for path in sorted(source.glob("*.py"))]
        text = "\n".join(links)
    else:
        options = f'.{LANGUAGES.get(source.suffix, "text")} linenums="1"'
        text = f"{fence} {{ {options} }}\n{source.read_text().rstrip()}\n{fence}"
    return f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n# {name}\n\n{text}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills the list of commands, inlines diagrams, and redirects links from files of the repository to their pages."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    markdown = with_blank_lines(COMMANDS.sub(lambda _: reference.command_line(), markdown))
    if uri in PROJECT.values():  # their links start at the top folder
        markdown = LINK.sub(lambda match: from_top(match, uri), markdown)
    markdown = LINK.sub(lambda match: redirected(match, uri), markdown)
    return DIAGRAM.sub(lambda match: inlined(match, uri), markdown)


def with_blank_lines(markdown: str) -> str:
    """A list may follow a paragraph directly on GitHub, but not in Python-Markdown: a blank line between them."""
    lines: list[str] = []
    in_fence = in_list = False
    for line in markdown.splitlines():
        is_item = bool(ITEM.match(line)) and not in_fence
        if is_item and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_fence ^= line.lstrip().startswith("```")
        in_list = is_item or (in_list and (not line.strip() or line.startswith(" ")))
        lines.append(line)
    return "\n".join(lines) + "\n"


def from_top(match: re.Match[str], uri: str) -> str:
    path = match["path"]
    inside = path.removeprefix("docs/") if path.startswith("docs/") else path
    return f"{match['text']}{inside}{match['anchor'] or ''})"


def redirected(match: re.Match[str], uri: str) -> str:
    target = target_of(match["path"], uri)
    if target is None or not target.exists():
        return match[0]
    path = os.path.relpath(source_page(target), Path(uri).parent)
    return f"{match['text']}{path}{match['anchor'] or ''})"


def inlined(match: re.Match[str], uri: str) -> str:
    """The SVG itself instead of an image, so that its colors follow the theme."""
    svg = (DOCS / Path(uri).parent / match["path"]).read_text()
    return f'<figure class="diagram" markdown="0">{svg.strip()}</figure>'


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers render without a script; no line breaks in short cells of tables."""
    html = INDENTATION.sub(lambda spaces: "&nbsp;" * 2 * len(spaces[0]), FORMULA.sub(to_mathml, html))
    html = SHORT_CELL.sub(r'<td class="short"\g<style>>\g<text></td>', html)
    html = PIPE_IN_CODE.sub(lambda text: text[0].replace("\\|", "|"), html)
    return with_indices(html) if page.file.src_uri.startswith(("course", "lab/")) else html


def with_indices(html: str) -> str:
    """W_Q,i and e^(−β g) in running text with real subscripts and superscripts; code and formulas stay as they are."""
    parts, depth = [], 0
    for part in re.split(r"(<[^>]+>)", html):
        if tag := VERBATIM.match(part):
            depth += -1 if tag["end"] else 1
        is_text = not part.startswith("<") and depth == 0
        parts.append(SUPERSCRIPT.sub(r"<sup>\1</sup>", SUBSCRIPT.sub(to_subscript, part)) if is_text else part)
    return "".join(parts)


def to_subscript(match: re.Match[str]) -> str:
    return f"{match['name']}<sub>{match['index'].strip('{}')}</sub>"


def to_mathml(match: re.Match[str]) -> str:
    tex = unescape(match["tex"]).strip()
    body: Any = tex.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
    if match["tag"] == "span":
        return convert(body)
    return f'<div class="formula">{convert(body, display="block")}</div>'
