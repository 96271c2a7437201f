"""`clearhead`: finds the command, runs it, and turns what went wrong into one line.

Nothing here imports torch, so that help and mistakes answer at once; a command imports it when it needs it.
"""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from clearhead import __version__
from clearhead.messages import EscapedStream, FaultTolerantStream, open_standard_descriptors, unknown_name

FAILED, USAGE_ERROR, MISTAKE, INTERRUPTED = 1, 2, 5, 130
"""training adds two of its own: see training/signals.py"""
TRACEBACK = "CLEARHEAD_TRACEBACK"


@dataclass(frozen=True)
class Command:
    home: str
    """module:function, called with the arguments"""
    summary: str
    """one line of `clearhead --help`"""


GROUPS = {
    "Train": {
        "demo": Command("clearhead.cli.train:demo", "Train on handwritten digits for a minute and plot the results"),
        "recipes": Command("clearhead.cli.data:recipes", "List the recipes with their measured time and accuracy"),
        "train": Command("clearhead.cli.train:train", "Train a recipe, with any of its settings changed"),
        "resume": Command("clearhead.cli.train:resume", "Resume an interrupted run, or lengthen a finished one"),
        "runs": Command("clearhead.cli.runs:runs", "List runs with their recipe, step, accuracy and state"),
        "curves": Command("clearhead.cli.curves:curves", "Plot loss and accuracy of runs against epochs"),
        "evaluate": Command("clearhead.cli.evaluate:evaluate", "Measure a run on its test or validation set"),
        "confusion": Command("clearhead.cli.evaluate:confusion", "Plot the confusion matrix on the test set"),
        "predictions": Command(
            "clearhead.cli.evaluate:predictions", "Compare predictions with the truth; show the worst mistakes"
        ),
        "predict": Command(
            "clearhead.cli.predict:predict", "Predict the class of your own images, or from words or digits"
        ),
        "sample": Command("clearhead.cli.predict:sample", "Generate words or text with a trained language model"),
        "verify": Command("clearhead.cli.runs:verify", "Check the files of a run: what is missing, changed or surplus"),
        "verify-resume": Command(
            "clearhead.cli.train:verify_resume", "Prove on this machine that a killed run resumes bit for bit"
        ),
    },
    "Look inside": {
        "look": Command("clearhead.cli.look:look", "Plot the attention of a run for one example"),
        "doctor": Command("clearhead.cli.look:doctor", "Examine your own module: leaking masks, NaN, dead parameters"),
        "shapes": Command(
            "clearhead.cli.shapes:shapes", "List the shape and the parameters of every tensor of a model"
        ),
    },
    "Learn": {
        "lab": Command("clearhead.cli.lab:lab", "Run claims about attention as experiments with a verdict"),
        "steps": Command("clearhead.cli.mask:steps", "Compute self-attention in five steps, with the numbers of each"),
        "mask": Command("clearhead.cli.mask:mask", "Show an attention mask, or your own, as numbers and as a figure"),
    },
    "Data": {
        "data": Command("clearhead.cli.data:data", "List, download and show data sets"),
    },
    "Shell": {
        "completion": Command("clearhead.cli.completion:completion", "Print a completion script for bash, zsh or fish"),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}

EXIT_CODES = """\
Exit codes
    0  success
    1  a file could not be read or written, or a check failed (doctor, lab,
       verify, verify-resume)
    2  invalid command or input
    3  training was stopped by a signal, and a checkpoint was saved
    4  training diverged: loss, gradients or weights were not finite
    5  internal error, or out of memory
  130  interrupted (143: terminated) outside of training, or by a second signal"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, one of those above; all but 0, 3 and 130 come with one line on stderr.

    Names, values and texts come from files of others: nothing but rich's colours reaches the terminal unescaped.
    """
    open_standard_descriptors()
    streams = sys.stdout, sys.stderr
    out, err = (stream or open(os.devnull, "w") for stream in streams)  # noqa: SIM115 - None: closed by the caller
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal without kᵀ shows k?
    sys.stdout, sys.stderr = EscapedStream(out), EscapedStream(FaultTolerantStream(err))
    try:
        return answer(list(sys.argv[1:] if argv is None else argv))
    finally:
        for stream in (out, err):
            FaultTolerantStream(stream).flush()  # what cannot be written must not fail again when Python exits
        sys.stdout, sys.stderr = streams


def answer(argv: list[str]) -> int:
    """Runs the command; what went wrong becomes one line and an exit code."""
    try:
        code = run(argv)
        sys.stdout.flush()
    except (KeyError, IndexError, UnicodeError) as error:  # nobody wrote these for a reader
        return complain_unexpected(error)
    except (ValueError, LookupError) as error:
        return complain(error.args[0] if error.args else error, USAGE_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        return 0
    except OSError as error:
        return complain(f"{error.strerror}: {error.filename or 'output'}" if error.strerror else error, FAILED)
    except Exception as error:
        return complain_unexpected(error)
    return code


def complain(message: object, code: int) -> int:
    """One line, whatever the message is."""
    print("clearhead:", *str(message).split(), file=sys.stderr)
    return code


def complain_unexpected(error: Exception) -> int:
    """A run that diverged knows its exit code; anything else is our mistake, or the machine's limit."""
    if hasattr(error, "exit_code"):
        return complain(error, error.exit_code)
    if os.environ.get(TRACEBACK):
        raise error
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return complain("out of memory; try a smaller batch, model or input", MISTAKE)
    first = (str(error).strip().splitlines() or [""])[0]
    return complain(f"{type(error).__name__}: {first} (unexpected; {TRACEBACK}=1 shows where)", MISTAKE)


def run(argv: list[str]) -> int:
    """A command's own exit code, 0 unless it has one."""
    match argv:
        case [] | ["-h" | "--help" | "help", *_]:
            print(welcome())
        case ["-V" | "--version", *_]:
            print(f"clearhead {__version__}")
        case [name, *rest] if name in COMMANDS:
            return run_command(name, rest)
        case [name, *_]:
            raise unknown_name("command", name, COMMANDS)
    return 0


def run_command(name: str, argv: list[str]) -> int:
    try:
        module, function = COMMANDS[name].home.split(":")
        return getattr(import_module(module), function)(argv) or 0
    except SystemExit as leaving:  # argparse has shown the command's help
        return leaving.code if isinstance(leaving.code, int) else 0


def welcome() -> str:
    size = max(map(len, COMMANDS))
    lines = [
        "clearhead: a transformer you can read, train and see through",
        "",
        "Usage: clearhead COMMAND [options]",
        "",
    ]
    for group, commands in GROUPS.items():
        lines += [group, *(f"  {name:{size}}  {command.summary}" for name, command in commands.items()), ""]
    return "\n".join(
        [*lines, EXIT_CODES, "", "Run `clearhead COMMAND --help` for the options of a command, with examples."]
    )


if __name__ == "__main__":
    sys.exit(main())
