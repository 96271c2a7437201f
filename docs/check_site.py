"""Checks the built site without a network: python docs/check_site.py site

Every link and every anchor leads somewhere, no page loads anything from another server, and no Markdown is left
unrendered. Prints one line per problem; the exit code is 1 if there is any.
"""

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
"""attributes whose target a browser loads by itself"""
IN_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")
UNRENDERED = re.compile(r"^\s*\|.*\|\s*$|^\s*[-*] |^\s*```|^\s*:::|\]\([^)]*\)", re.MULTILINE)
"""rows of tables, items of lists, fences and links that a Markdown parser took for text"""


@dataclass
class Html:
    """What the checks need of a page."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    paragraphs: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Collects links, loaded files, anchors and the text of paragraphs outside of code."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Html()
        self.in_paragraph, self.in_code, self.in_style = False, 0, False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value is not None}
        self.page.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        if tag != "link" or values.get("rel") not in ("canonical", "prev", "next"):
            self.page.loads += [values[name] for name in LOADED.get(tag, ()) if name in values]
        self.page.loads += IN_CSS.findall(values.get("style", ""))
        if tag == "p":
            self.in_paragraph = True
            self.page.paragraphs.append("")
        self.in_code += tag == "code"
        self.in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self.in_code -= tag == "code"
        self.in_paragraph = self.in_paragraph and tag != "p"
        self.in_style = False

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.page.loads += IN_CSS.findall(data)
        if self.in_paragraph:
            self.page.paragraphs[-1] += "`" if self.in_code else data


def read(text: str) -> Html:
    reader = Reader()
    reader.feed(text)
    return reader.page


def is_outside(address: str) -> bool:
    """Whether an address names a server, as in https://... and //..."""
    return bool(urlsplit(address).netloc)


def problems(folder: Path) -> list[str]:
    """One line for each dead link, each file from another server and each piece of unrendered Markdown."""
    pages = {path: read(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        return [f"{folder} has no pages"]
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        found += [f"{name}: loads {address} from another server" for address in page.loads if is_outside(address)]
        found += [
            f"{name}: unrendered Markdown: {text.strip()[:80]!r}" for text in page.paragraphs if UNRENDERED.search(text)
        ]
        if name.name == "404.html":  # its links are absolute: it is shown for any address
            continue
        for address in {*page.links, *page.loads}:
            if error := dead(address, path, pages):
                found.append(f"{name}: {error}")
    for path in folder.rglob("*.css"):
        found += [
            f"{path.relative_to(folder)}: loads {url} from another server" for url in IN_CSS.findall(path.read_text())
        ]
    return found


def dead(address: str, path: Path, pages: dict[Path, Html]) -> str:
    """Why a link of a page leads nowhere; empty if it is fine or leaves the site."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    target = path
    if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
        if target.is_dir():
            target /= "index.html"
    if not target.is_file():
        return f"dead link {address}"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return f"no anchor {address}"
    return ""


def main(folder: str) -> int:
    found = problems(Path(folder).resolve())
    print("\n".join(found) or f"{folder}: every link leads somewhere, and nothing is loaded from another server")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
