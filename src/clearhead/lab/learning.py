"""The training loop of the claims that train a model, and two of them: `several-heads` and `modern-parts`.

Both claims compare models of equal size within a training budget. All training is in float32 on every processor.

`several-heads` varies the number of heads in a task whose outputs depend on four positions. `modern-parts` compares
language models, which learn to spell: each letter of an English word is predicted from the letters before it.

                     Vaswani et al. 2017       modern
    norm             layer norm, post-norm     RMS norm, pre-norm
    MLP              ReLU                      SwiGLU
    positions        sinusoidal                rotary
    attention        one key head per head     grouped queries, QK-norm
    biases           yes                       no
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, Vocabulary, load_word_list, split_test
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most, equals
from clearhead.lab.lstm import size_ratio
from clearhead.lab.plots import draw_measured
from clearhead.models.config import LanguageConfig, PredictorConfig
from clearhead.models.language import LanguageModel
from clearhead.models.predictor import SequencePredictor
from clearhead.models.presets import classic_lm, modern_lm
from clearhead.recipes import config_of
from clearhead.training.context import TrainContext, build_context
from clearhead.training.distributed import SINGLE_PROCESS
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Task = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
"""(random, n) -> inputs (n,...) and targets (n,...): class indices, or IGNORE_INDEX"""

WARMUP = 30
"""number of warm-up steps of the learning rate"""
TEST_SEED_OFFSET = 1_000_003
"""added to the seed to draw the test examples"""


def run_seeds(seed: int, num_seeds: int) -> list[int]:
    """The seeds of the training runs, disjoint for different values of `seed`."""
    return [seed * num_seeds + i for i in range(num_seeds)]


def mean_over_seeds(measure: Callable[[int], Sequence[float]], seed: int, num_seeds: int) -> list[float]:
    """Averages the numbers that measure(seed) returns over the training runs."""
    runs = [measure(run_seed) for run_seed in run_seeds(seed, num_seeds)]
    return torch.tensor(runs, dtype=torch.float64).mean(0).tolist()


def step_budgets(steps: int, *factors: float) -> list[int]:
    """`steps` times each factor, sorted."""
    return sorted({max(1, round(steps * factor)) for factor in factors})


def learning_curve(
    model: nn.Module,
    task: Task,
    *,
    budgets: Sequence[int],
    seed: int,
    lr: float = 1e-2,
    batch_size: int = 64,
    test_task: Task | None = None,
    num_test: int = 500,
) -> list[float]:
    """Accuracy on unseen examples after each number of steps in `budgets`, from one training run.

    The learning rate is constant after a short warm-up, so that a smaller budget is a prefix of a larger one.
    Test examples come from `test_task` (default: `task`).
    """
    accuracies = []
    with single_thread():
        for _ in train(model, task, budgets=budgets, seed=seed, lr=lr, batch_size=batch_size):
            accuracies.append(accuracy(model, test_task or task, seed=seed, num_test=num_test))
    return accuracies


def train(
    model: nn.Module, task: Task, *, budgets: Sequence[int], seed: int, lr: float, batch_size: int
) -> Iterator[int]:
    """Minimizes the cross-entropy with AdamW on random batches. Yields each budget when it is reached."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step in range(1, max(budgets) + 1):
        inputs, targets = task(random, batch_size)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in budgets:
            yield step


def train_recipe(recipe: str, changes: Mapping[str, object], steps: int) -> TrainContext:
    """Trains a recipe for `steps` steps without a run directory; returns its model and data."""
    values = {**changes, "training.steps": steps, "training.precision": "float32"}
    ctx, state = build_context(config_of(recipe, values), SINGLE_PROCESS, shard=False, report=print), TrainState()
    ctx.model.train()
    while state.step < steps:
        train_step(ctx, state, StopRequest())
    ctx.model.eval()
    return ctx


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, *, seed: int, num_test: int = 2_000) -> float:
    """The fraction of correct predictions on unseen examples; targets equal to IGNORE_INDEX are excluded."""
    inputs, targets = task(torch.Generator().manual_seed(seed + TEST_SEED_OFFSET), num_test)
    return (model(inputs).argmax(-1) == targets)[targets != IGNORE_INDEX].double().mean().item()


