"""clearhead.examine: runs every check on a module and reports the findings."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from clearhead.insight.doctor import causality, gradient, lengths, padding, scores
from clearhead.insight.doctor.call_plan import GivenInputs, prepare
from clearhead.insight.doctor.inputs import ImageInput
from clearhead.insight.doctor.module_under_test import (
    ModuleUnderTest,
    approximate_change,
    has_active_dropout,
    isolated_state,
    main_output,
    output_change,
    output_tensors,
    unwrap_compiled,
)
from clearhead.insight.doctor.report import Finding, Report, as_value_error, error_summary
from clearhead.interception import ModuleStack, RunningModule

Check = Callable[[], list[Finding]]
FINITE_CHECKS = (
    "padding",
    "fully masked rows",
    "attention weights",
    "heads",
    "dependency",
    "batch",
    "order",
    "length",
    "scale",
    "norms",
    "gradient",
    "dtype",
)
"""checks that need a finite output"""
STATEFUL = "it keeps state between calls, or draws random numbers outside torch; make it a function of its input"


def examine(
    module: nn.Module,
    inputs: GivenInputs | None = None,
    *,
    causal: bool = True,
    width: int | None = None,
    length: int | None = None,
    loss: lengths.LossFn | None = None,
    name: str | None = None,
) -> Report:
    """Finds faults of a transformer from outside: print() the report, or read report.faults.

    The module is called with token ids if it has an nn.Embedding, and with features or images otherwise; `width` and
    `length` set the size of features and the number of tokens. `inputs` are your own instead: a tuple of positional
    arguments, a mapping of names, or a tuple that ends with one. `causal=False` is for bidirectional models.
    `loss(logits, ids)` is checked for its shift. A copy is examined; the module itself does not change.
    """
    if not isinstance(module, nn.Module):
        hint = "; pass an instance, not the class" if isinstance(module, type) else ""
        raise ValueError(f"examine() needs an nn.Module, got {type(module).__name__}{hint}")
    for option, value, minimum in (("width", width, 1), ("length", length, 3)):
        if value is not None and value < minimum:
            raise ValueError(f"{option} must be at least {minimum}, got {value}")
    name = name or type(unwrap_compiled(module)).__name__
    with as_value_error(f"examining {name}"):
        under_test, findings = examine_calls(prepare(module, width, length, inputs), causal, loss)
        sizes = [kind.image_size for kind in under_test.plan.inputs.values() if isinstance(kind, ImageInput)]
        if sizes and any(f.verdict == "fault" and f.check == "gradient" for f in findings) and inputs is None:
            under_test, findings = examine_larger_images(module, under_test, findings, sizes[0])
        findings += [*gradient.check_saving(unwrap_compiled(module), module), gradient.check_shared_modules(module)]
        return Report(name, under_test.describe_call(), tuple(findings))


def examine_larger_images(
    module: nn.Module, under_test: ModuleUnderTest, findings: list[Finding], image_size: int
) -> tuple[ModuleUnderTest, list[Finding]]:
    """The examination with a larger image, if all gradients arrive there: a small one may leave a single token."""
    for size in (4 * image_size, 2 * image_size):
        try:
            larger = prepare(module, None, None, image_size=size)
        except ValueError:  # the module has a fixed image size
            continue
        if not any(finding.verdict == "fault" for finding in gradient.check_gradient(larger)):
            return examine_calls(larger, True, None)
    return under_test, findings


def examine_calls(
    module: ModuleUnderTest, causal: bool, loss: lengths.LossFn | None
) -> tuple[ModuleUnderTest, list[Finding]]:
    """Runs all checks that call the module. Returns the findings, and the module with the masks that were passed."""
    if (stateful := check_repeatable(module)) is not None:
        skipped = [*["causality"] * causal, *FINITE_CHECKS]
        return module, [stateful, *not_checked(skipped, "the outputs of identical calls differ")]
    module = padding.with_required_masks(module)
    findings = run_check("output", lambda: [check_output(module)])
    if causal:
        module = causality.with_causal_mask(module)
        findings += run_check("causality", lambda: [causality.check_causality(module)])
    else:
        findings += run_check("causality", lambda: present(causality.check_bidirectional(module)))
    if module.run(module.sample_inputs(0)).isfinite().all():
        is_causal = causal and not any(finding.verdict == "fault" for finding in findings)
        findings += examine_finite(module, causal, is_causal, loss)
    else:
        findings += not_checked(FINITE_CHECKS, "the output is not finite")
    return module, findings


def examine_finite(
    module: ModuleUnderTest, causal: bool, is_causal: bool, loss: lengths.LossFn | None
) -> list[Finding]:
    """`causal`: whether the module is meant to be; `is_causal`: whether it is."""
    tried = [padding.find_convention(module, group) for group in padding.mask_groups(module)]
    known = [group for group, _ in tried if group.convention is not None]
    checks: dict[str, Check] = {
        "causality": lambda: check_masked_causality(module, known) if is_causal else [],
        "padding": lambda: padding.check_padding(module, tried) + check_more_padding(module, known),
        "fully masked rows": lambda: [padding.check_fully_masked_rows(module, known)],
        "attention weights": lambda: [scores.check_weights(module)],
        "heads": lambda: [scores.check_heads(module)],
        "dependency": lambda: causality.check_dependency(module, causal),
        "batch": lambda: [check_batch(module)],
        "order": lambda: causality.check_order(module, causal),
        "length": lambda: [lengths.check_length(module, is_causal)],
        "cache": lambda: present(lengths.check_cache(module) if is_causal else None),
        "loss": lambda: present(lengths.check_loss(module, loss) if causal else None),
        "patches": lambda: present(check_patches(module)),
        "logits": lambda: present(check_logits(module)),
        "input": lambda: present(check_input(module)),
        "scale": lambda: scores.check_scale(module),
        "norms": lambda: [gradient.check_norms(module)],
        "gradient": lambda: gradient.check_gradient(module),
        "dtype": lambda: gradient.check_dtypes(module),
    }
    return [finding for name, check in checks.items() for finding in run_check(name, check)]


def present(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]


def check_masked_causality(module: ModuleUnderTest, groups: list[padding.MaskGroup]) -> list[Finding]:
    for group in groups:
        if group.sequence == module.plan.main and not set(group.names) & set(module.plan.causal_masks):
            masks = group.masks(torch.ones(padding.BATCH_SIZE, module.length, dtype=torch.bool))
            if finding := causality.check_masked_causality(module, masks, str(group)):
                return [finding]
    return []


def check_more_padding(module: ModuleUnderTest, groups: list[padding.MaskGroup]) -> list[Finding]:
    return [finding for group in groups if (finding := lengths.check_more_padding(module, group))][:1]


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
        operation = causality.first_mixing(module, inputs, changed, torch.arange(len(before)) > 0)
        return Finding("batch", "fault", f"{text}: examples first mix in {operation or 'forward()'}")
    if not module.plan.batch_first:
        modules = [path for path, part in module.model.named_modules() if getattr(part, "batch_first", True) is False]
        where = f" in {modules[0]}" if modules and modules[0] else ""
        text = "examples are independent if inputs are (length, batch, ...): intended, or is batch_first=True missing"
        return Finding("batch", "warning", f"{text}{where}?")
    rolled = module.run({name: x.roll(1, 0) for name, x in inputs.items()})
    change = approximate_change(before.roll(1, 0), rolled)
    is_random = output_change(before, module.run(inputs, seed=1)).any()
    if change.any() and not is_random and not module.plan.constants:
        text = (
            f"outputs change by {change.max().item():.2g} when the examples are reordered: they depend on the position"
        )
        return Finding("batch", "fault", f"{text} in the batch; is an index of the wrong axis embedded?")
    return Finding("batch", "fine", "examples of a batch are independent")


def check_logits(module: ModuleUnderTest) -> Finding | None:
    """Warns about probabilities and rectified values where a loss expects logits."""
    outputs = [module.run(module.sample_inputs(seed)) for seed in range(2)]
    output, check = torch.cat(outputs), "logits"
    twice = scores.record_scores(module)[0].softmaxed_twice
    if "forward()" in twice:
        return Finding(
            check, "warning", "a softmax is applied to the result of a softmax: cross_entropy expects logits"
        )
    if output.shape[-1] < 2 or (output < 0).any():
        return None
    if torch.allclose(output.sum(-1), torch.ones(()).to(output), atol=1e-3):
        text = "outputs are probabilities, which sum to 1: F.cross_entropy applies its own softmax; return the logits"
        return Finding(check, "warning", f"{text}, unless your loss expects them")
    share = (output == 0).double().mean().item()
    if MIN_ZEROS < share < 1:
        text = f"no output is negative, and {share:.0%} are 0: is there a relu on the logits?"
        return Finding(check, "warning", text)
    return None


MIN_ZEROS = 0.1


def check_input(module: ModuleUnderTest) -> Finding | None:
    """Warns if forward() modifies a tensor of the caller."""
    arguments = module.arguments(module.sample_inputs(0), {})
    tensors = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    with torch.no_grad(), isolated_state(module.dtype, 0):
        module.model(**arguments)
    for name, x in tensors.items():
        changed = int((arguments[name] != x).sum()) if arguments[name].shape == x.shape else x.numel()
        if changed:
            text = f"forward() modifies {changed} of {x.numel()} values of {name} in place"
            return Finding("input", "warning", f"{text}, which the caller may still need: write x = x + y, not x += y")
    return None


def check_patches(module: ModuleUnderTest) -> Finding | None:
    """The pixels that each of the first tokens depends on: a rectangle in all channels, unless patches are wrong."""
    kind = module.plan.inputs[module.plan.main]
    if not isinstance(kind, ImageInput) or len(module.plan.inputs) > 1:
        return None
    images = module.sample_inputs(0, 2)[module.plan.main].to(module.dtype).requires_grad_()
    tokens: list[tuple[str, Tensor]] = []

    def keep(running: RunningModule, output: object) -> None:
        found = [x for x in output_tensors(output) if x.dim() == 3 and x.shape[1] > 3 and x.requires_grad]
        tokens.extend((running.path, x) for x in found if len(x) == len(images) and not tokens)

    with torch.enable_grad(), isolated_state(module.dtype, 0), ModuleStack(module.model, on_exit=keep).tracking():
        main_output(module.model(**{module.plan.main: images}))
        if not tokens:
            return None
        path, first = tokens[0]
        middle = first.shape[1] // 2
        (gradient,) = torch.autograd.grad(first[:, middle].square().sum(), images, retain_graph=True, allow_unused=True)
        (every,) = torch.autograd.grad(first.square().sum(), images, allow_unused=True)
    return patch_finding(path, middle, gradient, every)


def patch_finding(path: str, token: int, gradient: Tensor | None, every: Tensor | None) -> Finding | None:
    if gradient is None or every is None or not gradient.any():
        return None
    used = (gradient != 0).any(0)  # (C,H,W)
    rows, columns = used.any(0).any(1).nonzero().flatten(), used.any(0).any(0).nonzero().flatten()
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    where = f"token {token} of {path} depends on {int(used.any(0).sum())} pixels"
    if not used.flatten(1).any(1).all() or used.any(0).sum() < 0.5 * height * width:
        text = f"{where} of {int(used.flatten(1).any(1).sum())} of {len(used)} channels, which are no square"
        return Finding("patches", "warning", f"{text}: are patches made by view() or reshape() without permute()?")
    if width == used.shape[2] and height <= used.shape[1] // 4:
        return Finding(
            "patches", "warning", f"{where}, which are whole rows of the image: are they meant to be patches?"
        )
    area = (every != 0).any(0).any(0)
    box = [int(area.any(axis).nonzero().max() - area.any(axis).nonzero().min()) + 1 for axis in (1, 0)]
    if box[0] * box[1] < MIN_AREA * area.numel():
        text = (
            f"tokens depend on {box[0]} x {box[1]} of {area.shape[0]} x {area.shape[1]} pixels: is the border cut off?"
        )
        return Finding("dependency", "warning", text)
    return None


MIN_AREA = 0.8
