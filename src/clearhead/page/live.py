"""A model that PyTorch runs on the server: any image classifier whose attention `look` can record.

Each call of js/remote.js is a generator that yields after every forward pass, so that newer calls can come between two
passes of a long one. Edits act on the attention itself: weights are computed from the recorded queries and keys, and
the model continues with the edited output. Without edits, the pass is an ordinary one.
Dims: B batch, C channels, H heads, Q queries, K keys, L tokens, P patches, V classes.
"""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.data.dataset import Normalize
from clearhead.insight.attribution import mean_attention, relevance, rollout
from clearhead.insight.calls import AttentionCall, Rows, SDPACall, select_heads
from clearhead.insight.capture import capture_attention, module_named
from clearhead.insight.trace import AttentionRecord, AttentionTrace, look
from clearhead.nn.attention import in_float32, softargmax
from clearhead.validation import check_choice, is_number
from clearhead.viewer import InputSpec, LayerInfo

Method = Literal["mean", "rollout", "relevance", "occlusion"]
Steps = Generator[None, None, dict[str, np.ndarray]]
"""yields after each pass, and returns the tensors of the answer"""
OCCLUSION_BATCH = 4
MAX_PREFIX_TOKENS = 64
MAX_EDITS = 4096
HALF_PRECISION_BYTES = 16 * 2**20
"""maps that take more as float32 are sent as float16"""


@dataclass(frozen=True)
class Edits:
    """Interventions on a forward pass, as `Edits` in js/types.js."""

    heads: tuple[tuple[str, int, Literal["zero", "uniform"]], ...] = ()
    """(layer, head, pattern); of two edits of a head the last one counts"""
    hidden_patches: tuple[int, ...] = ()
    masked_patches: tuple[int, ...] = ()
    beta: float | None = None

    @classmethod
    def from_dict(cls, values: Any) -> "Edits":
        """ValueError for anything but the JSON of js/remote.js."""
        if not isinstance(values, dict) or values.keys() != {"heads", "hiddenPatches", "maskedPatches", "beta"}:
            raise ValueError(f"edits must have heads, hiddenPatches, maskedPatches and beta, got {values!r:.80}")
        heads, hidden, masked = (values[name] for name in ("heads", "hiddenPatches", "maskedPatches"))
        for name, value in (("heads", heads), ("hiddenPatches", hidden), ("maskedPatches", masked)):
            if not isinstance(value, list) or len(value) > MAX_EDITS:
                raise ValueError(f"{name} must be a list of at most {MAX_EDITS} entries, got {value!r:.60}")
        for index in [*hidden, *masked]:
            check_index(patch=index)
        beta = values["beta"]
        if beta in ("Infinity", "-Infinity"):
            beta = float(beta)
        elif beta is not None and not is_number(beta):
            raise ValueError(f"beta must be a number or null, got {beta!r:.60}")
        return cls(tuple(map(head_edit, heads)), tuple(hidden), tuple(masked), beta)

    @property
    def change_attention(self) -> bool:
        return bool(self.heads or self.masked_patches or self.beta is not None)


def head_edit(value: Any) -> tuple[str, int, Literal["zero", "uniform"]]:
    if not isinstance(value, dict) or value.keys() != {"layer", "head", "pattern"}:
        raise ValueError(f"an edit of a head must have layer, head and pattern, got {value!r:.80}")
    check_choice(pattern=(value["pattern"], Literal["zero", "uniform"]))
    check_index(head=value["head"])
    return str(value["layer"]), value["head"], value["pattern"]


