"""What the viewer shows of a model: descriptions, weights, test images, and one-file HTML documents.

The image that a module of the user's own expects is found in the attributes by which timm, Hugging Face and others name
it. Importing this does not import torch, and neither does the shipped checkpoint.
Dims: N examples, C channels, V classes.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.messages import printable
from clearhead.models.config import VisionConfig
from clearhead.tasks.images import ImageTask
from clearhead.training.run_summary import error_text
from clearhead.viewer import Description, InputSpec, document, pack_tensors, to_half

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clearhead.inference.run import Run
    from clearhead.insight.trace import AttentionTrace
    from clearhead.models.vit import VisionTransformer
    from clearhead.tasks.report import Example
    from clearhead.tasks.task import Task

NUM_EXAMPLES = 150
MAX_EXAMPLE_BYTES = 400_000
SCORED_EXAMPLES = 1000
"""test images that are scored, so that mistakes and uncertain ones can be among the examples"""
SIZE_NAMES = ("image_size", "img_size", "input_size")
CHANNEL_NAMES = ("in_channels", "in_chans", "num_channels")


# Descriptions


def describe_run(run: "Run") -> Description:
    """A run of a VisionTransformer, for the browser."""
    from clearhead.models.vit import VisionTransformer

    task = run.task
    if not isinstance(run.model, VisionTransformer) or not isinstance(task, ImageTask) or run.normalize is None:
        raise ValueError(no_images(run.path, task))
    spec = vision_input(run.model.config, run.normalize.mean, run.normalize.std, draw=task.can_be_drawn)
    source = f"clearhead.open_run({str(run.path)!r}).model"
    return describe_vision(run.model, spec, title=printable(run.path.name), source=source, classes=run.classes)


def no_images(path: Path, task: "Task") -> str:
    """Why the page does not show a run, and what does."""
    example = "--sample 0" if task.has_test else f"--{task.input_option} ..."
    return (
        f"The page supports only image models so far, and this run takes {task.input_kind}; "
        f"try: clearhead look {path} {example} --html attention.html"
    )


def vision_input(config: VisionConfig, mean: Sequence[float], std: Sequence[float], *, draw: bool) -> InputSpec:
    height, width = config.image_shape
    # black hides a patch of a white drawing; elsewhere the mean color does, which is 0 after normalization
    background = (0,) if config.in_channels == 1 else tuple(round(255 * value) for value in mean)
    return InputSpec(
        channels=config.in_channels,
        height=height,
        width=width,
        mean=tuple(mean),
        std=tuple(std),
        background=background,
        draw=draw,
        patch_size=config.patch_size,
    )


def describe_vision(
    model: "VisionTransformer", spec: InputSpec, *, title: str, source: str, classes: Sequence[str]
) -> Description:
    import torch

    from clearhead.insight.trace import look

    with torch.no_grad():
        trace = look(model, torch.zeros(1, spec.channels, spec.height, spec.width))
    config = model.config
    return Description(
        kind="model",
        title=title,
        source=source,
        input=spec,
        classes=tuple(classes) if len(classes) == config.num_classes else (),
        grid=config.grid,
        num_prefix_tokens=(config.pooling == "cls") + config.num_register_tokens,
        layers=tuple(record.info(1) for record in trace.values()),
        config=config.to_dict(),
    )


def weights_of(model: "nn.Module") -> dict[str, np.ndarray]:
    return {f"model.{name}": tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}


# Modules of the user's own


def find_input(module: "nn.Module", image: tuple[int, int, int] | None) -> InputSpec:
    """The image that a module takes: `image` (channels, height, width), or what its attributes say.

    The normalization is that of timm's configuration, else none: pixels from 0 to 1.
    """
    preprocessing = timm_config(module)
    shape = image or find_image_shape(module, preprocessing)
    if shape is None:
        name = type(module).__name__
        raise ValueError(
            f"cannot determine the image size of {name}; try --image 3x224x224 (channels x height x width)"
        )
    channels, height, width = shape
    mean, std = (values_per_channel(preprocessing.get(name), channels) for name in ("mean", "std"))
    mean, std = (mean, std) if mean and std and min(std) > 0 else ((0.0,) * channels, (1.0,) * channels)
    background = (0,) if channels == 1 else tuple(min(255, max(0, round(255 * value))) for value in mean)
    return InputSpec(
        channels=channels,
        height=height,
        width=width,
        mean=mean,
        std=std,
        background=background,
        draw=channels == 1,
        patch_size=find_patch_size(module) or 1,
    )


def timm_config(module: "nn.Module") -> Mapping[str, Any]:
    for name in ("pretrained_cfg", "default_cfg"):
        config: Any = getattr(module, name, None)
        config = config.to_dict() if hasattr(config, "to_dict") else config
        if isinstance(config, Mapping):
            return config
    return {}


def find_image_shape(module: "nn.Module", preprocessing: Mapping[str, Any]) -> tuple[int, int, int] | None:
    channels = next((value for value in attributes(module, CHANNEL_NAMES) if isinstance(value, int)), None)
    for size in attributes(module, SIZE_NAMES):
        if isinstance(size, int) and not isinstance(size, bool):
            size = (size, size)
        if isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size):
            return channels or first_channels(module), size[0], size[1]
    size = preprocessing.get("input_size")
    if isinstance(size, Sequence) and len(size) == 3 and all(isinstance(n, int) and n > 0 for n in size):
        return size[0], size[1], size[2]
    return None


def attributes(module: "nn.Module", names: Sequence[str]) -> Iterator[Any]:
    """The values of these attributes in the module, its config and its patch embedding."""
    for owner in (module, getattr(module, "config", None), getattr(module, "patch_embed", None)):
        for name in names:
            if (value := getattr(owner, name, None)) is not None:
                yield value


def first_channels(module: "nn.Module") -> int:
    from torch import nn

    return next((part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d)), 3)


def values_per_channel(values: Any, channels: int) -> tuple[float, ...]:
    """() unless there is a number for each channel."""
    if not isinstance(values, Sequence) or len(values) != channels:
        return ()
    return tuple(float(value) for value in values) if all(isinstance(value, int | float) for value in values) else ()


def find_patch_size(module: "nn.Module") -> int | None:
    for size in attributes(module, ("patch_size",)):
        if isinstance(size, Sequence) and len(set(size)) == 1:
            size = size[0]
        if isinstance(size, int) and size > 0:
            return size
    return None


def find_classes(module: "nn.Module") -> tuple[str, ...]:
    """The names of the classes, from `classes` or from the configuration of Hugging Face; () if they are unknown."""
    labels = getattr(getattr(module, "config", None), "id2label", None)
    if isinstance(labels, Mapping) and sorted(labels) == list(range(len(labels))):
        return tuple(str(labels[i]) for i in range(len(labels)))
    classes = getattr(module, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        return tuple(map(str, classes))
    return ()


def pictures(spec: InputSpec) -> dict[str, np.ndarray]:
    """Simple pictures to begin with, for a model without test images: digits of MNIST, or colored shapes."""
    if (spec.channels, spec.height, spec.width) == (1, 28, 28):
        return {"examples.pixels": read_idx("t10k-images-idx3-ubyte.gz")[:30, None]}
    y, x = np.mgrid[0 : spec.height, 0 : spec.width] / (np.array([spec.height, spec.width]) - 0.999)[:, None, None]
    shapes = {
        "disc": (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.09,
        "square": np.maximum(abs(x - 0.35), abs(y - 0.35)) < 0.2,
        "ring": abs(np.hypot(x - 0.5, y - 0.5) - 0.3) < 0.06,
        "cross": np.minimum(abs(x - 0.5), abs(y - 0.5)) < 0.08,
        "stripes": (6 * x).astype(int) % 2 == 0,
        "ramp": x,
    }
    colors = [(230, 60, 50, 255), (60, 160, 70, 255), (60, 110, 230, 255), (240, 190, 60, 255)]
    images = [
        shape[None] * np.array(colors[i % len(colors)])[: spec.channels, None, None] + 20 * (1 - shape)
        for i, shape in enumerate(shapes.values())
    ]
    return {"examples.pixels": np.stack(images).clip(0, 255).astype(np.uint8)}


# Examples of the test set


def run_examples(run: "Run", warn: Callable[[str], None] = print) -> dict[str, np.ndarray]:
    """Test images with labels and logits; {} and a warning if the data is not there."""
    import torch

    try:
        run.check_data_files()
        test = run.task.load(run.config.seed).test
    except (ValueError, LookupError, OSError) as error:
        warn(f"warning: {run.path} is shown without test images: {printable(error_text(error))}")
        return {}
    if not len(test):
        return {}
    images, labels = test.get_batch(torch.arange(min(SCORED_EXAMPLES, len(test))))
    assert run.normalize is not None
    with torch.inference_mode():
        batches = images.split(run.eval_batch_size)
        logits = torch.cat([run.model(run.normalize(part)) for part in batches])
    count = min(NUM_EXAMPLES, max(8, MAX_EXAMPLE_BYTES // images[0].numel()))
    chosen = choose_examples(labels, logits, count)
    return {
        "examples.pixels": images[chosen].numpy(),
        "examples.labels": labels[chosen].int().numpy(),
        "examples.logits": logits[chosen].float().numpy(),
    }


def choose_examples(labels: "Tensor", logits: "Tensor", count: int) -> "Tensor":
    """Indices (n,): mistakes and the least certain predictions, at most a fifth each, then every class in turn."""
    import torch

    probabilities = logits.softmax(-1)
    certainty, predicted = probabilities.max(-1)
    mistakes = (predicted != labels).nonzero().flatten()[: count // 5].tolist()
    uncertain = certainty.argsort(stable=True)[: count // 5].tolist()
    rank = torch.zeros_like(labels)
    for label in labels.unique():
        of_class = labels == label
        rank[of_class] = torch.arange(int(of_class.sum()))
    in_turn = (rank * (int(labels.max()) + 1) + labels).argsort(stable=True).tolist()
    return torch.tensor(list(dict.fromkeys([*mistakes, *uncertain, *in_turn]))[:count]).sort().values


# Files


def export_html(run: "Run", warn: Callable[[str], None] = print) -> str:
    """One HTML file with the model of an image run in float16 and some of its test images."""
    description = describe_run(run)
    weights = {name: to_half(array) for name, array in weights_of(run.model).items()}
    notice = run.task.license_notice if isinstance(run.task, ImageTask) else ""
    tensors = pack_tensors(weights | run_examples(run, warn))
    return document(description, tensors, title=f"{description.title} · Clearhead", notice=notice)


def save_trace_html(run: "Run", example: "Example", path: Path) -> Path:
    """One HTML file with the attention of a run for one example."""
    trace, title = run.task.trace(run, example), f"{run.path.name}: {example.heading}"
    config = run.model_config
    if not isinstance(config, VisionConfig):
        return trace.save_html(path, title=title, tokens=token_names(example, trace))
    prefix = (config.pooling == "cls") + config.num_register_tokens
    return trace.save_html(
        path, title=title, image=example.image, grid=config.grid, num_prefix_tokens=prefix, classes=run.classes
    )


def token_names(example: "Example", trace: "AttentionTrace") -> tuple[str, ...] | None:
    """The names of all tokens of a sequence; those that the model has put before it are class tokens."""
    if example.tokens is None:
        return None
    num_keys = max(record.num_keys for record in trace.values())
    return ("class",) * (num_keys - len(example.tokens)) + example.tokens


# The shipped checkpoint


@cache
def shipped() -> tuple[Description, bytes]:
    """A vision transformer trained on MNIST, with test images from the embedded MNIST. torch is not imported."""
    from safetensors.numpy import load

    folder = files("clearhead.page").joinpath("files")
    stored = json.loads(folder.joinpath("mnist.json").read_bytes())
    tensors = load(folder.joinpath("mnist.safetensors").read_bytes())
    images, labels = (read_idx(f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    chosen = tensors.pop("examples.indices")
    tensors["examples.pixels"] = images[chosen][:, None]
    tensors["examples.labels"] = labels[chosen].astype(np.int32)
    return Description.from_dict(stored), pack_tensors(tensors)


def read_idx(name: str) -> np.ndarray:
    """A file of the embedded MNIST: a header with the size of each dimension, then bytes."""
    data = gzip.decompress(files("clearhead.data").joinpath("files", "mnist", name).read_bytes())
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def shipped_model() -> "VisionTransformer":
    """The shipped checkpoint as a module in eval mode."""
    import torch

    from clearhead.models.vit import VisionTransformer
    from clearhead.training.distributed import load_tensors, state_of

    description, _ = shipped()
    assert description.config is not None
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer.from_config(VisionConfig.from_dict(description.config))
    load_tensors(state_of(model), {name: torch.from_numpy(array) for name, array in shipped_weights().items()})
    return model.eval()


def shipped_weights() -> dict[str, np.ndarray]:
    """The weights of the shipped checkpoint, by their names in the state dict, in float32."""
    from safetensors.numpy import load

    tensors = load(files("clearhead.page").joinpath("files", "mnist.safetensors").read_bytes())
    prefix = "model."
    return {
        name.removeprefix(prefix): array.astype(np.float32)
        for name, array in tensors.items()
        if name.startswith(prefix)
    }
