"""What a run looks at: its attention on one example, as pictures.

For images, also what the attention adds up to, beside what hiding each patch does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import Batch
from clearhead.data.pronounce import parts
from clearhead.data.vocab import BOS, IGNORE_INDEX, Vocabulary, text_to_tokens
from clearhead.drawing import displayable, save_figure
from clearhead.inference.g2p import pictures_of_word, pronounce, spelled
from clearhead.inference.run import Prediction, Run
from clearhead.insight.attribution import (
    Fill,
    deletion_auc,
    deletion_curve,
    max_attention,
    mean_attention,
    occlusion,
    output_map,
    relevance,
    rollout,
)
from clearhead.insight.edit import entropy, head_importance
from clearhead.insight.head_plots import (
    draw_attributions,
    draw_head_entropy,
    draw_head_importance,
    draw_training_strip,
    save_animation,
)
from clearhead.insight.look import AttentionTrace, look
from clearhead.insight.plots import draw_head, draw_head_grid, draw_over_image, draw_tokens
from clearhead.models.config import LanguageConfig, VisionConfig
from clearhead.training.objectives import OBJECTIVES
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import read_snapshots

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
    prediction: str
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
        predicted = f"predicted: {displayable(self.prediction)}"
        if self.truth is None:
            return predicted
        actual, verdict = f"actual: {displayable(self.truth)}", "correct" if self.correct else "wrong"
        if len(predicted) + len(actual) > LONGEST_HEADING:  # sequences, one below the other
            return f"{predicted}\n{actual} · {verdict}"
        return f"{predicted} · {actual} · {verdict}"

    @property
    def sentence(self) -> str:
        """The same for the terminal."""
        if self.truth is None:
            return f"Predicted: {self.prediction or '(nothing)'}."
        agreement = "correct" if self.correct else "wrong"
        return f"Predicted: {self.prediction or '(nothing)'}. Actual: {self.truth}. The prediction is {agreement}."


def explain_input(run: Run, example: Example, folder: Path | None = None) -> list[tuple[Path, str]]:
    """Draws all there is to see of an example into RUN/figures/look, or `folder`; each file, and what it shows."""
    folder = run.path / "figures/look" if folder is None else folder
    return [(save_figure(figure, folder / name), what) for name, what, figure in pictures_of(run, example)]


def sample(run: Run, number: int) -> Example:
    """Example `number` of the run's test set."""
    run.check_files()
    data = datasets.load_dataset(run.config.data, run.config.seed)
    if not len(data.test):
        raise LookupError(f"{run.path} has no test examples, got --sample {number}; try --text instead")
    if not 0 <= number < len(data.test):
        raise LookupError(
            f"a test example has a number from 0 to {len(data.test) - 1}, got {number}; choose one of them"
        )
    inputs, targets = data.test.get_batch(torch.tensor([number]))
    if run.normalize is not None:
        example, target = picture(run, inputs), int(targets[0])
        return with_truth(example, run.classes[target], correct=example.predicted == target)
    if run.input_kind == "words":
        return sampled_word(run, inputs[0])
    if run.input_kind == "text":
        return sampled_text(run, inputs[0], targets[0])
    if run.input_kind == "images":  # a set of images: each is a token
        (odd,) = [i for i, answer in enumerate(run.odd_one(inputs[0])) if answer.label == "odd"]
        names = tuple(f"image {i}" for i in range(inputs.shape[1]))
        target = int(targets[0])
        return with_truth(Example(inputs, names[odd], tokens=names), names[target], correct=odd == target)
    return sampled_digits(run, inputs[0], targets[0])


def with_truth(example: Example, truth: str, *, correct: bool) -> Example:
    return replace(example, truth=truth, correct=correct)


def sampled_digits(run: Run, ids: Tensor, target: Tensor) -> Example:
    example = digits(run, ids.tolist())
    if run.config.objective == "regression":
        batch = Batch(ids[None], target[None], None, None, 1)
        correct = bool(OBJECTIVES["regression"].correct(run.logits(batch.inputs), batch))
        return with_truth(example, f"{float(target):g}", correct=correct)
    truth = " ".join(run.classes[int(i)] for i in target.flatten())
    return with_truth(example, truth, correct=example.prediction == truth)


def sampled_word(run: Run, source: Tensor) -> Example:
    """A word is pronounced correctly if one of its pronunciations is written."""
    word = "".join(Vocabulary(run.vocab).decode(source.tolist()))
    known = [" ".join(phones) for phones in parts(run.config.data)["test"][word]]
    example = text(run, word)
    return with_truth(example, " or ".join(known), correct=example.prediction in known)


def sampled_text(run: Run, ids: Tensor, targets: Tensor) -> Example:
    """The token after the last one that has a target."""
    last = int((targets != IGNORE_INDEX).nonzero()[-1])
    example, target = next_token(run, ids[: last + 1].tolist()), int(targets[last])
    return with_truth(example, quoted(run, run.vocab[target]), correct=example.predicted == target)


