"""How a mask is written down: ours is bool (B,Q,K), True = may attend; others turn it round, add it, drop axes.

Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Meaning = Literal["may", "hidden", "ones", "added"]

MEANINGS: dict[Meaning, str] = {
    "hidden": "True = hidden",
    "may": "True = may attend",
    "added": "added to the scores, -inf = hidden",
    "ones": "1 = may attend",
}

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B,K)": lambda seen: seen[:, 0],
    "(Q,K)": lambda seen: seen[0],
    "(B,1,1,K)": lambda seen: seen[:, None, :1],
    "(B,1,K)": lambda seen: seen[:, :1],
    "(B,Q,K)": lambda seen: seen,
    "(B,1,Q,K)": lambda seen: seen[:, None],
}
OF_TOKENS = ("(B,K)", "(B,1,1,K)", "(B,1,K)", "(B,Q,K)", "(B,1,Q,K)")
OF_PAIRS = ("(Q,K)", "(B,1,Q,K)", "(B,Q,K)")
OF_BOTH = ("(B,1,Q,K)", "(B,Q,K)")


@dataclass(frozen=True)
class Encoding:
    """The shape of a mask, and what its numbers mean; for lengths, the shape (B,) and the meaning "ones"."""

    shape: str
    meaning: Meaning

    def write(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """From (B,Q,K), True = may attend."""
        if self.shape == "(B,)":
            return seen[:, 0].sum(-1)
        mask = SHAPES[self.shape](seen)
        if self.meaning == "may":
            return mask.clone()
        if self.meaning == "hidden":
            return ~mask
        if self.meaning == "ones":
            return mask.long()
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)

    def __str__(self) -> str:
        return "real tokens" if self.shape == "(B,)" else f"{self.shape}, {MEANINGS[self.meaning]}"


LENGTHS = Encoding("(B,)", "ones")


def encodings(shapes: tuple[str, ...]) -> Iterator[Encoding]:
    """All, the likeliest first."""
    for meaning in MEANINGS:
        for shape in shapes:
            yield Encoding(shape, meaning)


def usual(name: str) -> Meaning | None:
    """What a mask of this name means wherever it is used, at Hugging Face or in torch.nn; others mean either."""
    if name.endswith("attention_mask"):
        return "may"
    return "hidden" if name.endswith("key_padding_mask") else None


def is_turned(name: str, meaning: Meaning) -> bool:
    """Whether it says the opposite of what its name promises."""
    promised = usual(name)
    return promised is not None and (meaning in ("may", "ones")) != (promised == "may") and meaning != "added"
