"""The shapes of any nn.Module, called with inputs that the doctor infers or with inputs of given sizes.

module_shapes(my_gpt)                                       # inputs inferred from forward() and the layers
module_shapes(my_gpt, sizes=[(2, 16)], dtypes=["long"])     # inputs of these sizes, by position
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.module_under_test import eval_copy, isolated_state, unwrap_compiled
from clearhead.insight.doctor.report import as_value_error, error_summary
from clearhead.models.recorder import record
from clearhead.models.shapes import Shapes

DTYPES = {"float": torch.float32, "float32": torch.float32, "long": torch.long, "int": torch.long, "bool": torch.bool}


def module_shapes(
    module: nn.Module,
    *,
    batch: int = 1,
    width: int | None = None,
    length: int | None = None,
    sizes: Sequence[tuple[int, ...]] = (),
    dtypes: Sequence[str] = (),
) -> Shapes:
    """The shape of every tensor in a forward pass of a copy of the module in eval mode."""
    inner = unwrap_compiled(module)
    with as_value_error(f"recording the shapes of {type(inner).__name__}"):
        return record_shapes(inner, batch, width, length, sizes, dtypes)


def record_shapes(
    inner: nn.Module,
    batch: int,
    width: int | None,
    length: int | None,
    sizes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
) -> Shapes:
    arguments: dict[str, Any]
    batch_size: int | None
    if sizes:
        model: nn.Module = eval_copy(inner).cpu()
        inputs = {
            f"input {i}" if len(sizes) > 1 else "input": x for i, x in enumerate(make_inputs(model, sizes, dtypes), 1)
        }
        arguments, dtype, batch_size = {}, torch.float32, None  # the batch axis is not known
    else:
        under_test = prepare(inner, width, length)
        model, dtype, batch_size = under_test.model, under_test.dtype, batch
        arguments = under_test.arguments(under_test.sample_inputs(0, batch), {})
        inputs = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}

    def forward() -> Any:
        return model(**arguments) if arguments else model(*inputs.values())

    try:
        with isolated_state(dtype, seed=0):
            tensors = record(model, inputs, forward)
    except Exception as error:
        shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs.values())
        raise ValueError(f"{type(inner).__name__} does not take {shapes}: {error_summary(error)}") from None
    return Shapes(
        config=type(inner).__name__,
        batch=batch_size,
        tensors=tuple(tensors),
        parameters=sum(p.numel() for p in inner.parameters()),
        multiply_adds=sum(tensor.multiply_adds for tensor in tensors),
    )


def make_inputs(model: nn.Module, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[Tensor]:
    """Zeros for ids, True for masks, random features; by default, inputs (B,L) of a model with embeddings are ids."""
    for name in dtypes:
        if name not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if len(dtypes) > len(sizes):
        raise ValueError(f"every dtype needs an input, got {len(sizes)} inputs and {len(dtypes)} dtypes")
    has_embedding = any(isinstance(module, nn.Embedding) for module in model.modules())
    inputs = []
    for i, size in enumerate(sizes):
        guess = "long" if has_embedding and len(size) <= 2 else "float"
        dtype = DTYPES[dtypes[i] if i < len(dtypes) else guess]
        if dtype.is_floating_point:
            inputs.append(torch.randn(size, generator=torch.Generator().manual_seed(0)))
        else:
            inputs.append(torch.ones(size, dtype=dtype) if dtype == torch.bool else torch.zeros(size, dtype=dtype))
    return inputs
