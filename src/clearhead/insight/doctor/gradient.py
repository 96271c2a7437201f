"""Training: gradients for every parameter, shared norms, reduced precision, and saving."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.call_plan import LENGTH
from clearhead.insight.doctor.inputs import (
    MEMORY_NAME,
    FeatureInput,
    ImageInput,
    ModelInput,
    PerExampleInput,
    TokenIds,
    candidate_widths,
)
from clearhead.insight.doctor.module_under_test import (
    ModuleUnderTest,
    eval_copy,
    isolated_state,
    output_tensors,
    seeded_generator,
)
from clearhead.insight.doctor.report import Finding, Verdict, error_summary, join_names
from clearhead.insight.doctor.scores import KEY_MODULE
from clearhead.interception import ModuleStack, RunningModule

GRADIENT, NORMS, DTYPE, SAVING, SHARED = "gradient", "norms", "dtype", "saving", "shared modules"
NUM_BATCHES, NUM_BATCHES_FOR_EXPERTS = 3, 12
MAX_SHAPES = 3
"""number of parameter shapes for which optional inputs are generated"""
ROUNDING = 1e-11
"""rounding error of a zero gradient in float64, relative to the largest gradient"""
KEY_BIAS = "harmless, since it adds the same number to all scores of a query, which softmax cancels"
Outputs = Callable[[Any], list[Tensor]]


def check_gradient(module: ModuleUnderTest) -> list[Finding]:
    """Backpropagates a random direction of all outputs, for a few batches."""
    try:
        sizes = gradient_sizes(module)
    except Exception as error:
        try:  # some modules can only be trained in train() mode
            module = replace(module, model=eval_copy(module.model).train())
            sizes = gradient_sizes(module)
        except Exception:
            if "not implemented" in str(error):  # by torch, for this device and dtype
                text = f"torch cannot compute gradients here: {error_summary(error)}"
                return [Finding(GRADIENT, "not checked", text)]
            text = f"training fails: with gradients enabled, it raises {error_summary(error)}"
            return [Finding(GRADIENT, "fault", text)]
    if not sizes:
        return [Finding(GRADIENT, "not checked", "the module has no trainable parameters")]
    if any(not size.isfinite().all() for size in sizes.values()) and module.dtype != module.native_dtype:
        module = module.with_dtype(module.native_dtype)  # only float64 may fail
        sizes = gradient_sizes(module)
    if non_finite := [name for name, size in sizes.items() if not size.isfinite().all()]:
        return [Finding(GRADIENT, "fault", f"the gradient of {join_names(non_finite)} is not finite")]
    largest = max(size.max().item() for size in sizes.values())
    threshold = ROUNDING * largest if module.dtype == torch.float64 else 0.0
    zero = [name for name, size in sizes.items() if size.max().item() <= threshold]
    key_biases = [name for name in zero if is_key_bias(name) or (sizes[name].any() and name.endswith("bias"))]
    unreached = still_unreached(module, [name for name in zero if name not in key_biases])
    key_biases += [f"{name} (the keys' third)" for name, size in sizes.items() if has_zero_key_third(size, threshold)]
    findings = unreached_findings(module, unreached)
    if rows := unused_rows(module, sizes, threshold):
        text = f"the last rows of {join_names(rows)} receive no gradient: is width // num_heads rounded down?"
        findings.append(Finding(GRADIENT, "warning", text))
    if key_biases:
        findings.append(
            Finding(GRADIENT, "note", f"the gradient of key bias {join_names(key_biases)} is zero: {KEY_BIAS}")
        )
    return findings or [Finding(GRADIENT, "fine", f"a finite gradient reaches all {len(sizes)} parameters")]


def unreached_findings(module: ModuleUnderTest, unreached: list[str]) -> list[Finding]:
    findings = []
    experts = expert_lists(module) if unreached else set()
    unselected = [name for name in unreached if any(parent in experts for parent, _ in list_entries(name))]
    if unselected:
        text = (
            f"no gradient reaches {join_names(unselected)}, but other members of its list receive one in some batches"
        )
        findings.append(Finding(GRADIENT, "warning", f"{text}: are these experts that no token selected?"))
    runs = count_runs(module) if unreached else Counter()
    idle = [name for name in unreached if name not in unselected and not runs[name.rpartition(".")[0]]]
    if idle:
        text = (
            f"{join_names(collapsed(module, idle))} does not run with these inputs, so its parameters get no gradient"
        )
        findings.append(Finding(GRADIENT, "warning", f"{text}: is it unused?"))
    if unused := [name for name in unreached if name not in unselected and name not in idle]:
        names = join_names(collapsed(module, unused), 5)
        text = f"no gradient reaches {names}: unused, detached, or behind a non-differentiable operation"
        findings.append(Finding(GRADIENT, "fault", text + break_of_graph(module, runs)))
    return findings


def collapsed(module: ModuleUnderTest, names: list[str]) -> list[str]:
    """The same parameters, with a module's path in place of the names of all its parameters."""
    remaining, paths = list(names), []
    for path, part in module.model.named_modules():
        inside = [f"{path}.{name}" if path else name for name, p in part.named_parameters() if p.requires_grad]
        if path and len(inside) > 1 and set(inside) <= set(remaining):
            paths.append(path)
            remaining = [name for name in remaining if name not in inside]
    order = {name: i for i, name in enumerate(names)}
    first = {path: min(i for name, i in order.items() if name.startswith(f"{path}.")) for path in paths}
    return sorted([*paths, *remaining], key=lambda name: first.get(name, order.get(name, 0)))


