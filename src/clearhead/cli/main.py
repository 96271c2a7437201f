"""`clearhead`: finds the command, runs it, and turns what went wrong into one line.

Nothing here imports torch, so that help and mistakes answer at once; a command imports it when it needs it.
"""

import difflib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from clearhead import __version__

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Command:
    home: str
    """the module whose run(argv) it is"""
    what: str
    example: str


COMMANDS = {
    "shapes": Command(
        home="clearhead.cli.shapes",
        what="every tensor of a model: its shape, parameters and multiply-adds",
        example="clearhead shapes bert_cifar",
    ),
    "steps": Command(
        home="clearhead.cli.steps",
        what="self-attention in five steps, with the numbers of each",
        example="clearhead steps --causal",
    ),
    "lab": Command(
        home="clearhead.cli.lab",
        what="claims about attention, each an experiment with a verdict",
        example="clearhead lab elongated-key --alpha 10",
    ),
    "data": Command(
        home="clearhead.cli.data",
        what="data sets: which there are, fetching one, looking at one",
        example="clearhead data list",
    ),
    "curves": Command(
        home="clearhead.cli.curves",
        what="loss and accuracy of one or more runs against their epochs, as a picture",
        example="clearhead curves runs/mine --epochs 10 20 30",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 130 after Ctrl-C; with one line on stderr, 2 when the input was wrong, 1 when writing failed.

    A command may have a code of its own: lab says 1 when a verdict is not the expected one.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without kᵀ shows k?
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except (ValueError, LookupError) as error:
        print("clearhead:", *str(error.args[0] if error.args else error).split(), file=sys.stderr)
        return USAGE_ERROR
    except SystemExit as leaving:  # argparse has shown a command's help
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough; Python must not complain when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"clearhead: {error.strerror or error}: {error.filename or 'output'}", file=sys.stderr)
        return FAILED
    else:
        return code
    return 0


def run(argv: list[str]) -> int:
    """A command's own exit code, 0 unless it has one."""
    match argv:
        case [] | ["-h" | "--help" | "help", *_]:
            print(welcome())
        case ["-V" | "--version", *_]:
            print(f"clearhead {__version__}")
        case [name, *rest] if name in COMMANDS:
            return import_module(COMMANDS[name].home).run(rest) or 0
        case [name, *_]:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "see clearhead --help"
            raise LookupError(f"a command is one of {', '.join(COMMANDS)}, got {name!r}; {hint}")
    return 0


def welcome() -> str:
    size = max(map(len, COMMANDS))
    commands = [f"  {name:{size}}  {command.what}" for name, command in COMMANDS.items()]
    examples = [f"  {command.example}" for command in COMMANDS.values()]
    return "\n".join(
        [
            "clearhead: a transformer you can read, train and see through",
            "",
            "usage: clearhead COMMAND [options]",
            "",
            "commands",
            *commands,
            "",
            "examples",
            *examples,
            "",
            "clearhead COMMAND --help explains a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
