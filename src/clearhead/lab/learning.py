"""Training loop of the claims that train a model, and means over several seeds.

All training is in float32 on every processor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.data.vocab import IGNORE_INDEX
from clearhead.recipes.launch import config_of
from clearhead.training.context import TrainContext, build_context
from clearhead.training.distributed import SINGLE_PROCESS
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState

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
