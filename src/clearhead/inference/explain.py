"""Figures of a run's attention for one input, of its heads during training, and of the results of `clearhead demo`.

For images, the attention over all layers is compared with occlusion, the effect of hiding each patch.
Dims: C channels, H heads, Q queries, K keys, T recorded steps, N recorded inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead import recipes
from clearhead.data.dataset import Examples
from clearhead.drawing import save_figure
from clearhead.inference.evaluate import confusion, draw_confusion, plot_test_predictions
from clearhead.inference.run import Run
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
from clearhead.insight.head_plots import (
    draw_attributions,
    draw_head_entropy,
    draw_head_importance,
    draw_training_strip,
    save_animation,
)
from clearhead.insight.heads import entropy, head_importance
from clearhead.insight.plots import draw_head, draw_head_grid, draw_over_image, draw_tokens
from clearhead.insight.trace import AttentionTrace, look
from clearhead.models.config import VisionConfig
from clearhead.models.mask_view import MaskView
from clearhead.recipes import config_of
from clearhead.tasks.pronunciation import IMPORTANCE_TITLE
from clearhead.tasks.report import Example
from clearhead.training.curves import draw_curves, read_curves
from clearhead.training.progress import TrainResult
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import read_snapshots
from clearhead.validation import check_positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEMO_RECIPE, DEMO_NAME = "mnist", "demo"
AGGREGATES = "attention over all layers, compared with occlusion"


def explain_input(run: Run, example: Example, folder: Path | None = None) -> list[tuple[Path, str]]:
    """Save all figures of an example in `folder` (default: RUN/figures/look). Returns the path and title of each."""
    folder = run.path / "figures/look" if folder is None else folder
    return [(save_figure(figure, folder / name), title) for name, title, figure in figures_of(run, example)]


def dataset_example(run: Run, index: int) -> Example:
    """Example `index` of the run's test set, with its target."""
    run.check_data_files()
    data = run.task.load(run.config.seed)
    if not len(data.test):
        raise LookupError(f"{run.path} has no test examples; try --{run.task.input_option} instead of --sample {index}")
    if not 0 <= index < len(data.test):
        raise LookupError(f"the test set has examples from 0 to {len(data.test) - 1}, got {index}")
    return example_at(run, data.test, index)


def example_at(run: Run, examples: Examples, index: int) -> Example:
    """An example of a part of the run's data, with its target."""
    inputs, targets = examples.get_batch(torch.tensor([index]))
    return run.task.labeled_example(run, inputs[0], targets[0])


def figures_of(run: Run, example: Example) -> "Iterator[tuple[str, str, Figure]]":
    """(file name, title, figure) for each figure."""
    if (figures := run.task.figures(run, example)) is not None:
        yield from figures
        return
    with torch.enable_grad():
        traced = look(run.model, example.inputs)
    names = list(traced)
    weights = [record.weights().detach() for record in traced.values()]
    grid = draw_head_grid([layer[0] for layer in weights], names, title=f"every layer and head\n{example.heading}")
    yield "wall.png", "every layer and head", grid
    head = int(weights[0][0].amax(-1).mean(-1).argmax())
    tokens = token_names(example, weights[0].shape[-1])
    title, matrix = f"{names[0]}, head {head}\n{example.heading}", weights[0][0, head]
    figure = draw_head(matrix, queries=tokens, keys=tokens, title=title)
    yield "head.png", "the sharpest head of the first layer", figure
    if tokens is not None:
        yield "tokens.png", "the same head, from token to token", draw_tokens(matrix, tokens, title=title)
    yield "heads.png", IMPORTANCE_TITLE, head_importance_figure(run, example, traced)
    if example.image is not None:
        yield from image_figures(run, example, traced, weights)


def token_names(example: Example, num_tokens: int) -> tuple[str, ...] | None:
    if example.tokens is None:
        return None
    return ("class",) * (num_tokens - len(example.tokens)) + example.tokens