def check_index(**values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(f"{name} must be an index, got {value!r:.60}")


class EditedCall:
    """An attention call whose weights were replaced; `raw_out` is the output that the model continued with."""

    def __init__(self, call: AttentionCall, new_weights: Tensor, raw_out: Tensor):
        self.call, self.new_weights, self.raw_out = call, new_weights, raw_out

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        return select_heads(self.new_weights, heads, self.new_weights.shape[1])[:, :, rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)


class LiveModel:
    """A model in eval mode, and the layout of its tokens, found by one pass over the background."""

    def __init__(self, model: nn.Module, spec: InputSpec, patch_size: int | None = None):
        self.model, self.spec = model.eval(), spec
        self.normalize = Normalize(spec.mean, spec.std)
        parameter = next(model.parameters(), torch.zeros(()))
        self.dtype, self.device = parameter.dtype, parameter.device
        blank = np.tile(np.array(spec.background, dtype=np.uint8)[:, None, None], (1, spec.height, spec.width))
        with torch.no_grad():
            trace = self.trace(blank[None], Edits())
        self.num_classes = logits_of(trace.output).shape[1]
        self.layers = tuple(layer_info(record) for record in trace.values())
        self.unresolved = tuple(f"Not recorded: {item}" for item in trace.unresolved)
        self.grid, self.num_prefix_tokens = find_grid(trace, spec, patch_size)
        if self.grid is not None:
            self.spec = replace(spec, patch_size=spec.height // self.grid[0])

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] if self.grid else 0

    def answer(self, header: Any, pixels: bytes) -> "Generator[None, None, tuple[dict[str, np.ndarray], dict]]":
        """The tensors and metadata of the answer to a request; ValueError if the request is invalid."""
        if not isinstance(header, dict):
            raise ValueError("a request must begin with a JSON object")
        image, edits = self.read_pixels(pixels), Edits.from_dict(header.get("edits"))
        self.check_edits(edits)
        options = {name: value for name, value in header.items() if name not in ("call", "edits")}
        calls: dict[Any, tuple[Callable[..., Steps], set[str]]] = {
            "run": (self.run, set()),
            "head_effects": (self.head_effects, {"target"}),
            "attribute": (self.attribute, {"method", "target"}),
            "head_steps": (self.head_steps, {"layer", "head"}),
        }
        if header.get("call") not in calls or options.keys() != calls[header["call"]][1]:
            raise ValueError(f"unknown call {header.get('call')!r:.60} with {', '.join(options) or 'no options'}")
        tensors = yield from calls[header["call"]][0](image, edits, **options)
        metadata = {name: str(tensors.pop(name)) for name in ("layers", "beta") if name in tensors}
        return tensors, metadata

    def read_pixels(self, pixels: bytes) -> np.ndarray:
        shape = (self.spec.channels, self.spec.height, self.spec.width)
        if len(pixels) != math.prod(shape):
            raise ValueError(f"an image has {math.prod(shape):,} bytes {shape}, got {len(pixels):,}")
        return np.frombuffer(pixels, dtype=np.uint8).reshape(1, *shape)

    def check_edits(self, edits: Edits) -> None:
        heads = {layer.name: layer.heads for layer in self.layers}
        for layer, head, _ in edits.heads:
            if head >= heads.get(layer, 0):
                raise ValueError(f"the model has no head {head} in the layer {layer!r:.80}")
        for patch in (*edits.hidden_patches, *edits.masked_patches):
            if patch >= self.num_patches:
                raise ValueError(f"the image has {self.num_patches} patches, got patch {patch}")

    # Passes

    def prepare(self, images: np.ndarray, hidden: Sequence[int]) -> Tensor:
        """uint8 (B,C,height,width) -> the model's input, with hidden patches replaced by the background."""
        pixels = torch.from_numpy(np.array(images))
        for patch in hidden:
            hide_patch(pixels, patch, self.spec, self.grid)
        return self.normalize(pixels).to(self.device, self.dtype)

    def trace(self, images: np.ndarray, edits: Edits) -> AttentionTrace:
        x = self.prepare(images, edits.hidden_patches)
        if not edits.change_attention:
            return look(self.model, x)
        records: dict[str, AttentionRecord] = {}

        def receive(name: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
            edited = self.edit_call(name, call, edits, len(x))
            records[name] = AttentionRecord(name, kernel, note, cast(AttentionCall, edited))
            return edited.raw_out

        with capture_attention(self.model, receive):
            output = self.model(x)
        return AttentionTrace(output, records, list(records))

    def edit_call(self, name: str, call: AttentionCall, edits: Edits, num_images: int) -> EditedCall:
        """The call with all edits. If an image has several windows, its heads are counted through all of them."""
        num_heads = call.arrange_out(call.raw_out).shape[1]
        heads = list(range(num_heads))
        weights = (
            call.weights(heads, slice(None)) if edits.beta is None else weights_at_beta(call, heads, edits.beta)
        ).clone()
        first_patch = weights.shape[-1] - self.num_patches
        if edits.masked_patches and 0 <= first_patch <= MAX_PREFIX_TOKENS:
            weights[..., [first_patch + patch for patch in edits.masked_patches]] = 0
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        shape = (num_images, -1, *weights.shape[-2:])
        by_image = weights.reshape(shape)
        for layer, head, pattern in edits.heads:
            if layer == name:
                new = uniform(call, weights, edits, first_patch).reshape(shape)[:, head] if pattern == "uniform" else 0
                by_image[:, head] = new
        weights = by_image.reshape(weights.shape)
        values = call.values(heads)
        return EditedCall(call, weights, call.replace_heads(heads, weights.to(values.dtype) @ values))

    @torch.no_grad()
    def probabilities(self, images: np.ndarray, edits: Edits) -> Tensor:
        """(B,V)"""
        if edits.change_attention:
            output = self.trace(images, edits).output
        else:
            output = self.model(self.prepare(images, edits.hidden_patches))
        return logits_of(output).float().softmax(-1)

    # The calls of an engine

    def run(self, image: np.ndarray, edits: Edits) -> Steps:
        with torch.no_grad():
            trace = self.trace(image, edits)
            maps = [flat_heads(record.weights()) for record in trace.values()]
        yield
        is_large = sum(layer.numel() for layer in maps) * 4 > HALF_PRECISION_BYTES
        dtype = np.float16 if is_large else np.float32
        tensors = {f"layers.{i}": layer.float().cpu().numpy().astype(dtype) for i, layer in enumerate(maps)}
        names: Any = json.dumps(list(trace))
        return {"logits": logits_of(trace.output)[0].float().cpu().numpy(), **tensors, "layers": names}

    def head_effects(self, image: np.ndarray, edits: Edits, target: Any) -> Steps:
        self.check_target(target)
        before = self.probabilities(image, edits)[0, target]
        yield
        effects = []
        for layer in self.layers:
            for head in range(layer.heads):
                edited = replace(edits, heads=(*edits.heads, (layer.name, head, "zero")))
                effects.append((self.probabilities(image, edited)[0, target] - before).item())
                yield
        return {"effects": np.array(effects, dtype=np.float32)}

    def attribute(self, image: np.ndarray, edits: Edits, method: Any, target: Any) -> Steps:
        check_choice(method=(method, Method))
        self.check_target(target)
        if self.grid is None:
            raise ValueError("the tokens of this model are not the patches of a grid")
        if method == "occlusion":
            return (yield from self.occlusion(image, edits, target))
        with torch.enable_grad():
            trace = self.trace(image, edits)
            layers = [record.weights().detach() for record in trace.values()]
            if layers[-1].shape[-2] != layers[-1].shape[-1] and method == "mean":
                layers = layers[-1:]  # only a pooling layer's query leads to the output
            if method == "relevance":
                matrix = relevance(trace, logits_of(trace.output)[:, target])
            else:
                matrix = mean_attention(layers) if method == "mean" else rollout(layers)
        yield
        has_class_token = matrix.shape[-2] == matrix.shape[-1] > self.num_patches
        rows = matrix[0, 0] if has_class_token else matrix[0].mean(0)
        return {"patches": rows[-self.num_patches :].detach().float().cpu().numpy()}

    def occlusion(self, image: np.ndarray, edits: Edits, target: int) -> Steps:
        before = self.probabilities(image, edits)[0, target]
        yield
        drops: list[Tensor] = []
        for start in range(0, self.num_patches, OCCLUSION_BATCH):
            patches = range(start, min(start + OCCLUSION_BATCH, self.num_patches))
            images = torch.from_numpy(np.repeat(image, len(patches), axis=0))
            for row, patch in zip(images, patches, strict=True):
                hide_patch(row[None], patch, self.spec, self.grid)
            drops.append(before - self.probabilities(images.numpy(), edits)[:, target])
            yield
        return {"patches": torch.cat(drops).cpu().numpy()}

    def head_steps(self, image: np.ndarray, edits: Edits, layer: Any, head: Any) -> Steps:
        """All steps of one head; no tensors if the model computes its own scores."""
        check_index(head=head)
        self.check_edits(Edits(heads=((layer, head, "zero"),)))
        with torch.no_grad():  # closed before `yield`: the mode of gradients belongs to a thread
            trace = self.trace(image, edits)
        yield
        with torch.no_grad():
            record = trace[layer]
            if record.q is None or record.k is None:
                return {}
            q, k, v, weights, out = (
                flat_heads(x)[head].float() for x in (record.q, record.k, record.v, record.weights(), record.out)
            )
            allowed = record.call.allowed(list(range(record.num_heads)))
            mask = flat_heads(allowed.expand(record.batch, record.num_heads, *weights.shape))[head]
            scores = q @ k.T
            own_beta = getattr(getattr(record.call, "call", record.call), "scale", 1 / math.sqrt(q.shape[-1]))
            beta: Any = own_beta if edits.beta is None else edits.beta
            parts = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "out": out}
            if (weight := self.output_projection(layer, head, out.shape[-1])) is not None:
                parts["projected"] = out @ weight.T.float()
            tensors = {name: part.cpu().numpy() for name, part in parts.items()}
            if not mask.all():
                tensors["mask"] = mask.cpu().numpy().astype(np.uint8).reshape(-1)
            return {**tensors, "beta": str(beta).replace("inf", "Infinity")}  # type: ignore[dict-item]

    def output_projection(self, layer: str, head: int, width: int) -> Tensor | None:
        """The columns (E,Dv) of W_O that multiply this head's output, if the layer has one."""
        module = module_named(self.model, layer)
        for name in ("out_proj", "proj"):
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear) and (head + 1) * width <= linear.in_features:
                return linear.weight[:, head * width : (head + 1) * width]
        return None

    def check_target(self, target: Any) -> None:
        check_index(target=target)
        if target >= self.num_classes:
            raise ValueError(f"the model has the classes 0 to {self.num_classes - 1}, got {target}")


