"""`look` on published architectures: does it record every attention call, and are its weights right?

    python benchmarks/zoo.py --results zoo.jsonl      # all architectures: about 15 minutes on one CPU core
    python benchmarks/zoo.py --sample 40              # the sample of the tests: about a minute
    python benchmarks/zoo.py --only bert swin         # architectures whose name contains one of these
    python benchmarks/zoo.py --report zoo.jsonl       # write docs/zoo.md from the results
    python benchmarks/zoo.py --doctor ...             # also examine each model with the doctor (several times slower)

The architectures are listed in zoo_architectures.json. Each is built with tiny random weights (zoo_models.py) and runs
in a process of its own. An independent judge (zoo_judge.py) records what attention really ran; where a model returns
its own eager weights, those of `look` must be equal. Beside `look`: `output_attentions` of Hugging Face,
AttentionExtract of timm, and plain forward hooks.

complete    every judged attention call has a record
notice      a call without a record is listed in `trace.unresolved`, or `look` says that it found no attention
silent      a call without a record, and nothing says so
wrong       a record whose weights are wrong, or a changed output or model
refused     the model runs, but not inside `look`
"""

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import clearhead
from peers import torchvision_or_stand_in
from zoo_judge import Event, Judge, memory
from zoo_models import Entry, build

LIST = Path(__file__).with_name("zoo_architectures.json")
SECONDS = 120
TOLERANCE = 1e-4
SOFTMAX_ROWS = 1e-4


def measure(entry: Entry, examine: bool = False) -> dict[str, Any]:
    model, args, kwargs = build(entry)
    result: dict[str, Any] = {"name": label(entry), "library": entry["library"], "kind": entry["kind"]}
    with torch.no_grad():
        torch.manual_seed(3)
        plain = model(*args, **kwargs)
        state = state_of(model)  # some models change themselves in their first pass
        torch.manual_seed(3)
        result |= judged_look(model, args, kwargs, plain)
        if state_of(model) != state:
            result |= {"class": "wrong", "why": "the model, a random state or a global setting changed"}
        if names := result.pop("names", []):
            interrupted_edit(model, args, kwargs, names[0])
            torch.manual_seed(3)
            model(*args, **kwargs)
            if state_of(model) != state:
                result |= {"class": "wrong", "why": "an exception inside edit left a change behind"}
        result |= peers(entry, model, args, kwargs)
    if examine:
        result["doctor"] = doctor_verdict(model, args, kwargs)
    return result


def judged_look(model: nn.Module, args: Any, kwargs: Any, plain: Any) -> dict[str, Any]:
    """The class of the model, the number of judged and of recorded calls, and what was missed."""
    start = time.perf_counter()
    with Judge() as judge:
        try:
            trace = clearhead.look(model, *args, **kwargs)
        except LookupError as error:
            judged = len(judge.attention())
            notice = {"class": "notice" if judged else "complete", "why": f"{error}"[:300]}
            return {"judged": judged, "recorded": 0, "missed": judged, **notice}
        except Exception as error:
            return {"class": "refused", "judged": len(judge.attention()), "recorded": 0, "why": describe(error)}
    outputs = {memory(record.call.raw_out) for record in trace.values()}
    missed = [event for event in judge.attention() if not event.products & outputs]
    unresolved = getattr(trace, "unresolved", ())
    result = {"judged": len(judge.attention()), "recorded": len(trace), "missed": len(missed)}
    result |= {"unresolved": len(unresolved), "seconds": round(time.perf_counter() - start, 3)}
    result["class"] = "complete" if not missed else "notice" if len(unresolved) >= len(missed) else "silent"
    if missed:
        reasons = [str(item) for item in unresolved][:3]
        result["why"] = f"missed {', '.join(map(describe_event, missed[:4]))}" + (f"; {reasons}" if reasons else "")
    errors = {name: error for name, error in trace.verify().items() if not error < limit(trace[name].out)}
    if errors:
        result |= {"class": "wrong", "why": f"weights @ v differs from the output: {errors}"[:300]}
    if not same(trace.output, plain):
        result |= {"class": "wrong", "why": "the output of the model changed"}
    return result | {"names": list(trace)}


def interrupted_edit(model: nn.Module, args: Any, kwargs: Any, name: str) -> None:
    """A pass that an exception ends in the middle of an edited layer."""

    def fail(weights: Tensor) -> Tensor:
        raise ZeroDivisionError

    with suppress(ZeroDivisionError), clearhead.edit(model, name, pattern=fail):
        model(*args, **kwargs)


def limit(out: Tensor) -> float:
    largest = float(out.abs().max()) if out.numel() else 0.0
    return TOLERANCE * max(1.0, largest) if largest == largest else float("inf")


