"""The questions of the course with their answers, read from Markdown files; measured numbers are inserted.

Each file holds one topic: a title, an introduction, and a section for each question. A section starts with `## SLUG`
and the numbered question. Its blocks are separated by blank lines: paragraphs, lists, fenced code, `Figure: PATH |
CAPTION`, `Lab: CLAIM: SENTENCE`, `Misconception: TEXT` and `Try: COMMAND`. Placeholders are filled from recorded
results:

    {value:CLAIM|CHECK}    a measured value of a claim; CHECK is the name of a check, or a unique part of it
    {error:CLAIM|CHECK}    a difference in words, such as `exactly` or `up to rounding errors`
    {percent:CLAIM|CHECK}  a measured value as a percentage
    {points:CLAIM|CHECK}   the same as a number of percentage points
    {recipe:RECIPE|FIELD}  accuracy, time, epochs or machine of a recipe, from recipes/measured.json
    {run:RUN|FIELD}        a result of one of the runs in runs.json

The verdict of a claim is inserted after its name. Importing this module does not import torch.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from clearhead.lab.record import recorded
from clearhead.messages import duration

TOPICS = ("attention", "theory", "transformer", "vision")
PLACEHOLDER = re.compile(r"\{(value|error|percent|points|recipe|run):([^|}]+)\|([^}]+)\}")


@dataclass(frozen=True)
class Block:
    """A part of an answer; a `figure` has the path of an image in docs/, and its text is the caption."""

    kind: Literal["paragraph", "list", "formula", "python", "figure"]
    text: str
    path: str = ""


@dataclass(frozen=True)
class Evidence:
    """A claim of the lab that demonstrates an answer."""

    claim: str
    kind: str
    verdict: str
    text: str


@dataclass(frozen=True)
class Answer:
    number: int
    slug: str
    topic: str
    """the title of the topic"""
    question: str
    body: tuple[Block, ...]
    evidence: tuple[Evidence, ...]
    misconception: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Topic:
    title: str
    introduction: str
    answers: tuple[Answer, ...]


@cache
def topics() -> tuple[Topic, ...]:
    """All topics in the order of the course."""
    return tuple(parse_topic(read("clearhead.course", f"{name}.md")) for name in TOPICS)


def answers() -> dict[str, Answer]:
    """All answers by slug, in the order of the course."""
    return {answer.slug: answer for topic in topics() for answer in topic.answers}


def find(name: str) -> Answer:
    """The answer with this slug or number."""
    known = answers()
    slug = re.sub(r"[\s_]+", "-", name.strip().lower())
    by_number = {str(answer.number): answer for answer in known.values()}
    if slug in known or slug in by_number:
        return known.get(slug) or by_number[slug]
    *others, last = suggestions(name) or [""]
    similar = f"{', '.join(others)} or {last}" if others else last
    hint = f"did you mean {similar}? Run" if similar else "run"
    raise LookupError(f"no question named {name!r}; {hint} clearhead ask to list all {len(known)}")


def suggestions(name: str) -> list[str]:
    """Up to three slugs: those that share most words with the name, or else the question and then the answer does, or
    else those that are spelled similarly."""
    words, known = words_of(name), answers()
    texts: tuple[Callable[[Answer], str], ...] = (
        lambda answer: " ".join([answer.slug, *(evidence.claim for evidence in answer.evidence)]),
        lambda answer: answer.question,
        lambda answer: " ".join(block.text for block in answer.body),
    )
    for text in texts:
        common = {slug: len(words & words_of(text(answer))) for slug, answer in known.items()}
        if any(common.values()):
            return [slug for slug in sorted(common, key=lambda slug: -common[slug])[:3] if common[slug]]
    slug_of_word = {word: slug for slug in reversed(known) for word in words_of(slug)}
    close = difflib.get_close_matches(name.lower(), [*known, *slug_of_word], n=3, cutoff=0.7)
    return list(dict.fromkeys(slug_of_word.get(match, match) for match in close))


def words_of(text: str) -> set[str]:
    """The words of at least three letters, in the singular."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]{3,}", text.lower())}


def parse_topic(source: str) -> Topic:
    head, *sections = re.split(r"(?m)^## ", source)
    title, *introduction = head.removeprefix("# ").strip().split("\n", 1)
    parsed = tuple(parse_answer(section, title) for section in sections)
    return Topic(title, fill(" ".join("".join(introduction).split())), parsed)