@contextmanager
def single_thread() -> Iterator[None]:
    """Small models train faster on one thread than on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


LENGTH, DIGITS, NUM_OUTPUTS = 16, 10, 4
LONG_FACTOR = 5
"""multiple of the budget after which one head nearly catches up"""


def four_digits_task(seed: int) -> Task:
    """The targets of each position are the digits at four positions, which are the same in every sequence."""
    random = torch.Generator().manual_seed(seed)
    sources = torch.stack([torch.randperm(LENGTH, generator=random) for _ in range(NUM_OUTPUTS)], dim=1)  # (L,4)

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
        return digits, digits[:, sources]  # (n,L,4)

    return task


class FourDigitModel(nn.Module):
    """One encoder block with four outputs per token. ids (n,L) -> logits (n,L,4,10)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.predictor = SequencePredictor.from_config(
            PredictorConfig(
                width=width,
                depth=1,
                num_heads=num_heads,
                mlp_dim=2 * width,
                in_features=DIGITS,
                out_features=NUM_OUTPUTS * DIGITS,
                pos_embed="learned",
                context_length=LENGTH,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.predictor(ids).unflatten(-1, (NUM_OUTPUTS, DIGITS))


def accuracies(width: int, num_heads: int, budgets: list[int], seed: int) -> list[float]:
    """Accuracy after each number of training steps."""
    torch.manual_seed(seed)
    return learning_curve(
        FourDigitModel(width, num_heads), four_digits_task(seed), budgets=budgets, seed=seed, batch_size=32
    )


def run_several_heads(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, num_heads: int = 4, steps: int = 250
) -> Result:
    """num_heads is compared with a single head and with `width` heads of width 1."""
    budgets = step_budgets(steps, 0.25, 0.5, 1, 2, LONG_FACTOR)
    index = budgets.index(steps)
    trained_for = {width: step_budgets(steps, 0.25, 0.5, 1, 2), 1: budgets, num_heads: budgets}
    accuracy_by_heads = {
        n: mean_over_seeds(partial(accuracies, width, n, budget), seed, num_seeds) for n, budget in trained_for.items()
    }
    one, several, many = (accuracy_by_heads[n][index] for n in (1, num_heads, width))
    checks = (
        at_least(f"{num_heads} heads of width {width // num_heads}, {steps} steps: accuracy", several, 0.9),
        at_least(f"lead over one head of width {width}", several - one, 0.1),
        at_least(f"lead over {width} heads of width 1", several - many, 0.1),
        at_least(f"one head, {budgets[-1]} steps: accuracy", accuracy_by_heads[1][-1], 0.8),
    )
    return Result(
        checks, tuple(curve(n, width, trained_for[n], accuracy_by_heads[n]) for n in sorted(accuracy_by_heads))
    )


def curve(num_heads: int, width: int, budgets: list[int], accuracy: list[float]) -> Curve:
    """Accuracy against training steps."""
    plural = "head" if num_heads == 1 else "heads"
    return Curve("accuracy", f"{num_heads} {plural} of width {width // num_heads}", tuple(budgets), tuple(accuracy))


def draw_several_heads(result: Result) -> "Figure":
    return draw_measured(result, "Several heads learn faster than one wide head or many narrow heads")


SEVERAL_HEADS = Claim(
    slug="several-heads",
    lesson="Multi-head attention",
    statement="If each output depends on several positions, several heads learn the task within a training budget "
    "that is too small for a single head and for many heads of width 1, at equal total width. With five times the "
    "budget, a single head nearly catches up.",
    misconception="More heads are always better, the number of heads does not matter, or a single head cannot learn "
    "the task at all.",
    formula="num_heads · head width = width: all models have the same number of parameters",
    conditions="One encoder block of width 32, 250 training steps in float32; mean of three seeds.",
    run=run_several_heads,
    figure=draw_several_heads,
    try_next="clearhead lab several-heads --num-heads 16",
    trains=True,
    seconds=40,
)


WORD_LENGTH = 12
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
    return replace(config, width=width, vocab_size=len(VOCAB), context_length=WORD_LENGTH)


def word_tensors(words: list[str]) -> tuple[Tensor, Tensor]:
    """Inputs (n,L), which begin with BOS, and targets (n,L), which end with EOS; the rest has no loss."""
    short = [VOCAB.encode(word) for word in words if len(word) < WORD_LENGTH]
    inputs = torch.full((len(short), WORD_LENGTH), EOS)
    targets = torch.full((len(short), WORD_LENGTH), IGNORE_INDEX)
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
