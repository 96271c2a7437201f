"""Draw the README's figure: what two small trained models attend to.

python docs/make_readme_figure.py runs/demo runs/reverse-0 docs/figures/attention.png
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import clearhead

INK, ACCENT = "#1a1a1a", "#d6246e"


def draw_digits(figure, run) -> None:
    """Ten test digits, tinted by the attention of the pooling query, summed over heads."""
    dataset = run.task.load(run.config.seed)
    images, labels = dataset.test.get_batch(torch.arange(500))
    images = dataset.normalize(images)
    chosen = [int((labels == digit).nonzero()[3]) for digit in range(10)]
    batch = images[chosen]
    trace = clearhead.look(run.model, batch)
    record = trace[list(trace)[-1]]
    weights = record.weights().mean(1)[:, 0]  # (B,P): the mean over heads of the pooling query's weights
    predicted = trace.output.softmax(-1)
    side = int(weights.shape[1] ** 0.5)
    axes = figure.subplots(2, 5, gridspec_kw={"wspace": 0.08, "hspace": 0.22})
    for i, axis in enumerate(axes.flat):
        image = batch[i, 0].numpy()
        image = (image - image.min()) / (image.max() - image.min())
        glow = np.kron(weights[i].view(side, side).numpy(), np.ones((28 // side, 28 // side)))
        alpha = np.clip(glow / glow.max(), 0, 1) ** 1.2 * 0.85
        rgb = np.stack([1 - image] * 3, axis=-1)
        tint = np.array(matplotlib.colors.to_rgb(ACCENT))
        axis.imshow(rgb * (1 - alpha[..., None]) + tint * alpha[..., None], interpolation="nearest")
        probability, label = predicted[i].max(-1)
        axis.set_title(f"{int(label)}  ({float(probability):.0%})", fontsize=10, color=INK, pad=3)
        axis.set(xticks=[], yticks=[])
    figure.suptitle(
        "A vision transformer, trained for one minute on a laptop CPU:\nthe patches that its prediction attends to",
        fontsize=11,
    )


def draw_reversal(figure, run) -> None:
    """The attention of the one head of `reverse`, on one unseen sequence."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
    trace = clearhead.look(run.model, ids)
    weights = trace[next(iter(trace))].weights()[0, 0].numpy()
    axis = figure.subplots()
    axis.imshow(weights, cmap="RdPu", vmin=0)
    output = trace.output[0].argmax(-1).tolist()
    axis.set_xticks(range(16), ids[0].tolist(), fontsize=9)
    axis.set_yticks(range(16), output, fontsize=9)
    axis.set_xlabel("input digits (keys)", fontsize=10)
    axis.set_ylabel("predicted digits (queries)", fontsize=10)
    axis.tick_params(length=0)
    figure.suptitle(
        "One head that learned to reverse 16 digits:\neach output attends to the mirrored position", fontsize=11
    )


@torch.no_grad()
def main(vision: str, reverse: str, path: str) -> None:
    figure = plt.figure(figsize=(11.5, 4.0), dpi=120)
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])
    draw_digits(left, clearhead.open_run(vision))
    draw_reversal(right, clearhead.open_run(reverse))
    left.subplots_adjust(left=0.02, right=0.98, top=0.8, bottom=0.02)
    right.subplots_adjust(left=0.06, right=0.99, top=0.85, bottom=0.13)
    figure.savefig(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
