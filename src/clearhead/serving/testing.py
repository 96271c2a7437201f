"""A run on its test set: which class is taken for which, and what its answers look like."""

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import evaluation_batches
from clearhead.data.dataset import DataSet
from clearhead.serving.session import AT_ONCE, Session
from clearhead.training.confusion import confusion_matrix


def answers_on_test(session: Session, data: DataSet) -> tuple[Tensor, Tensor]:
    """The right class of each test example (N,), and the probabilities of all (N,V). Of sequences with an answer for
    each token, every token is an example."""
    if session.config.objective not in ("classes", "each", "yes-no"):
        raise ValueError(
            f"classes can be confused, got {session.path}, whose answers are no classes; measure it with: "
            f"clearhead evaluate {session.path}"
        )
    targets, answers = [], []
    for batch in evaluation_batches(data.test, data.normalise, AT_ONCE):
        logits = session.logits(batch.inputs)
        if session.config.objective == "yes-no":
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        answers.append(logits.flatten(0, -2).softmax(-1))
        targets.append(batch.targets.flatten().long())
    return torch.cat(targets), torch.cat(answers)


def confusion(session: Session) -> Tensor:
    """(V,V): row t, column p counts the test examples of class t that were taken for class p."""
    session.check_files()
    data = datasets.load(session.config.data, session.config.seed)
    targets, answers = answers_on_test(session, data)
    return confusion_matrix(targets, answers.argmax(-1), len(session.classes))
