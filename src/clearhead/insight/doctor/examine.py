"""The examination: every check of anybody's module, in the order in which one thing explains the next."""

from dataclasses import replace

from torch import nn

from clearhead.insight.doctor import calling, causality, gradient, norms, nothing_seen, order, padding, precision
from clearhead.insight.doctor import saving, scores, shown
from clearhead.insight.doctor.report import Finding, Report


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
    called = calling.call(module, width, length)
    findings = [order.check_answer(called.subject), order.check_examples(called.subject)]
    if causal:
        called = replace(called, subject=causality.with_causal_mask(called))
        findings.append(causality.check_causality(called))
    solved = [padding.solve(called, group) for group in padding.groups(called)] if called.subject.has_tokens else []
    known = [group for group, _ in solved if group.encoding is not None]
    findings += padding.check_padding(called, solved)
    findings.append(nothing_seen.check_nothing_seen(called, known))
    findings.append(shown.check_rows(called.subject))
    findings += order.check_order(called.subject, causal)
    findings += scores.check_scores(called.subject)
    findings.append(norms.check_norms(called.subject))
    findings += gradient.check_gradient(called.subject)
    findings += precision.check_precision(called)
    findings += saving.check_saving(module)
    return Report(name or type(module).__name__, called.describe(), tuple(findings))
