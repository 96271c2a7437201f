"""Sampling from the language model of a run (`words`, `text`)."""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.data.prng import fold_in
from clearhead.data.vocab import BOS, EOS, Vocabulary, text_to_tokens, tokens_to_text
from clearhead.inference.run import Run
from clearhead.models.generate import Sampling, free_positions
from clearhead.models.language import LanguageModel

SAMPLING_BATCH_SIZE = 256
"""each batch draws its own random numbers, so another size draws other samples"""
MAX_WORD_LETTERS = 40
"""longer words are cut off"""
MAX_COUNT = 1_000_000
"""samples, and tokens of each"""
LINE_BREAK = "\n"
"""an empty prompt for a text becomes a line break, if the text has any"""


def draw_samples(run: Run, prompt: str, strategy: Sampling, *, n: int, max_new_tokens: int) -> list[str]:
    """n continuations of a prompt, each with the prompt before it. A word ends by itself; a text has max_new_tokens
    more tokens."""
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
    """The same strategy with a seed derived from its own; at index 0 unchanged."""
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
    """ids (B,L) -> (B,L+max_new_tokens). When the context is full, the model reads its last half again and goes on."""
    context, n_new = model.config.context_length, 0
    while n_new < max_new_tokens:
        window = ids if ids.shape[1] < context else ids[:, -max(1, context // 2) :]
        count = min(max_new_tokens - n_new, context - window.shape[1] + 1)
        new = model.generate(window, max_new_tokens=count, strategy=with_seed(strategy, "chunk", n_new)).ids
        ids = torch.cat([ids, new], dim=1)
        n_new += count
    return ids
