"""An argparse parser whose mistakes are one line: the rule, what came, what to do."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from clearhead import messages

SYNONYMS = {
    "learning-rate": "lr",
    "bs": "batch-size",
    "wd": "weight-decay",
    "dtype": "precision",
    "layers": "depth",
    "n-layers": "depth",
    "num-layers": "depth",
    "dim": "width",
    "d-model": "width",
    "embed-dim": "width",
    "hidden-size": "width",
    "num-heads": "n-heads",
    "num-classes": "n-classes",
}
"""options as other libraries call them, by the last part of ours"""


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing its usage and leaving; names the nearest option to an unknown one."""

    def __init__(self, prog: str, description: str):
        super().__init__(
            prog=prog,
            usage=f"{prog} [options]",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        )
        self._negative_number_matcher = re.compile(r"-(inf|\.?\d)", re.ASCII)  # --beta -inf, --beta -1e5

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        for arg in argv:
            option, _, value = arg.partition("=")
            if option.startswith("--") and value == "--":  # which argparse would drop, and give the option a list
                self.error(f"{option}: expected one argument, got '--'")
        args, unknown = self.parse_known_args([dashed(arg) for arg in argv])
        if unknown:
            raise ValueError(self.describe_unknown(unknown[0]))
        return args

    def describe_unknown(self, arg: str) -> str:
        command = self.prog.removeprefix("clearhead ")
        if not arg.startswith("-"):
            return f"{command} takes options, --name value, got {arg!r}; see {self.prog} --help"
        option = arg.partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        known.remove("--help")  # no suggestion for --heads
        near = nearest(option, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return f"{command} has no option {option}; {hint}"


def nearest(option: str, known: Sequence[str]) -> str | None:
    """The option most like it; for one without its group (--lr for --optimizer.lr), or with another's (--training.seed
    for --seed), by the last part of the name."""
    by_end = {last_part(name): name for name in reversed(known)}
    end = last_part(option)
    if end in by_end:
        return by_end[end]
    if SYNONYMS.get(end) in by_end:
        return by_end[SYNONYMS[end]]
    if near := difflib.get_close_matches(option, known, n=1, cutoff=0.7):
        return near[0]
    if (by_last := messages.nearest(end, by_end)) is not None:
        return by_end[by_last]
    by_name = {name.removeprefix("--"): name for name in known}  # the dashes, which all have, are no resemblance
    return next((by_name[near] for near in difflib.get_close_matches(option.removeprefix("--"), by_name, n=1)), None)


def last_part(option: str) -> str:
    """--optimizer.lr -> lr"""
    return option.rpartition(".")[2].removeprefix("--")


def dashed(arg: str) -> str:
    """--n_heads=4 is --n-heads=4"""
    option, equals, value = arg.partition("=")
    return option.replace("_", "-") + equals + value if option.startswith("--") else arg
