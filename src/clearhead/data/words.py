"""`words`: words letter by letter, each between a begin and an end mark, for a model that invents others.

The words of the embedded dictionary that are written with the letters a to z, or the lines of the user's own `file`.
Parts are chosen by the digest of a word, as those of `pronounce` are. Dims: N words, B batch, L tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet
from clearhead.data.dictionary import apart, for_testing, letters_of
from clearhead.data.pairs import Pairs
from clearhead.data.tokens import BEGIN, END, Vocabulary
from clearhead.data.word_list import words_of


@dataclass(frozen=True, eq=False)
class Words:
    """Word i: the begin mark and its letters (B,L) -> its letters and the end mark (B,L)."""

    pairs: Pairs

    @property
    def lengths(self) -> Tensor:
        """(N,1): each token is read, and one is written after it"""
        return self.pairs.lengths[:, :1]

    def __len__(self) -> int:
        return len(self.pairs)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.pairs.take(indices)


def load(config: DataConfig, seed: int) -> DataSet:
    known = words_of(config.file)
    learned, tested = for_testing(known)
    learned, held = apart(learned, config.validation)
    learned = learned[: config.limit] if config.limit else learned
    letters = Vocabulary.marked(letters_of(known))
    train, validation, test = (spelled(part, letters) for part in (learned, held, tested))
    return DataSet(train, validation, test, classes=letters.symbols, normalise=None, symbols=letters.symbols)


def spelled(words: Iterable[str], letters: Vocabulary) -> Words:
    ids = [letters.ids(word) for word in words]
    return Words(Pairs.of([[BEGIN, *word] for word in ids], [[*word, END] for word in ids]))
