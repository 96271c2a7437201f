"""Loss and accuracy from counts. Counts add up over batches, portions and processes; means of means would not."""

import torch
from torch import Tensor

N_COUNTS = 5


def counts(loss: Tensor, right: Tensor, asked: Tensor | None = None) -> Tensor:
    """Sum of losses, examples, right answers, answers, examples with every answer right. right (B,…) -> float64 (5,)

    `asked` is False where no answer was asked for; those count neither as right nor as wrong.
    """
    n_examples = right.shape[0]
    answers = right[:, None] if right.dim() == 1 else right.flatten(1)
    if asked is None:
        n_answers = loss.new_full((), answers.numel(), dtype=torch.float64)
        whole = answers.all(dim=1)
    else:
        n_answers = asked.sum().double()
        whole, answers = (answers | ~asked.flatten(1)).all(dim=1), answers & asked.flatten(1)
    return torch.stack(
        [
            loss.detach().double(),
            loss.new_full((), n_examples, dtype=torch.float64),
            answers.sum().double(),
            n_answers,
            whole.sum().double(),
        ]
    )


def summary(sums: list[float]) -> dict[str, float]:
    """loss and accuracy; where an example asks for several answers, also `whole`: the share with all of them right."""
    loss, n_examples, right, answers, whole = sums
    result = {"loss": loss / n_examples, "accuracy": right / answers}
    return result if answers == n_examples else result | {"whole": whole / n_examples}
