"""A run of `words` or `text` that writes: samples from a language model."""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.data.prng import fold_in
from clearhead.data.vocab import BOS, EOS, Vocabulary, text_to_tokens, tokens_to_text
from clearhead.inference.run import Run
from clearhead.models.generate import Sampling, free_positions
from clearhead.models.language import LanguageModel

AT_ONCE = 256
"""samples that are generated together; each batch has its own random numbers, so another number is another sample"""
MOST_LETTERS = 40
"""a word that is longer is broken off"""
MOST = 1_000_000
"""samples, and tokens of each: to write more takes longer than anybody waits"""
FIRST = "\n"
"""what a text goes on from without a prompt, if it has lines"""


def draw_samples(run: Run, prompt: str, how: Sampling, *, n: int, n_tokens: int) -> list[str]:
    """n continuations of a prompt, each with the prompt before it: words to their end, of a text n_tokens."""
    if not isinstance(run.model, LanguageModel):
        raise ValueError(
            f"a run of the recipe words or text writes, got {run.path}, which takes {run.input_kind}; "
            f"try clearhead predict {run.path}"
        )
    if not (1 <= n <= MOST and 1 <= n_tokens <= MOST):
        raise ValueError(f"n and n_tokens must be from 1 to {MOST}, got n={n}, n_tokens={n_tokens}; choose others")
    found: list[str] = []
    for i in range(0, n, AT_ONCE):  # more at once might not fit into memory
        found += portion(run, run.model, prompt, with_seed(how, "sample", i), n=min(AT_ONCE, n - i), n_tokens=n_tokens)
    return found


def with_seed(how: Sampling, kind: str, part: int) -> Sampling:
    """The same with other random numbers, which follow from its seed; for part 0 with its own."""
    if how.seed is None or not part:
        return how
    return replace(how, seed=fold_in(how.seed, kind, part) >> 1)  # torch takes 63 bits


def portion(run: Run, model: LanguageModel, prompt: str, how: Sampling, *, n: int, n_tokens: int) -> list[str]:
    """As many as the model writes side by side."""
    known = Vocabulary(run.vocab)
    level = run.config.data.level
    symbols = text_to_tokens(prompt, level)
    if known.has_special_tokens:
        begin = torch.tensor([[BOS, *known.encode(symbols)]]).expand(n, -1)
        n_letters = max(1, free_positions(model.config, begin.shape[1], MOST_LETTERS))
        rows = model.generate(begin, strategy=how, max_new_tokens=n_letters, eos_id=EOS).ids
        return [prompt + "".join(known.decode(row)) for row in rows.tolist()]
    if not symbols:
        symbols = FIRST if FIRST in known.token_to_id else known.tokens[0]
    rows = continued(model, torch.tensor([known.encode(symbols)]).expand(n, -1), how, n_tokens)
    return [prompt + tokens_to_text("".join(known.decode(row)), level) for row in rows[:, len(symbols) :].tolist()]


def continued(model: LanguageModel, ids: Tensor, how: Sampling, n_tokens: int) -> Tensor:
    """ids (B,L) and n_tokens more. The model has learnt from no more than its context: when that is full, it reads the
    last half of it anew and goes on."""
    context, n_written = model.config.context_length, 0
    while n_written < n_tokens:
        seen = ids if ids.shape[1] < context else ids[:, -max(1, context // 2) :]
        count = min(n_tokens - n_written, context - seen.shape[1] + 1)
        ids = torch.cat(
            [ids, model.generate(seen, max_new_tokens=count, strategy=with_seed(how, "chunk", n_written)).ids], dim=1
        )
        n_written += count
    return ids
