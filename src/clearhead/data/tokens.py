"""Symbols as ids: what letters, phones and characters are to a model. Does not import torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

PAD, BEGIN, END = 0, 1, 2
"""ids that stand for no symbol: the rest of a short source; before the first token of a target; after its last"""
MARKS = ("<pad>", "<begin>", "<end>")
"""their names, in the order of the ids"""
IGNORED = -100
"""what targets are padded with: no answer is asked for there"""
MOST_SHOWN = 120
"""characters of a list of symbols that fit into a message"""


@dataclass(frozen=True)
class Vocabulary:
    """All symbols in the order of their ids."""

    symbols: tuple[str, ...]

    @classmethod
    def marked(cls, symbols: Iterable[str]) -> "Vocabulary":
        """The three marks, and then the symbols, sorted."""
        return cls((*MARKS, *sorted(set(symbols))))

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def places(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @property
    def has_marks(self) -> bool:
        return self.symbols[: len(MARKS)] == MARKS

    def ids(self, symbols: Sequence[str]) -> list[int]:
        """An id for each symbol; of a text, for each of its characters."""
        try:
            return [self.places[symbol] for symbol in symbols]
        except KeyError:
            known = self.symbols[len(MARKS) :] if self.has_marks else self.symbols
            unknown = next(symbol for symbol in symbols if symbol not in self.places)
            raise LookupError(
                f"a symbol is one of those learnt, {shown(known)}, got {unknown!r} in {shown(symbols)}; "
                "write it another way"
            ) from None

    def read(self, ids: Iterable[int]) -> list[str]:
        """The symbols up to the end mark; other marks are left out."""
        if not self.has_marks:
            return [self.symbols[i] for i in ids]
        written = takewhile(lambda i: i != END, ids)
        return [self.symbols[i] for i in written if i >= len(MARKS)]


def shown(symbols: Sequence[str]) -> str:
    """Characters side by side, names with blanks between them; the first of very many."""
    text = repr("".join(symbols)) if all(len(symbol) == 1 for symbol in symbols) else " ".join(symbols)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
