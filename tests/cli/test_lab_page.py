"""docs/lab.md equals the current results of the lab; regenerate it with clearhead lab --all --page docs/lab.md"""

import re
from pathlib import Path

import pytest

from clearhead import lab
from clearhead.cli.lab import page, rounded, write_page
from clearhead.lab.claim import LESSONS, Finding, Result, equals
from clearhead.lab.registry import all_claims

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}

DOCS = Path(__file__).parents[2] / "docs"
STALE = "docs/lab.md is stale; regenerate it: clearhead lab --all --page docs/lab.md"


def entries(text):
    """The verdict and the body of each `### slug: verdict` section."""
    parts = re.split(r"^### (\S+): (.+)$", text, flags=re.MULTILINE)
    return {slug: (verdict, body) for slug, verdict, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}


def without_values(body):
    return re.sub(r"^(\| .*? \| )\S+(?: 1e-9)?( \|)", r"\1\2", body, flags=re.MULTILINE)


def values(body):
    cells = [line.split(" | ")[1] for line in body.splitlines() if re.match(r"\| (?!measured)", line)]
    return [0.0 if cell == "below 1e-9" else float(cell) for cell in cells]


@pytest.fixture(scope="module")
def written():
    return entries((DOCS / "lab.md").read_text(encoding="utf-8"))


def test_page_has_every_claim_in_order(written):
    assert list(written) == list(CLAIMS), STALE
    text = (DOCS / "lab.md").read_text(encoding="utf-8")
    assert all(f". {lesson}\n" in text for lesson in LESSONS), STALE


@pytest.mark.parametrize("slug", CLAIMS)
def test_page_is_current(written, slug):
    claim = CLAIMS[slug]
    verdict, body = written[slug]
    assert verdict == claim.expected, STALE
    assert claim.statement in body, STALE
    assert claim.misconception in body, STALE
    if claim.trains:  # minutes: their numbers are measured when the page is written
        return
    finding = Finding(claim, lab.run(slug))
    now = entries(page([finding], "lab", CLAIMS))[slug][1].strip()
    before = body.partition("\n## ")[0].strip()
    assert without_values(now) == without_values(before), STALE
    for new, old in zip(values(now), values(before), strict=True):
        assert new == pytest.approx(old, rel=0.05, abs=1e-6), STALE


def test_page_links_existing_figures():
    text = (DOCS / "lab.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((lab/.*?)\)", text)
    assert {Path(link).stem for link in linked} == set(CLAIMS)
    assert all((DOCS / link).is_file() for link in linked)


def test_write_page_saves_figures(tmp_path):
    claim = CLAIMS["temperature"]
    write_page(tmp_path / "new" / "hand-out.md", [Finding(claim, lab.run("temperature")), Finding(ALL[-1], None)])
    text = (tmp_path / "new" / "hand-out.md").read_text(encoding="utf-8")
    assert "(hand-out/temperature.svg)" in text
    assert (tmp_path / "new" / "hand-out" / "temperature.svg").is_file()
    assert f"### {ALL[-1].slug}: not run" in text


def test_refuted_claim_is_unexpected():
    claim = CLAIMS["temperature"]
    assert not Finding(claim, Result((equals("two", 2, 1, 0),))).is_expected
    assert Finding(claim, None).is_expected


def test_any_verdict_is_expected_with_changed_settings():
    claim = CLAIMS["temperature"]
    assert Finding(claim, Result((equals("two", 2, 1, 0),)), {"seed": 1}).is_expected


def test_page_shows_kind_conditions_and_misconception():
    claim = CLAIMS["saturation"]
    text = page([Finding(claim, None)], "lab", ())
    assert f"*Experiment:* {claim.statement}" in text
    assert f"*Conditions:* {claim.conditions}" in text
    assert f"*Misconception:* {claim.misconception}" in text


def test_page_has_one_formula_per_line():
    claim = CLAIMS["scaled-key"]
    assert len(claim.formulas) == 4
    assert "```text\n" + "\n".join(claim.formulas) + "\n```\n" in page([Finding(claim, None)], "lab", ())


def test_rounding_errors_are_not_printed():
    assert [rounded(value) for value in (0.0, 3e-16, -3e-16, 0.12345, 768)] == [
        "0",
        "below 1e-9",
        "below 1e-9",
        "0.123",
        "768",
    ]