def head_importance_figure(run: Run, example: Example, traced: AttentionTrace) -> "Figure":
    """The effect of removing each head on the mean log-probability of the prediction, or on a predicted number."""
    chosen = traced.output.detach().argmax(-1, keepdim=True)
    if example.image is not None and example.predicted is not None:  # with TTA, other views may outvote this one
        chosen = torch.full_like(chosen, example.predicted)
    is_number = traced.output.shape[-1] == 1

    def score(output: Tensor) -> Tensor:
        return output.mean() if is_number else output.log_softmax(-1).gather(-1, chosen).mean()

    log_probability = "change in the log-probability of the prediction\n(below 0: less confident without the head)"
    unit = "change in the output" if is_number else log_probability
    changes = head_importance(run.model, example.inputs, score)
    return draw_head_importance(changes, list(traced), unit=unit, title=f"{IMPORTANCE_TITLE}\n{example.heading}")


def image_figures(
    run: Run, example: Example, traced: AttentionTrace, weights: Sequence[Tensor]
) -> "Iterator[tuple[str, str, Figure]]":
    """The attention of the last layer over the image, and aggregates over all layers compared with occlusion."""
    model, chosen = run.config.model, example.predicted
    assert isinstance(model, VisionConfig)
    assert chosen is not None
    grid, last = model.grid, weights[-1]
    has_pooling = last.shape[-2] != last.shape[-1]
    num_register_tokens = 0 if has_pooling else model.num_register_tokens  # a pooling query does not see them

    def to_patches(matrix: Tensor) -> Tensor:
        """weights (...,Q,K) -> (...,rows,columns): attention from the output to each patch"""
        cells = output_map(matrix, class_token=model.pooling == "cls", num_register_tokens=num_register_tokens)
        return cells.unflatten(1, grid)

    title = "attention from the output to each patch"
    heads = {f"head {i}": cells for i, cells in enumerate(to_patches(last[0]))}
    full = f"{title}, in {list(traced)[-1]}\n{example.heading}"
    yield "patches.png", title, draw_over_image(example.image, heads, title=full)
    layers = weights[-1:] if has_pooling else weights  # only a pooling layer's query leads to the output
    matrices = {"mean": mean_attention(layers), "maximum": max_attention(layers)}
    if not (has_pooling and model.num_register_tokens):  # these two follow the same tokens through all layers
        matrices["rollout"] = rollout(weights)
        matrices["relevance"] = relevance(traced, traced.output[:, chosen])
    maps = {name: to_patches(matrix) for name, matrix in matrices.items()}
    fill: Fill = "black" if model.in_channels == 1 else "gray"
    occluded = occlusion(run.model, example.inputs, grid, chosen, fill=fill)
    areas = {
        name: deletion_auc(deletion_curve(run.model, example.inputs, ranked, chosen, fill=fill)).item()
        for name, ranked in {**maps, "occlusion": occluded}.items()
    }
    cells = {name: one[0] for name, one in maps.items()}
    figure = draw_attributions(example.image, cells, occluded[0], areas, title=f"{AGGREGATES}\n{example.heading}")
    yield "aggregates.png", AGGREGATES, figure


