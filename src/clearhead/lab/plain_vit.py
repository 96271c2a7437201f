"""What positions, norm and output projection add to the plain vision transformer. Trains five models on MNIST."""

from functools import partial

from clearhead.lab.claim import Claim, Curve, Result, above, at_least, within
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
    positions, norm, projection = (found[f"+ {name}"] - plain for name in PARTS)
    checks = (
        at_least(f"{PLAIN}, {steps} steps: test accuracy", plain, 0.75),
        at_least("+ positions: gain", positions, 0.02),
        at_least("+ norm: gain", norm, 0.005),
        within("+ output projection: gain", projection, -0.03, 0.03),
        at_least(f"{ALL}: gain", complete - plain, 0.04),
        above(
            f"{ALL}: gain beyond that of the best single part", complete - plain - max(positions, norm, projection), 0
        ),
    )
    return Result(checks, tuple(Curve("test accuracy", name, (steps,), (found[name],)) for name in VARIANTS))


CLAIM = Claim(
    slug="plain-vit",
    rows=("R3.1",),
    lesson="Images and convolutions",
    statement="Of the parts that the plain vision transformer lacks, position embeddings alone gain most and norm "
    "alone gains some; the output projection of a single head gains next to nothing. All three together gain most.",
    mistake="Each missing part costs about as much accuracy; or: a single one explains the low accuracy.",
    formula="one head: softargmax(beta Q Kᵀ) (x W_V) W_O, and W_V W_O is a single matrix: W_O adds no new function",
    conditions="Preset plain_mnist: 4 blocks of width 64, 7 x 7 patches; 40,000 training images, 600 steps of 128. "
    "Float32, the mean of three seeds.",
    run=run,
    try_next="clearhead lab plain-vit --steps 200",
    trains=True,
    seconds=300,
)
