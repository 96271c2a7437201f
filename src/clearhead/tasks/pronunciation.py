"""Pronunciation of words by beam search, with ensembles, error rates and figures of the attention.

The word error rate (WER) is the fraction of words whose pronunciation equals none of those in the dictionary; the
phoneme error rate (PER) is the edit distance to the nearest pronunciation over its length, summed over all words.

Dims: B batch, H heads, Q phones, K letters.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from clearhead.data.dataset import SequencePairs
from clearhead.data.sequences import check_vocab, load_splits
from clearhead.data.vocab import (
    BOS,
    EOS,
    MAX_WORD_LENGTH,
    PAD,
    SPECIAL_TOKENS,
    Pronunciations,
    Vocabulary,
    read_dictionary,
)
from clearhead.drawing import displayable
from clearhead.insight.head_plots import draw_head_importance
from clearhead.insight.heads import entropy, head_importance
from clearhead.insight.plots import draw_alignment, draw_head_grid
from clearhead.insight.trace import AttentionTrace, look
from clearhead.models.generate import Beam, free_positions
from clearhead.models.seq2seq import Ensemble, Seq2Seq
from clearhead.tasks.report import Example, Prediction, Report, Row
from clearhead.tasks.task import PartName, TrainedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.tasks.pronounce import Pronounce

RunT = TypeVar("RunT", bound=TrainedRun)
MAX_PHONES = MAX_WORD_LENGTH + 1
"""the length limit of a pronunciation in a dictionary, plus the end-of-sequence token"""
BEAM = Beam(5)
CROSS_ATTENTION = "cross_attn"
"""part of the module path of each cross-attention layer"""
HEAD_GRIDS = {
    "cross.png": "cross-attention of the decoder: every head",
    "encoder.png": "self-attention of the encoder: every head",
    "decoder.png": "self-attention of the decoder: every head",
}
"""file name -> title"""
IMPORTANCE_TITLE = "effect of removing each head"


def beam_of(size: int | None) -> Beam:
    """A beam of the given size, or the default."""
    return BEAM if size is None else replace(BEAM, size=size)


@dataclass(frozen=True)
class Pronunciation:
    """A candidate of the beam search. Candidates are ordered by score per token; those that are less probable than the
    greedy candidate come last."""

    phones: tuple[str, ...]
    score: float
    """log-probability under the model"""
    ended: bool = True
    """False if it was cut off before the end-of-sequence token"""

    @property
    def score_per_token(self) -> float:
        """The mean log-probability of its tokens, including the end-of-sequence token."""
        return self.score / max(1, len(self.phones) + self.ended)

    def __str__(self) -> str:
        return " ".join(self.phones if self.ended else (*self.phones, "..."))


def pronounce(run: TrainedRun, words: Sequence[str], beam: Beam = BEAM) -> list[list[Pronunciation]]:
    """The candidates of the beam search for each word, best first."""
    model = run.model
    if not isinstance(model, Seq2Seq | Ensemble):
        raise ValueError(f"pronouncing words needs a run of the recipe pronounce, got {run.path}")
    ids = [letter_ids(run, word) for word in words]
    sources = SequencePairs.of(ids, [[EOS]] * len(ids))
    order = sources.lengths[:, 0].argsort(stable=True)  # words of similar length need little padding
    results: list[list[Pronunciation]] = [[] for _ in words]
    models = model.models if isinstance(model, Ensemble) else [model]
    max_phones = min(free_positions(each.config, 1, MAX_PHONES) for each in models)
    batch_size = run.eval_batch_size // max(1, beam.size // BEAM.size)
    for indices in order.split(max(1, batch_size)):
        source, _ = sources.get_batch(indices)
        output = model.generate(
            source,
            strategy=beam,
            bos_id=BOS,
            eos_id=EOS,
            max_new_tokens=max_phones,
            source_lengths=(source != PAD).sum(1),
        )

        for row, index in enumerate(indices.tolist()):
            candidates = zip(output.candidates[row].tolist(), output.scores[row].tolist(), strict=True)
            results[index] = [
                Pronunciation(phones_of(run, ids), score, EOS in ids) for ids, score in candidates if score > -math.inf
            ]
    return results


def check_words(run: TrainedRun, inputs: Any) -> list[str]:
    """Words as a list of strings; ValueError for inputs of another kind."""
    words = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not words:
        raise ValueError("predict needs at least one input, got none")
    if not isinstance(words[0], str | Path):
        kind = "images" if getattr(inputs, "ndim", 1) > 1 else "digits"
        raise ValueError(f"{run.path} takes words, got {kind}; pass words")
    return [str(word) for word in words]


def word_example(run: TrainedRun, word: str) -> Example:
    """A word with its best pronunciation."""
    best = pronounce(run, [word])[0][0]
    return Example(torch.tensor([letter_ids(run, word)]), str(best), word=word)


def predict_words(run: TrainedRun, words: Sequence[str]) -> list[Prediction]:
    """The best candidate of each word, with the probabilities of all."""
    return [
        Prediction(str(best), math.exp(best.score), {str(one): math.exp(one.score) for one in (best, *others)})
        for best, *others in pronounce(run, words)
    ]


def ensemble(runs: Sequence[RunT]) -> RunT:
    """A run whose model averages the predictions of several runs; its data is that of the first."""
    first = runs[0]
    for other in runs:
        if not isinstance(other.model, Seq2Seq):
            raise ValueError(f"an ensemble needs runs of the recipe pronounce, got {other.path}")
        if (other.vocab, other.classes) != (first.vocab, first.classes):
            raise ValueError(
                f"all runs of an ensemble must have the same letters and phones; those of {other.path} differ"
            )
    if len(runs) == 1:
        return first
    joint = copy(first)
    joint.model = Ensemble([cast(Seq2Seq, each.model) for each in runs])
    return joint


def phones_of(run: TrainedRun, ids: Sequence[int]) -> tuple[str, ...]:
    """The phones before the end-of-sequence token, and any other special token among them."""
    return tuple(run.classes[i] for i in takewhile(lambda i: i != EOS, ids))


def letter_ids(run: TrainedRun, word: str) -> list[int]:
    letters = word.strip().lower()
    if not letters:
        raise ValueError(f"a word must have letters, got {word!r}")
    if len(letters) > MAX_WORD_LENGTH:
        raise ValueError(f"a word may have at most {MAX_WORD_LENGTH} letters, got {len(letters)}: {letters[:20]!r}...")
    return Vocabulary(run.vocab).encode(letters)


def predicted_phones(run: TrainedRun, word: str) -> tuple[str, ...]:
    """The best pronunciation of a word, with the end-of-sequence token if it was reached."""
    best = pronounce(run, [word])[0][0]
    return (*best.phones, SPECIAL_TOKENS[EOS]) if best.ended else best.phones


def decoder_inputs(run: TrainedRun, word: str, phones: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """letters (1,K), the phones before each position (1,Q), and the phones themselves (1,Q)"""
    target = torch.tensor([Vocabulary(run.classes).encode(phones)])
    shifted = torch.cat([torch.full((1, 1), BOS), target[:, :-1]], dim=1)
    return torch.tensor([letter_ids(run, word)]), shifted, target


def trace_word(run: TrainedRun, word: str) -> AttentionTrace:
    """The attention under teacher forcing with the best pronunciation of a word."""
    letters, shifted, _ = decoder_inputs(run, word, predicted_phones(run, word))
    return look(run.model, letters, shifted)


def word_figures(run: TrainedRun, word: str, heading: str = "") -> "Iterator[tuple[str, str, Figure]]":
    """(file name, title, figure) for each figure; the heading is drawn below the title."""
    phones, letters = predicted_phones(run, word), tuple(map(displayable, word.strip().lower()))
    *inputs, target = decoder_inputs(run, word, phones)
    with torch.no_grad():
        trace = look(run.model, *inputs)
        weights = {name: record.weights() for name, record in trace.items()}
    heading = f"\n{heading}" if heading else ""
    name, aligned = sharpest({name: w for name, w in weights.items() if CROSS_ATTENTION in name})
    title = "attention of each phone to the letters"
    full = f"{title},\n{name}, mean of heads{heading}"
    yield "alignment.png", title, draw_alignment(aligned, letters, phones, names=("letter", "phone"), title=full)
    for file, title in HEAD_GRIDS.items():
        layers = {name: w for name, w in weights.items() if grid_file(name) == file}
        yield file, title, draw_head_grid([w[0] for w in layers.values()], list(layers), title=title + heading)

    def score(output: Tensor) -> Tensor:
        return output.log_softmax(-1).gather(-1, target[..., None]).mean()

    unit = "change of the mean log-probability of a phone\n(below 0: less confident without the head)"
    changes = head_importance(run.model, tuple(inputs), score)
    yield (
        "heads.png",
        IMPORTANCE_TITLE,
        draw_head_importance(changes, list(trace), unit=unit, title=IMPORTANCE_TITLE + heading),
    )


def grid_file(name: str) -> str:
    """The file name of the figure that shows a layer."""
    if CROSS_ATTENTION in name:
        return "cross.png"
    return "encoder.png" if name.startswith("encoder.") else "decoder.png"


def sharpest(layers: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The layer whose mean over heads has the lowest entropy: its name, and that mean (Q,K)."""
    means = {name: weights.mean(1, keepdim=True) for name, weights in layers.items()}
    name = min(means, key=lambda name: float(entropy(means[name])))
    return name, means[name][0, 0]