def masks_of(run: Run, example: Example) -> list[tuple[str, MaskView]]:
    """The different masks that the layers apply to an example, each with the names of its layers."""
    masks: list[Tensor] = []
    names: list[list[str]] = []
    for name, record in run.task.trace(run, example).items():
        mask = record.call.allowed([0]).expand(1, 1, record.num_queries, record.num_keys)[0, 0]
        index = next((i for i, other in enumerate(masks) if torch.equal(mask, other)), len(masks))
        if index == len(masks):
            masks.append(mask)
            names.append([])
        names[index].append(name)
    titles = [layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" for layers in names]
    views = [MaskView(mask, "no mask" if mask.all() else "attention mask") for mask in masks]
    return list(zip(titles, views, strict=True))


def plot_training_dynamics(
    run: str | Path, folder: Path | None = None, before_drawing: Callable[[], None] = lambda: None
) -> list[tuple[Path, str]]:
    """Save figures of the attention snapshots of a run: the entropy of each head against the step, and the head that
    changed most, as a strip and as an animation. Returns the path and title of each."""
    path = RunDirectory.open(run).path
    folder = path / "figures/look" if folder is None else folder
    steps, snapshots = read_snapshots(path)
    before_drawing()
    layers = {name: snapshots[name] for name in in_layer_order(snapshots)}
    table = entropies(list(layers.values()))
    layer, head = most_changed_head(table)
    name = list(layers)[layer]
    matrices, title = layers[name][:, 0, head], f"{name}, head {head}"  # (T,Q,K) of the first input
    uniform = {round(uniform_entropy(weights), 6) for weights in layers.values()}
    maximum = uniform.pop() if len(uniform) == 1 else None
    entropy_figure = draw_head_entropy(steps, table, list(layers), maximum=maximum)
    strip = draw_training_strip(steps, matrices, title=title)
    return [
        (save_figure(entropy_figure, folder / "entropy.png"), "entropy of each head against the step"),
        (save_figure(strip, folder / "strip.png"), "the head that changed most"),
        (save_animation(steps, matrices, folder / "head.gif", title=title), "the same head, animated"),
    ]


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Module paths with numbers compared as numbers: blocks.2 comes before blocks.10."""
    return sorted(names, key=lambda name: [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")])


def entropies(layers: Sequence[Tensor]) -> Tensor:
    """(T,layers,H) from the weights (T,N,H,Q,K) of each layer; NaN where a layer has fewer heads."""
    num_heads = max(layer.shape[2] for layer in layers)
    table = torch.full((len(layers[0]), len(layers), num_heads), torch.nan)
    for i, layer in enumerate(layers):
        table[:, i, : layer.shape[2]] = torch.stack([entropy(weights) for weights in layer])
    return table


def uniform_entropy(weights: Tensor) -> float:
    """The entropy of uniform attention to all keys that a query may attend to: those that any head ever attended to.

    weights (T,N,H,Q,K)
    """
    num_keys = (weights > 0).any(0).any(1).sum(-1).double()  # (N,Q)
    return num_keys[num_keys > 0].log().mean().item()


def most_changed_head(table: Tensor) -> tuple[int, int]:
    """The layer and head whose entropy differs most from its initial value at any step."""
    change = (table - table[:1]).abs().amax(0).nan_to_num(-1)
    return divmod(int(change.argmax()), change.shape[1])


def run_demo(
    steps: int | None = None, announce: Callable[[], None] = lambda: None
) -> tuple[TrainResult, list[tuple[Path, str]]]:
    """Train runs/demo, or resume it, and plot its results. Returns the path and the title of each figure, none if
    training was stopped. `announce` is called before drawing, which takes seconds."""
    if steps is not None:
        check_positive(steps=steps)
    result = recipes.train(config_of(DEMO_RECIPE, {"training.steps": steps} if steps else {}), DEMO_NAME, resume=True)
    if result.reason == "stopped":
        return result, []
    announce()
    return result, plot_results(Run(Path("runs") / DEMO_NAME))


def plot_results(run: Run) -> list[tuple[Path, str]]:
    """Learning curves, confusion matrix, predictions, and the attention for the first test image."""
    figures = {
        "curves.png": ("loss and accuracy against epochs", draw_curves([read_curves(run.path)])),
        "confusion.png": ("the confusion matrix on the test set", draw_confusion(confusion(run), run.classes)),
        "predictions.png": ("predictions, and the most confident mistakes", plot_test_predictions(run)),
    }
    saved = [(save_figure(figure, run.path / "figures" / name), title) for name, (title, figure) in figures.items()]
    return saved + explain_input(run, dataset_example(run, 0))
