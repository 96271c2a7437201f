import inspect
import math

import pytest

from clearhead import lab
from clearhead.lab import all_claims
from clearhead.lab.claim import (
    SETTING_HELP,
    Result,
    at_least,
    at_most,
    below,
    check_lines,
    check_settings,
    equals,
    limits,
    readable_memory_errors,
    settings,
)

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}


@pytest.mark.parametrize(
    ("check", "passes"),
    [
        (equals("a", 1.0, 1.1, 0.2), True),
        (equals("a", 1.0, 1.1, 0.05), False),
        (at_most("a", 2.0, 2.0), True),
        (at_most("a", 2.1, 2.0), False),
        (at_least("a", 2.0, 2.0), True),
        (at_least("a", 1.9, 2.0), False),
        (at_most("a", math.nan, 2.0), False),
    ],
)
def test_check_passes_within_its_range(check, passes):
    assert check.passed is passes
    assert Result((check,)).verdict == ("holds" if passes else "refuted")


def test_expectation_includes_a_nonzero_tolerance():
    assert equals("a", 3, 3, 0).expectation == "= 3"
    assert equals("a", 3, 3, 1e-9).expectation == "= 3 ± 1e-09"


def test_one_failed_check_refutes_the_claim():
    assert Result((at_most("a", 0.0, 1.0), at_most("b", 2.0, 1.0))).verdict == "refuted"


def test_result_without_checks_is_rejected():
    with pytest.raises(AssertionError, match="needs at least one check"):
        Result(())


NUMBERS = [
    (claim, name)
    for claim in ALL
    for name, parameter in settings(claim).items()
    if not isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(("claim", "name"), NUMBERS, ids=lambda part: getattr(part, "slug", part))
def test_out_of_range_settings_raise_one_line_errors(claim, name):
    minimum, maximum = limits(claim, name)
    for value in (math.nan, minimum - max(1, abs(minimum)), maximum + max(1, maximum)):
        if value in (math.inf, -math.inf) and maximum == math.inf:  # beta may be infinite
            continue
        is_integer = isinstance(settings(claim)[name].default, int)
        if is_integer and math.isnan(value):
            continue
        with pytest.raises(ValueError, match=rf"^{name} of {claim.slug} must be from .* to .*, got ") as caught:
            lab.run(claim.slug, **{name: int(value) if is_integer else value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("claim", "name"), NUMBERS, ids=lambda part: getattr(part, "slug", part))
def test_numeric_settings_have_help_and_accept_their_default(claim, name):
    assert SETTING_HELP[name]
    check_settings(claim, {name: settings(claim)[name].default})


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.slug)
def test_boolean_settings_are_explained_in_the_docstring(claim):
    for name, parameter in settings(claim).items():
        if isinstance(parameter.default, bool):
            assert name in (inspect.getdoc(claim.run) or ""), name


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.slug)
def test_limits_refer_to_existing_settings(claim):
    assert {*claim.minimum, *claim.maximum, *claim.multiple_of} <= set(settings(claim))


@pytest.mark.parametrize(
    ("slug", "changes", "message"),
    [
        ("heads-as-groups", {"num_heads": 3}, "width must be a multiple of num_heads"),
        ("receptive-field", {"width": 7}, r"width of receptive-field must be a multiple of 2, got 7; try width=8"),
        (
            "receptive-field",
            {"kernel_size": 4},
            r"kernel_size of receptive-field must be odd, got 4; try kernel_size=5",
        ),
        ("receptive-field", {"kernel_size": 25}, "num_tokens must be at least kernel_size, got"),
        ("temperature", {"num_keys": 2.5}, "num_keys must be an integer, got 2.5"),
        ("temperature", {"num_keys": True}, "num_keys must be an integer, got True"),
        ("scaled-key", {"alpha": "3"}, "alpha must be a number, got '3'"),
        ("self-weight", {"same_projection": 1}, "same_projection must be True or False, got 1"),
    ],
)
def test_invalid_settings_raise_value_errors(slug, changes, message):
    with pytest.raises(ValueError, match=message):
        lab.run(slug, **changes)


def test_beta_may_be_infinite():
    check_settings(CLAIMS["hard-and-soft"], {"beta": -math.inf})


def test_only_memory_errors_become_value_errors():
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")):
        with pytest.raises(ValueError, match="out of memory"), readable_memory_errors():
            raise error
    with pytest.raises(RuntimeError, match="shapes"), readable_memory_errors():
        raise RuntimeError("shapes do not match")


def test_tables_of_checks_fit_a_terminal():
    long = "the largest difference between a formula and what was measured, over all queries and all keys of a head"
    lines = check_lines([at_most(long, 1.23456789e-15, 1e-12), below("short", 2.0, 1.0)])
    assert max(map(len, lines)) <= 78
    words = " ".join(lines).split()
    assert words == f"measured predicted pass 1.23457e-15 at most 1e-12 {long} FAIL 2 below 1 short".split()
