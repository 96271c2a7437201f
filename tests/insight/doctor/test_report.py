import json

import pytest

from clearhead.insight.doctor.report import Finding, Report

REPORT = Report(
    "my:Model",
    "forward(x)",
    (
        Finding("causality", "fine", "nothing moves"),
        Finding("order", "fine", "noticed"),
        Finding("order", "warning", "not noticed"),
        Finding("padding", "fault", "leaks"),
    ),
)


def test_faults_and_warnings_are_counted():
    assert [finding.check for finding in REPORT.faults] == ["padding"]
    assert REPORT.summary() == "1 fault, 1 warning"
    assert Report("m", "c", ()).summary() == "no faults, no warnings"


def test_a_check_is_found_by_its_name_the_worst_first():
    assert REPORT["order"].verdict == "warning"
    assert REPORT["causality"].verdict == "fine"
    with pytest.raises(LookupError, match="no check 'ordre'; there is causality, order, padding"):
        REPORT["ordre"]


def test_the_table_has_a_line_for_each_finding():
    lines = str(REPORT).splitlines()
    assert lines[0] == "my:Model: forward(x)"
    assert [line.split()[0] for line in lines[2:6]] == ["fine", "fine", "warning", "fault"]
    assert all(finding.text in line for finding, line in zip(REPORT.findings, lines[2:], strict=False))


def test_programs_get_everything():
    read = json.loads(json.dumps(REPORT.to_dict()))
    assert (read["faults"], read["warnings"], len(read["findings"])) == (1, 1, 4)
    assert read["findings"][3] == {"check": "padding", "verdict": "fault", "text": "leaks"}