def break_of_graph(module: ModuleUnderTest, runs: Counter[str]) -> str:
    """The last module whose output has a gradient, if the output of the whole has none."""
    last: list[str] = []

    def keep(running: RunningModule, output: Any) -> None:
        last.extend([running.path] * any(tensor.requires_grad for tensor in output_tensors(output)))

    stack = ModuleStack(module.model, on_exit=keep)
    with torch.enable_grad(), isolated_state(module.dtype, 0), stack.tracking():
        output = module.model(**module.arguments(module.sample_inputs(0), {}))
    if not last or any(tensor.requires_grad for tensor in output_tensors(output)):
        return ""
    return f"; the output has no gradient at all, and {last[-1]} is the last module whose output has one"


def unused_rows(module: ModuleUnderTest, sizes: dict[str, Tensor], threshold: float) -> list[str]:
    """Weights of linear layers whose last rows get no gradient though all others do: no part of the module reads them.

    Rows in other places may belong to a ReLU that is never active."""
    linear = {f"{path}.weight" for path, part in module.model.named_modules() if isinstance(part, nn.Linear)}
    found = []
    for name, size in sizes.items():
        if name in linear and len(size) > 2:
            is_zero = size.amax(1) <= threshold
            first = int(is_zero.int().argmax())
            if is_zero.any() and 2 * first >= len(size) and is_zero[first:].all():
                found.append(name)
    return found if len(found) > 1 else []


def gradient_sizes(module: ModuleUnderTest, outputs: Outputs = output_tensors) -> dict[str, Tensor]:
    """The largest |gradient| of each element over all batches; zeros where there is no gradient."""
    sizes = {name: torch.zeros_like(p) for name, p in module.model.named_parameters() if p.requires_grad and p.numel()}
    for batch in range(NUM_BATCHES):
        for name, gradient in batch_gradients(module, batch, outputs).items():
            if name in sizes:
                sizes[name] = torch.maximum(sizes[name], gradient.abs().nan_to_num(torch.inf))
    return sizes


def batch_gradients(module: ModuleUnderTest, batch: int, outputs: Outputs) -> dict[str, Tensor]:
    parameters = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), isolated_state(module.dtype, batch):
        tensors = outputs(module.model(**module.arguments(module.sample_inputs(batch), {}))) if parameters else []
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if not tensors:
            return {}
        directions = [
            torch.randn(tensor.shape, generator=seeded_generator(batch, 7), dtype=torch.float64).to(tensor)
            for tensor in tensors
        ]
        gradients = torch.autograd.grad(tensors, list(parameters.values()), directions, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def expert_lists(module: ModuleUnderTest) -> set[str]:
    """Module lists, such as experts, whose members get gradients as a whole in some batches and not in others."""
    try:
        reached = [
            {name for name, gradient in batch_gradients(module, batch, output_tensors).items() if gradient.any()}
            for batch in range(NUM_BATCHES_FOR_EXPERTS)
        ]
    except Exception:  # a module may fail with other inputs
        return set()
    always, ever = set.intersection(*reached), set().union(*reached)
    always_used = {member for name in always for _, member in list_entries(name)}
    return {parent for name in ever - always for parent, member in list_entries(name) if member not in always_used}


def list_entries(name: str) -> list[tuple[str, str]]:
    """layers.0.experts.3.weight -> (layers, layers.0), (layers.0.experts, layers.0.experts.3)"""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[: i + 1])) for i, part in enumerate(parts) if part.isdigit()]


