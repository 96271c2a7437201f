"""`clearhead completion bash|zsh|fish`: a completion script for commands, recipes, questions, runs and options.

Options are taken from the help of each command, so that they are always complete.
"""

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout

from clearhead.cli.lab import claim_parser
from clearhead.cli.options import Parser
from clearhead.messages import unknown_name

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
DETAILS = """\
To enable completion, save the script where your shell looks for it:
  bash  clearhead completion bash > ~/.local/share/bash-completion/completions/clearhead
  zsh   clearhead completion zsh > ~/.zfunc/_clearhead    (with ~/.zfunc in fpath)
  fish  clearhead completion fish > ~/.config/fish/completions/clearhead.fish"""


def completion(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead completion",
        "Print a completion script for bash, zsh or fish.",
        usage="clearhead completion {bash,zsh,fish}",
        examples=("source <(clearhead completion bash)", "clearhead completion fish | source"),
        details=DETAILS,
    )
    options.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    shell = options.parse(argv).shell
    if shell not in SHELLS:
        raise unknown_name("shell", shell, SHELLS)
    print(script(shell), end="")


def script(shell: str) -> str:
    from clearhead.cli.main import COMMANDS
    from clearhead.course import answers
    from clearhead.recipes.launch import RECIPES

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
    """The long options in the help of a command.

    If the command takes a recipe, these are the options of all recipes; for `lab`, those that all claims share are
    added, because the settings of a claim could not be listed without importing torch.
    """
    if command in ("train", "verify-resume"):
        texts = [help_of([command, recipe, "--help"]) for recipe in recipes]
    else:
        texts = [help_of([command, "--help"])]
    if command == "lab":
        texts.append(claim_parser("CLAIM", "").format_help())
    names = [name for text in texts for name in re.findall(r"(?m)^ +(?:-h, )?(--[a-z][a-z0-9.-]*)", text)]
    return list(dict.fromkeys(names))


def help_of(argv: list[str]) -> str:
    from clearhead.cli.main import run

    with redirect_stdout(io.StringIO()) as text:
        run(argv)
    return text.getvalue()
