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
from clearhead.messages import unknown_name
from clearhead.output import Escaped, Tolerant, open_standard_descriptors

FAILED, USAGE_ERROR, MISTAKE, INTERRUPTED = 1, 2, 5, 130
"""training adds two of its own: see training/signals.py"""
TRACEBACK = "CLEARHEAD_TRACEBACK"


@dataclass(frozen=True)
class Command:
    home: str
    """the module whose run(argv) it is"""
    what: str
    example: str


COMMANDS = {
    "demo": Command(
        home="clearhead.cli.demo",
        what="a first run: train on digits for a minute, see what came of it",
        example="clearhead demo",
    ),
    "recipes": Command(
        home="clearhead.cli.recipes",
        what="experiments that are ready to run, with what they take and reach",
        example="clearhead recipes",
    ),
    "train": Command(
        home="clearhead.cli.train",
        what="train a recipe, with any of its numbers changed",
        example="clearhead train reverse --name mine --training.steps 150",
    ),
    "resume": Command(
        home="clearhead.cli.resume",
        what="resume an interrupted run, or lengthen a finished one",
        example="clearhead resume mine --epochs 20",
    ),
    "runs": Command(
        home="clearhead.cli.runs",
        what="list runs with their recipe, step, accuracy and state",
        example="clearhead runs",
    ),
    "curves": Command(
        home="clearhead.cli.curves",
        what="plot loss and accuracy of runs against epochs",
        example="clearhead curves runs/mine --epochs 10 20 30",
    ),
    "confusion": Command(
        home="clearhead.cli.confusion",
        what="plot the confusion matrix on the test set",
        example="clearhead confusion runs/mine",
    ),
    "predictions": Command(
        home="clearhead.cli.predictions",
        what="compare predictions with the truth; show the worst mistakes",
        example="clearhead predictions runs/mine",
    ),
    "predict": Command(
        home="clearhead.cli.predict",
        what="a run's answers for your own pictures, words or digits",
        example="clearhead predict runs/mine --ids 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3",
    ),
    "evaluate": Command(
        home="clearhead.cli.evaluate",
        what="how good a run is, on the test set or on a dictionary of your own",
        example="clearhead evaluate runs/mine --part validation",
    ),
    "sample": Command(
        home="clearhead.cli.sample",
        what="words or text that a run writes",
        example="clearhead sample runs/words-0 --prompt un",
    ),
    "look": Command(
        home="clearhead.cli.look",
        what="what a run looks at when it answers: its attention, as pictures",
        example="clearhead look runs/mine --sample 3",
    ),
    "doctor": Command(
        home="clearhead.cli.doctor",
        what="your own module, examined: masks that leak, NaN, dead parameters",
        example="clearhead doctor mymodel.py:GPT",
    ),
    "verify": Command(
        home="clearhead.cli.verify",
        what="check the files of a run: what is missing, changed or surplus",
        example="clearhead verify runs/mine",
    ),
    "verify-resume": Command(
        home="clearhead.cli.verify_resume",
        what="proof that a killed run goes on bit for bit on this machine",
        example="clearhead verify-resume reverse",
    ),
    "data": Command(
        home="clearhead.cli.data",
        what="data sets: which there are, fetching one, looking at one",
        example="clearhead data list",
    ),
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
    "mask": Command(
        home="clearhead.cli.mask",
        what="an attention mask as numbers and as a figure, or your own",
        example="clearhead mask causal --tokens 5",
    ),
    "lab": Command(
        home="clearhead.cli.lab",
        what="claims about attention, each an experiment with a verdict",
        example="clearhead lab elongated-key --alpha 10",
    ),
}

EXIT_CODES = """\
exit codes
    0  done
    1  a file could not be read or written; lab: a verdict is not the expected
       one; verify: the run is not intact; verify-resume: the runs differ;
       doctor: there is a fault
    2  the command or its input was wrong
    3  training was stopped by a signal: a checkpoint is there, resume goes on
    4  training diverged: loss, gradient or weights were not finite numbers
    5  a mistake in clearhead, or not enough memory
  130  Ctrl-C, outside of training, or a second time in it; 143: so for SIGTERM"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, one of those above; all but 0, 3 and 130 come with one line on stderr.

    Names, values and texts come from files of others: nothing but rich's colours reaches the terminal unescaped.
    """
    open_standard_descriptors()
    streams = sys.stdout, sys.stderr
    out, err = (stream or open(os.devnull, "w") for stream in streams)  # noqa: SIM115 - None: closed by the caller
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal without kᵀ shows k?
    sys.stdout, sys.stderr = Escaped(out), Escaped(Tolerant(err))
    try:
        return answer(list(sys.argv[1:] if argv is None else argv))
    finally:
        for stream in (out, err):
            Tolerant(stream).flush()  # what cannot be written must not fail again when Python exits
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
        return complain("this must fit into memory, got too little; choose a smaller batch, model or input", MISTAKE)
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
        return import_module(COMMANDS[name].home).run(argv) or 0
    except SystemExit as leaving:  # argparse has shown the command's help
        return leaving.code if isinstance(leaving.code, int) else 0


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
            EXIT_CODES,
            "",
            "clearhead COMMAND --help explains a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
