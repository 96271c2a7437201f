"""Look inside any PyTorch model: one ordinary forward pass, and the attention of every layer and head.

    trace = look(model, images)
    trace.output                                       # the output of the model
    trace                                              # prints a table: name, kernel, heads, queries x keys
    trace["blocks.3.attn"].weights(head=1, rows=[0])   # (B,1,1,K), computed only now
    trace.verify()                                     # per layer, the largest |weights @ v - output of the kernel|
    trace.plot()                                       # a matplotlib figure of all layers and heads
    trace.save("attention.safetensors")                # the weights of each layer, by name
    trace.save_html("attention.html")                  # the viewer and the weights in one file

Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv width of values.
"""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clearhead.insight.calls import AttentionCall, as_slice, check_heads, check_rows
from clearhead.insight.capture import LOOKED_FOR, Unresolved, capture_attention, join_names, unknown_name
from clearhead.messages import align_columns, html_table, printable
from clearhead.viewer import Description, LayerInfo, document, static_image, trace_view, viewer_frame

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

CHUNK = 2**20
"""the number of weights computed at a time"""
MAX_HTML_BYTES, MAX_NOTEBOOK_BYTES = 64_000_000, 6_000_000
"""of the maps in an HTML file, and in the output of a notebook cell; layers that do not fit are left out"""
TABLE_HEADER = ["name", "kernel", "heads", "queries x keys", "note"]
RIGHT_ALIGNED = {2, 3}
MAX_LISTED = 20
"""the number of unresolved calls that the table lists"""


