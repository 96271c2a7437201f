"""Language models with the parts of Vaswani et al. 2017 and with modern parts, at equal size and training budget.

                     Vaswani et al. 2017       modern
    norm             layer norm, post-norm     RMS norm, pre-norm
    MLP              ReLU                      SwiGLU
    positions        sinusoidal                rotary
    attention        one key head per head     grouped queries, QK-norm
    biases           yes                       no

Both models learn to spell: each letter of an English word is predicted from the letters before it.
"""

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, Vocabulary, load_word_list, split_test
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most, equals
from clearhead.lab.learning import mean_over_seeds, single_thread, step_budgets, train
from clearhead.lab.lstm import size_ratio
from clearhead.lab.plots import draw_measured
from clearhead.models.config import LanguageConfig
from clearhead.models.language import LanguageModel
from clearhead.models.presets import classic_lm, modern_lm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH = 12
"""letters of the longest word, and the end of it"""
BATCH_SIZE, NUM_TEST = 32, 2_000
LR = 2e-3
"""the best learning rate of the classic model among 0.001, 0.002, 0.004 and 0.008"""
HIGH_LR = 4 * LR
CLASSIC, MODERN = "Vaswani et al. 2017", "modern parts"
VOCAB = Vocabulary.with_special_tokens("abcdefghijklmnopqrstuvwxyz")


def model_config(name: str, width: int) -> LanguageConfig:
    """Blocks of 12 width² weights: the modern attention has fewer, and the modern MLP a third matrix."""
    classic, modern = replace(classic_lm(), mlp_dim=4 * width), replace(modern_lm(), mlp_dim=3 * width)
    config = classic if name == CLASSIC else modern
    return replace(config, width=width, vocab_size=len(VOCAB), context_length=LENGTH)


def word_tensors(words: list[str]) -> tuple[Tensor, Tensor]:
    """Inputs (n,L), which begin with BOS, and targets (n,L), which end with EOS; the rest has no loss."""
    short = [VOCAB.encode(word) for word in words if len(word) < LENGTH]
    inputs = torch.full((len(short), LENGTH), EOS)
    targets = torch.full((len(short), LENGTH), IGNORE_INDEX)
    for i, ids in enumerate(short):
        inputs[i, : len(ids) + 1] = torch.tensor([BOS, *ids])
        targets[i, : len(ids) + 1] = torch.tensor([*ids, EOS])
    return inputs, targets


@cache
def word_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training words of the embedded dictionary, and some of its test words."""
    rest, test = split_test(load_word_list(""))
    return word_tensors(rest), word_tensors(test[:: len(test) // NUM_TEST])


def sample_words(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    inputs, targets = word_data()[0]
    chosen = torch.randint(len(inputs), (n,), generator=random)
    return inputs[chosen], targets[chosen]


@torch.no_grad()
def loss_on_test_words(model: LanguageModel) -> float:
    """Nats per letter of words that the model was not trained on."""
    inputs, targets = word_data()[1]
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX).item()


def losses(name: str, width: int, lr: float, budgets: list[int], seed: int) -> list[float]:
    """The test loss after each number of training steps."""
    torch.manual_seed(seed)
    model = LanguageModel.from_config(model_config(name, width))
    with single_thread():
        steps = train(model, sample_words, budgets=budgets, seed=seed, lr=lr, batch_size=BATCH_SIZE)
        return [loss_on_test_words(model) for _ in steps]


def run_modern_parts(
    *, seed: int = 0, num_seeds: int = 3, width: int = 64, steps: int = 400, classic: bool = False
) -> Result:
    """classic=True tests the parts of Vaswani et al. 2017 in place of the modern ones."""
    tested = CLASSIC if classic else MODERN
    with torch.device("meta"):
        models = [LanguageModel.from_config(model_config(name, width)) for name in (CLASSIC, tested)]
    cached = [model.config.kv_heads / model.config.num_heads for model in models]
    budgets = step_budgets(steps, 0.25, 0.5, 1)
    measured = {
        (lr, name): mean_over_seeds(partial(losses, name, width, lr, budgets), seed, num_seeds)
        for lr in (LR, HIGH_LR)
        for name in dict.fromkeys((CLASSIC, tested))
    }
    old, new, old_high, new_high = (measured[lr, name][-1] for lr in (LR, HIGH_LR) for name in (CLASSIC, tested))
    unit = "nats per letter"
    checks = (
        at_most("parameters of the larger model / smaller model", size_ratio([*models]), 1.05),
        at_least(f"learning rate {LR:g}, {steps} steps: lead of the modern parts ({unit})", old - new, 0.015),
        at_least(
            f"learning rate {HIGH_LR:g}, {steps} steps: lead of the modern parts ({unit})", old_high - new_high, 0.1
        ),
        at_most(
            f"modern parts: loss with {HIGH_LR / LR:g} times the learning rate, minus that without",
            new_high - new,
            0.05,
        ),
        equals("size of the key-value cache, modern parts / Vaswani et al. 2017", cached[1] / cached[0], 0.5, 0),
    )
    curves = [
        Curve(f"loss on unseen words at learning rate {lr:g}", name, tuple(budgets), tuple(measured[lr, name]))
        for lr, name in measured
    ]
    return Result(checks, tuple(curves))


def draw_modern_parts(result: Result) -> "Figure":
    figure = draw_measured(result, "Modern parts learn faster at equal size, and tolerate a higher learning rate")
    values = [loss for curve in result.curves if len(curve.x) > 1 for loss in curve.y]
    for axes in figure.axes if values else ():  # losses that differ by a few percent: the axis does not begin at 0
        axes.set_ylim(min(values) - 0.05, max(values) + 0.05)
    return figure


MODERN_PARTS = Claim(
    slug="modern-parts",
    lesson="Blocks: feed-forward network, normalization, skip connections",
    statement="At equal depth, width, number of parameters, training words and steps, a small language model with RMS "
    "norm, pre-norm, SwiGLU, rotary positions, grouped queries, QK-norm and no biases has a lower loss than one with "
    "the parts of Vaswani et al. 2017. The lead is small at the learning rate that suits the latter best, and large "
    "at four times that rate. The key-value cache is half as large.",
    misconception="The newer parts of language models matter only at a large scale, or they make small models much "
    "better even at a well-chosen learning rate.",
    formula="both: 12 width² weights per block;  attention + MLP: 4 + 2·4 = 3 + 3·3",
    conditions="Four blocks of width 64 (0.2 million parameters), 400 steps of 32 English words; mean of three seeds. "
    "For the parts of Vaswani et al. 2017, 0.002 was the best of four learning rates. The result says nothing about "
    "large models, long training, long contexts, or which of the parts matter.",
    run=run_modern_parts,
    figure=draw_modern_parts,
    try_next="clearhead lab modern-parts --classic true",
    minimum={"width": 32},
    maximum={"width": 512},
    multiple_of={"width": 8},
    trains=True,
    seconds=70,
)
