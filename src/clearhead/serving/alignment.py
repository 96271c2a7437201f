"""Which letters a run of `pronounce` looks at while it writes each phone: its cross-attention, as pictures.

Dims: H heads, Q written tokens, K letters.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.data.tokens import BEGIN, END, MARKS, Vocabulary
from clearhead.drawing import visible
from clearhead.insight.figures import draw_alignment, draw_wall
from clearhead.insight.figures_heads import draw_ranking
from clearhead.insight.heads import entropy, head_importance
from clearhead.insight.look import look
from clearhead.serving.pronouncing import pronounce, spelled
from clearhead.serving.session import Session

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WALLS = {
    "cross.png": ("cross_attention", "every head of the decoder, looking at the letters"),
    "encoder.png": ("encoder.", "every head of the encoder"),
    "decoder.png": ("decoder.", "every head of the decoder, looking at what is written"),
}
"""file name -> what its layers' addresses have in them, and what it shows"""


def written(session: Session, word: str) -> tuple[str, ...]:
    """The phones that the run writes for a word, and the end mark if it comes to one."""
    best = pronounce(session, [word])[0][0]
    return (*best.phones, MARKS[END]) if best.ended else best.phones


def pictures_of_word(session: Session, word: str, about: str = "") -> "Iterator[tuple[str, str, Figure]]":
    """File name, what it shows, and the figure, with a line about the prediction in its title."""
    phones, letters = written(session, word), tuple(map(visible, word.strip().lower()))
    target = torch.tensor([Vocabulary(session.classes).ids(phones)])
    given = torch.cat([torch.full((1, 1), BEGIN), target[:, :-1]], dim=1)
    inputs = torch.tensor([spelled(session, word)]), given
    with torch.no_grad():
        seen = look(session.model, *inputs)
        weights = {address: seen[address].weights() for address in seen}
    address, aligned = sharpest({name: w for name, w in weights.items() if "cross_attention" in name})
    what = "which letter each phone looks at"
    about = f"\n{about}" if about else ""
    title = f"{what},\n{address}, mean of heads{about}"
    yield "alignment.png", what, draw_alignment(aligned, letters, phones, names=("letter", "phone"), title=title)
    for name, (part, what) in WALLS.items():
        chosen = {address: w for address, w in weights.items() if part in address}
        if part == "decoder.":
            chosen = {address: w for address, w in chosen.items() if "cross_attention" not in address}
        yield name, what, draw_wall([w[0] for w in chosen.values()], list(chosen), title=what + about)

    def score(output: Tensor) -> Tensor:
        return output.log_softmax(-1).gather(-1, target[..., None]).mean()

    unit = "change of the mean log-probability of a phone\n(below 0: less sure without the head)"
    what = "what the model loses without each head"
    changes = head_importance(session.model, inputs, score)
    yield "heads.png", what, draw_ranking(changes, list(seen), unit=unit, title=what + about)


def sharpest(layers: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The layer whose heads look at the fewest letters together: its address, and the mean of its heads (Q,K)."""
    means = {address: weights.mean(1, keepdim=True) for address, weights in layers.items()}
    address = min(means, key=lambda address: float(entropy(means[address])))
    return address, means[address][0, 0]