def look(
    model: nn.Module,
    *args: Any,
    keep: Literal["all", "last"] | Sequence[str] = "all",
    count: bool | None = None,
    **kwargs: Any,
) -> "AttentionTrace":
    """Run model(*args, **kwargs) and record its attention. The model, its output and its gradients do not change.

    `keep` chooses the layers whose tensors are kept: "all", the "last", or a list of names. Attention that was seen but
    could not be followed to its values is in `trace.unresolved`. `count=True` also counts the operators that really
    ran, and finds attention that no Python function called; by default only if the model has scripted modules.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"look needs an nn.Module and its inputs, got {type(model).__name__}")
    if isinstance(keep, str) and keep not in ("all", "last"):
        raise ValueError(f'keep must be "all", "last" or a list of names, got {keep!r}; try keep=[{keep!r}]')
    names: list[str] = []
    records: dict[str, AttentionRecord] = {}

    def receive(name: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
        if keep == "last":
            records.clear()
        if isinstance(keep, str) or name in keep:
            records[name] = AttentionRecord(name, kernel, note, call)
        names.append(name)
        return call.raw_out

    if count is None:
        count = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    with capture_attention(model, receive, count) as capture:
        output = model(*args, **kwargs)
    unresolved = capture.unresolved()
    if not names:
        seen = "; ".join(["", "unresolved", *map(str, unresolved)]) if unresolved else ""
        raise LookupError(f"no attention was found in {type(model).__name__}; looked for {LOOKED_FOR}{seen}")
    for name in () if isinstance(keep, str) else keep:
        if name not in names:
            raise unknown_name(name, names)
    return AttentionTrace(output, records, names, unresolved, count, leading_sizes((args, kwargs)))


@dataclass(frozen=True, eq=False, repr=False)
class AttentionRecord:
    """One attention call of a forward pass. Weights are computed on demand, for the requested heads and rows only."""

    name: str
    """the path of the module, with #2 for the module's second attention call in the pass"""
    kernel: str
    """sdpa, softmax, or nn.MultiheadAttention"""
    note: str
    """remarks about this pass, such as active dropout or a compiled module that ran eagerly"""
    call: AttentionCall

    @property
    def q(self) -> Tensor | None:
        """(B,H,Q,D); None if the model computed its own softmax."""
        return self.call.q

    @property
    def k(self) -> Tensor | None:
        """(B,H,K,D), repeated to the number of query heads; None if the model computed its own softmax."""
        return self.call.k

    @property
    def v(self) -> Tensor:
        """(B,H,K,Dv)"""
        return self.call.v

    @property
    def out(self) -> Tensor:
        """(B,H,Q,Dv): the output that the model received, before the heads are concatenated."""
        self.call.check("raw_out")
        return self.call.arrange_out(self.call.raw_out)

    @property
    def batch(self) -> int:
        return self.call.arrange_out(self.call.alias).shape[0]

    @property
    def num_heads(self) -> int:
        return self.call.arrange_out(self.call.alias).shape[1]

    @property
    def num_queries(self) -> int:
        return self.call.arrange_out(self.call.alias).shape[2]

    @property
    def num_keys(self) -> int:
        return self.call.num_keys

    def weights(self, head: int | Sequence[int] | None = None, rows: Sequence[int] | slice | None = None) -> Tensor:
        """The attention weights before dropout, (B,H,Q,K), or those of some heads and of some rows (queries)."""
        heads = check_heads(head, self.num_heads, self.name)
        indices = torch.tensor(check_rows(rows, self.num_queries, self.name), dtype=torch.long)
        chunk = max(1, CHUNK // max(1, self.batch * len(heads) * self.num_keys))
        if len(indices) <= chunk:
            return self.call.weights(heads, as_slice(indices))
        return torch.cat([self.call.weights(heads, as_slice(part)) for part in indices.split(chunk)], dim=2)

    def gradient(self, score: Tensor) -> Tensor:
        """d score / d out (B,H,Q,Dv), for a pass with gradients enabled. Times vᵀ it is d score / d weights."""
        (gradient,) = torch.autograd.grad(score, self.call.raw_out, retain_graph=True)
        return self.call.arrange_out(gradient)

    def verify(self) -> float:
        """The largest |weights @ v - out|; NaN if one of the two has a NaN."""
        largest, heads, out = self.out.new_zeros(()), list(range(self.num_heads)), self.out
        chunk = max(1, CHUNK // max(1, self.batch * self.num_heads * self.num_keys))
        with torch.no_grad():
            values = self.call.values(heads)
            for start in range(0, self.num_queries, chunk):
                rows = slice(start, start + chunk)
                difference = self.call.weights(heads, rows).to(values.dtype) @ values - out[:, :, rows]
                if difference.numel():
                    largest = torch.maximum(largest, difference.abs().amax())  # propagates NaN
        return largest.item()

    def plot(
        self,
        head: int | None = None,
        *,
        example: int = 0,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
    ) -> "Figure":
        """The weights of one example: one head with labeled tokens, or all heads side by side."""
        from clearhead.insight.plots import draw_head, draw_head_grid

        if head is None:
            return draw_head_grid([self.weights()[example]], [self.name], title=f"Attention weights of {self.name}")
        title = f"Attention weights of {self.name}, head {head}"
        return draw_head(self.weights(head)[example, 0], queries=queries, keys=keys, title=title)

    def __repr__(self) -> str:
        size = f"{self.num_heads} heads, {self.num_queries} x {self.num_keys}"
        return printable(f"{self.name}: {self.kernel}, {size}" + (f" ({self.note})" if self.note else ""))

    def info(self, batch: int) -> LayerInfo:
        """For the viewer. Windows, several of which belong to one example of the batch, count as heads."""
        sizes = {"heads": self.batch * self.num_heads // batch, "queries": self.num_queries, "keys": self.num_keys}
        return LayerInfo(name=self.name, kernel=self.kernel, note=self.note, **sizes)

    def maps(self, batch: int) -> "Callable[[], np.ndarray]":
        """Computes the weights (B,H,Q,K) of all heads that `info` counts."""
        shape = (batch, -1, self.num_queries, self.num_keys)
        return lambda: self.weights().detach().float().cpu().numpy().reshape(shape)

    def row(self) -> list[str]:
        """The cells of this record in the table of its trace: TABLE_HEADER."""
        return [self.name, self.kernel, str(self.num_heads), f"{self.num_queries} x {self.num_keys}", self.note]

    def _repr_html_(self) -> str:
        return html_table(TABLE_HEADER, [self.row()], right=RIGHT_ALIGNED)


class AttentionTrace:
    """The attention of one forward pass, by module name in order of execution, and the output of the model."""

    def __init__(
        self,
        output: Any,
        records: dict[str, AttentionRecord],
        names: Sequence[str],
        unresolved: Sequence[Unresolved] = (),
        is_counted: bool = False,
        leading_sizes: frozenset[int] = frozenset(),
    ):
        self.output, self.records = output, records
        self.names = list(names)
        """the names of all attention calls of the pass, including those that `keep` excluded"""
        self.unresolved = list(unresolved)
        """attention of the pass that became no record, with the operation where it was lost"""
        self.is_counted = is_counted
        """whether the operators that really ran were counted, so that nothing is missing here"""
        self.leading_sizes = leading_sizes
        """the sizes of the first two axes of the inputs, one of which is the batch"""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def keys(self) -> KeysView[str]:
        return self.records.keys()

    def values(self) -> ValuesView[AttentionRecord]:
        return self.records.values()

    def items(self) -> ItemsView[str, AttentionRecord]:
        return self.records.items()

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __getitem__(self, name: str) -> AttentionRecord:
        if not isinstance(name, str):
            raise LookupError(
                f"layers are looked up by module name, got {name!r}; this trace has {join_names(self.names)}"
            )
        if name in self.records:
            return self.records[name]
        if name in self.names:
            raise LookupError(
                f"{name!r} was not kept, only {join_names(list(self.records))}; use look(keep=[{name!r}])"
            )
        raise unknown_name(name, self.records)

    def is_batch_size(self, size: int) -> bool:
        """Whether a layer with this batch can have attended over whole inputs, rather than inside windows."""
        return not self.leading_sizes or size == 1 or size in self.leading_sizes

    def verify(self) -> dict[str, float]:
        """For each layer, the largest |weights @ v - output of the kernel|.

        Layers with dropout, and those whose tensors the model changed in place afterwards, are left out.
        """
        return {
            name: record.verify()
            for name, record in self.items()
            if not record.call.dropout and not record.call.is_stale
        }

    def plot(
        self,
        name: str | None = None,
        head: int | None = None,
        *,
        example: int = 0,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
    ) -> "Figure":
        """A matplotlib figure of the weights of one example: all layers and heads, one layer, or one head of it.

        `queries` and `keys` label the tokens of a single head. Save the figure with `figure.savefig(path)`.
        """
        if name is not None:
            return self[name].plot(head, example=example, queries=queries, keys=keys)
        if head is not None:
            raise ValueError(
                f"plot needs the name of a layer to plot one head, got head={head}; known: {join_names(list(self))}"
            )
        from clearhead.insight.plots import draw_head_grid

        return draw_head_grid([record.weights()[example] for record in self.values()], list(self))

    def save(self, path: str | Path, names: Sequence[str] | None = None) -> Path:
        """Write the weights (B,H,Q,K) of the layers `names` (default: all kept layers) to a .safetensors file, by name.

        `safetensors.torch.load_file(path)` reads them back.
        """
        from safetensors.torch import save

        from clearhead.files import write_atomic

        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"a trace is saved as .safetensors, got {path.name!r}; try {path.stem}.safetensors")
        chosen = list(self) if names is None else list(names)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save({name: self[name].weights().detach().cpu().contiguous() for name in chosen}))
        return path

    def save_html(
        self,
        path: str | Path,
        *,
        title: str = "Attention",
        image: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        classes: Sequence[str] = (),
        tokens: Sequence[str] | None = None,
        max_bytes: int = MAX_HTML_BYTES,
    ) -> Path:
        """Write the viewer and the weights to one HTML file, which opens from disk and makes no request.

        For an image model, `image` is the input as uint8 (C,height,width) or (B,C,height,width), `grid` has the rows
        and columns of patches, and `num_prefix_tokens` stand before them. For a sequence, `tokens` are its labels.
        Layers that do not fit into `max_bytes` are left out, and the page lists them.
        """
        from clearhead.files import write_atomic

        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"the viewer is saved as .html, got {path.name!r}; try {path.stem}.html")
        description = Description(
            kind="trace",
            title=title,
            source="trace",
            classes=tuple(classes),
            grid=grid,
            num_prefix_tokens=num_prefix_tokens,
            tokens=None if tokens is None else tuple(tokens),
        )
        page = document(*self.view(description, max_bytes, image), title=f"{title} · Clearhead")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode())
        return path

    def view(self, description: Description, max_bytes: int, image: Tensor | None = None) -> tuple[Description, bytes]:
        """What the viewer shows: the description with the layers that fit, and the bytes of a safetensors file."""
        records = [record for record in self.values() if record.num_queries and record.num_keys and record.batch]
        batch = min((record.batch for record in records), default=1)
        left_out = {r.name: "the model changed its tensors in place after the pass" for r in records if r.call.is_stale}
        left_out |= {r.name: f"its batch is {r.batch}, not {batch}" for r in records if r.batch % batch}
        records = [record for record in records if record.name not in left_out]
        pixels = image[None] if image is not None and image.dim() == 3 else image
        if pixels is not None and (pixels.dtype != torch.uint8 or pixels.dim() != 4 or len(pixels) != batch):
            raise ValueError(
                f"image must be uint8 (C,height,width), or (B,C,height,width) for a batch of {batch}, "
                f"got {pixels.dtype} of shape {tuple(pixels.shape)}"
            )
        output = self.output if isinstance(self.output, Tensor) and self.output.dim() == 2 else None
        missing = [f"Not recorded: {item}" for item in self.unresolved]
        missing += [f"{name} was left out: {why}." for name, why in left_out.items()]
        description = replace(description, unresolved=(*description.unresolved, *missing))
        return trace_view(
            [(record.info(batch), record.maps(batch)) for record in records],
            batch,
            max_bytes,
            description,
            pixels=None if pixels is None else pixels.cpu().numpy(),
            logits=None if output is None or len(output) != batch else output.detach().float().cpu().numpy(),
        )

    def __repr__(self) -> str:
        lines = [[printable(cell) for cell in record.row()] for record in self.values()]
        footer = [self.footer] if self.footer else []
        return "\n".join([*align_columns([TABLE_HEADER, *lines], right=RIGHT_ALIGNED), *footer])

    def _repr_html_(self) -> str:
        rows = [record.row() for record in self.values()]
        table = html_table(TABLE_HEADER, rows, footer=self.footer, right=RIGHT_ALIGNED)
        shown, tensors = self.view(Description(kind="trace", title="Attention", source="trace"), MAX_NOTEBOOK_BYTES)
        if not shown.layers:
            return table
        image = static_image([self[layer.name].weights()[0].detach().float().cpu().numpy() for layer in shown.layers])
        return viewer_frame(document(shown, tensors, title="Attention"), image) + table

    @property
    def footer(self) -> str:
        """What the table does not show: layers that were not kept, unresolved attention, and whether it was counted."""
        num_excluded = len(self.names) - len(self.records)
        lines = [f"and {num_excluded} more, not kept"] if num_excluded else []
        lines += [f"unresolved: {printable(str(item))}" for item in self.unresolved[:MAX_LISTED]]
        if len(self.unresolved) > MAX_LISTED:
            lines.append(f"and {len(self.unresolved) - MAX_LISTED} more unresolved")
        return "\n".join([*lines, *([] if self.is_counted else ["operators not counted"])])


def leading_sizes(inputs: Any) -> frozenset[int]:
    tensors = (x for x in tree_leaves(inputs) if isinstance(x, Tensor) and not x.is_nested)
    return frozenset(size for x in tensors for size in x.shape[:2])