# Parts


def logits_of(output: Any) -> Tensor:
    """Logits (B,V) in the output of a classifier: a tensor, an object or a mapping with logits, or a tuple."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.dim() != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"the page shows classifiers, whose output is (images, classes), got {shape}")
    return output


def layer_info(record: AttentionRecord) -> LayerInfo:
    note = record.note
    if record.batch > 1:
        windows = f"{record.batch} windows of {record.num_heads} heads"
        note = f"{note}; {windows}" if note else windows
    return LayerInfo(
        name=record.name,
        kernel=record.kernel,
        heads=record.batch * record.num_heads,
        queries=record.num_queries,
        keys=record.num_keys,
        note=note,
    )


def flat_heads(x: Tensor) -> Tensor:
    """(B,H,...) -> (B H,...): one image may be several windows."""
    return x.flatten(0, 1)


def find_grid(trace: AttentionTrace, spec: InputSpec, patch_size: int | None) -> tuple[tuple[int, int] | None, int]:
    """Rows and columns of patches and the number of tokens before them, from the number of keys of the first layer."""
    first = next(iter(trace.values()))
    sizes = [patch_size] if patch_size else range(min(spec.height, spec.width), 0, -1)
    found = []
    for size in sizes:
        prefix = first.num_keys - (spec.height // size) * (spec.width // size)
        if not spec.height % size and not spec.width % size and 0 <= prefix <= MAX_PREFIX_TOKENS:
            found.append((prefix, size))
    if not found or first.batch != 1 or first.num_keys < 4:
        return None, 0
    prefix, size = min(found)
    return (spec.height // size, spec.width // size), prefix


def hide_patch(pixels: Tensor, patch: int, spec: InputSpec, grid: tuple[int, int] | None) -> None:
    """Replace a patch of uint8 (B,C,height,width) by the background, in place."""
    assert grid is not None
    height, width = spec.height // grid[0], spec.width // grid[1]
    row, column = divmod(patch, grid[1])
    background = torch.tensor(spec.background, dtype=torch.uint8)[:, None, None]
    pixels[:, :, row * height : (row + 1) * height, column * width : (column + 1) * width] = background


def weights_at_beta(call: AttentionCall, heads: list[int], beta: float) -> Tensor:
    """The weights at another inverse temperature (B,H,Q,K).

    The scores are log(weights) / own beta, which differ from those of the model by a constant per row. So biases of
    the logits, such as relative positions, are scaled as well. A model that computes its own softmax has no recorded
    beta: 1/sqrt(head width) takes its place.
    """
    own = call.scale if isinstance(call, SDPACall) else 1 / math.sqrt(call.v.shape[-1])
    if isinstance(call, SDPACall) and not has_bias(call):
        scores = in_float32(call.q) @ in_float32(call.k).transpose(-2, -1)  # exact, also where weights underflow
    else:
        scores = call.weights(heads, slice(None)).float().log() / own
    return softargmax(scores, beta, where=call.allowed(heads).expand(scores.shape)).to(call.v.dtype)


def has_bias(call: SDPACall) -> bool:
    """Whether something is added to the scores, beyond a mask of -inf and 0."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return call.score_mod is not None
    return bool((call.mask.isfinite() & (call.mask != 0)).any())


def uniform(call: AttentionCall, weights: Tensor, edits: Edits, first_patch: int) -> Tensor:
    """Equal weights for all keys that may be attended to (B,H,Q,K)."""
    allowed = call.allowed(list(range(weights.shape[1]))).to(weights.dtype).expand_as(weights).clone()
    if 0 <= first_patch <= MAX_PREFIX_TOKENS:
        allowed[..., [first_patch + patch for patch in edits.masked_patches]] = 0
    return allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
