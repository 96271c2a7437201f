"""Which map of an image finds what a trained model needs? Areas under deletion curves, on test images of a run.

python benchmarks/deletion.py runs/demo --images 500

Patches are hidden one by one, those that a map ranks first before the others; the faster the probability of the true
class falls, the smaller the area, the better the map. `relevance of another class` is the control: the same map, asked
about a class that is wrong. `chance` hides patches in random order; `occlusion` is what hiding each one alone does.
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


def maps_of(session: Run, images: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Each map (B,rows,columns), by name."""
    model = session.config.model
    seen = look(session.model, images)
    weights = weights_of(seen)
    pools = weights[-1].shape[-2] != weights[-1].shape[-1]
    layers = weights[-1:] if pools else weights
    wrong = (right + torch.randint(1, model.num_classes, right.shape)) % model.num_classes
    matrices = {
        "mean": mean_attention(layers),
        "maximum": max_attention(layers),
        "rollout": rollout(weights),
        "relevance": relevance(seen, seen.output.gather(1, right[:, None])),
        "relevance of another class": relevance(seen, seen.output.gather(1, wrong[:, None])),
    }
    maps = {
        name: output_map(matrix, class_token=model.pooling == "cls").unflatten(1, model.grid)
        for name, matrix in matrices.items()
    }
    return maps | {"chance": torch.rand(len(images), *model.grid)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run")
    options.add_argument("--images", type=int, default=500)
    options.add_argument("--first", type=int, default=0, help="number of the first image")
    options.add_argument("--fill", choices=("gray", "mean", "black"), default="black")
    args = options.parse_args()
    torch.manual_seed(0)
    session = Run(args.run)
    pixels, right = session.config.data.load(session.config.seed).test.get_batch(
        torch.arange(args.first, args.first + args.images)
    )
    images = session.normalize(pixels)
    maps = maps_of(session, images, right)
    maps["occlusion"] = occlusion(session.model, images, session.config.model.grid, right, fill=args.fill)
    areas = {
        name: deletion_auc(deletion_curve(session.model, images, ranked, right, fill=args.fill))
        for name, ranked in maps.items()
    }
    for name, area in areas.items():
        print(f"{name:28}  {area.mean():.4f} ± {area.std() / math.sqrt(len(area)):.4f}")
    better = areas["relevance of another class"] - areas["relevance"]
    error = better.std() / math.sqrt(len(better))
    print(f"the true class beats another by {better.mean():.4f} ± {error:.4f}, in {(better > 0).float().mean():.0%}")


if __name__ == "__main__":
    main()
