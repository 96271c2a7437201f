"""Every command that the lab suggests in its help, output and page succeeds."""

import re
import shlex

import pytest

import clearhead
from clearhead.cli.lab import ABOUT, about_claim, report, summary
from clearhead.cli.main import main
from clearhead.lab import all_claims
from clearhead.lab import run as run_claim
from clearhead.lab.claim import Finding, Result, equals, settings
from clearhead.lab.record import single_page

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}


def suggested():
    """Commands, without their first word, in the order of the texts that name them."""
    done = Result((equals("one", 1, 1, 0),))
    texts = [
        ABOUT,
        *summary([Finding(claim, None) for claim in ALL]),
        *(about_claim(claim) for claim in ALL),
        *(report(Finding(claim, done), None) for claim in ALL),
        *(report(Finding(claim, done, {"seed": 1}), None) for claim in ALL),
        single_page([Finding(claim, done) for claim in ALL], "lab", ()),
    ]
    found = [command for text in texts for command in re.findall(r"\bclearhead ([a-z][^`\n]*?)(?=`|  |\n|$)", text)]
    return list(dict.fromkeys(command.strip() for command in found))


COMMANDS = suggested()
OF_ALL = [command for command in COMMANDS if command.startswith("lab") and not re.match(r"lab [a-z]", command)]
OF_ONE = [command for command in COMMANDS if command not in OF_ALL]


def trains(command):
    words = shlex.split(command)
    return words[0] == "lab" and CLAIMS[words[1]].trains


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_commands_are_found():
    assert {"lab temperature --help", "lab permutation --beta 2", "lab --all", "lab --page lab.md"} <= set(COMMANDS)
    assert {claim.try_next.removeprefix("clearhead ") for claim in ALL} <= set(COMMANDS)
    assert all(f"lab {slug}" in COMMANDS for slug in CLAIMS)


@pytest.mark.parametrize("command", OF_ONE)
def test_suggested_command_succeeds(capsys, elsewhere, command):
    argv = shlex.split(command)
    if argv[0] == "lab" and "--help" not in argv:  # verdicts of training and figures have tests of their own
        argv += ["--no-figure", *(["--steps", "2", "--num-seeds", "1"] if trains(command) else [])]
    assert main(argv) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", OF_ALL)
def test_suggested_command_for_all_claims_succeeds(capsys, elsewhere, monkeypatch, command):
    """With numbers in the place of the experiments, which have tests of their own."""
    done = Result((equals("one", 1, 1, 0),))
    monkeypatch.setattr("clearhead.lab.run", lambda slug: done if CLAIMS[slug].expected == "holds" else run_claim(slug))
    monkeypatch.setattr("clearhead.lab.draw", lambda *_, **__: None)
    assert main(shlex.split(command)) == 0, capsys.readouterr().err


@pytest.mark.parametrize("claim", [claim for claim in ALL if not claim.trains], ids=lambda claim: claim.slug)
def test_suggested_python_runs(claim):
    (line,) = re.findall(r"clearhead\.lab\.run\(.*", about_claim(claim))
    assert eval(line, {"clearhead": clearhead})
    assert all(name in settings(claim) for name in re.findall(r"(\w+)=", line))