@dataclass(frozen=True)
class ErrorRates:
    words: int
    wrong: int
    """words whose pronunciation equals none of those in the dictionary"""
    phones: int
    """of the nearest pronunciations"""
    errors: int
    """insertions, deletions and substitutions"""

    @property
    def word_error_rate(self) -> float:
        return self.wrong / self.words

    @property
    def phoneme_error_rate(self) -> float:
        return self.errors / self.phones

    def to_dict(self, beam: Beam) -> dict[str, Any]:
        rates = {"word_error_rate": self.word_error_rate, "phoneme_error_rate": self.phoneme_error_rate}
        return {"beam": beam.size} | asdict(self) | rates


def error_rates(run: TrainedRun, words: Pronunciations, beam: Beam = BEAM) -> ErrorRates:
    """The best candidate of each word, compared with its pronunciations in the dictionary."""
    if not words:
        raise ValueError(f"{run.path} has no words to evaluate on; name a dictionary with --test FILE")
    return count_errors(pronounce(run, list(words), beam), words)


def count_errors(candidates: Sequence[Sequence[Pronunciation]], words: Pronunciations) -> ErrorRates:
    counts = [
        distance_to_nearest(best.phones, known) for (best, *_), known in zip(candidates, words.values(), strict=True)
    ]
    wrong, phones, errors = sum(e > 0 for e, _ in counts), sum(n for _, n in counts), sum(e for e, _ in counts)
    return ErrorRates(len(words), wrong, phones, errors)