def file(run: Run, path: Path, *, invert: bool = False) -> Example:
    """A picture file, made square and resized as in training."""
    if run.normalize is None:
        way = {"digits": "--ids 3 1 4", "words": "--text WORD", "text": "--text TEXT"}.get(run.input_kind, "--sample 0")
        raise ValueError(f"{run.path} takes no single picture, got {path}; try {way}")
    pixels = run.read([path])
    return picture(run, 255 - pixels if invert else pixels)


def picture(run: Run, pixels: Tensor) -> Example:
    assert run.normalize is not None
    (answer,) = run.predict(pixels)
    predicted = run.classes.index(answer.label)
    return Example(run.normalize(pixels), said(answer), image=pixels[0], predicted=predicted)


def digits(run: Run, ids: Sequence[int]) -> Example:
    answers = run.predict_ids(ids)
    return Example(torch.tensor([list(ids)]), " ".join(a.label for a in answers), tokens=tuple(map(str, ids)))


def said(answer: Prediction) -> str:
    return answer.label if answer.probability is None else f"{answer.label} ({answer.probability:.0%})"


def text(run: Run, asked: str) -> Example:
    """A word for a run of pronounce; any text for a run of words or text."""
    known = Vocabulary(run.vocab)
    if run.input_kind == "words":
        best = pronounce(run, [asked])[0][0]
        return Example(torch.tensor([spelled(run, asked)]), str(best), word=asked)
    if run.input_kind != "text":
        raise ValueError(f"{run.path} takes {run.input_kind}, got text; {run.hint}")
    marks = [BOS] if known.has_special_tokens else []
    ids = [*marks, *known.encode(text_to_tokens(asked, run.config.data.level))]
    if not ids:
        raise ValueError("--text is empty")
    return next_token(run, ids)


def next_token(run: Run, ids: Sequence[int]) -> Example:
    """What a language model predicts after the last of these tokens."""
    assert isinstance(run.config.model, LanguageConfig)
    inputs = torch.tensor([ids[-min(LONGEST, run.config.model.context_length) :]])
    symbols = [run.vocab[i] for i in inputs[0].tolist()]
    predicted = int(run.logits(inputs)[0, -1].argmax())
    if run.config.data.level == "byte":  # half of a letter is no other letter
        names = tuple(displayable(symbol) if symbol.isascii() else ascii(symbol)[1:-1] for symbol in symbols)
    else:
        names = tuple(map(displayable, symbols))
    answer = f"{quoted(run, run.vocab[predicted])} after {quoted(run, symbols[-1])}"
    return Example(inputs, answer, tokens=names, predicted=predicted)


def quoted(run: Run, symbol: str) -> str:
    return ascii(symbol) if run.config.data.level == "byte" else repr(symbol)


def pictures_of(run: Run, example: Example) -> "Iterator[tuple[str, str, Figure]]":
    """File name, what it shows, and the figure."""
    if example.word is not None:
        yield from pictures_of_word(run, example.word, example.heading)
        return
    with torch.enable_grad():
        seen = look(run.model, example.inputs)
    names = list(seen)
    weights = [seen[name].weights().detach() for name in names]
    sharpest = weights[0][0].amax(-1).mean(-1).argmax().item()
    wall = draw_head_grid([layer[0] for layer in weights], names, title=f"every layer and head\n{example.heading}")
    yield "wall.png", "every layer and head", wall
    tokens = names_of(example, weights[0].shape[-1])
    title = f"{names[0]}, head {sharpest}\n{example.heading}"
    one = weights[0][0, int(sharpest)]
    yield "head.png", "the sharpest head of the first layer", draw_head(one, queries=tokens, keys=tokens, title=title)
    if tokens is not None:
        yield "tokens.png", "the same head, from token to token", draw_tokens(one, tokens, title=title)
    yield "heads.png", RANKING, ranking(run, example, seen)
    if example.image is not None:
        yield from over_image(run, example, seen, weights)


def names_of(example: Example, n_tokens: int) -> tuple[str, ...] | None:
    if example.tokens is None:
        return None
    return ("class",) * (n_tokens - len(example.tokens)) + example.tokens


def ranking(run: Run, example: Example, seen: AttentionTrace) -> "Figure":
    """Each head's loss against how sure the model is of what it answers: the mean log-probability, or the number."""
    chosen = seen.output.detach().argmax(-1, keepdim=True)
    if example.image is not None and example.predicted is not None:  # several views may have outvoted this one
        chosen = torch.full_like(chosen, example.predicted)

    def score(output: Tensor) -> Tensor:
        return output.mean() if output.shape[-1] == 1 else output.log_softmax(-1).gather(-1, chosen).mean()

    log_probability = "change in the log-probability of the prediction\n(below 0: less confident without the head)"
    unit = "change in the output" if seen.output.shape[-1] == 1 else log_probability
    changes, title = head_importance(run.model, example.inputs, score), f"{RANKING}\n{example.heading}"
    return draw_head_importance(changes, list(seen), unit=unit, title=title)


