"""Generation with a run: pronunciations by beam search (`pronounce`), samples of a language model (`words`, `text`).

Pronunciation is grapheme-to-phoneme conversion; it has ensembles and figures of the attention.

Dims: B batch, H heads, Q phones, K letters.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from clearhead.data.dataset import SequencePairs
from clearhead.data.prng import fold_in
from clearhead.data.vocab import (
    BOS,
    EOS,
    MAX_WORD_LENGTH,
    PAD,
    SPECIAL_TOKENS,
    Vocabulary,
    text_to_tokens,
    tokens_to_text,
)
from clearhead.drawing import displayable
from clearhead.inference.run import Prediction, Run
from clearhead.insight.head_plots import draw_head_importance
from clearhead.insight.heads import entropy, head_importance
from clearhead.insight.plots import draw_alignment, draw_head_grid
from clearhead.insight.trace import AttentionTrace, look
from clearhead.models.generate import Beam, Sampling, free_positions
from clearhead.models.language import LanguageModel
from clearhead.models.seq2seq import Ensemble, Seq2Seq

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PHONES = MAX_WORD_LENGTH + 1
"""the length limit of a pronunciation in a dictionary, plus the end-of-sequence token"""
BEAM = Beam(5)
SAMPLING_BATCH_SIZE = 256
"""each batch draws its own random numbers, so a different size gives different samples"""
MAX_WORD_LETTERS = 40
"""longer words are truncated"""
MAX_COUNT = 1_000_000
"""limit for the number of samples, and for the tokens of each"""
LINE_BREAK = "\n"
"""replaces an empty prompt if it is in the vocabulary"""

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


def pronounce(run: Run, words: Sequence[str], beam: Beam = BEAM) -> list[list[Pronunciation]]:
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
    batch_size = run.config.training.eval_batch_size // max(1, beam.size // BEAM.size)
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


def predict_words(run: Run, words: Sequence[str]) -> list[Prediction]:
    """The best candidate of each word, with the probabilities of all."""
    return [
        Prediction(str(best), math.exp(best.score), {str(one): math.exp(one.score) for one in (best, *others)})
        for best, *others in pronounce(run, words)
    ]


def ensemble(runs: Sequence[Run]) -> Run:
    """A run whose model averages the predictions of several runs, with the data of the first one."""
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


def phones_of(run: Run, ids: Sequence[int]) -> tuple[str, ...]:
    """The phones before the end-of-sequence token, and any other special token among them."""
    return tuple(run.classes[i] for i in takewhile(lambda i: i != EOS, ids))


def letter_ids(run: Run, word: str) -> list[int]:
    letters = word.strip().lower()
    if not letters:
        raise ValueError(f"a word must have letters, got {word!r}")
    if len(letters) > MAX_WORD_LENGTH:
        raise ValueError(f"a word may have at most {MAX_WORD_LENGTH} letters, got {len(letters)}: {letters[:20]!r}...")
    return Vocabulary(run.vocab).encode(letters)


def predicted_phones(run: Run, word: str) -> tuple[str, ...]:
    """The best pronunciation of a word, with the end-of-sequence token if it was reached."""
    best = pronounce(run, [word])[0][0]
    return (*best.phones, SPECIAL_TOKENS[EOS]) if best.ended else best.phones


def decoder_inputs(run: Run, word: str, phones: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """letters (1,K), the phones before each position (1,Q), and the phones themselves (1,Q)"""
    target = torch.tensor([Vocabulary(run.classes).encode(phones)])
    shifted = torch.cat([torch.full((1, 1), BOS), target[:, :-1]], dim=1)
    return torch.tensor([letter_ids(run, word)]), shifted, target


def trace_word(run: Run, word: str) -> AttentionTrace:
    """The attention under teacher forcing with the best pronunciation of a word."""
    letters, shifted, _ = decoder_inputs(run, word, predicted_phones(run, word))
    return look(run.model, letters, shifted)


def word_figures(run: Run, word: str, heading: str = "") -> "Iterator[tuple[str, str, Figure]]":
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


def draw_samples(run: Run, prompt: str, strategy: Sampling, *, n: int, max_new_tokens: int) -> list[str]:
    """n continuations of a prompt, including the prompt. A word ends at its end-of-sequence token; a text is continued
    by max_new_tokens tokens."""
    if not isinstance(run.model, LanguageModel):
        raise ValueError(
            f"sampling needs a language model (recipes words and text), got {run.path}, which takes {run.input_kind}; "
            f"try clearhead predict {run.path}"
        )
    if not (1 <= n <= MAX_COUNT and 1 <= max_new_tokens <= MAX_COUNT):
        raise ValueError(f"n and max_new_tokens must be from 1 to {MAX_COUNT}, got {n} and {max_new_tokens}")
    samples: list[str] = []
    for i in range(0, n, SAMPLING_BATCH_SIZE):
        n_batch = min(SAMPLING_BATCH_SIZE, n - i)
        samples += sample_batch(run, run.model, prompt, with_seed(strategy, "sample", i), n_batch, max_new_tokens)
    return samples


def with_seed(strategy: Sampling, kind: str, index: int) -> Sampling:
    """The strategy with a seed derived from its own; unchanged for index 0 or without a seed."""
    if strategy.seed is None or not index:
        return strategy
    return replace(strategy, seed=fold_in(strategy.seed, kind, index) >> 1)  # torch takes 63 bits


def sample_batch(
    run: Run, model: LanguageModel, prompt: str, strategy: Sampling, n: int, max_new_tokens: int
) -> list[str]:
    vocab, level = Vocabulary(run.vocab), run.config.data.level
    tokens = text_to_tokens(prompt, level)
    if vocab.has_special_tokens:
        ids = torch.tensor([[BOS, *vocab.encode(tokens)]]).expand(n, -1)
        max_letters = max(1, free_positions(model.config, ids.shape[1], MAX_WORD_LETTERS))
        rows = model.generate(ids, strategy=strategy, max_new_tokens=max_letters, eos_id=EOS).ids
        return [prompt + "".join(vocab.decode(row)) for row in rows.tolist()]
    if not tokens:
        tokens = LINE_BREAK if LINE_BREAK in vocab.token_to_id else vocab.tokens[0]
    rows = continue_text(model, torch.tensor([vocab.encode(tokens)]).expand(n, -1), strategy, max_new_tokens)
    return [prompt + tokens_to_text("".join(vocab.decode(row)), level) for row in rows[:, len(tokens) :].tolist()]


def continue_text(model: LanguageModel, ids: Tensor, strategy: Sampling, max_new_tokens: int) -> Tensor:
    """ids (B,L) -> (B,L+max_new_tokens). When the context is full, generation continues from its last half."""
    context, n_new = model.config.context_length, 0
    while n_new < max_new_tokens:
        window = ids if ids.shape[1] < context else ids[:, -max(1, context // 2) :]
        count = min(max_new_tokens - n_new, context - window.shape[1] + 1)
        new = model.generate(window, max_new_tokens=count, strategy=with_seed(strategy, "chunk", n_new)).ids
        ids = torch.cat([ids, new], dim=1)
        n_new += count
    return ids
