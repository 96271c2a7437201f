"""The `clearhead` command: dispatches to subcommands, reports each error in one line, and completes words in a shell.

This module does not import torch, so that help and usage errors are instant; a command imports it when needed.
"""

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module

from clearhead import __version__
from clearhead.messages import EscapedStream, FaultTolerantStream, open_standard_descriptors, unknown_name

FAILED, USAGE_ERROR, INTERNAL_ERROR, INTERRUPTED = 1, 2, 5, 130
"""training adds 3 (stopped) and 4 (diverged): see training/progress.py"""
TRACEBACK = "CLEARHEAD_TRACEBACK"


@dataclass(frozen=True)
class Command:
    entry_point: str
    """module:function, called with the arguments"""
    summary: str
    """one line of `clearhead --help`"""


GROUPS = {
    "Train": {
        "demo": Command("clearhead.cli.train:demo", "Train on handwritten digits for a minute and plot the results"),
        "recipes": Command("clearhead.cli.data:recipes", "List the recipes with their measured time and accuracy"),
        "train": Command("clearhead.cli.train:train", "Train a recipe, with any of its settings changed"),
        "resume": Command("clearhead.cli.train:resume", "Resume an interrupted run, or extend a finished one"),
        "runs": Command("clearhead.cli.runs:runs", "List runs with their recipe, step, accuracy and state"),
        "curves": Command("clearhead.cli.runs:curves", "Plot loss and accuracy of runs against epochs"),
        "evaluate": Command("clearhead.cli.evaluate:evaluate", "Measure a run on its test or validation set"),
        "confusion": Command("clearhead.cli.evaluate:confusion", "Plot the confusion matrix on the test set"),
        "predictions": Command(
            "clearhead.cli.evaluate:predictions", "Compare predictions with targets; show confident mistakes"
        ),
        "report": Command("clearhead.cli.runs:report", "Write a report of runs: settings, curves, results, attention"),
        "predict": Command(
            "clearhead.cli.predict:predict", "Predict the class of your own images, or from words or digits"
        ),
        "sample": Command("clearhead.cli.predict:sample", "Generate words or text with a trained language model"),
        "verify": Command("clearhead.cli.runs:verify", "Check the files of a run: missing, changed or unexpected ones"),
        "verify-resume": Command(
            "clearhead.cli.train:verify_resume", "Verify on this machine that a killed run resumes bit for bit"
        ),
    },
    "Look inside": {
        "open": Command("clearhead.cli.look:open_page", "Draw, look at attention and edit a model in the browser"),
        "export": Command("clearhead.cli.look:export", "Write a trained model and its page to one HTML file"),
        "look": Command("clearhead.cli.look:look", "Plot the attention of a run for one example"),
        "doctor": Command("clearhead.cli.look:doctor", "Examine your own module: leaking masks, NaN, dead parameters"),
        "shapes": Command(
            "clearhead.cli.shapes:shapes", "List the shape and the parameters of every tensor of a model"
        ),
    },
    "Learn": {
        "ask": Command("clearhead.cli.learn:ask", "Answer a question about attention and transformers"),
        "lab": Command("clearhead.cli.lab:lab", "List claims about attention, and test them by experiments"),
        "steps": Command("clearhead.cli.learn:steps", "Compute self-attention in five steps, with the numbers of each"),
        "mask": Command("clearhead.cli.learn:mask", "Show an attention mask, or your own, as numbers and as a figure"),
    },
    "Data": {
        "data": Command("clearhead.cli.data:data", "List, download and show data sets"),
    },
    "Shell": {
        "completion": Command("clearhead.cli.main:completion", "Print a completion script for bash, zsh or fish"),
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

BASH = """\
_clearhead() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{bash_cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$current")); return ;;
    esac
    if [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
            train|verify-resume) COMPREPLY=($(compgen -W "{recipes}" -- "$current")); return ;;
            ask) COMPREPLY=($(compgen -W "{questions}" -- "$current")); return ;;
            completion) COMPREPLY=($(compgen -W "{shells}" -- "$current")); return ;;
        esac
    fi
    COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _clearhead clearhead
"""
ZSH = """\
#compdef clearhead
autoload -U +X bashcompinit && bashcompinit
{bash}"""
FISH = """\
complete -c clearhead -f -n __fish_use_subcommand -a "{commands}"
complete -c clearhead -f -n "__fish_seen_subcommand_from train verify-resume" -a "{recipes}"
complete -c clearhead -f -n "__fish_seen_subcommand_from ask" -a "{questions}"
complete -c clearhead -f -n "__fish_seen_subcommand_from completion" -a "{shells}"
{fish_options}
"""
SHELLS = ("bash", "zsh", "fish")
COMPLETION_DETAILS = """\
To enable completion, save the script where your shell looks for it:
  bash  clearhead completion bash > ~/.local/share/bash-completion/completions/clearhead
  zsh   clearhead completion zsh > ~/.zfunc/_clearhead    (with ~/.zfunc in fpath)
  fish  clearhead completion fish > ~/.config/fish/completions/clearhead.fish"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; all but 0, 3 and 130 come with one line on stderr.

    Names and texts may come from untrusted files: only rich's color codes reach the terminal unescaped.
    """
    open_standard_descriptors()
    streams = sys.stdout, sys.stderr
    out, err = (stream or open(os.devnull, "w") for stream in streams)  # noqa: SIM115 - None if the caller closed it
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal that cannot encode kᵀ shows k?
    sys.stdout, sys.stderr = EscapedStream(out), EscapedStream(FaultTolerantStream(err))
    try:
        return run_reporting_errors(list(sys.argv[1:] if argv is None else argv))
    finally:
        for stream in (out, err):
            FaultTolerantStream(stream).flush()  # a failed write must not fail again when Python exits
        sys.stdout, sys.stderr = streams


def run_reporting_errors(argv: list[str]) -> int:
    """Runs a command; an exception becomes one line on stderr and an exit code."""
    try:
        code = run(argv)
        sys.stdout.flush()
    except (KeyError, IndexError, UnicodeError) as error:  # raised by Python, not worded for users
        return report_unexpected(error)
    except (ValueError, LookupError) as error:
        return report_error(error.args[0] if error.args else error, USAGE_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        return 0
    except OSError as error:
        return report_error(f"{error.strerror}: {error.filename or 'output'}" if error.strerror else error, FAILED)
    except Exception as error:
        return report_unexpected(error)
    return code


def report_error(message: object, code: int) -> int:
    """Prints the message as one line."""
    print("clearhead:", *str(message).split(), file=sys.stderr)
    return code


def report_unexpected(error: Exception) -> int:
    """A diverged run has its own exit code; anything else is a bug or a lack of memory."""
    if hasattr(error, "exit_code"):
        return report_error(error, error.exit_code)
    if os.environ.get(TRACEBACK):
        raise error
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return report_error("out of memory; try a smaller batch, model or input", INTERNAL_ERROR)
    first = (str(error).strip().splitlines() or [""])[0]
    return report_error(f"{type(error).__name__}: {first} (unexpected; {TRACEBACK}=1 shows where)", INTERNAL_ERROR)


def run(argv: list[str]) -> int:
    """Dispatches to a command and returns its exit code."""
    match argv:
        case [] | ["-h" | "--help" | "help", *_]:
            print(overview())
        case ["-V" | "--version", *_]:
            print(f"clearhead {__version__}")
        case [name, *rest] if name in COMMANDS:
            return run_command(name, rest)
        case [name, *_]:
            raise unknown_name("command", name, COMMANDS)
    return 0


def run_command(name: str, argv: list[str]) -> int:
    try:
        module, function = COMMANDS[name].entry_point.split(":")
        return getattr(import_module(module), function)(argv) or 0
    except SystemExit as exit:  # argparse has printed the help
        return exit.code if isinstance(exit.code, int) else 0


def overview() -> str:
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


def completion(argv: Sequence[str]) -> None:
    """Prints a completion script for commands, recipes, questions, runs and options."""
    from clearhead.cli.options import Parser

    options = Parser(
        "clearhead completion",
        "Print a completion script for bash, zsh or fish.",
        usage="clearhead completion {bash,zsh,fish}",
        examples=("source <(clearhead completion bash)", "clearhead completion fish | source"),
        details=COMPLETION_DETAILS,
    )
    options.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    shell = options.parse(argv).shell
    if shell not in SHELLS:
        raise unknown_name("shell", shell, SHELLS)
    print(completion_script(shell), end="")


def completion_script(shell: str) -> str:
    from clearhead.course import answers
    from clearhead.recipes import RECIPES

    options = {command: options_of(command, RECIPES) for command in COMMANDS}
    lists: dict[str, Iterable[str]] = {
        "commands": COMMANDS,
        "recipes": RECIPES,
        "questions": answers(),
        "shells": SHELLS,
    }
    words = {name: " ".join(values) for name, values in lists.items()}
    if shell == "fish":
        lines = [
            f'complete -c clearhead -n "__fish_seen_subcommand_from {command}" -l {name.removeprefix("--")}'
            for command, names in options.items()
            for name in names
        ]
        return FISH.format(fish_options="\n".join(lines), **words)
    cases = "\n".join(f'        {command}) options="{" ".join(names)}" ;;' for command, names in options.items())
    bash = BASH.format(bash_cases=cases, **words)
    return bash if shell == "bash" else ZSH.format(bash=bash)


def options_of(command: str, recipes: Iterable[str]) -> list[str]:
    """The long options in the help of a command, so that they are always complete.

    If the command takes a recipe, these are the options of all recipes; for `lab`, those that all claims share are
    added, because the settings of a claim could not be listed without importing torch.
    """
    if command in ("train", "verify-resume"):
        texts = [help_of([command, recipe, "--help"]) for recipe in recipes]
    else:
        texts = [help_of([command, "--help"])]
    if command == "lab":
        from clearhead.cli.lab import claim_parser

        texts.append(claim_parser("CLAIM", "").format_help())
    names = [name for text in texts for name in re.findall(r"(?m)^ +(?:-h, )?(--[a-z][a-z0-9.-]*)", text)]
    return list(dict.fromkeys(names))


def help_of(argv: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as text:
        run(argv)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
