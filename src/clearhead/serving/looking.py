"""What a run looks at: its attention on one example, as pictures.

For images, also what the attention adds up to, beside what hiding each patch does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import Batch
from clearhead.data.characters import from_user
from clearhead.data.pronounce import parts
from clearhead.data.tokens import BEGIN, IGNORED, Vocabulary
from clearhead.drawing import save_figure, visible
from clearhead.insight.figures import draw_head, draw_over_image, draw_tokens, draw_wall
from clearhead.insight.figures_heads import draw_aggregates, draw_ranking
from clearhead.insight.heads import head_importance
from clearhead.insight.look import look
from clearhead.insight.occlusion import Fill, deletion_area, deletion_curve, occlusion
from clearhead.insight.relevance import relevance
from clearhead.insight.rollout import maximum, mean, rollout, to_answer
from clearhead.insight.seen import Seen
from clearhead.models.config import LanguageConfig, VisionConfig
from clearhead.serving.alignment import pictures_of_word
from clearhead.serving.pronouncing import pronounce, spelled
from clearhead.serving.session import Answer, Session
from clearhead.training.objective import OBJECTIVES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKING = "what the model loses without each head"
AGGREGATES = "attention over all layers, compared with hiding each patch"
LONGEST = 64
"""tokens of a text that are drawn: its last, and no more than the model has learnt to read at once"""

LONGEST_HEADING = 60
"""letters of a prediction and its truth that stand in one line"""


@dataclass(frozen=True)
class Example:
    """One input as the model takes it, (1, ...), and as it is drawn."""

    inputs: Tensor
    answer: str
    """the prediction"""
    image: Tensor | None = None
    """uint8 (C,height,width)"""
    tokens: tuple[str, ...] | None = None
    """names of its tokens"""
    word: str | None = None
    """what is to be pronounced"""
    truth: str | None = None
    """the target of an example from the test set; None for a user's own input"""
    correct: bool | None = None
    """whether the prediction agrees with the truth"""
    predicted: int | None = None
    """number of the predicted class of an image, or of the predicted token after a text"""

    @property
    def heading(self) -> str:
        """For the title of a figure: what was predicted, what is true, and whether they agree."""
        predicted = f"predicted: {visible(self.answer)}"
        if self.truth is None:
            return predicted
        actual, verdict = f"actual: {visible(self.truth)}", "correct" if self.correct else "wrong"
        if len(predicted) + len(actual) > LONGEST_HEADING:  # sequences, one below the other
            return f"{predicted}\n{actual} · {verdict}"
        return f"{predicted} · {actual} · {verdict}"

    @property
    def sentence(self) -> str:
        """The same for the terminal."""
        if self.truth is None:
            return f"Predicted: {self.answer or '(nothing)'}."
        agreement = "correct" if self.correct else "wrong"
        return f"Predicted: {self.answer or '(nothing)'}. Actual: {self.truth}. The prediction is {agreement}."


def look_at(session: Session, example: Example, folder: Path | None = None) -> list[tuple[Path, str]]:
    """Draws all there is to see of an example into RUN/figures/look, or `folder`; each file, and what it shows."""
    folder = session.path / "figures/look" if folder is None else folder
    return [(save_figure(figure, folder / name), what) for name, what, figure in pictures_of(session, example)]


def sample(session: Session, number: int) -> Example:
    """Example `number` of the run's test set."""
    session.check_files()
    data = datasets.load(session.config.data, session.config.seed)
    if not len(data.test):
        raise LookupError(f"{session.path} has no test examples, got --sample {number}; try --text instead")
    if not 0 <= number < len(data.test):
        raise LookupError(
            f"a test example has a number from 0 to {len(data.test) - 1}, got {number}; choose one of them"
        )
    inputs, targets = data.test.take(torch.tensor([number]))
    if session.normalise is not None:
        example, target = picture(session, inputs), int(targets[0])
        return with_truth(example, session.classes[target], correct=example.predicted == target)
    if session.takes == "words":
        return sampled_word(session, inputs[0])
    if session.takes == "text":
        return sampled_text(session, inputs[0], targets[0])
    if session.takes_pictures:  # a set of images: each is a token
        (odd,) = [i for i, answer in enumerate(session.odd_one(inputs[0])) if answer.answer == "odd"]
        names = tuple(f"image {i}" for i in range(inputs.shape[1]))
        target = int(targets[0])
        return with_truth(Example(inputs, names[odd], tokens=names), names[target], correct=odd == target)
    return sampled_digits(session, inputs[0], targets[0])


