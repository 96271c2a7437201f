"""Every planted fault of the catalogue is found and named, and every right module is clean."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from clearhead import examine

FOLDER, PACKAGE = Path(__file__).with_name("catalogue"), "doctor_catalogue"
FAMILIES = ("causal", "padding", "internals", "training", "outputs", "sequences", "decoding")


def families():
    """The files of the catalogue. They import each other, so they are loaded as a package."""
    spec = importlib.util.spec_from_file_location(PACKAGE, FOLDER / "__init__.py")
    sys.modules[PACKAGE] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return [importlib.import_module(f"{PACKAGE}.{name}") for name in FAMILIES]


LOADED = families()
FAULTS = {fault.name: fault for family in LOADED for fault in family.FAULTS}
CONTROLS = {control.name: control for family in LOADED for control in family.CONTROLS}
GAPS = importlib.import_module(f"{PACKAGE}.gaps")
NOT_FOUND = dict.fromkeys(GAPS.NOT_NAMED, "found, but not named") | dict.fromkeys(GAPS.MISSED, "not found yet")
FALSE_ALARMS = dict.fromkeys(GAPS.FALSE_ALARMS, "blamed in error, or refused")


def known_failure(reason):
    return [pytest.mark.xfail(reason=reason, strict=True)] if reason else []


def entries(table, known):
    return [pytest.param(entry, id=name, marks=known_failure(known.get(name))) for name, entry in table.items()]


def examined(entry):
    torch.manual_seed(0)
    return examine(entry.build(), causal=entry.causal, **entry.options)


@pytest.mark.parametrize("fault", entries(FAULTS, NOT_FOUND))
def test_a_planted_fault_is_found_and_named(fault):
    report = examined(fault)
    found = [finding for finding in (*report.faults, *report.warnings) if finding.check == fault.check]
    assert any(fault.word in finding.text for finding in found), report


@pytest.mark.parametrize("control", entries(CONTROLS, FALSE_ALARMS))
def test_a_right_module_is_clean(control):
    report = examined(control)
    assert not report.faults, report
    assert {finding.check for finding in report.warnings} <= set(control.warnings), report


def test_the_catalogue_does_not_shrink():
    assert len(FAULTS) >= 110
    assert len(CONTROLS) >= 60
    assert NOT_FOUND.keys() <= FAULTS.keys()
    assert FALSE_ALARMS.keys() <= CONTROLS.keys()
