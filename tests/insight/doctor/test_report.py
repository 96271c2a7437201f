import json

import pytest

from clearhead.insight.doctor.report import Finding, Report, as_value_error, error_summary

REPORT = Report(
    "my:Model",
    "forward(x)",
    (
        Finding("causality", "fine", "no leak"),
        Finding("order", "fine", "matters"),
        Finding("order", "warning", "does not matter"),
        Finding("padding", "fault", "leaks"),
    ),
)


def test_faults_and_warnings_are_counted():
    assert [finding.check for finding in REPORT.faults] == ["padding"]
    assert REPORT.summary() == "1 fault, 1 warning"
    assert Report("m", "c", ()).summary() == "no faults, no warnings"


def test_indexing_returns_the_worst_finding_of_a_check():
    assert REPORT["order"].verdict == "warning"
    assert REPORT["causality"].verdict == "fine"
    with pytest.raises(LookupError, match=r"no check 'ordre'.* causality, order, padding"):
        REPORT["ordre"]


def test_table_has_one_line_per_finding():
    lines = str(REPORT).splitlines()
    assert lines[0] == "my:Model: forward(x)"
    assert [line.split()[0] for line in lines[2:6]] == ["fine", "fine", "warning", "fault"]
    assert all(finding.text in line for finding, line in zip(REPORT.findings, lines[2:], strict=False))


def test_to_dict_survives_json():
    decoded = json.loads(json.dumps(REPORT.to_dict()))
    assert (decoded["faults"], decoded["warnings"], len(decoded["findings"])) == (1, 1, 4)
    assert decoded["findings"][3] == {
        "check": "padding",
        "verdict": "fault",
        "text": "leaks",
        "docs": "docs/doctor.md#padding",
    }


def test_error_summary_is_one_line_with_the_location_in_user_code():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert error_summary(caught.value).startswith("ZeroDivisionError: division by zero (test_report.py:")
    assert error_summary(RuntimeError("first\nsecond")) == "RuntimeError: first"
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert "(test_report.py:" in error_summary(caught.value)  # and not a location in Python's own files


def test_errors_become_value_errors_that_name_the_action():
    with pytest.raises(ValueError, match="examining GPT failed: RuntimeError: first"), as_value_error("examining GPT"):
        raise RuntimeError("first\nsecond")
