"""`clearhead ask`: list the questions of the course, or print the answer to one of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, console, show
from clearhead.messages import json_text

if TYPE_CHECKING:
    from rich.text import Text

    from clearhead.course import Answer, Block

MAX_WIDTH = 88
"""columns of an answer; longer lines are hard to read"""
CODE_INDENT = "    "
INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\*(?P<italic>[^*]+)\*")


def ask(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead ask",
        "Answer a question about attention, transformers and vision transformers: in words, as a formula, and with "
        "numbers that the lab has measured. Without a question, all questions are listed.",
        usage="clearhead ask [QUESTION] [options]",
        examples=("clearhead ask layer-norm", "clearhead ask 28", "clearhead ask --json"),
    )
    options.add_argument("question", metavar="QUESTION", nargs="*", help="name or number of a question")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.course import answers, find

    chosen = find(" ".join(args.question)) if args.question else None
    if args.json:
        print(json_text([asdict(answer) for answer in ([chosen] if chosen else answers().values())]))
        return
    target = console()
    width = min(target.width, MAX_WIDTH)
    show(answer_text(chosen, width, target.is_terminal) if chosen else question_list(width))


def question_list(width: int) -> "Text":
    from rich.text import Text

    from clearhead.course import answers, topics

    size = max(map(len, answers()))
    text = Text()
    for topic in topics():
        text.append(f"{topic.title}\n", "bold")
        for answer in topic.answers:
            first, *others = wrap(f"{answer.number:2}. {answer.question}", width - size - 4, subsequent_indent="    ")
            text.append(f"  {answer.slug:{size}}", "cyan").append(f"  {first}\n")
            text.append("".join(f"{'':{size + 4}}{line}\n" for line in others))
        text.append("\n")
    return text.append("Print an answer: clearhead ask layer-norm")


def answer_text(answer: "Answer", width: int, is_terminal: bool) -> "Text":
    """The answer as styled text. Without styles, code keeps its backticks."""
    from rich.text import Text

    text = Text()
    for line in wrap(f"{answer.number}. {answer.question}", width):
        text.append(f"{line}\n", "bold")
    text.append(f"{answer.topic}\n", "dim")
    for lines in paragraphs(answer, width):
        text.append("\n")
        for line in lines:
            text.append_text(Text(line) if line.startswith(CODE_INDENT) else styled(line, is_terminal)).append("\n")
    text.append("\nSee for yourself\n", "bold")
    return text.append("\n".join(f"  {command}" for command in answer.commands), "cyan")


def paragraphs(answer: "Answer", width: int) -> Iterator[list[str]]:
    """The wrapped lines of each part of an answer, without its figures."""
    for block in answer.body:
        if block.kind != "figure":
            yield block_lines(block, width)
    for evidence in answer.evidence:
        yield wrap_inline(f"**Lab:** `{evidence.claim}` {verdict_text(evidence.verdict)}. {evidence.text}", width)
    yield wrap_inline(f"**Misconception:** {answer.misconception}", width)


def verdict_text(verdict: str) -> str:
    """The verdict as a predicate: the claim holds, the claim is refuted."""
    return "holds" if verdict == "holds" else f"is {verdict}"


def block_lines(block: "Block", width: int) -> list[str]:
    match block.kind:
        case "formula" | "python":
            return [f"{CODE_INDENT}{line}".rstrip() for line in block.text.splitlines()]
        case "list":
            return [line for item in block.text.splitlines() for line in wrap_inline(f"- {item}", width, "  ")]
    return wrap_inline(block.text, width)


def wrap_inline(text: str, width: int, indent: str = "") -> list[str]:
    """Wraps Markdown text; a span of code or emphasis is not broken across lines."""
    glued = INLINE.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = wrap(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def styled(line: str, is_terminal: bool) -> "Text":
    from rich.text import Text

    text, end = Text(), 0
    for match in INLINE.finditer(line):
        text.append(line[end : match.start()])
        if code := match["code"]:
            text.append(code if is_terminal else match[0], "cyan")
        else:
            text.append(match["bold"] or match["italic"], "bold" if match["bold"] else "italic")
        end = match.end()
    return text.append(line[end:])