def still_unreached(module: ModuleUnderTest, names: list[str]) -> list[str]:
    """The parameters that receive no gradient in train() mode or with optional inputs either."""
    for other in other_uses(module, names) if names else ():
        try:
            sizes = gradient_sizes(other, nested_tensors)
        except Exception:  # the module does not accept this input
            continue
        names = [name for name in names if not sizes[name].any()]
    return names


def other_uses(module: ModuleUnderTest, names: list[str]) -> Iterator[ModuleUnderTest]:
    """The module in train() mode, alone and with each optional input: an encoder's output, or ids and features that fit
    the parameters of these names."""
    training = replace(module, model=eval_copy(module.model).train())
    yield training
    plan, parameters = module.plan, inspect.signature(module.model.forward).parameters
    filled = {*plan.inputs, *plan.aliases, *plan.masks, *plan.flags, *plan.none_args}
    for name in (name for name, parameter in parameters.items() if parameter.default is None and name not in filled):
        is_memory = MEMORY_NAME.fullmatch(name.lower())
        kinds: list[ModelInput] = (
            [*map(FeatureInput, candidate_widths(module.model))] if is_memory else fitting_inputs(module, names)
        )
        for kind in kinds:
            lengths = {**plan.lengths, name: LENGTH if is_memory else module.length or LENGTH}
            yield training.with_plan(inputs={**plan.inputs, name: kind}, lengths=lengths)


def fitting_inputs(module: ModuleUnderTest, names: list[str]) -> list[ModelInput]:
    """Ids for these parameters as embeddings, features for them as linear layers; per token and per example."""
    shapes = [p.shape for name, p in module.model.named_parameters() if name in names and p.dim() == 2]
    tokens: list[TokenIds | FeatureInput] = []
    for rows, columns in list(dict.fromkeys(shapes))[:MAX_SHAPES]:
        tokens += [TokenIds(rows), FeatureInput(columns)]
    return [*tokens, *map(PerExampleInput, tokens)]


def nested_tensors(output: Any) -> list[Tensor]:
    """All floating-point tensors that a module returns, at any depth of lists and dicts."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    nested = (x for part in parts if not isinstance(part, Tensor) for x in nested_tensors(part))
    return [*output_tensors(output), *nested]


def is_key_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias")) and KEY_MODULE.fullmatch(name.lower()[: -len("_bias")]) is not None


def has_zero_key_third(size: Tensor, threshold: float) -> bool:
    """Whether a joint bias of queries, keys and values has a gradient in the first and last third only."""
    if size.dim() != 1 or len(size) % 3 or not threshold:
        return False
    queries, keys, values = size.chunk(3)
    return bool(keys.max() <= threshold < min(queries.max(), values.max()))


def check_norms(module: ModuleUnderTest) -> Finding:
    """Warns about a norm that runs twice in one pass of its block, with the same scale and shift."""
    runs = count_runs(module)
    norms = [path for path, part in module.model.named_modules() if is_norm(part)]
    shared = [path for path in norms if runs[path] > max(1, *(runs[parent] for parent in parents(path)))]
    if shared:
        text = f"{join_names(shared)}: {runs[shared[0]]} runs per forward pass"
        return Finding(NORMS, "warning", f"{text}; is the norm shared on purpose, or is one missing?")
    return Finding(
        NORMS, "fine", f"each of {len(norms)} norm layers runs once per block" if norms else "no norm layers were found"
    )


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def parents(path: str) -> list[str]:
    """All modules that contain it. A shared block that runs twice runs its norms twice."""
    parts = path.split(".")
    return ["", *(".".join(parts[:n]) for n in range(1, len(parts)))]


def count_runs(module: ModuleUnderTest) -> Counter[str]:
    """How often each submodule runs in one call."""
    runs: Counter[str] = Counter()

    def counter(path: str) -> Any:
        def hook(*_: Any) -> None:
            runs[path] += 1

        return hook

    hooks = [part.register_forward_pre_hook(counter(path)) for path, part in module.model.named_modules()]
    try:
        with torch.no_grad(), isolated_state(module.dtype, 0):
            module.model(**module.arguments(module.sample_inputs(0), {}))
    finally:
        for hook in hooks:
            hook.remove()
    return runs


UNSUPPORTED = ("not implemented for", "not supported", "unsupported dtype")
"""parts of torch's message when an operation lacks a dtype on the CPU"""