def words_to_score(
    task: "Pronounce", run: TrainedRun, part: PartName, dictionary: Path | None = None
) -> Pronunciations:
    """The words of a dictionary file, or of a part of the run's data. Phones that the run does not know are refused:
    usually they have stress marks and the run has none, or the other way round."""
    if dictionary is not None:
        words = read_dictionary(dictionary, stress=task.stress)
        check_vocab(words, Vocabulary(run.vocab), Vocabulary(run.classes), dictionary)
        return words
    run.check_data_files()
    return load_splits(task)[part]


def training_overlap(task: "Pronounce", run: TrainedRun, words: Pronunciations) -> int | None:
    """How many of the words the run was trained on; None if its data is missing or has changed."""
    try:
        run.check_data_files()
        return len(words.keys() & load_splits(task)["train"].keys())
    except (OSError, ValueError):
        return None


def distance_to_nearest(phones: Sequence[str], known: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The edit distance to the nearest known pronunciation, and the length of that one; ties go to the first."""
    return min(((edit_distance(phones, other), len(other)) for other in known), key=lambda pair: pair[0])


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn a into b."""
    row = list(range(len(b) + 1))
    for i, symbol_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, symbol_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(diagonal + (symbol_a != symbol_b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def report_words(
    task: "Pronounce",
    run: TrainedRun,
    part: PartName,
    n: int,
    beam: Beam,
    before: Callable[[], None],
    max_words: int | None = None,
) -> Report:
    """A row for each word: any of its pronunciations is correct. At most `max_words` are evaluated, the first ones."""
    words = dict(islice(words_to_score(task, run, part).items(), max_words))
    if not words:
        raise ValueError(f"{run.path} has no {part} words; try --part validation")
    before()
    candidates = pronounce(run, list(words), beam)
    rates = count_errors(candidates, words)
    rows = [
        Row(None, word, str(best), " or ".join(map(" ".join, known)), math.exp(best.score), best.phones in known)
        for (best, *_), (word, known) in zip(candidates, words.items(), strict=True)
    ]
    mistakes = sorted((row for row in rows if not row.correct), key=lambda row: -(row.probability or 0))
    return Report("words", rates.to_dict(beam), len(rows), rates.wrong, rows[:n], mistakes[:n])
