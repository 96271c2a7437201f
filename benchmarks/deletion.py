"""Which attribution map finds the patches a model relies on? Areas under deletion curves on the test images of a run.

python benchmarks/deletion.py runs/demo --images 500

Patches are deleted one by one in the order of the map; the faster the probability of the true class falls, the smaller
the area and the better the map. `relevance of another class` is a control: the same map for a wrong class. `random`
deletes patches in random order; `occlusion` ranks them by the effect of deleting each one alone.
"""

import argparse
import math

import torch
from torch import Tensor

from clearhead.inference.run import Run
from clearhead.insight.attribution import (
    deletion_auc,
    deletion_curve,
    max_attention,
    mean_attention,
    occlusion,
    output_map,
    relevance,
    rollout,
    weights_of,
)
from clearhead.insight.trace import look


def maps_of(run: Run, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Each map (B,rows,columns), by name."""
    model = run.config.model
    trace = look(run.model, images)
    weights = weights_of(trace)
    pools = weights[-1].shape[-2] != weights[-1].shape[-1]
    layers = weights[-1:] if pools else weights
    wrong = (labels + torch.randint(1, model.num_classes, labels.shape)) % model.num_classes
    matrices = {
        "mean": mean_attention(layers),
        "maximum": max_attention(layers),
        "rollout": rollout(weights),
        "relevance": relevance(trace, trace.output.gather(1, labels[:, None])),
        "relevance of another class": relevance(trace, trace.output.gather(1, wrong[:, None])),
    }
    maps = {
        name: output_map(matrix, class_token=model.pooling == "cls").unflatten(1, model.grid)
        for name, matrix in matrices.items()
    }
    return maps | {"random": torch.rand(len(images), *model.grid)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run")
    options.add_argument("--images", type=int, default=500)
    options.add_argument("--first", type=int, default=0, help="index of the first image")
    options.add_argument("--fill", choices=("gray", "mean", "black"), default="black")
    args = options.parse_args()
    torch.manual_seed(0)
    run = Run(args.run)
    pixels, labels = run.config.data.load(run.config.seed).test.get_batch(
        torch.arange(args.first, args.first + args.images)
    )
    images = run.normalize(pixels)
    maps = maps_of(run, images, labels)
    maps["occlusion"] = occlusion(run.model, images, run.config.model.grid, labels, fill=args.fill)
    areas = {
        name: deletion_auc(deletion_curve(run.model, images, ranked, labels, fill=args.fill))
        for name, ranked in maps.items()
    }
    for name, area in areas.items():
        print(f"{name:28}  {area.mean():.4f} ± {area.std() / math.sqrt(len(area)):.4f}")
    better = areas["relevance of another class"] - areas["relevance"]
    error = better.std() / math.sqrt(len(better))
    print(f"the true class beats another by {better.mean():.4f} ± {error:.4f}, in {(better > 0).float().mean():.0%}")


if __name__ == "__main__":
    main()
