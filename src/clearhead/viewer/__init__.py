"""The viewer: hand-written ES modules in js/ and viewer.css, and what Python writes for them.

A viewer shows a `Description` (JSON) and tensors (a safetensors file); js/types.js documents both. `document` joins
everything into one HTML file that makes no request: it opens from disk, in a notebook or on any server.

This is a leaf: it knows arrays and names, no models. Dims: B batch, H heads, Q queries, K keys.
"""

import base64
import hashlib
import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.messages import finite_or_none, printable
from clearhead.validation import check_bool, check_choice, check_int, check_positive
from clearhead.viewer.join import compact, join

if TYPE_CHECKING:
    import numpy as np

FOLDER = Path(__file__).parent
FORMAT = 1
Kind = Literal["model", "live", "trace"]
FRAME_HEIGHT = 720
"""pixels of the viewer in a notebook"""


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """How an image enters the model: normalized = (pixel / 255 - mean) / std, per channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    background: tuple[int, ...]
    """pixel value per channel that hides a patch"""
    draw: bool
    """whether visitors can draw: gray, white on black"""
    patch_size: int

    def __post_init__(self) -> None:
        check_positive(height=self.height, width=self.width, patch_size=self.patch_size)
        check_int(1, 4, channels=self.channels)
        check_bool(draw=self.draw)
        for name in ("mean", "std", "background"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(f"{name} must have {self.channels} values, one per channel, got {getattr(self, name)}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One attention layer of a forward pass."""

    name: str
    kernel: str
    heads: int
    queries: int
    keys: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a viewer shows. The fields are those of `Description` in js/types.js."""

    kind: Kind
    title: str
    source: str
    """Python expression of the model, such as `clearhead.open_run("runs/mine").model`"""
    input: InputSpec | None = None
    classes: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None
    num_prefix_tokens: int = 0
    layers: tuple[LayerInfo, ...] = ()
    unresolved: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    tokens: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_choice(kind=(self.kind, Kind))
        check_int(0, num_prefix_tokens=self.num_prefix_tokens)
        if self.grid is not None:
            check_positive(rows=self.grid[0], columns=self.grid[1])
        if self.kind == "model" and self.config is None:
            raise ValueError("kind 'model' needs a config")
        if self.kind != "trace" and self.input is None:
            raise ValueError(f"kind {self.kind!r} needs an input")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Description":
        """The inverse of `to_dict`, also after it has been JSON."""
        fields = with_tuples(values)
        if (version := fields.pop("format", None)) != FORMAT:
            raise ValueError(f"a description must have format {FORMAT}, got {version!r:.20}")
        fields["input"] = None if fields["input"] is None else InputSpec(**with_tuples(fields["input"]))
        return cls(**fields | {"layers": tuple(LayerInfo(**layer) for layer in fields["layers"])})


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def pack_tensors(arrays: "Mapping[str, np.ndarray]", metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of float32, float16, uint8 and int32 arrays: the types that the viewer reads."""
    import numpy as np
    from safetensors.numpy import save

    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float16, np.uint8, np.int32):
            raise ValueError(f"tensor {name!r} must be float32, float16, uint8 or int32, got {array.dtype}")
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    return save(contiguous, None if metadata is None else dict(metadata))


def to_half(array: "np.ndarray") -> "np.ndarray":
    """float16, or float32 if a value exceeds the range of float16."""
    import numpy as np

    largest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    return array.astype(np.float16 if largest <= np.finfo(np.float16).max else np.float32)


# HTML documents


@cache
def asset_names() -> tuple[str, ...]:
    """The files of the viewer by the path that a server gives them: js/host.js, viewer.css, ..."""
    files = [*sorted((FOLDER / "js").glob("*.js")), *sorted(FOLDER.glob("*.css"))]
    return tuple(path.relative_to(FOLDER).as_posix() for path in files)


@cache
def asset(name: str) -> str:
    """A file of the viewer, without comments and indentation."""
    if name not in asset_names():
        raise LookupError(f"the viewer has no file {name!r:.60}")
    text = (FOLDER / name).read_text(encoding="utf-8")
    return compact(text, name) if name.endswith(".js") else compact_css(text)


def compact_css(text: str) -> str:
    """A style sheet without comments, indentation and empty lines."""
    return re.sub(r"\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)).strip() + "\n"


@cache
def joined_script() -> str:
    return join({name.removeprefix("js/"): asset(name) for name in asset_names() if name.startswith("js/")})


def styles() -> list[str]:
    return [name for name in asset_names() if name.endswith(".css")]


def server_document() -> str:
    """The page of the local server, which loads everything else from its own origin."""
    links = [f'<link rel="stylesheet" href="{name}">' for name in styles()]
    links += [f'<link rel="modulepreload" href="{name}">' for name in asset_names() if name.endswith(".js")]
    return page("Clearhead", "\n".join(links), '<script type="module" src="js/host.js"></script>')


def document(description: Description, tensors: bytes, *, title: str, notice: str = "") -> str:
    """One self-contained HTML file. Its policy forbids every request, and every script and style but its own.

    `notice` is text for whoever reads the source, such as the license of the examples.
    """
    script, style = joined_script(), "".join(map(asset, styles()))
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; "
        "img-src data: blob:; worker-src blob:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = (
        f'<script type="application/json" id="clearhead-description">{script_json(description.to_dict())}</script>\n'
        f'<script type="text/plain" id="clearhead-tensors">{base64.b64encode(tensors).decode()}</script>\n'
        f"<script>{script}</script>"
    )
    return page(title, head, body, notice)