def with_truth(example: Example, truth: str, *, correct: bool) -> Example:
    return replace(example, truth=truth, correct=correct)


def sampled_digits(session: Session, ids: Tensor, target: Tensor) -> Example:
    example = digits(session, ids.tolist())
    if session.config.objective == "number":
        batch = Batch(ids[None], target[None], None, None, 1)
        correct = bool(OBJECTIVES["number"].right(session.logits(batch.inputs), batch))
        return with_truth(example, f"{float(target):g}", correct=correct)
    truth = " ".join(session.classes[int(i)] for i in target.flatten())
    return with_truth(example, truth, correct=example.answer == truth)


def sampled_word(session: Session, source: Tensor) -> Example:
    """A word is pronounced correctly if one of its pronunciations is written."""
    word = "".join(Vocabulary(session.symbols).read(source.tolist()))
    known = [" ".join(phones) for phones in parts(session.config.data)["test"][word]]
    example = text(session, word)
    return with_truth(example, " or ".join(known), correct=example.answer in known)


def sampled_text(session: Session, ids: Tensor, targets: Tensor) -> Example:
    """The token after the last one that has a target."""
    last = int((targets != IGNORED).nonzero()[-1])
    example, target = next_token(session, ids[: last + 1].tolist()), int(targets[last])
    return with_truth(example, quoted(session, session.symbols[target]), correct=example.predicted == target)


def file(session: Session, path: Path, *, invert: bool = False) -> Example:
    """A picture file, made square and resized as in training."""
    if session.normalise is None:
        way = {"digits": "--ids 3 1 4", "words": "--text WORD", "text": "--text TEXT"}.get(session.takes, "--sample 0")
        raise ValueError(f"{session.path} takes no single picture, got {path}; try {way}")
    pixels = session.read([path])
    return picture(session, 255 - pixels if invert else pixels)


def picture(session: Session, pixels: Tensor) -> Example:
    assert session.normalise is not None
    (answer,) = session.predict(pixels)
    predicted = session.classes.index(answer.answer)
    return Example(session.normalise(pixels), said(answer), image=pixels[0], predicted=predicted)


def digits(session: Session, ids: Sequence[int]) -> Example:
    answers = session.predict_ids(ids)
    return Example(torch.tensor([list(ids)]), " ".join(a.answer for a in answers), tokens=tuple(map(str, ids)))


def said(answer: Answer) -> str:
    return answer.answer if answer.probability is None else f"{answer.answer} ({answer.probability:.0%})"


def text(session: Session, asked: str) -> Example:
    """A word for a run of pronounce; any text for a run of words or text."""
    known = Vocabulary(session.symbols)
    if session.takes == "words":
        best = pronounce(session, [asked])[0][0]
        return Example(torch.tensor([spelled(session, asked)]), str(best), word=asked)
    if session.takes != "text":
        raise ValueError(f"{session.path} answers about {session.takes}, got text; {session.instead}")
    marks = [BEGIN] if known.has_marks else []
    ids = [*marks, *known.ids(from_user(asked, session.config.data.level))]
    if not ids:
        raise ValueError("--text is empty")
    return next_token(session, ids)


def next_token(session: Session, ids: Sequence[int]) -> Example:
    """What a language model predicts after the last of these tokens."""
    assert isinstance(session.config.model, LanguageConfig)
    inputs = torch.tensor([ids[-min(LONGEST, session.config.model.context) :]])
    symbols = [session.symbols[i] for i in inputs[0].tolist()]
    predicted = int(session.logits(inputs)[0, -1].argmax())
    if session.config.data.level == "byte":  # half of a letter is no other letter
        names = tuple(visible(symbol) if symbol.isascii() else ascii(symbol)[1:-1] for symbol in symbols)
    else:
        names = tuple(map(visible, symbols))
    answer = f"{quoted(session, session.symbols[predicted])} after {quoted(session, symbols[-1])}"
    return Example(inputs, answer, tokens=names, predicted=predicted)


