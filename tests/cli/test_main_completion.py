import shutil
import subprocess
import sys

import pytest

from clearhead.cli.main import COMMANDS, SHELLS, completion_script
from clearhead.recipes import RECIPES


@pytest.fixture(scope="module")
def bash_script():
    return completion_script("bash")


def complete(script, *words):
    """The completions of the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _clearhead; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@needs_bash
def test_bash_registers_the_function(bash_script):
    done = subprocess.run(
        ["bash", "-c", f"{bash_script}\ncomplete -p clearhead"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "complete -o filenames -F _clearhead clearhead\n"
    assert done.stderr == ""


@needs_bash
def test_bash_completes_commands_recipes_and_options(bash_script):
    assert complete(bash_script, "clearhead", "") == list(COMMANDS)
    assert complete(bash_script, "clearhead", "pre") == ["predictions", "predict"]
    assert complete(bash_script, "clearhead", "train", "mn") == [name for name in RECIPES if name.startswith("mn")]
    assert complete(bash_script, "clearhead", "train", "mnist", "--training.st") == ["--training.steps"]
    assert complete(bash_script, "clearhead", "completion", "") == list(SHELLS)
    assert "--temperature" in complete(bash_script, "clearhead", "sample", "runs/x", "--t")
    assert complete(bash_script, "clearhead", "lab", "temperature", "--") == [
        *("--help", "--run", "--all", "--json", "--page", "--figure", "--no-figure")
    ]


@needs_bash
def test_bash_completes_paths(bash_script, tmp_path, monkeypatch):
    (tmp_path / "runs/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert complete(bash_script, "clearhead", "look", "runs/m") == ["runs/mine"]


def test_fish_and_zsh_scripts_have_commands_recipes_and_options():
    fish, zsh = completion_script("fish"), completion_script("zsh")
    assert zsh.startswith("#compdef clearhead\n")
    for text in (fish, zsh):
        assert " ".join(COMMANDS) in text
        assert " ".join(RECIPES) in text
    assert 'complete -c clearhead -n "__fish_seen_subcommand_from look" -l sample' in fish.splitlines()


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_scripts_are_valid(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=completion_script(shell), text=True, check=True)


def test_completion_does_not_import_torch():
    code = "import sys; from clearhead.cli.main import completion_script; completion_script('bash')"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_shells_are_refused(capsys):
    from clearhead.cli.main import main

    assert main(["completion", "bsh"]) == 2
    assert "did you mean bash?" in capsys.readouterr().err


@needs_bash
def test_bash_completes_questions(bash_script):
    assert complete(bash_script, "clearhead", "ask", "causal") == ["causal-mask"]
