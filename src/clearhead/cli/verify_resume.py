"""`clearhead verify-resume`: a recipe's name, a verdict."""

import sys
import tempfile
from collections.abc import Sequence

from clearhead.cli.overrides import add_overrides, given
from clearhead.cli.parser import Parser
from clearhead.cli.train import fixed, recipe_lines, split_recipe
from clearhead.messages import printable
from clearhead.recipes.all import config_of, find

ABOUT = """\
Trains a few steps of a recipe twice: once undisturbed, and once in a process
that is killed halfway (kill -9) and resumed. Weights, optimizer, random state
and records of the two must agree in every bit. Leaves nothing behind."""

STEPS, CHECKPOINT_EVERY = 30, 4
DIFFERENT = 1


def run(argv: Sequence[str]) -> int:
    """The exit code: 1 when the two differ."""
    name, rest = split_recipe(argv, "verify-resume")
    if name is None:
        print("\n".join(["usage: clearhead verify-resume RECIPE [options]", "", ABOUT, "", "recipes", *recipe_lines()]))
        return 0
    config = find(name).make()
    options = Parser(f"clearhead verify-resume {name}", ABOUT)
    add_overrides(options, config, "what you may change", without=fixed(name))
    short = {"training.steps": STEPS, "training.checkpoint_every": CHECKPOINT_EVERY}
    config = config_of(name, short | given(config, options.parse(rest)))

    from clearhead.training.verify import verify_resume

    with tempfile.TemporaryDirectory() as folder:
        seen = verify_resume(config, folder, report)
    print(f"killed at step {seen.killed_at} of {seen.steps}, resumed from the checkpoint of step {seen.resumed_from}")
    if seen.is_exact:
        print("exact: weights, optimizer, random state and records agree in every bit with the run that was not killed")
        return 0
    print(f"DIFFERENT in {len(seen.differences)} places: {', '.join(map(printable, seen.differences[:5]))}")
    return DIFFERENT


def report(line: str) -> None:
    """A line before a wait; on stderr, where no program reads it as an answer."""
    print(line, file=sys.stderr, flush=True)