def quoted(session: Session, symbol: str) -> str:
    return ascii(symbol) if session.config.data.level == "byte" else repr(symbol)


def pictures_of(session: Session, example: Example) -> "Iterator[tuple[str, str, Figure]]":
    """File name, what it shows, and the figure."""
    if example.word is not None:
        yield from pictures_of_word(session, example.word, example.heading)
        return
    with torch.enable_grad():
        seen = look(session.model, example.inputs)
    names = list(seen)
    weights = [seen[name].weights().detach() for name in names]
    sharpest = weights[0][0].amax(-1).mean(-1).argmax().item()
    wall = draw_wall([layer[0] for layer in weights], names, title=f"every layer and head\n{example.heading}")
    yield "wall.png", "every layer and head", wall
    tokens = names_of(example, weights[0].shape[-1])
    title = f"{names[0]}, head {sharpest}\n{example.heading}"
    one = weights[0][0, int(sharpest)]
    yield "head.png", "the sharpest head of the first layer", draw_head(one, queries=tokens, keys=tokens, title=title)
    if tokens is not None:
        yield "tokens.png", "the same head, from token to token", draw_tokens(one, tokens, title=title)
    yield "heads.png", RANKING, ranking(session, example, seen)
    if example.image is not None:
        yield from over_image(session, example, seen, weights)


def names_of(example: Example, n_tokens: int) -> tuple[str, ...] | None:
    if example.tokens is None:
        return None
    return ("class",) * (n_tokens - len(example.tokens)) + example.tokens


def ranking(session: Session, example: Example, seen: Seen) -> "Figure":
    """Each head's loss against how sure the model is of what it answers: the mean log-probability, or the number."""
    chosen = seen.output.detach().argmax(-1, keepdim=True)
    if example.image is not None and example.predicted is not None:  # several views may have outvoted this one
        chosen = torch.full_like(chosen, example.predicted)

    def score(output: Tensor) -> Tensor:
        return output.mean() if output.shape[-1] == 1 else output.log_softmax(-1).gather(-1, chosen).mean()

    log_probability = "change in the log-probability of the prediction\n(below 0: less confident without the head)"
    unit = "change in the output" if seen.output.shape[-1] == 1 else log_probability
    changes, title = head_importance(session.model, example.inputs, score), f"{RANKING}\n{example.heading}"
    return draw_ranking(changes, list(seen), unit=unit, title=title)


def over_image(
    session: Session, example: Example, seen: Seen, weights: Sequence[Tensor]
) -> "Iterator[tuple[str, str, Figure]]":
    model = session.config.model
    assert isinstance(model, VisionConfig)
    has_class_token, grid = model.readout == "class", model.grid
    last = weights[-1]
    heads = to_answer(last[0], class_token=has_class_token).unflatten(1, grid)  # (H,rows,columns)
    title = f"attention from the output to each patch, in {list(seen)[-1]}\n{example.heading}"
    by_head = {f"head {i}": cells for i, cells in enumerate(heads)}
    yield "patches.png", "attention from the output to each patch", draw_over_image(example.image, by_head, title=title)
    chosen = example.predicted
    assert chosen is not None
    pools = last.shape[-2] != last.shape[-1]
    layers = weights[-1:] if pools else weights  # a pooling query reads the answer alone
    matrices = {
        "mean": mean(layers),
        "maximum": maximum(layers),
        "rollout": rollout(weights),
        "relevance": relevance(seen, seen.output[:, chosen]),
    }
    maps = {name: to_answer(m, class_token=has_class_token).unflatten(1, grid) for name, m in matrices.items()}
    fill: Fill = "black" if model.channels == 1 else "grey"
    proof = occlusion(session.model, example.inputs, grid, chosen, fill=fill)
    areas = {
        name: deletion_area(deletion_curve(session.model, example.inputs, ranked, chosen, fill=fill)).item()
        for name, ranked in {**maps, "occlusion": proof}.items()
    }
    cells = {name: m[0] for name, m in maps.items()}
    figure = draw_aggregates(example.image, cells, proof[0], areas, title=f"{AGGREGATES}\n{example.heading}")
    yield "aggregates.png", "attention over all layers, beside occlusion", figure
