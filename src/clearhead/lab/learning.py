"""The small training loop of the claims that need one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Task = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
"""(random, n) -> inputs (n,...) and targets (n,...): the index of the right class"""


def fit(model: nn.Module, task: Task, *, steps: int, seed: int, lr: float = 1e-2, n_examples: int = 128) -> None:
    """Cross-entropy by AdamW, one cycle of the rate up and down; each batch is drawn anew."""
    with one_thread():
        train(model, task, steps, seed, lr, n_examples)


@contextmanager
def one_thread() -> Iterator[None]:
    """So small a model loses more by waiting for a second thread than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(model: nn.Module, task: Task, steps: int, seed: int, lr: float, n_examples: int) -> None:
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        inputs, targets = task(random, n_examples)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, *, seed: int, n_examples: int = 2_000) -> float:
    """The share of right answers to examples that training did not draw."""
    inputs, targets = task(torch.Generator().manual_seed(seed + 1_000_003), n_examples)
    return (model(inputs).argmax(-1) == targets).double().mean().item()