def parse_answer(section: str, topic: str) -> Answer:
    slug, *blocks = split_blocks(section)
    slug, question = slug.split("\n", 1)
    number, question = question.split(". ", 1)
    body, evidence, misconceptions, commands = [], [], [], []
    for block in blocks:
        label, _, text = block.partition(": ")
        match label:
            case "Lab":
                evidence.append(parse_evidence(text))
            case "Misconception":
                misconceptions.append(fill(joined(text)))
            case "Try":
                commands += [line.removeprefix("Try: ") for line in block.splitlines()]
            case "Figure":
                path, _, caption = text.partition(" | ")
                body.append(Block("figure", fill(joined(caption)), path))
            case _:
                body.append(parse_block(block))
    (misconception,) = misconceptions
    return Answer(
        int(number), slug, topic, joined(question), tuple(body), tuple(evidence), misconception, tuple(commands)
    )


def split_blocks(section: str) -> Iterator[str]:
    """The blocks of a section; a fenced block may contain blank lines."""
    for part in re.split(r"(?ms)^(```.*?^```)$", section):
        if part.startswith("```"):
            yield part
        else:
            yield from (block.strip("\n") for block in re.split(r"\n\s*\n", part) if block.strip())


def parse_block(block: str) -> Block:
    if block.startswith("```"):
        language, *lines = block.splitlines()[:-1]
        return Block("python" if language == "```python" else "formula", fill("\n".join(lines)))
    if block.startswith("- "):
        return Block("list", "\n".join(fill(joined(item)) for item in re.split(r"(?m)^- ", block)[1:]))
    return Block("paragraph", fill(joined(block)))


def parse_evidence(text: str) -> Evidence:
    claim, _, sentence = text.partition(": ")
    record = recorded()[claim]
    return Evidence(claim, record.kind, record.verdict, fill(joined(sentence)))


def joined(text: str) -> str:
    return " ".join(text.split())


def fill(text: str) -> str:
    """The text with all placeholders replaced; a LookupError if one has no value."""
    return PLACEHOLDER.sub(lambda match: SOURCES[match[1]](match[2], match[3]), text)


def claim_value(claim: str, name: str) -> float:
    """The value of the check with this name; or else the only one that starts with it; or else that contains it."""
    checks = {check.name: check.value for check in recorded()[claim].checks}
    tests = (name.__eq__, lambda check: check.startswith(name), lambda check: name in check)
    matches = next(filter(None, ([check for check in checks if test(check)] for test in tests)), [])
    if len(matches) != 1:
        raise LookupError(f"{claim} has {len(matches)} checks named {name!r}: {', '.join(checks)}")
    return checks[matches[0]]


def recipe_field(recipe: str, field: str) -> str:
    measured = recipe_results()[recipe]
    match field:
        case "accuracy":
            return f"{measured['accuracy']:.2%}"
        case "time":
            return duration(measured["seconds"])
    return str(measured[field])


def run_field(run: str, field: str) -> str:
    value = run_results()[run][field]
    return f"{value:.2%}" if "accuracy" in field else f"{value:.3g}"


def rounded(value: float) -> str:
    """Three significant digits without an exponent where possible; rounding errors differ between machines."""
    if 0 < abs(value) < 1e-12:
        return "below 1e-12"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def as_error(value: float) -> str:
    if value == 0:
        return "exactly"
    return "up to rounding errors (below 1e-12)" if abs(value) < 1e-12 else f"up to {rounded(value)}"


SOURCES: Mapping[str, Callable[[str, str], str]] = {
    "value": lambda claim, check: rounded(claim_value(claim, check)),
    "error": lambda claim, check: as_error(claim_value(claim, check)),
    "percent": lambda claim, check: f"{claim_value(claim, check):.1%}",
    "points": lambda claim, check: f"{100 * claim_value(claim, check):.1f}",
    "recipe": recipe_field,
    "run": run_field,
}


def read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def recipe_results() -> dict[str, Any]:
    return json.loads(read("clearhead.recipes", "measured.json"))


@cache
def run_results() -> dict[str, Any]:
    """Results of the runs in docs/runs; docs/make_course.py writes them."""
    return json.loads(read("clearhead.course", "runs.json"))
