"""Against recurrence: a transformer beside LSTMs of its size. Trains all three on reversal and on pronouncing."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.data.config import DataConfig
from clearhead.data.pairs import Pairs
from clearhead.data.pronounce import load
from clearhead.data.tokens import IGNORED, MARKS
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most
from clearhead.lab.gradient_path import SHORT, fading, untrained
from clearhead.lab.learning import Task, fit, one_thread
from clearhead.lab.rivals import DIGITS, NAMES, TRANSFORMER, WITH, WITHOUT, rival, spread
from clearhead.training.objective import before

LETTERS, N_TEST = 6, 1_000
TOKENS_AT_ONCE = 2_048
"""in the batch that a step's time is measured with, whatever the length"""
BEST_OF = 7


class SideBySide(nn.Module):
    """An encoder-decoder whose source and target so far stand in one row: ids (n,K+Q) -> logits (n,Q,V)"""

    def __init__(self, model: nn.Module, n_source: int):
        super().__init__()
        self.model, self.n_source = model, n_source

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, : self.n_source], ids[:, self.n_source :])


def reversal(length: int) -> Task:
    """Digits, to be said backwards: the last answer is the first digit that was read."""

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = len(MARKS) + torch.randint(DIGITS, (n, length), generator=random)
        return torch.cat([digits, before(digits.flip(1))], dim=1), digits.flip(1)

    return task


def pronouncing(examples: Pairs) -> Task:
    """Words of LETTERS letters, and their phones."""
    sources, targets = examples.take((examples.lengths[:, 0] == LETTERS).nonzero()[:, 0])

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(sources), (n,), generator=random)
        return torch.cat([sources[chosen], before(targets[chosen])], dim=1), targets[chosen]

    return task


def learnt(model: nn.Module, n_source: int, task: Task, unseen: Task, steps: int, seed: int) -> float:
    """The share of right tokens after training, where the right ones before it are told."""
    rows = SideBySide(model, n_source)
    fit(rows, task, steps=steps, seed=seed, n_examples=64)
    with torch.no_grad():
        inputs, targets = unseen(torch.Generator().manual_seed(seed + 1_000_003), N_TEST)
        return (rows(inputs).argmax(-1) == targets)[targets != IGNORED].double().mean().item()


def seconds(model: nn.Module, length: int, seed: int) -> float:
    """Processor time of a training step's passes, forwards and backwards; the best of several."""
    rows = SideBySide(model, length)
    inputs, targets = reversal(length)(torch.Generator().manual_seed(seed), TOKENS_AT_ONCE // length)
    found = []
    for _ in range(BEST_OF):
        start = time.process_time()
        nn.functional.cross_entropy(rows(inputs).flatten(0, -2), targets.flatten()).backward()
        found.append(time.process_time() - start)
    return min(found)


def digits_right(lengths: Sequence[int], width: int, steps: int, seed: int) -> dict[str, list[float]]:
    """Right digits of each model for each length."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for name in NAMES:
        for length in lengths:
            torch.manual_seed(seed)
            model, task = rival(name, width), reversal(length)
            found[name].append(learnt(model, length, task, task, steps, seed))
    return found


def phones_right(width: int, steps: int, seed: int) -> dict[str, float]:
    """Right phones of each model in words that it has not seen."""
    data = load(DataConfig(name="pronounce"), seed)
    assert isinstance(data.train, Pairs)
    assert isinstance(data.test, Pairs)
    found = {}
    for name in NAMES:
        torch.manual_seed(seed)
        model = rival(name, width, len(data.symbols), len(data.classes))
        found[name] = learnt(model, LETTERS, pronouncing(data.train), pronouncing(data.test), steps, seed)
    return found


def run(*, seed: int = 0, width: int = 32, length: int = 20, steps: int = 400, attends: bool = True) -> Result:
    """attends=False asks of the LSTM without attention what holds with it."""
    lengths = (length // 4, length // 2, length)
    with one_thread():
        digits = digits_right(lengths, width, steps, seed)
        phones = phones_right(width, steps, seed)
        drawn = curves(digits, phones, lengths, width, seed)
    other = WITH if attends else WITHOUT
    models = [rival(name, width) for name in NAMES]
    checks = (
        at_most("parameters of the largest model over the smallest", spread(models), 1.05),
        at_least(f"transformer, {length} digits: right", digits[TRANSFORMER][-1], 0.95),
        at_least("LSTM with attention: right", digits[other][-1], 0.95),
        at_most("LSTM alone: right", digits[WITHOUT][-1], 0.85),
        at_least(f"LSTM alone, {lengths[0]} digits: right", digits[WITHOUT][0], 0.95),
        at_least("transformer, new words: right phones, more than of LSTM alone", lead(phones, TRANSFORMER), 0.03),
        at_least("LSTM with attention: the same", lead(phones, other), 0.03),
    )
    return Result(checks, drawn)


def lead(phones: dict[str, float], name: str) -> float:
    return phones[name] - phones[WITHOUT]


def curves(
    digits: dict[str, list[float]], phones: dict[str, float], lengths: Sequence[int], width: int, seed: int
) -> tuple[Curve, ...]:
    """What the figure shows, with two numbers of models that are not trained yet: gradient and time."""
    further = [SHORT * 2**power for power in range(6)]
    models = untrained(width, 1.0, seed)
    found = []
    for name, model in models.items():
        gradients = fading(model, further, width, seed)
        milliseconds = [1000 * seconds(model.float(), length, seed) for length in further]
        found += [
            Curve("right digits", name, tuple(lengths), tuple(digits[name])),
            Curve("right phones", name, (LETTERS,), (phones[name],)),
            Curve("gradient", name, tuple(further), tuple(gradients)),
            Curve("milliseconds", name, tuple(further), tuple(milliseconds)),
        ]
    return tuple(found)


CLAIM = Claim(
    slug="recurrence",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="Attention, in a transformer or beside an LSTM, says long sequences backwards; an LSTM of equal size "
    "alone only short ones, and it pronounces words worse.",
    mistake="An LSTM with as many weights does without attention; or: recurrence has to go before attention helps.",
    formula="without attention, all that the decoder knows of the source is one state and cell, 2 width numbers",
    run=run,
    try_next="clearhead lab recurrence --length 10",
    least={"width": 16, "length": 8},
    most={"width": 256, "length": 128},
    multiples={"width": 2},
    trains=True,
)