def check_dtypes(module: ModuleUnderTest) -> list[Finding]:
    """Runs the module in bfloat16 and float16; hard-coded dtypes inside fail, or silently change the output's dtype."""
    findings = []
    if module.float64_error:
        text = f"fails in float64: {module.float64_error}; create tensors in the dtype of the input"
        findings.append(Finding(DTYPE, "warning", text))
    for dtype in (torch.bfloat16, torch.float16):
        finding = check_dtype(module, dtype)
        findings += [finding] if finding else []
    return findings or [Finding(DTYPE, "fine", "outputs keep the dtype: float64, bfloat16 and float16")]


def check_dtype(module: ModuleUnderTest, dtype: torch.dtype) -> Finding | None:
    name, inputs = str(dtype).removeprefix("torch."), module.sample_inputs(0)
    try:
        output = module.with_dtype(dtype).run(inputs)
    except Exception as error:
        if any(words in str(error).lower() for words in UNSUPPORTED):
            return None
        text = f"fails in {name}: {error_summary(error)}; create masks and buffers in the dtype of the input"
        return Finding(DTYPE, "warning", text)
    if output.dtype != dtype:
        text = f"{name} becomes {str(output.dtype).removeprefix('torch.')} inside"
        return Finding(
            DTYPE, "warning", f"{text}: intended for logits, or a hard-coded dtype that costs time and memory?"
        )
    has_images = any(isinstance(kind, ImageInput) for kind in module.plan.inputs.values())
    if not output.isfinite().all() and module.run(inputs).isfinite().all() and not has_images:
        text = f"the output is not finite in {name}: a constant such as -1e9 overflows"
        verdict: Verdict = "fault" if dtype == module.native_dtype else "warning"
        return Finding(DTYPE, verdict, f"{text}; use torch.finfo(dtype).min or a bool mask")
    return None


def check_saving(model: nn.Module, wrapper: nn.Module | None = None) -> list[Finding]:
    """state_dict keys that will not load again, and tensors that neither state_dict() nor .to(device) covers."""
    findings = []
    compiled = [name for name in (wrapper or model).state_dict() if "_orig_mod." in name]
    if compiled:
        text = f"state_dict keys contain _orig_mod. ({join_names(compiled, 1)}) and do not load without torch.compile"
        text += "; use model.compile(), or save model._orig_mod.state_dict()"
        findings.append(Finding(SAVING, "warning", text))
    registered = {id(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    hidden: dict[str, list[str]] = defaultdict(list)
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name not in MODULE_ATTRIBUTES:
                for kind in sorted({unregistered_kind(x) for x in contents(value) if id(x) not in registered}):
                    hidden[kind].append(f"{path}.{name}" if path else name)
    if hidden["trainable"]:
        text = f"{join_names(hidden['trainable'])} holds modules or parameters in a plain list or dict: they are not "
        text += "trained, not saved, and not moved by .to(device); use nn.ModuleList, nn.ModuleDict or nn.ParameterList"
        findings.append(Finding(SAVING, "fault", text))
    if plain := hidden["frozen"] + hidden["tensor"]:
        text = f"{join_names(plain)} is neither a parameter nor a buffer: not saved, and not moved by .to(device)"
        findings.append(Finding(SAVING, "warning", f"{text}; use register_buffer()"))
    fine = "no _orig_mod. in state_dict keys; all tensors are parameters or buffers"
    return findings or [Finding(SAVING, "fine", fine)]


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""torch's own attributes, among them the registered parameters, buffers and modules"""


def contents(value: Any, depth: int = 3) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors in an attribute: itself, or inside lists, tuples and dicts."""
    if isinstance(value, nn.Module | Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and depth and len(value) <= MAX_ENTRIES:
        for item in value.values() if isinstance(value, dict) else value:
            yield from contents(item, depth - 1)


MAX_ENTRIES = 1000


def unregistered_kind(x: nn.Module | Tensor) -> str:
    if isinstance(x, nn.Module):
        return "trainable" if any(p.requires_grad for p in x.parameters()) else "frozen"
    return "trainable" if isinstance(x, nn.Parameter) and x.requires_grad else "tensor"


def check_shared_modules(model: nn.Module) -> Finding:
    """Warns about a list that contains the same module twice, as after [block] * 3."""
    for path, part in model.named_modules():
        entries = [
            child for child in part._modules.values() if child is not None and any(True for _ in child.parameters())
        ]
        repeats = len(entries) - len({id(child) for child in entries})
        if repeats and isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            text = f"{repeats} of {len(entries)} entries of {path or type(part).__name__} repeat the same module"
            text += ": are weights shared on purpose? [block] * N copies nothing; build each entry in a loop"
            return Finding(SHARED, "warning", text)
    return Finding(SHARED, "fine", "no list contains the same module twice")
