"""results.json holds the current results; `python docs/make_lab.py --measure` records them again."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from clearhead import lab
from clearhead.lab import all_claims, record
from clearhead.lab.claim import Check, Curve, Finding, Result, settings
from clearhead.lab.record import Record, Variation, from_fields, recorded, to_text

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}
FAST = [claim.slug for claim in ALL if not claim.trains]
TRAINING = [claim.slug for claim in ALL if claim.trains]
STALE = "results.json is stale; run `python docs/make_lab.py --measure {}`"


def test_every_claim_is_recorded_in_alphabetical_order():
    assert list(recorded()) == sorted(CLAIMS), STALE.format("")


@pytest.mark.parametrize("slug", CLAIMS)
def test_record_agrees_with_the_claim(slug):
    claim, entry = CLAIMS[slug], recorded()[slug]
    assert (entry.kind, entry.statement, entry.verdict) == (claim.kind, claim.statement, claim.expected), STALE.format(
        slug
    )
    expected = {name: record.json_number(parameter.default) for name, parameter in settings(claim).items()}
    assert entry.settings == expected, STALE.format(slug)
    assert entry.result.verdict == entry.verdict


def differences(now, before):
    """The checks that differ: names and predictions exactly, values within what processors and rounding explain."""
    return [
        (new, old)
        for new, old in zip(now, before, strict=True)
        if (new.name, new.expectation, new.passed) != (old.name, old.expectation, old.passed)
        or new.value != pytest.approx(old.value, rel=0.05, abs=1e-6, nan_ok=True)
    ]


@pytest.mark.parametrize("slug", FAST)
def test_measured_values_equal_the_record(slug):
    result, entry = lab.run(slug), recorded()[slug]
    assert result.verdict == entry.verdict, STALE.format(slug)
    assert not differences(result.checks, entry.checks), STALE.format(slug)


@pytest.mark.slow
@pytest.mark.parametrize("slug", TRAINING)
def test_checks_of_a_training_claim_are_those_of_the_record(slug):
    """With two steps the values and the numbers of steps in the names differ, but not what is measured."""
    now = lab.run(slug, steps=2, num_seeds=1).checks
    names = [[re.sub(r"\d+", "N", check.name) for check in checks] for checks in (now, recorded()[slug].checks)]
    assert names[0] == names[1], STALE.format(slug)


def test_a_changed_value_verdict_or_name_is_noticed():
    checks = recorded()["saturation"].checks
    first = checks[0]
    for other in (
        replace(first, value=first.value * 1.2),
        replace(first, passed=not first.passed),
        replace(first, name="another quantity"),
        replace(first, expectation="at most 0"),
    ):
        assert len(differences((other, *checks[1:]), checks)) == 1
    assert not differences(checks, checks)


def test_results_json_is_in_its_canonical_form():
    text = record.files("clearhead.lab").joinpath("results.json").read_text(encoding="utf-8")
    assert to_text(recorded()) == text
    assert len(text) < 100_000


def test_records_are_read_without_torch():
    code = "import sys; from clearhead.lab.record import recorded; recorded(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_record_survives_writing_and_reading():
    checks = (Check("a", 0.1234567, "at most 1", True), Check("b", math.inf, "above 0", True))
    entry = Record(
        kind="experiment",
        statement='A "quoted" statement.',
        verdict="holds",
        settings={"seed": 0, "beta": "inf"},
        checks=checks,
        curves=(Curve("accuracy", "model", (1.0, 2.0), (0.5, 0.25)),),
        variation=Variation(command="clearhead lab a --beta 2", verdict="refuted", failed=checks[:1]),
    )
    read = from_fields(record.json.loads(to_text({"a": entry}))["a"])
    assert read.checks[0].value == 0.123457
    assert read.checks[1] == checks[1]
    assert (read.curves, read.settings) == (entry.curves, entry.settings)
    assert read.variation.failed == read.checks[:1]
    assert to_text({"a": read}) == to_text({"a": entry})


def test_value_by_name():
    entry = recorded()["temperature"]
    assert entry.value("beta = 1: sum over the keys") == pytest.approx(1)
    with pytest.raises(LookupError, match="no recorded check named 'sum'; the checks are"):
        entry.value("sum")


def test_record_of_a_finding_has_the_default_settings():
    result = Result((Check("a", 1.0, "= 1", True),))
    entry = record.record(Finding(CLAIMS["hard-and-soft"], result))
    assert entry.settings["beta"] == "inf"
    assert entry.verdict == "holds"
