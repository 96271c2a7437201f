"""Grapheme-to-phoneme conversion: `pronounce`, from the spelling of a word to its phones.

The search, the error rates and the figures are in clearhead/tasks/pronunciation.py, which imports torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.data.user_files import MAX_EXAMPLES
from clearhead.models.config import Seq2SeqConfig
from clearhead.tasks.task import Origin, PartName, Task, TrainedRun
from clearhead.validation import check_bool, check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from clearhead.data.batches import Batches
    from clearhead.data.dataset import Dataset
    from clearhead.insight.trace import AttentionTrace
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Outputs, Prediction, Report

LETTERS, PHONES, STRESSED = 32, 42, 72
"""tokens of the embedded dictionary, with those for padding, beginning and end of a sequence"""


@dataclass(frozen=True, kw_only=True)
class Pronounce(Task):
    """English words and their phones."""

    name: ClassVar[str] = "pronounce"
    description: ClassVar[str] = "126,052 English words and their phones"
    origin: ClassVar[Origin] = "embedded"
    model_config: ClassVar[type] = Seq2SeqConfig
    derived: ClassVar[tuple[str, ...]] = ("src_vocab_size", "tgt_vocab_size")
    file_fields: ClassVar[tuple[str, ...]] = ("train_file", "test_file")
    input_kind: ClassVar[str] = "words"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "text"
    unit: ClassVar[str] = "words"

    train_file: str = ""
    """dictionary to train on, instead of the embedded one"""
    test_file: str = ""
    """dictionary to test on; its words are excluded from training"""
    stress: bool = False
    """keep the stress of vowels (AH0, AH1, AH2)"""
    window: int = 50
    """sort examples by length within this many batches, to pad less; 0 disables"""
    validation: int = 1000
    """training words held out for validation, chosen by their spelling"""
    limit: int = 0
    """number of training words to use; 0 for all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(0, MAX_EXAMPLES, window=self.window)
        check_bool(stress=self.stress)

    @cached_property
    def vocab_sizes(self) -> tuple[int, int]:
        """Letters and phones, with the special tokens."""
        if not self.train_file:
            return LETTERS, STRESSED if self.stress else PHONES
        from clearhead.data.vocab import SPECIAL_TOKENS, letters_in, phones_in, read_dictionary

        words = read_dictionary(self.train_file, stress=self.stress)
        return len(SPECIAL_TOKENS) + len(letters_in(words)), len(SPECIAL_TOKENS) + len(phones_in(words))

    @property
    def src_vocab_size(self) -> int:
        return self.vocab_sizes[0]

    @property
    def tgt_vocab_size(self) -> int:
        return self.vocab_sizes[1]

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import SequenceToSequence

        return SequenceToSequence()

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.sequences import load_pronounce

        return load_pronounce(self)

    def published_digests(self) -> dict[str, str]:
        from clearhead.data.vocab import CMUDICT_SHA256

        return {} if self.train_file else {"cmudict.dict": CMUDICT_SHA256}

    def batches(self, data: "Dataset", batch_size: int, seed: int) -> "Batches":
        from clearhead.data.batches import Batches

        return Batches(data, batch_size, seed, window=self.window)

    def label_counts(self, model: Seq2SeqConfig) -> dict[str, int]:
        return {"vocab": model.src_vocab_size, "classes": model.tgt_vocab_size}

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["predict {} thorough", "look {} --text thorough", "curves {}"]

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """The pronunciation of each word."""
        from clearhead.tasks.pronunciation import check_words, predict_words

        return predict_words(run, check_words(run, inputs))

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        from clearhead.tasks.pronunciation import check_words, word_example

        (word,) = check_words(run, inputs)
        return word_example(run, word)

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        """Any of a word's pronunciations is correct."""
        from clearhead.data.sequences import load_splits
        from clearhead.data.vocab import Vocabulary
        from clearhead.tasks.pronunciation import word_example

        word = "".join(Vocabulary(run.vocab).decode(inputs.tolist()))
        known = [" ".join(phones) for phones in load_splits(self)["test"][word]]
        example = word_example(run, word)
        return example.with_target(" or ".join(known), correct=example.prediction in known)

    def trace(self, run: TrainedRun, example: "Example") -> "AttentionTrace":
        """The attention while the best pronunciation of a word is read back."""
        from clearhead.tasks.pronunciation import trace_word

        assert example.word is not None
        return trace_word(run, example.word)

    def figures(self, run: TrainedRun, example: "Example") -> "Iterator[tuple[str, str, Figure]] | None":
        from clearhead.tasks.pronunciation import word_figures

        assert example.word is not None
        return word_figures(run, example.word, example.heading)

    def evaluate(self, run: TrainedRun, part: PartName, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """Word and phoneme error rates of the beam search."""
        from clearhead.tasks.pronunciation import BEAM, error_rates, words_to_score

        return error_rates(run, words_to_score(self, run, part)).to_dict(BEAM)

    def report(
        self, run: TrainedRun, part: PartName, n: int, collect: "Callable[[], Outputs]", before: Callable[[], None]
    ) -> "Report":
        from clearhead.tasks.pronunciation import BEAM, report_words

        return report_words(self, run, part, n, BEAM, before)

    def show_examples(self, data: "Dataset", seed: int) -> Sequence[str]:
        from clearhead.data.dataset import fold_in, permutation
        from clearhead.data.vocab import Vocabulary

        sources, targets = data.train.get_batch(permutation(fold_in(seed, "show"), len(data.train))[:10])
        letters, phones = Vocabulary(data.vocab), Vocabulary(data.classes)
        return [
            f"{''.join(letters.decode(source))}   ->   {' '.join(phones.decode(i for i in target if i >= 0))}"
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
