"""Language modeling: `words`, new words letter by letter, and `text`, the user's own text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.data import Level
from clearhead.data.user_files import MAX_EXAMPLES, MAX_LENGTH
from clearhead.messages import printable
from clearhead.models.config import LanguageConfig
from clearhead.tasks.task import Origin, PartName, Task, TrainedRun
from clearhead.validation import check_choice, check_int

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data.batches import Batches
    from clearhead.data.dataset import Dataset
    from clearhead.models.generate import Sampling
    from clearhead.models.language import LanguageModel
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Outputs, Prediction, Report, Row

WORD_TOKENS = 29
"""a to z, and the tokens for padding, beginning and end of a sequence"""
ASCII_TOKENS, BYTE_TOKENS = 96, 256
"""printable characters and the line break; all bytes"""
CONTEXT = 20
"""tokens of context that a report shows"""
MAX_TOKENS = 64
"""of a text, the last tokens are drawn, within the model's context"""
SAMPLING_BATCH_SIZE = 256
"""each batch draws its own random numbers, so another size draws other samples"""
MAX_WORD_LETTERS = 40
"""longer words are cut off"""
MAX_COUNT = 1_000_000
"""samples, and tokens of each"""
LINE_BREAK = "\n"
"""an empty prompt for a text becomes a line break, if the text has any"""


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """Next-token prediction."""

    model_config: ClassVar[type] = LanguageConfig
    input_kind: ClassVar[str] = "text"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "text"
    unit: ClassVar[str] = "tokens"
    num_samples: ClassVar[int] = 1
    """that `clearhead sample` draws by default"""

    file: str = ""

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import CausalLM

        return CausalLM()

    def label_counts(self, model: LanguageConfig) -> dict[str, int]:
        return {"vocab": model.vocab_size}

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["sample {}", *super().next_commands(has_test=has_test)]

    def tokenize(self, run: TrainedRun, text: str) -> list[int]:
        """The ids of a text, as the model reads it."""
        raise NotImplementedError

    def detokenize(self, tokens: Sequence[str]) -> str:
        """Tokens as text."""
        return "".join(tokens)

    def quote(self, token: str) -> str:
        """A token in quotation marks, with control characters as escapes."""
        return repr(token)

    def token_names(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """The label of each token in a figure."""
        from clearhead.drawing import displayable

        return tuple(map(displayable, tokens))

    def generate(
        self, run: TrainedRun, model: "LanguageModel", prompt: str, strategy: "Sampling", n: int, max_new_tokens: int
    ) -> list[str]:
        """n continuations of a prompt, in one batch."""
        raise NotImplementedError

    def sample(self, run: TrainedRun, prompt: str, strategy: "Sampling", *, n: int, max_new_tokens: int) -> list[str]:
        """n continuations of a prompt, each with the prompt before it."""
        from clearhead.models.language import LanguageModel

        assert isinstance(run.model, LanguageModel)
        if not (1 <= n <= MAX_COUNT and 1 <= max_new_tokens <= MAX_COUNT):
            raise ValueError(f"n and max_new_tokens must be from 1 to {MAX_COUNT}, got {n} and {max_new_tokens}")
        samples: list[str] = []
        for i in range(0, n, SAMPLING_BATCH_SIZE):
            batch_strategy = with_seed(strategy, "sample", i)
            n_batch = min(SAMPLING_BATCH_SIZE, n - i)
            samples += self.generate(run, run.model, prompt, batch_strategy, n_batch, max_new_tokens)
        return samples

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        first = inputs if isinstance(inputs, str) or not len(inputs) else inputs[0]
        raise ValueError(f"{run.path} takes text, got {str(first)!r}; generate text with: clearhead sample {run.path}")

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        """The token that the model predicts after a text."""
        if not isinstance(inputs, str):
            raise ValueError(f"{run.path} takes text, got {str(inputs)!r}; try --text TEXT")
        ids = self.tokenize(run, inputs)
        if not ids:
            raise ValueError("--text is empty")
        return self.next_token_example(run, ids)

    def next_token_example(self, run: TrainedRun, ids: Sequence[int]) -> "Example":
        import torch

        from clearhead.tasks.report import Example

        inputs = torch.tensor([ids[-min(MAX_TOKENS, run.model_config.context_length) :]])
        tokens = [run.vocab[i] for i in inputs[0].tolist()]
        predicted = int(run.logits(inputs)[0, -1].argmax())
        prediction = f"{self.quote(run.vocab[predicted])} after {self.quote(tokens[-1])}"
        return Example(inputs, prediction, tokens=self.token_names(tokens), predicted=predicted)

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        """The token after the last one that has a target."""
        from clearhead.data.vocab import IGNORE_INDEX

        last = int((target != IGNORE_INDEX).nonzero()[-1])
        example, token = self.next_token_example(run, inputs[: last + 1].tolist()), int(target[last])
        return example.with_target(self.quote(run.vocab[token]), correct=example.predicted == token)

    def report(
        self, run: TrainedRun, part: PartName, n: int, collect: "Callable[[], Outputs]", before: Callable[[], None]
    ) -> "Report":
        """A row for each of the first texts, and for each of the most confident mistakes among all tokens."""
        import torch

        from clearhead.data.vocab import IGNORE_INDEX
        from clearhead.tasks.report import Report, Row

        outputs = collect()
        targets, predicted, confidence, correct = map(
            torch.cat, (outputs.targets, outputs.predicted, outputs.confidence, outputs.correct)
        )
        lengths = torch.tensor([len(row) for row in outputs.targets])
        starts = lengths.cumsum(0) - lengths
        wrong = ((targets != IGNORE_INDEX) & ~correct).nonzero().flatten()
        worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:n]

        def as_text(ids: "Tensor") -> str:
            return repr(self.detokenize([run.vocab[i] for i in ids.tolist()]))[1:-1]

        def token_row(position: int) -> "Row":
            example = int(torch.searchsorted(starts, position, right=True)) - 1
            inputs, _ = outputs.examples.get_batch(torch.tensor([example]))
            context = inputs[0, : position - int(starts[example]) + 1][-CONTEXT:]
            sides = (context, predicted[position, None], targets[position, None])
            before, prediction, actual = map(as_text, sides)
            return Row(example, before, prediction, actual, float(confidence[position]), False)

        def text_row(example: int) -> "Row":
            mask = outputs.targets[example] != IGNORE_INDEX
            prediction, actual = (
                as_text(side[example][mask][-2 * CONTEXT :]) for side in (outputs.predicted, outputs.targets)
            )
            return Row(example, None, prediction, actual, None, bool((outputs.correct[example] | ~mask).all()))

        first = [text_row(i) for i in range(min(n, len(lengths)))]
        total = int((targets != IGNORE_INDEX).sum())
        return Report(self.unit, outputs.metrics, total, len(wrong), first, [token_row(i) for i in worst.tolist()])

    def random_texts(self, data: "Dataset", seed: int) -> list[str]:
        """The inputs of ten random training examples."""
        from clearhead.data.dataset import fold_in, permutation
        from clearhead.data.vocab import Vocabulary

        sources, _ = data.train.get_batch(permutation(fold_in(seed, "show"), len(data.train))[:10])
        return ["".join(Vocabulary(data.vocab).decode(source)) for source in sources.tolist()]


