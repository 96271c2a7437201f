"""What positions, norm and output projection add to the plain vision transformer. Trains five models on MNIST."""

from functools import partial

from clearhead.lab.claim import Claim, Curve, Result, above, at_least
from clearhead.lab.learning import mean_over_seeds, one_thread, train_recipe
from clearhead.training.evaluate import evaluate

PARTS: dict[str, dict[str, object]] = {
    "positions": {"model.positions": "learned"},
    "norm": {"model.norm": "pre"},
    "output projection": {"model.output_projection": True},
}
"""what the plain model lacks: learned position embeddings, layer norm before each sublayer, and W_O"""

PLAIN, ALL = "plain", "all three"
VARIANTS: dict[str, dict[str, object]] = {
    PLAIN: {},
    **{f"+ {name}": part for name, part in PARTS.items()},
    ALL: {key: value for part in PARTS.values() for key, value in part.items()},
}


def variant_accuracy(changes: dict[str, object], steps: int, seed: int) -> list[float]:
    """Accuracy on all test images of the recipe `mnist-plain` with these changes, after so many steps."""
    setup = train_recipe("mnist-plain", {"seed": seed, **changes}, steps)
    return [evaluate(setup.model, setup.objective, setup.data.test, setup.data.normalise)["accuracy"]]


def run(*, seed: int = 0, num_seeds: int = 3, steps: int = 600, without: bool = False) -> Result:
    """without=True asks of the plain model what holds of the one with all three parts."""
    with one_thread():
        found = {
            name: mean_over_seeds(partial(variant_accuracy, changes, steps), seed, num_seeds)[0]
            for name, changes in VARIANTS.items()
        }
    plain, complete = found[PLAIN], found[PLAIN if without else ALL]
    singles = [found[f"+ {name}"] - plain for name in PARTS]
    checks = (
        at_least(f"{PLAIN}: test accuracy after {steps} steps", plain, 0.75),
        *(above(f"+ {name}: gain", gain, -0.02) for name, gain in zip(PARTS, singles, strict=True)),
        at_least(f"{ALL}: gain", complete - plain, 0.04),
        at_least(f"{ALL}: gain beyond the largest of a single part", complete - plain - max(singles), 0.02),
    )
    return Result(checks, tuple(Curve("test accuracy", name, (steps,), (found[name],)) for name in VARIANTS))


CLAIM = Claim(
    slug="plain-vit",
    rows=("R3.1",),
    lesson="Images and convolutions",
    statement="TODO",
    mistake="TODO",
    formula="plain: x + attn(x), then x + mlp(x);  all three: x + W_O attn(norm(x)), then x + mlp(norm(x)), "
    "with x = patches + positions at the input",
    conditions="Preset plain_mnist: 4 blocks of width 64, 7 x 7 patches; 40,000 training images, 600 steps of 128. "
    "Float32, the mean of three seeds.",
    run=run,
    try_next="clearhead train mnist-plain --model.norm pre",
    trains=True,
    seconds=120,
)
