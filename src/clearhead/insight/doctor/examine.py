"""The examination: every check of anybody's module, in the order in which one thing explains the next."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from clearhead.insight.doctor import causality, gradient, order, padding, scores
from clearhead.insight.doctor.call_plan import CallableModule, blamed, call, said
from clearhead.insight.doctor.module_under_test import unwrapped
from clearhead.insight.doctor.padding import groups
from clearhead.insight.doctor.report import Finding, Report
from clearhead.insight.doctor.scores import check_rows

Check = Callable[[], list[Finding]]
INNER = ("padding", "empty rows", "weights", "examples", "order", "scale", "norms", "gradient", "dtype")
"""what needs finite numbers"""


def examine(
    module: nn.Module,
    *,
    causal: bool = True,
    width: int | None = None,
    length: int | None = None,
    name: str | None = None,
) -> Report:
    """What is wrong with a module, found from outside: print() the report, or ask report.faults.

    It is called with ids below the size of its first nn.Embedding, or else with features; `width` and `length` say how
    wide and how long if that can't be found. The module itself is not changed: a copy of it is examined.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"examine needs an nn.Module, got {type(module).__name__}; pass the module itself")
    for what, number, least in (("width", width, 1), ("length", length, 3)):
        if number is not None and number < least:
            raise ValueError(f"{what} must be at least {least}, got {number}; leave it out to let the doctor find one")
    name = name or type(unwrapped(module)).__name__
    with blamed(name, "it is examined"):
        return examined(module, call(module, width, length), causal, name)


def examined(module: nn.Module, called: CallableModule, causal: bool, name: str) -> Report:
    if (changing := order.check_again(called.subject)) is not None:
        findings = [changing, *unchecked([*["causality"] * causal, *INNER], "its answers differ from call to call")]
        return reported(module, called, findings, name)
    called = padding.with_required_masks(called)
    findings = found("answer", lambda: [order.check_answer(called.subject)])
    if causal:
        called = replace(called, subject=causality.with_causal_mask(called))
        findings += found("causality", lambda: [causality.check_causality(called)])
    if called.subject.answer(called.subject.draw(0)).isfinite().all():
        findings += inner_findings(called, causal)
    else:
        findings += unchecked(INNER, "the answer is not finite")
    return reported(module, called, findings, name)


def unchecked(checks: Sequence[str], why: str) -> list[Finding]:
    return [Finding(check, "not checked", why) for check in checks]


def reported(module: nn.Module, called: CallableModule, findings: list[Finding], name: str) -> Report:
    """With the check that calls nothing."""
    everything = (*findings, *gradient.check_saving(module))
    return Report(name, called.describe(), everything)


def inner_findings(called: CallableModule, causal: bool) -> list[Finding]:
    subject = called.subject
    solved = [padding.solve(called, group) for group in groups(called)]
    known = [group for group, _ in solved if group.encoding is not None]
    checks: dict[str, Check] = {
        "padding": lambda: padding.check_padding(called, solved),
        "empty rows": lambda: [causality.check_empty_rows(subject, known)],
        "weights": lambda: [check_rows(subject)],
        "examples": lambda: [order.check_examples(subject)],
        "order": lambda: order.check_order(subject, causal),
        "scale": lambda: scores.check_scores(subject),
        "norms": lambda: [gradient.check_norms(subject)],
        "gradient": lambda: gradient.check_gradient(subject),
        "dtype": lambda: gradient.check_precision(called),
    }
    return [finding for name, check in checks.items() for finding in found(name, check)]


def found(name: str, check: Check) -> list[Finding]:
    """What a check finds; the module may break in the middle of it, and the others go on."""
    try:
        return check()
    except Exception as error:
        return [Finding(name, "not checked", f"it breaks here: {said(error)}")]
