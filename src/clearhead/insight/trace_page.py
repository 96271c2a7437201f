"""A trace in the viewer: as one HTML file, and in the output of a notebook cell.

Dims: B batch, C channels, H heads, Q queries, K keys.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.files import write_atomic
from clearhead.viewer import Description, LayerInfo, document, static_image, trace_view, viewer_frame

if TYPE_CHECKING:
    import numpy as np

    from clearhead.insight.trace import AttentionRecord, AttentionTrace

MAX_NOTEBOOK_BYTES = 6_000_000
"""of the maps in the output of a notebook cell; layers that do not fit are left out"""


def save_page(
    trace: "AttentionTrace", path: Path, description: Description, max_bytes: int, image: Tensor | None
) -> Path:
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the viewer is saved as .html, got {path.name!r}; try {path.stem}.html")
    page = document(*view(trace, description, max_bytes, image), title=f"{description.title} · Clearhead")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode())
    return path


def notebook_page(trace: "AttentionTrace") -> str:
    """The viewer in a frame; "" if no layer fits."""
    description, tensors = view(trace, Description(kind="trace", title="Attention", source="trace"), MAX_NOTEBOOK_BYTES)
    if not description.layers:
        return ""
    maps = [trace[layer.name].weights()[0].detach().float().cpu().numpy() for layer in description.layers]
    return viewer_frame(document(description, tensors, title="Attention"), static_image(maps))


def view(
    trace: "AttentionTrace", description: Description, max_bytes: int, image: Tensor | None = None
) -> tuple[Description, bytes]:
    """What the viewer shows: the description with the layers that fit, and the bytes of a safetensors file.

    image uint8 (C,height,width), or (B,C,height,width)
    """
    records = [record for record in trace.values() if record.num_queries and record.num_keys and record.batch]
    batch = min((record.batch for record in records), default=1)
    pixels = image[None] if image is not None and image.dim() == 3 else image
    if pixels is not None and (pixels.dtype != torch.uint8 or pixels.dim() != 4 or len(pixels) != batch):
        raise ValueError(
            f"image must be uint8 (C,height,width), or (B,C,height,width) for a batch of {batch}, "
            f"got {pixels.dtype} of shape {tuple(pixels.shape)}"
        )
    output = trace.output if isinstance(trace.output, Tensor) and trace.output.dim() == 2 else None
    return trace_view(
        [(layer_info(record, batch), maps_of(record, batch)) for record in records],
        batch,
        max_bytes,
        replace(description, unresolved=tuple(map(str, getattr(trace, "unresolved", ())))),
        pixels=None if pixels is None else pixels.cpu().numpy(),
        logits=None if output is None or len(output) != batch else output.detach().float().cpu().numpy(),
    )


def layer_info(record: "AttentionRecord", batch: int = 1) -> LayerInfo:
    """A layer as the viewer lists it. Windows, several of which belong to one example of the batch, count as heads."""
    note, windows = record.note, record.batch // batch
    if windows > 1:
        counted = f"{windows} windows of {record.num_heads} heads"
        note = f"{note}; {counted}" if note else counted
    return LayerInfo(
        name=record.name,
        kernel=record.kernel,
        heads=windows * record.num_heads,
        queries=record.num_queries,
        keys=record.num_keys,
        note=note,
    )


def maps_of(record: "AttentionRecord", batch: int) -> "Callable[[], np.ndarray]":
    """Computes the weights (B,H,Q,K) of all heads that `layer_info` counts."""
    shape = (batch, -1, record.num_queries, record.num_keys)
    return lambda: record.weights().detach().float().cpu().numpy().reshape(shape)
