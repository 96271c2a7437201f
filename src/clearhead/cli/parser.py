"""An argparse parser whose mistakes are one line: the rule, what came, what to do."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn


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
        near = nearest(option, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return f"{command} has no option {option}; {hint}"


def nearest(option: str, known: Sequence[str]) -> str | None:
    """The option most like it; for one without its group (--lr for --optimizer.lr), by the last part of the name."""
    by_end = {name.rpartition(".")[2].removeprefix("--"): name for name in reversed(known)}
    if near := difflib.get_close_matches(option, known, n=1, cutoff=0.7):
        return near[0]
    if near := difflib.get_close_matches(option.rpartition(".")[2].removeprefix("--"), by_end, n=1):
        return by_end[near[0]]
    return next(iter(difflib.get_close_matches(option, known, n=1)), None)


def dashed(arg: str) -> str:
    """--n_heads=4 is --n-heads=4"""
    option, equals, value = arg.partition("=")
    return option.replace("_", "-") + equals + value if option.startswith("--") else arg
