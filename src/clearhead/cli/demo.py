"""`clearhead demo`: one command that trains, draws, and says where to go from there."""

from collections.abc import Sequence

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import duration

ABOUT = """\
Trains a vision transformer on the 60,000 handwritten digits that come with
clearhead, in runs/demo, tests it on 10,000 others, and draws its curves, its
confusion matrix, its answers and what it looks at. Once more, and it goes on
where it was."""


def run(argv: Sequence[str]) -> int:
    options = Parser("clearhead demo", ABOUT)
    options.add_argument("--steps", type=reader(int), metavar="N", help="fewer or more steps than the recipe has")
    args = options.parse(argv)

    from clearhead.cli.look import say_drawing
    from clearhead.models.shapes import shapes
    from clearhead.recipes.all import config_of
    from clearhead.serving.demo import RECIPE, demo

    config = config_of(RECIPE)
    print(
        f"Training a vision transformer of {shapes(config.model).parameters:,} parameters to read digits.\n", flush=True
    )
    outcome, pictures = demo(steps=args.steps, before_drawing=say_drawing)
    if outcome.test is None:
        return outcome.exit_code
    seconds = outcome.test["seconds"]
    print(
        f"\n{outcome.test['accuracy']:.2%} of 10,000 unseen digits read right, after {duration(seconds)} of training.\n"
    )
    print("Open")
    for path, what in pictures:
        print(f"  {path!s:37}  {what}")
    print(
        "\nTry\n"
        "  clearhead predict runs/demo YOUR.png --invert    your own digit, dark on white paper\n"
        "  clearhead look runs/demo --sample 7              what it looks at in another digit\n"
        "  clearhead train mnist --name wide --model.width 96 --training.epochs 4\n"
        "  clearhead curves runs/demo runs/wide             the two side by side\n"
        "  clearhead train reverse                          four seconds, 100%\n"
        "  clearhead recipes                                what else there is"
    )
    return 0
