import html
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from clearhead.drawing import new_figure
from clearhead.inference.document import (
    MAX_TEXT,
    Document,
    Facts,
    Paragraph,
    Picture,
    Preformatted,
    Section,
    Table,
    check_suffix,
    markdown,
    save,
    shown,
    to_html,
    to_markdown,
)

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "](https://example.org) [a](javascript:alert(1))",
    "![x](https://example.org/x.png)",
    "a | b | c",
    "`code` *bold* __bold__ ~~gone~~ # title",
    "<https://example.org>",
    "&lt;b&gt; &amp;",
    "- item",
    "12. item",
    "> quote",
    "=====",
    "---",
    "$x$ $$y$$",
    "back\\slash\\",
    "line\nbreak\n\n# heading",
    "\x1b[31mred\u202e",
]
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def document(text):
    blocks = [
        Paragraph(text),
        Paragraph(text, is_warning=True),
        Preformatted(text),
        Facts([(text, text)]),
        Facts([(text, text)], is_highlighted=True),
        Table((text, "b"), [(text, text), (text, "")], caption=text, right_aligned=(text,)),
    ]
    return Document(text, [Section(text, blocks), Section(text, blocks, 3)], blocks, text)


@pytest.mark.parametrize("text", HOSTILE)
def test_html_contains_no_markup_of_a_text(text):
    page = to_html(document(text))
    plain = to_html(document("plain"))
    for character in "<>":
        assert page.count(character) == plain.count(character)
    assert html.escape(shown(text)) in page


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_contains_no_markup_of_a_text(text):
    """Rendered by another program, a document has the same tags as with a plain text."""
    pages = [RENDERER.render(to_markdown(document(each), "figures")) for each in (text, "plain")]
    names = ("<p>", "<li>", "<h1>", "<h2>", "<h3>", "<hr", "<td", "<th", "<a", "<img", "<em", "<strong", "<code", "<s>")
    assert [pages[0].count(name) for name in names] == [pages[1].count(name) for name in names]
    assert "<script" not in pages[0]


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp"]), min_size=1))
def test_escaped_markdown_renders_as_the_text_itself(text):
    if shown(text):
        assert html.unescape(RENDERER.renderInline(markdown(text))) == shown(text)
        assert RENDERER.render(markdown(text)).startswith("<p>")


def test_the_html_page_allows_neither_scripts_nor_requests():
    page = to_html(document("x"))
    assert "default-src 'none'; img-src data:" in page
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_long_text_is_cut_off():
    assert len(shown("x" * 10 * MAX_TEXT)) < MAX_TEXT + 10
    assert len(to_html(Document("x" * 10**6, []))) < len(to_html(Document("", []))) + 2 * MAX_TEXT + 20


@pytest.mark.parametrize("embed", [False, True])
def test_figures_of_markdown_are_beside_it_or_inside(tmp_path, embed):
    figure = new_figure(2, 1)
    pictures = [
        Picture("a.png", figure, "First *one*"),
        Picture("b.png", figure, "Second", "with a caption", is_vector=True),
    ]
    path = save(Document("t", [Section("s", pictures)]), tmp_path / "my (own) report.md", embed=embed)
    folder, text = tmp_path / "my (own) report-figures", path.read_text()
    assert text.count("data:image/") == (2 if embed else 0)
    assert sorted(file.name for file in folder.glob("*")) == ([] if embed else ["a.png", "b.png"])
    sources = [token.attrs["src"] for token in images(text)]
    assert len(sources) == 2
    if not embed:
        assert sources[0] == "my%20%28own%29%20report-figures/a.png"


def images(text):
    return [token for block in RENDERER.parse(text) for token in block.children or [] if token.type == "image"]


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz", ".html"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ValueError, match=r"\.html or \.md"):
        check_suffix(Path(name))
    for good in ("a.html", "a.HTML", "a.md"):
        check_suffix(Path(good))
