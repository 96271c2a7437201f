import math

import pytest

from clearhead.lab.claim import Result, at_least, at_most, equals


@pytest.mark.parametrize(
    ("check", "ok"),
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
def test_a_check_says_whether_its_number_is_as_claimed(check, ok):
    assert check.ok is ok
    assert Result((check,)).verdict == ("holds" if ok else "refuted")


def test_a_tolerance_is_named_where_there_is_one():
    assert equals("a", 3, 3, 0).expectation == "= 3"
    assert equals("a", 3, 3, 1e-9).expectation == "= 3 to 1e-09"


def test_one_number_that_is_off_refutes():
    assert Result((at_most("a", 0.0, 1.0), at_most("b", 2.0, 1.0))).verdict == "refuted"


def test_an_experiment_needs_a_number():
    with pytest.raises(AssertionError, match="proves nothing"):
        Result(())