def with_seed(strategy: "Sampling", kind: str, index: int) -> "Sampling":
    """The same strategy with a seed derived from its own; at index 0 unchanged."""
    from clearhead.data.dataset import fold_in

    if strategy.seed is None or not index:
        return strategy
    return replace(strategy, seed=fold_in(strategy.seed, kind, index) >> 1)  # torch takes 63 bits


@dataclass(frozen=True, kw_only=True)
class Words(LanguageTask):
    """English words, letter by letter."""

    name: ClassVar[str] = "words"
    description: ClassVar[str] = "English words, letter by letter"
    origin: ClassVar[Origin] = "embedded"
    derived: ClassVar[tuple[str, ...]] = ("vocab_size",)
    file_fields: ClassVar[tuple[str, ...]] = ("file",)
    num_samples: ClassVar[int] = 10

    file: str = ""
    """a list of words, one per line, instead of those of the embedded dictionary"""
    window: int = 50
    """sort examples by length within this many batches, to pad less; 0 disables"""
    validation: int = 1000
    """training words held out for validation, chosen by their spelling"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(0, MAX_EXAMPLES, window=self.window)

    @cached_property
    def vocab_size(self) -> int:
        if not self.file:
            return WORD_TOKENS
        from clearhead.data.vocab import SPECIAL_TOKENS, letters_in, read_words

        return len(SPECIAL_TOKENS) + len(letters_in(read_words(self.file)))

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.sequences import load_words

        return load_words(self.file, self.validation, self.limit)

    def published_digests(self) -> dict[str, str]:
        from clearhead.data.vocab import CMUDICT_SHA256

        return {} if self.file else {"cmudict.dict": CMUDICT_SHA256}

    def batches(self, data: "Dataset", batch_size: int, seed: int) -> "Batches":
        from clearhead.data.batches import Batches

        return Batches(data, batch_size, seed, window=self.window)

    def tokenize(self, run: TrainedRun, text: str) -> list[int]:
        from clearhead.data.vocab import BOS, Vocabulary

        return [BOS, *Vocabulary(run.vocab).encode(text)]

    def generate(
        self, run: TrainedRun, model: "LanguageModel", prompt: str, strategy: "Sampling", n: int, max_new_tokens: int
    ) -> list[str]:
        """A word ends by itself."""
        import torch

        from clearhead.data.vocab import EOS, Vocabulary
        from clearhead.models.generate import free_positions

        ids = torch.tensor([self.tokenize(run, prompt)]).expand(n, -1)
        max_letters = max(1, free_positions(model.config, ids.shape[1], MAX_WORD_LETTERS))
        rows = model.generate(ids, strategy=strategy, max_new_tokens=max_letters, eos_id=EOS).ids
        return [prompt + "".join(Vocabulary(run.vocab).decode(row)) for row in rows.tolist()]

    def show_examples(self, data: "Dataset", seed: int) -> Sequence[str]:
        return [printable(word) for word in self.random_texts(data, seed)]


@dataclass(frozen=True, kw_only=True)
class Text(LanguageTask):
    """The user's own text, by characters or bytes."""

    name: ClassVar[str] = "text"
    description: ClassVar[str] = "a text file, by characters or bytes"
    origin: ClassVar[Origin] = "your own"
    derived: ClassVar[tuple[str, ...]] = ("vocab_size", "context_length")
    file_fields: ClassVar[tuple[str, ...]] = ("file",)
    required: ClassVar[str] = "file"
    example_path: ClassVar[str] = "my.txt"
    has_test: ClassVar[bool] = False

    file: str = ""
    """the text file"""
    level: Level = "character"
    """unit of a token"""
    length: int = 64
    """context length in characters or bytes"""
    validation: int = 1000
    """windows at the end of the text held out for validation: at most a tenth of it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(level=(self.level, Level))
        check_int(1, MAX_LENGTH, length=self.length)

    @property
    def context_length(self) -> int:
        return self.length

    @cached_property
    def vocab_size(self) -> int:
        """The characters of the text, or all bytes; without a text, the printable characters of ASCII."""
        if not self.file:
            return BYTE_TOKENS if self.level == "byte" else ASCII_TOKENS
        from clearhead.data.vocab import read_text, text_vocab

        return len(text_vocab(read_text(self.file, self.level), self.level))

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.sequences import load_text

        return load_text(self.file, self.level, self.length, self.validation, self.limit)

    def tokenize(self, run: TrainedRun, text: str) -> list[int]:
        from clearhead.data.vocab import Vocabulary, text_to_tokens

        return Vocabulary(run.vocab).encode(text_to_tokens(text, self.level))

    def detokenize(self, tokens: Sequence[str]) -> str:
        from clearhead.data.vocab import tokens_to_text

        return tokens_to_text("".join(tokens), self.level)

    def quote(self, token: str) -> str:
        return ascii(token) if self.level == "byte" else repr(token)

    def token_names(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """A byte of a longer character is escaped, so that it does not look like another character."""
        names = super().token_names(tokens)
        if self.level != "byte":
            return names
        return tuple(name if token.isascii() else ascii(token)[1:-1] for name, token in zip(names, tokens, strict=True))

    def generate(
        self, run: TrainedRun, model: "LanguageModel", prompt: str, strategy: "Sampling", n: int, max_new_tokens: int
    ) -> list[str]:
        """max_new_tokens tokens after the prompt."""
        import torch

        ids_of_prompt = self.tokenize(run, prompt)
        if not ids_of_prompt:
            ids_of_prompt = [run.vocab.index(LINE_BREAK) if LINE_BREAK in run.vocab else 0]
        ids = continue_text(model, torch.tensor([ids_of_prompt]).expand(n, -1), strategy, max_new_tokens)
        rows = ids[:, len(ids_of_prompt) :].tolist()
        return [prompt + self.detokenize([run.vocab[i] for i in row]) for row in rows]

    def show_examples(self, data: "Dataset", seed: int) -> Sequence[str]:
        return [repr(text) for text in self.random_texts(data, seed)]


def continue_text(model: "LanguageModel", ids: "Tensor", strategy: "Sampling", max_new_tokens: int) -> "Tensor":
    """ids (B,L) -> (B,L+max_new_tokens). When the context is full, generation continues from its last half."""
    import torch

    context, n_new = model.config.context_length, 0
    while n_new < max_new_tokens:
        window = ids if ids.shape[1] < context else ids[:, -max(1, context // 2) :]
        count = min(max_new_tokens - n_new, context - window.shape[1] + 1)
        new = model.generate(window, max_new_tokens=count, strategy=with_seed(strategy, "chunk", n_new)).ids
        ids = torch.cat([ids, new], dim=1)
        n_new += count
    return ids
