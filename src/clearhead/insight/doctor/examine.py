"""clearhead.examine: runs every check on a module and reports the findings."""

from collections.abc import Callable, Sequence

from torch import nn

from clearhead.insight.doctor import causality, gradient, padding, scores
from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.module_under_test import ModuleUnderTest, has_active_dropout, unwrap_compiled
from clearhead.insight.doctor.report import Finding, Report, as_value_error, error_summary
from clearhead.insight.leaks import output_change

Check = Callable[[], list[Finding]]
FINITE_CHECKS = (
    "padding",
    "fully masked rows",
    "attention weights",
    "batch",
    "order",
    "scale",
    "norms",
    "gradient",
    "dtype",
)
"""checks that need a finite output"""
STATEFUL = "it keeps state between calls, or draws random numbers outside torch; make it a function of its input"


def examine(
    module: nn.Module,
    *,
    causal: bool = True,
    width: int | None = None,
    length: int | None = None,
    name: str | None = None,
) -> Report:
    """Finds faults of a transformer from outside: print() the report, or read report.faults.

    The module is called with token ids if it has an nn.Embedding, and with features or images otherwise; `width` and
    `length` set the size of features and the number of tokens. `causal=False` is for bidirectional models. A copy is
    examined; the module itself does not change.
    """
    if not isinstance(module, nn.Module):
        hint = "; pass an instance, not the class" if isinstance(module, type) else ""
        raise ValueError(f"examine() needs an nn.Module, got {type(module).__name__}{hint}")
    for option, value, minimum in (("width", width, 1), ("length", length, 3)):
        if value is not None and value < minimum:
            raise ValueError(f"{option} must be at least {minimum}, got {value}")
    name = name or type(unwrap_compiled(module)).__name__
    with as_value_error(f"examining {name}"):
        under_test = prepare(module, width, length)
        under_test, findings = examine_calls(under_test, causal)
        findings += gradient.check_saving(module)
        return Report(name, under_test.describe_call(), tuple(findings))


def examine_calls(module: ModuleUnderTest, causal: bool) -> tuple[ModuleUnderTest, list[Finding]]:
    """Runs all checks that call the module. Returns the findings, and the module with the masks that were passed."""
    if (stateful := check_repeatable(module)) is not None:
        skipped = [*["causality"] * causal, *FINITE_CHECKS]
        return module, [stateful, *not_checked(skipped, "the outputs of identical calls differ")]
    module = padding.with_required_masks(module)
    findings = run_check("output", lambda: [check_output(module)])
    if causal:
        module = causality.with_causal_mask(module)
        findings += run_check("causality", lambda: [causality.check_causality(module)])
    if module.run(module.sample_inputs(0)).isfinite().all():
        findings += examine_finite(module, causal)
    else:
        findings += not_checked(FINITE_CHECKS, "the output is not finite")
    return module, findings


def examine_finite(module: ModuleUnderTest, causal: bool) -> list[Finding]:
    tried = [padding.find_convention(module, group) for group in padding.mask_groups(module)]
    known = [group for group, _ in tried if group.convention is not None]
    checks: dict[str, Check] = {
        "padding": lambda: padding.check_padding(module, tried),
        "fully masked rows": lambda: [padding.check_fully_masked_rows(module, known)],
        "attention weights": lambda: [scores.check_weights(module)],
        "batch": lambda: [check_batch(module)],
        "order": lambda: causality.check_order(module, causal),
        "scale": lambda: scores.check_scale(module),
        "norms": lambda: [gradient.check_norms(module)],
        "gradient": lambda: gradient.check_gradient(module),
        "dtype": lambda: gradient.check_dtypes(module),
    }
    return [finding for name, check in checks.items() for finding in run_check(name, check)]


def run_check(name: str, check: Check) -> list[Finding]:
    """Runs one check; an exception in the module is reported as a finding, so that the other checks still run."""
    try:
        return check()
    except Exception as error:
        return [
            Finding(name, "not checked", f"the module raised an exception during this check: {error_summary(error)}")
        ]


def not_checked(checks: Sequence[str], reason: str) -> list[Finding]:
    return [Finding(check, "not checked", reason) for check in checks]


def check_repeatable(module: ModuleUnderTest) -> Finding | None:
    """Calls twice with the same input and seed. If the outputs differ, no other check can attribute a change."""
    inputs = module.sample_inputs(0)
    try:
        first, second = module.run(inputs), module.run(inputs)
    except Exception as error:
        return Finding("output", "fault", f"the second call raises {error_summary(error)}: {STATEFUL}")
    if first.shape == second.shape and not output_change(first, second).any():
        return None
    return Finding("output", "fault", f"two calls with the same input and seed differ: {STATEFUL}")


def check_output(module: ModuleUnderTest) -> Finding:
    """Calls twice with the same input and different seeds."""
    inputs = module.sample_inputs(0)
    first, second = module.run(inputs, seed=0), module.run(inputs, seed=1)
    is_finite = first.isfinite()
    if not is_finite.all():
        total = first.shape[1] if first.dim() > 2 else 1
        n = int((~is_finite).flatten(2).any(-1).any(0).sum()) if first.dim() > 2 else 1
        text = f"{n} of {total} outputs are not finite for random input: does a query see no key at all?"
        return Finding("output", "fault", text)
    if output_change(first, second).any():
        if has_active_dropout(module):
            text = "dropout is active in eval() mode; pass training=self.training to F.dropout"
            return Finding("output", "fault", text)
        text = "outputs are random in eval() mode: is the noise intended, or is it a custom dropout?"
        return Finding("output", "warning", text)
    return Finding("output", "fine", "finite, and deterministic in eval() mode")


def check_batch(module: ModuleUnderTest) -> Finding:
    """Changes one example: no other example may change."""
    inputs = module.sample_inputs(0)
    before, changed = module.run(inputs), inputs
    for name in inputs:
        changed = module.replace_tokens(changed, name, 0)
    change = output_change(before, module.run(changed))[1:]
    if change.any():
        example, amount = 1 + int(change.amax(1).argmax()), change.max().item()
        text = f"example {example} changes by {amount:.2g} when example 0 changes"
        return Finding("batch", "fault", f"{text}: a view() or a norm mixes the batch axis")
    if not module.plan.batch_first:
        text = "examples are independent if inputs are (length, batch, ...): intended, or is batch_first=True missing?"
        return Finding("batch", "warning", text)
    return Finding("batch", "fine", "examples of a batch are independent")
