"""Joins ES modules into one classic script, and removes their comments. No JavaScript tools are needed.

Each module becomes a function of its own, so that names need to be unique within a module only. The modules are written
in a small part of JavaScript's module syntax; anything else is refused with the file and line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ENTRIES = {"host.js": "document", "worker.js": "WorkerGlobalScope"}
"""modules that run by themselves, and the global name that exists where they do"""
TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<word>[\w$]+)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<mark>=>|[-+*%&|^!=<>?:;,.~@#/(){}\[\]`])""",
    re.DOTALL | re.VERBOSE,
)
REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/\w*")
TEMPLATE = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(?P<end>`|\$\{)", re.DOTALL)
OPENING, CLOSING = {"(": ")", "[": "]", "{": "}", "${": "}"}, ")]}"
BEFORE_REGEX = {"return", "typeof", "case", "in", "of", "void", "delete", "throw", "yield", "await", "else", "do"}


class Token(NamedTuple):
    text: str
    start: int
    depth: int
    """brackets around it"""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def tokens_of(source: str, name: str) -> Iterator[Token]:
    """The tokens of a module without spaces and comments. A template is one token for each of its literal parts."""
    open_brackets: list[str] = []
    position, previous = 0, ""
    while position < len(source):
        is_template = source[position] == "`" or (source[position] == "}" and open_brackets[-1:] == ["${"])
        if is_template:
            match = TEMPLATE.match(source, position + 1)
        elif source[position] == "/" and source[position + 1] not in "/*" and begins_regex(previous):
            match = REGEX.match(source, position)
        else:
            match = TOKEN.match(source, position)
        if match is None:
            raise problem(source, name, position, "cannot be read")
        text = source[position : match.end()]
        if text[0] in CLOSING and (not open_brackets or OPENING[open_brackets.pop()] != text[0]):
            raise problem(source, name, position, f"has an unexpected {text[0]!r}")
        if is_template or match.lastgroup != "space":
            yield Token(text, position, len(open_brackets))
            previous = text
        if is_template and match["end"] == "${":
            open_brackets.append("${")
        elif text in OPENING:
            open_brackets.append(text)
        position = match.end()
    if open_brackets:
        raise problem(source, name, len(source), f"ends inside {open_brackets[-1]!r}")


def begins_regex(previous: str) -> bool:
    """Whether a slash after this token begins a regular expression; after a value it divides."""
    is_value = re.fullmatch(r"[\w$]+|[)\]}]|[\"'`}].*[\"'`]", previous, re.DOTALL)
    return not is_value or previous in BEFORE_REGEX


def problem(source: str, name: str, position: int, what: str) -> ValueError:
    return ValueError(f"{name}:{source.count(chr(10), 0, position) + 1} {what}")


def compact(source: str, name: str) -> str:
    """The same code without comments, indentation and spaces that separate nothing. Line breaks stay: they can end a
    statement."""
    parts: list[str] = []
    previous, end = "", 0
    for token in tokens_of(source, name):
        if "\n" in source[end : token.start]:
            parts.append("\n")
        elif end < token.start and needs_space(previous[-1:], token.text[0]):
            parts.append(" ")
        parts.append(token.text)
        previous, end = token.text, token.end
    return "".join(parts).strip() + "\n"


def needs_space(before: str, after: str) -> bool:
    """Whether two tokens would become one: two words, a number and a dot, two signs, two slashes."""
    is_word = before.isalnum() or before in ("_", "$")
    return (is_word and (after.isalnum() or after in "_$.")) or (before in "+-/<" and after in "+-/*!")


@dataclass(frozen=True)
class Module:
    """An ES module as the body of a function: its imports and exports are names in an object `modules`."""

    name: str
    body: str
    imports: dict[str, tuple[str, ...]]
    """the names that it takes from each module"""
    exports: tuple[str, ...]


def parse_module(name: str, source: str) -> Module:
    """ValueError for every form of import and export but `import {a, b as c} from "./x.js"`, `export function`,
    `export class`, `export const` and, for other hosts, `export default {name}`."""
    if re.search(r"<!--|</?script", source, re.IGNORECASE):
        raise ValueError(f"{name} contains <!-- or a script tag, which would end the script element")
    tokens = list(tokens_of(source, name))
    imports: dict[str, tuple[str, ...]] = {}
    exports, pieces, copied = [], [], 0
    for i, token in enumerate(tokens):
        if not is_module_keyword(tokens, i):
            continue
        end = next((j for j in range(i, len(tokens)) if tokens[j].text == ";" and tokens[j].depth == 0), -1)
        statement = " ".join(part.text for part in tokens[i : end + 1 or None])
        if match := re.fullmatch(r"import \{ ([\w$, ]+?),? ?\} from [\"']\./([\w-]+\.js)[\"'] ;", statement):
            pairs = [pair.split(" as ") for pair in match[1].rstrip(" ,").split(" , ")]
            imports[match[2]] = (*imports.get(match[2], ()), *(pair[0] for pair in pairs))
            taken = ", ".join(": ".join(pair) for pair in pairs)
            replacement, after = f'const {{ {taken} }} = modules["{match[2]}"];', tokens[end].end
        elif match := re.match(r"export (?:async )?(?:function|class|const) (?:\* )?([\w$]+) ", statement):
            exports.append(match[1])
            replacement, after = "", tokens[i + 1].start
        elif re.fullmatch(r"export (?:default )?\{ (?:[\w$, ]* )?\} ;", statement):
            replacement, after = "", tokens[end].end
        else:
            raise problem(source, name, token.start, f"has a statement that the joiner does not read: {statement:.60}")
        pieces += [source[copied : token.start], replacement]
        copied = after
    return Module(name, "".join([*pieces, source[copied:]]), imports, tuple(exports))


def is_module_keyword(tokens: Sequence[Token], i: int) -> bool:
    """Whether a token is an `import`, or an `export` or `await` at the top level, and not the name of a property."""
    before, after = (tokens[j].text if 0 <= j < len(tokens) else "" for j in (i - 1, i + 1))
    if before == "." or after == ":":
        return False
    return tokens[i].text == "import" or (tokens[i].text in ("export", "await") and not tokens[i].depth)


def in_dependency_order(modules: Mapping[str, Module], entries: Sequence[str]) -> list[Module]:
    """Each module after those that it imports. ValueError for a cycle, a missing module or a name that is missing."""
    ordered: dict[str, Module] = {}

    def visit(name: str, importers: tuple[str, ...]) -> None:
        if name in ordered:
            return
        if name in importers:
            raise ValueError(f"modules import each other: {' -> '.join([*importers, name])}")
        for other, names in modules[name].imports.items():
            if other not in modules:
                raise ValueError(f"{name} imports {other}, which does not exist")
            if missing := set(names) - set(modules[other].exports):
                raise ValueError(f"{name} imports {', '.join(sorted(missing))}, which {other} does not export")
            visit(other, (*importers, name))
        ordered[name] = modules[name]

    for entry in entries:
        visit(entry, ())
    return list(ordered.values())


def join(sources: Mapping[str, str], entries: Mapping[str, str] = ENTRIES) -> str:
    """One classic script of ES modules. It also runs in a worker, where only the worker's entry is executed."""
    present = {name: exists for name, exists in entries.items() if name in sources}
    ordered = in_dependency_order({name: parse_module(name, text) for name, text in sources.items()}, list(present))
    parts = ['"use strict";\nconst modules = {};\n']
    for module in ordered:
        condition = f'if (typeof {present[module.name]} !== "undefined") ' if module.name in present else ""
        result = f"return {{ {', '.join(module.exports)} }};"
        parts.append(f'{condition}modules["{module.name}"] = (() => {{\n{module.body}\n{result}\n}})();\n')
    return "".join(parts)
