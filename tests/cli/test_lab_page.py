"""docs/lab.md and docs/lab/*.md show the claims and their recorded results; regenerate them with docs/make_lab.py."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from clearhead import lab
from clearhead.cli.lab import add_settings, claim_parser, write_page
from clearhead.cli.main import main
from clearhead.lab import all_claims
from clearhead.lab.claim import LESSONS, Check, Finding, Result, changed, check_settings, equals
from clearhead.lab.record import INTRODUCTIONS, LESSON_PAGES, Variation, outcome, recorded, shown, single_page

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAKE_LAB = runpy.run_path(str(DOCS / "make_lab.py"))
STALE = "the pages of the lab are stale; run `python docs/make_lab.py`"
PAGES = {page: (DOCS / "lab" / f"{page}.md").read_text(encoding="utf-8") for page in INTRODUCTIONS}


def sections(text):
    """The body of each `### slug` section."""
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    return {slug: body for slug, body in zip(parts[1::2], parts[2::2], strict=True) if slug in CLAIMS}


SECTIONS = {slug: body for page in PAGES.values() for slug, body in sections(page).items()}


@pytest.mark.parametrize(("path", "text"), MAKE_LAB["render"]().items())
def test_pages_are_current(path, text):
    assert (DOCS / path).read_text(encoding="utf-8") == text, STALE


def test_every_page_of_the_directory_is_generated():
    assert {path.stem for path in (DOCS / "lab").glob("*.md")} == set(INTRODUCTIONS)
    assert {path.stem for path in (DOCS / "lab").glob("*.svg")} == set(CLAIMS)


def test_every_claim_is_on_the_page_of_its_lesson():
    for lesson in LESSONS:
        assert set(sections(PAGES[LESSON_PAGES[lesson]])) == {claim.slug for claim in ALL if claim.lesson == lesson}


@pytest.mark.parametrize("slug", CLAIMS)
def test_section_shows_claim_and_record(slug):
    claim, entry, body = CLAIMS[slug], recorded()[slug], SECTIONS[slug]
    for text in (claim.statement, claim.misconception, claim.conditions, f"*Verdict:* **{entry.verdict}**"):
        assert text in body, STALE
    assert f"```text\n{chr(10).join(claim.formulas)}\n```\n" in body
    rows = [line for line in body.splitlines() if re.match(r"\| (?!measured)", line)]
    assert len(rows) == len(entry.checks)
    for row, check in zip(rows, entry.checks, strict=True):
        assert f"| {shown(check.value)} | {check.expectation} |" in row, STALE
    assert f"({slug}.svg)" in body


def test_experiments_are_apart_from_demonstrations():
    for page in PAGES.values():
        before, _, after = page.partition("## Experiments")
        assert all(CLAIMS[slug].kind == "demonstration" for slug in sections(before))
        assert all(CLAIMS[slug].kind == "experiment" for slug in sections(after))
    assert any("## Experiments" in page and "## Demonstrations" in page for page in PAGES.values())


def test_index_links_every_claim():
    index = (DOCS / "lab.md").read_text(encoding="utf-8")
    for claim in ALL:
        assert f"](lab/{LESSON_PAGES[claim.lesson]}.md#{claim.slug})" in index


def commands():
    return [
        line.partition(" #")[0].strip()
        for text in [(DOCS / "lab.md").read_text(encoding="utf-8"), *PAGES.values()]
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]


COMMANDS = list(dict.fromkeys(commands()))


def test_commands_are_found():
    assert {f"clearhead lab {slug}" for slug in CLAIMS} | {claim.try_next for claim in ALL} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command):
    """With settings that the claim accepts; test_lab_commands.py runs the commands."""
    program, name, *words = shlex.split(command)
    assert program == "clearhead"
    if name != "lab" or not words or "--help" in words:
        assert main([name, *words]) == 0
        return
    claim = CLAIMS[words[0]]
    parser = claim_parser(claim.slug, "")
    add_settings(parser, claim)
    check_settings(claim, changed(claim, vars(parser.parse(words[1:]))))


@pytest.mark.parametrize("slug", [slug for slug in CLAIMS if not CLAIMS[slug].trains and recorded()[slug].variation])
def test_recorded_variation_is_current(slug):
    """What the page says about the suggested command is what the command finds."""
    claim, variation = CLAIMS[slug], recorded()[slug].variation
    result = lab.run(slug, **MAKE_LAB["variation_settings"](claim))
    assert (variation.command, variation.verdict) == (claim.try_next, result.verdict), STALE
    failed = [check for check in result.checks if not check.passed]
    assert [check.name for check in failed] == [check.name for check in variation.failed]
    for now, before in zip(failed, variation.failed, strict=True):
        assert now.value == pytest.approx(before.value, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.slug)
def test_a_variation_is_recorded_where_one_is_suggested(claim):
    variation = recorded()[claim.slug].variation
    assert bool(variation) == bool(MAKE_LAB["variation_settings"](claim))
    assert variation is None or variation.command == claim.try_next


def test_outcome_of_a_variation():
    failed = (Check("largest error", 0.5, "at most 0.1", False),)
    command = "clearhead lab permutation --beta 2"
    refuted = outcome(Variation(command=command, verdict="refuted", failed=failed))
    assert "With `--beta 2` the claim does not hold: largest error: 0.5 (predicted: at most 0.1)." in refuted
    assert outcome(Variation(command=command, verdict="holds", failed=())) == "With `--beta 2` the claim still holds."


def test_write_page_saves_figures(tmp_path):
    claim = CLAIMS["temperature"]
    write_page(tmp_path / "new" / "hand-out.md", [Finding(claim, lab.run("temperature")), Finding(ALL[-1], None)])
    text = (tmp_path / "new" / "hand-out.md").read_text(encoding="utf-8")
    assert "(hand-out/temperature.svg)" in text
    assert (tmp_path / "new" / "hand-out" / "temperature.svg").is_file()
    assert "*Verdict:* **not run**." in sections(text)[ALL[-1].slug]


def test_refuted_claim_is_unexpected():
    claim = CLAIMS["temperature"]
    assert not Finding(claim, Result((equals("two", 2, 1, 0),))).is_expected
    assert Finding(claim, None).is_expected


def test_any_verdict_is_expected_with_changed_settings():
    claim = CLAIMS["temperature"]
    assert Finding(claim, Result((equals("two", 2, 1, 0),)), {"seed": 1}).is_expected


def test_single_page_shows_conditions_and_misconception():
    claim = CLAIMS["saturation"]
    text = single_page([Finding(claim, None)], "lab", ())
    assert claim.statement in text
    assert f"*Conditions:* {claim.conditions}" in text
    assert f"*Misconception:* {claim.misconception}" in text


def test_single_page_has_one_formula_per_line():
    claim = CLAIMS["scaled-key"]
    assert len(claim.formulas) == 4
    assert "```text\n" + "\n".join(claim.formulas) + "\n```\n" in single_page([Finding(claim, None)], "lab", ())


def test_rounding_errors_are_not_printed():
    assert [shown(value) for value in (0.0, 3e-16, -3e-16, 0.12345, 768)] == [
        "0",
        "below 1e-12",
        "below 1e-12",
        "0.123",
        "768",
    ]