def over_image(
    run: Run, example: Example, seen: AttentionTrace, weights: Sequence[Tensor]
) -> "Iterator[tuple[str, str, Figure]]":
    model = run.config.model
    assert isinstance(model, VisionConfig)
    has_class_token, grid = model.pooling == "cls", model.grid
    last = weights[-1]
    heads = output_map(last[0], class_token=has_class_token).unflatten(1, grid)  # (H,rows,columns)
    title = f"attention from the output to each patch, in {list(seen)[-1]}\n{example.heading}"
    by_head = {f"head {i}": cells for i, cells in enumerate(heads)}
    yield "patches.png", "attention from the output to each patch", draw_over_image(example.image, by_head, title=title)
    chosen = example.predicted
    assert chosen is not None
    pools = last.shape[-2] != last.shape[-1]
    layers = weights[-1:] if pools else weights  # a pooling query reads the answer alone
    matrices = {
        "mean": mean_attention(layers),
        "maximum": max_attention(layers),
        "rollout": rollout(weights),
        "relevance": relevance(seen, seen.output[:, chosen]),
    }
    maps = {name: output_map(m, class_token=has_class_token).unflatten(1, grid) for name, m in matrices.items()}
    fill: Fill = "black" if model.in_channels == 1 else "gray"
    proof = occlusion(run.model, example.inputs, grid, chosen, fill=fill)
    areas = {
        name: deletion_auc(deletion_curve(run.model, example.inputs, ranked, chosen, fill=fill)).item()
        for name, ranked in {**maps, "occlusion": proof}.items()
    }
    cells = {name: m[0] for name, m in maps.items()}
    figure = draw_attributions(example.image, cells, proof[0], areas, title=f"{AGGREGATES}\n{example.heading}")
    yield "aggregates.png", "attention over all layers, beside occlusion", figure


# Heads while they form: pictures of the maps that a run with a probe has kept.
#
# Dims: T steps, N inputs, H heads, Q queries, K keys.


def plot_training_dynamics(
    run: str | Path, folder: Path | None = None, before_drawing: Callable[[], None] = lambda: None
) -> list[tuple[Path, str]]:
    """Entropy of each head against the step; of the head that changed most, a strip of pictures and an animation."""
    path = RunDirectory.open(run).path
    folder = path / "figures/look" if folder is None else folder
    steps, found = read_snapshots(path)
    before_drawing()
    maps = {name: found[name] for name in in_order(found)}
    names = list(maps)
    table = entropies(list(maps.values()))
    layer, head = changed_most(table)
    one = maps[names[layer]][:, 0, head]  # (T,Q,K) of the first input
    title = f"{names[layer]}, head {head}"
    alike = {round(entropy_if_alike(layer_maps), 6) for layer_maps in maps.values()}
    most = alike.pop() if len(alike) == 1 else None
    return [
        (
            save_figure(draw_head_entropy(steps, table, names, maximum=most), folder / "entropy.png"),
            "how many keys each head looks at, against the step",
        ),
        (save_figure(draw_training_strip(steps, one, title=title), folder / "strip.png"), "the head that changed most"),
        (save_animation(steps, one, folder / "head.gif", title=title), "the same, moving"),
    ]


def in_order(addresses: Iterable[str]) -> list[str]:
    """A file of maps has no order of its own: by name, block 2 before block 10."""
    return sorted(addresses, key=lambda name: [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")])


def entropies(layers: Sequence[Tensor]) -> Tensor:
    """(T,layers,H) of weights (T,N,H,Q,K) for each layer; nan where a layer has fewer heads."""
    num_heads = max(layer.shape[2] for layer in layers)
    table = torch.full((len(layers[0]), len(layers), num_heads), torch.nan)
    for i, layer in enumerate(layers):
        table[:, i, : layer.shape[2]] = torch.stack([entropy(weights) for weights in layer])
    return table


def entropy_if_alike(layer: Tensor) -> float:
    """Of weights (T,N,H,Q,K): that of a head which looks alike at all keys that a query may see: those that any
    head has looked at."""
    n_keys = (layer > 0).any(0).any(1).sum(-1).double()  # (N,Q)
    return n_keys[n_keys > 0].log().mean().item()


def changed_most(table: Tensor) -> tuple[int, int]:
    """The layer and head whose entropy moved most from its first value."""
    moved = (table - table[:1]).abs().amax(0).nan_to_num(-1)
    return divmod(int(moved.argmax()), moved.shape[1])