def page(title: str, head: str, body: str, notice: str = "") -> str:
    comment = f"<!-- {html.escape(printable(notice)).replace('--', '- -')} -->\n" if notice else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{comment}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{html.escape(printable(title))}</title>\n<link rel="icon" href="data:,">\n{head}\n</head>\n'
        '<body>\n<main id="clearhead"><p class="host-status">Loading …</p></main>\n'
        f"<noscript>This page needs JavaScript. It makes no request to any other site.</noscript>\n{body}\n"
        "</body>\n</html>\n"
    )


def digest(text: str) -> str:
    """A source expression of a content security policy: exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: every `<` is escaped, so that no text can end the element."""
    return json.dumps(finite_or_none(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# Recorded traces

Maps = Callable[[], "np.ndarray"]
"""computes the weights (B,H,Q,K) of a layer"""


def trace_view(
    layers: Sequence[tuple[LayerInfo, Maps]],
    batch: int,
    max_bytes: int,
    description: Description,
    *,
    pixels: "np.ndarray | None" = None,
    logits: "np.ndarray | None" = None,
) -> tuple[Description, bytes]:
    """The description and the tensors of a recorded pass, whose maps take at most `max_bytes` of base64.

    If the maps of the whole batch do not fit, those of the first example are taken; layers that still do not fit are
    left out. The description lists what is missing. pixels uint8 (B,C,height,width), logits (B,V)
    """
    sizes = [info.heads * info.queries * info.keys * 2 * 4 // 3 for info, _ in layers]
    examples = batch if batch * sum(sizes) <= max_bytes else 1
    missing = [] if examples == batch else [f"Only the first of {batch} examples is shown; the others were left out."]
    shown: list[LayerInfo] = []
    arrays, room = {}, max_bytes
    for (info, maps), size in zip(layers, sizes, strict=True):
        if size * examples > room:
            megabytes = f"{size / 1e6:,.1f} MB, and {room / 1e6:,.1f} of {max_bytes / 1e6:,.0f} MB remain"
            missing.append(f"{info.name} was left out: its maps take {megabytes}.")
            continue
        room -= size * examples
        arrays[f"trace.{len(shown)}"] = to_half(maps()[:examples])
        shown.append(info)
    if pixels is not None:
        arrays["trace.pixels"] = pixels[:examples]
        description = replace(description, input=displayed_image(pixels.shape, description.grid))
    if logits is not None:
        arrays["trace.logits"] = logits[:examples]
    return replace(description, layers=tuple(shown), unresolved=(*description.unresolved, *missing)), pack_tensors(
        arrays
    )


def displayed_image(shape: tuple[int, ...], grid: tuple[int, int] | None) -> InputSpec:
    """The input of a recorded pass, which is shown and never normalized."""
    _, channels, height, width = shape
    return InputSpec(
        channels=channels,
        height=height,
        width=width,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        background=(0,) * channels,
        draw=False,
        patch_size=height // grid[0] if grid else height,
    )


def viewer_frame(document: str, image: bytes) -> str:
    """An HTML document in a frame that may run its scripts and save files, and reaches nothing else.

    A static image (PNG) lies below it, and is seen where frames or scripts are removed.
    """
    picture = base64.b64encode(image).decode()
    return (
        '<div class="clearhead-viewer" style="display: grid">'
        f'<img style="grid-area: 1 / 1; max-width: 100%" alt="Attention of every layer (rows) and head (columns)" '
        f'src="data:image/png;base64,{picture}">'
        f'<iframe style="grid-area: 1 / 1; z-index: 1; width: 100%; height: {FRAME_HEIGHT}px; border: 0; '
        f'background: white" sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(document)}"></iframe></div>'
    )


def static_image(maps: "Sequence[np.ndarray]", size: int = 64) -> bytes:
    """A PNG of attention maps (H,Q,K), one row for each layer: the darker, the larger the weight."""
    import numpy as np
    from PIL import Image

    gap, columns = 4, max(len(layer) for layer in maps)
    canvas = np.full((len(maps) * (size + gap) + gap, columns * (size + gap) + gap), 255, dtype=np.uint8)
    for i, layer in enumerate(maps):
        for j, weights in enumerate(layer):
            rows, keys = (np.arange(size) * length // size for length in weights.shape)
            cell = weights[rows][:, keys].astype(np.float32)
            shade = 235 - 235 * cell / max(float(np.nanmax(cell, initial=0.0)), 1e-12)
            top, left = gap + i * (size + gap), gap + j * (size + gap)
            canvas[top : top + size, left : left + size] = np.nan_to_num(shade, nan=255.0)
    stream = io.BytesIO()
    Image.fromarray(canvas).save(stream, "PNG")
    return stream.getvalue()
