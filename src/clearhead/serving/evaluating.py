"""How good a run is: loss and accuracy on a part of its data; for `pronounce` the error rates that papers name.

A word is right if one of its pronunciations is written, and its errors are those against the nearest of them: the
fewest phones put in, left out or changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import Batch
from clearhead.data.config import Views
from clearhead.data.dataset import Examples, Normalise
from clearhead.data.dictionary import Pronunciations, read_dictionary
from clearhead.data.pronounce import check_symbols, parts
from clearhead.data.tokens import Vocabulary
from clearhead.models.beam import Beam
from clearhead.serving.pronouncing import BEAM, Spoken, pronounce
from clearhead.serving.session import Session
from clearhead.training.evaluate import evaluate
from clearhead.training.objective import OBJECTIVES

PartName = Literal["validation", "test"]


@dataclass(frozen=True)
class ErrorRates:
    words: int
    wrong: int
    """words that are written like none of their pronunciations"""
    phones: int
    """of the nearest pronunciations"""
    errors: int
    """phones put in, left out or changed"""

    @property
    def word_error_rate(self) -> float:
        return self.wrong / self.words

    @property
    def phoneme_error_rate(self) -> float:
        return self.errors / self.phones


def error_rates(session: Session, words: Pronunciations, how: Beam = BEAM) -> ErrorRates:
    """The best answer to each word against its pronunciations."""
    if not words:
        raise ValueError(f"there must be words to score, got none for {session.path}; name some with --test FILE")
    return rates_of(pronounce(session, list(words), how), words)


def rates_of(answers: Sequence[Sequence[Spoken]], words: Pronunciations) -> ErrorRates:
    counted = [nearest(spoken[0].phones, known) for spoken, known in zip(answers, words.values(), strict=True)]
    wrong, phones, errors = sum(e > 0 for e, _ in counted), sum(n for _, n in counted), sum(e for e, _ in counted)
    return ErrorRates(len(words), wrong, phones, errors)


def words_to_score(session: Session, part: PartName, test: Path | None = None) -> Pronunciations:
    """Those of a file, or of a part of the run's own data. Phones of a file that the run cannot write are refused: they
    are mostly those of a dictionary with stress, for a run without, or the other way round."""
    if test is not None:
        words = read_dictionary(test, stress=session.config.data.stress)
        check_symbols(words, Vocabulary(session.symbols), Vocabulary(session.classes), test)
        return words
    session.check_files()
    return parts(session.config.data)[part]


def learnt(session: Session, words: Pronunciations) -> int | None:
    """How many of the words the run was trained on; None where that is not known, because its own file is not there,
    or has changed."""
    try:
        session.check_files()
        return len(words.keys() & parts(session.config.data)["train"].keys())
    except (OSError, ValueError):
        return None


def nearest(written: Sequence[str], known: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Errors against the nearest pronunciation, and how many phones that has; of equally near ones, the first."""
    return min(((edit_distance(written, phones), len(phones)) for phones in known), key=lambda found: found[0])


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The fewest symbols put in, left out or changed that make one sequence of the other."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        last, row[0] = row[0], i
        for j, theirs in enumerate(other, start=1):
            last, row[j] = row[j], min(last + (mine != theirs), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def loss_and_accuracy(session: Session, part: PartName) -> dict[str, float]:
    """Of any run, as its training measures them."""
    return measure(session, part, *examples_of(session, part))


def examples_of(session: Session, part: PartName) -> tuple[Examples, Normalise | None]:
    """The examples of a part, and what happens to images among them before the model."""
    session.check_files()
    data = datasets.load(session.config.data, session.config.seed)
    examples = data.test if part == "test" else data.validation
    if not len(examples):
        other = "validation" if part == "test" else "test"
        raise ValueError(f"{session.path} must have {part} examples, got none; try --part {other}")
    return examples, data.normalise


def measure(
    session: Session,
    part: PartName,
    examples: Examples,
    normalise: Normalise | None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Loss and accuracy of these examples; `on_batch` sees each batch and the model's outputs."""
    objective = OBJECTIVES[session.config.objective]
    return evaluate(session.model, objective, examples, normalise, views=views_at(session, part), on_batch=on_batch)


def views_at(session: Session, part: PartName) -> Views:
    """Of each image: several views only at the test, and only if the run says so."""
    return session.config.training.views if part == "test" else "one"