def describe_event(event: Event) -> str:
    return f"{event.kind} {'x'.join(map(str, event.shape))}"


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def same(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    tensors = ((x, y) for x, y in pairs if isinstance(x, Tensor) and not x.is_nested)
    return all(torch.allclose(x.float(), y.float(), atol=1e-5, equal_nan=True) for x, y in tensors)


def state_of(model: nn.Module) -> Any:
    """Everything that must not change: parameters, hooks, modes, `forward`, random state and switches of torch."""
    modules = [
        (module.training, "forward" in vars(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]
    parameters = [(name, x._version, x.data_ptr(), x.requires_grad) for name, x in model.named_parameters()]
    switches = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()
    stacks = torch.overrides._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return modules, parameters, switches, stacks, torch.get_rng_state().tolist()


# What other tools see on the same models


def peers(entry: Entry, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"hooks": is_complete(lambda: hooked(model, args, kwargs))}
    if entry["library"] == "transformers":
        result["own"] = is_complete(lambda: own_weights(entry, result))
    if entry["library"] == "timm":
        result["own"] = is_complete(lambda: extracted(model, args))
    return result


def is_complete(count: Any) -> bool:
    """Whether a tool returned as many attention tensors as the judge counted in the same pass."""
    try:
        with Judge() as judge, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            num_found = count()
        return num_found >= len(judge.attention()) > 0
    except Exception:  # the tool does not work on this model
        return False


def hooked(model: nn.Module, args: Any, kwargs: Any) -> int:
    """The number of different outputs of any module whose rows sum to 1, as forward hooks see them."""
    found: dict[int, Tensor] = {}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2 and x.numel():
                sums = x.sum(-1)
                if bool(((sums - 1).abs() < SOFTMAX_ROWS).all()) and bool((x >= 0).all()):
                    found[memory(x)] = x

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return len(found)


def own_weights(entry: Entry, result: dict[str, Any]) -> int:
    """output_attentions of the eager implementation. In the same pass, `look` must record the same numbers."""
    eager, args, kwargs = build(entry, "eager")
    trace = clearhead.look(eager, *args, **kwargs, output_attentions=True)
    own: dict[int, Tensor] = {}
    for name, value in trace.output.items():
        if "attentions" in name:
            own |= {memory(x): x for x in tree_leaves(value) if isinstance(x, Tensor)}
    recorded = [record.weights() for record in trace.values()]
    for x in own.values():
        alike = [weights for weights in recorded if weights.shape == x.shape]
        if alike and not any(torch.allclose(w.float(), x.float(), atol=TOLERANCE, equal_nan=True) for w in alike):
            result["differs"] = f"own weights {tuple(x.shape)} differ from those that look recorded"
    return len(own)


def extracted(model: nn.Module, args: Any) -> int:
    from timm.utils import AttentionExtract

    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return len(AttentionExtract(model, method="fx")(*args))


def doctor_verdict(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The faults that the doctor finds in a published model: false alarms, unless docs/doctor.md lists them."""
    try:
        report = clearhead.examine(model, causal=False)
    except Exception as error:
        return {"refused": describe(error)}
    return {"faults": [f"{finding.check}: {finding.text}"[:200] for finding in report.faults]}


# Running many models


def label(entry: Entry) -> str:
    return entry["name"] + (f" ({entry['variant']})" if "variant" in entry else "")


def run_one(entry: Entry, examine: bool, connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        connection.send(measure(entry, examine))
    except Exception as error:
        connection.send(failed(entry, f"the model itself failed: {describe(error)}"))


def failed(entry: Entry, why: str) -> dict[str, Any]:
    identity = {"name": label(entry), "library": entry["library"], "kind": entry["kind"]}
    return identity | {"class": "failed", "why": why, "judged": 0, "recorded": 0}


def run(entry: Entry, examine: bool) -> dict[str, Any]:
    """In a forked process, so that a crash or an endless loop costs one model only."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_one, args=(entry, examine, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else failed(entry, f"took more than {SECONDS} s")
    except EOFError:
        return failed(entry, "the process ended without a result")
    finally:
        process.kill()
        process.join()


def load_list() -> list[Entry]:
    return json.loads(LIST.read_text())["architectures"]


def sample(entries: list[Entry], size: int) -> list[Entry]:
    """Evenly spaced entries of the list, so that all libraries and kinds are in it."""
    return [entries[i * len(entries) // size] for i in range(min(size, len(entries)))]


def preload() -> None:
    torchvision_or_stand_in()
    warnings.simplefilter("ignore")
    import timm  # noqa: F401
    import transformers
    import vit_pytorch  # noqa: F401
    import x_transformers  # noqa: F401
    from transformers import AutoModel, BertModel  # noqa: F401

    transformers.logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="measure this many architectures, evenly spaced in the list")
    parser.add_argument("--only", nargs="+", help="architectures whose name contains one of these")
    parser.add_argument("--shard", default="0/1", help="measure every n-th architecture, as i/n")
    parser.add_argument("--results", type=Path, help="append the results to this file, one JSON object per line")
    parser.add_argument("--doctor", action="store_true", help="also examine each model with the doctor")
    parser.add_argument("--report", type=Path, nargs="+", help="write docs/zoo.md from these results, then exit")
    options = parser.parse_args(arguments)
    if options.report:
        torchvision_or_stand_in()
        from zoo_report import write

        write([json.loads(line) for path in options.report for line in path.read_text().splitlines()])
        return 0
    entries = load_list()
    if options.only:
        entries = [entry for entry in entries if any(part in label(entry) for part in options.only)]
    if options.sample:
        entries = sample(entries, options.sample)
    index, count = map(int, options.shard.split("/"))
    preload()
    bad = 0
    for entry in entries[index::count]:
        result = run(entry, options.doctor)
        bad += result["class"] in ("silent", "wrong", "refused", "failed")
        counts = f"{result['recorded']:>3} of {result['judged']:>3}"
        print(f"{result['class']:<9} {counts}  {result['name']}  {result.get('why', '')}")
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
