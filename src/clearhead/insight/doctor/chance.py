"""Which random numbers are dropout's: one that is on in eval() is a mistake, other noise may be meant so."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from clearhead.insight.doctor.subject import Subject, undisturbed


class Dropouts(TorchFunctionMode):
    """Notices a dropout that is on, also within attention."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:  # F.dropout gives all by name; torch.dropout(input, p, train) by place
            training = given.get("training", given.get("train", args[2] if len(args) > 2 else False))
            self.is_on |= bool(training) and (given.get("p", args[1] if len(args) > 1 else 0.0) or 0.0) > 0
        if name == "multi_head_attention_forward" and len(args) > 10:  # seen from outside only
            self.is_on |= bool(given.get("training", True)) and args[10] > 0
        if name == "scaled_dot_product_attention":
            self.is_on |= given.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
        return func(*args, **given)


def drops(subject: Subject) -> bool:
    """Whether a dropout is on in the evaluation stage."""
    with torch.no_grad(), undisturbed(subject.dtype, 0), Dropouts() as seen:
        subject.model(**subject.arguments(subject.draw(0), {}))
    return seen.is_on
