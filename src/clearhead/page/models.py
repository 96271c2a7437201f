"""The models that the page shows: the shipped checkpoint, the runs in runs/, and a module of the user's own.

A `VisionTransformer` of ours is sent to the browser, which computes its passes; any other model stays on the server
(page/live.py). Importing this does not import torch, and neither does listing runs nor showing the shipped checkpoint.
"""

import hashlib
import math
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.files import MAX_JSON_BYTES, from_json, read_regular
from clearhead.messages import printable
from clearhead.models.config import ModuleConfig, VisionConfig
from clearhead.page.describe import (
    describe_run,
    describe_vision,
    find_classes,
    find_input,
    find_patch_size,
    no_images,
    pictures,
    run_examples,
    shipped,
    weights_of,
)
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig
from clearhead.training.run_directory import BEST, CONFIG, RUNS
from clearhead.training.run_summary import RunSummary, summarize
from clearhead.viewer import Description, InputSpec, pack_tensors

if TYPE_CHECKING:
    from torch import nn

    from clearhead.inference.run import Run
    from clearhead.page.live import LiveModel

SHIPPED, OPENED = "shipped", "opened"
SHIPPED_TITLE = "Handwritten digits (shipped with Clearhead)"
MAX_BROWSER_WORK = 5 * 10**8
"""parameters times tokens of a model that the browser runs, which takes about a second; larger ones are run here"""
MAX_LOADED = 4
"""models that are kept in memory"""


@dataclass(frozen=True)
class Listed:
    """An entry of the page's list of models."""

    id: str
    title: str
    detail: str = ""
    problem: str = ""
    """why it cannot be shown; "" if it can"""


@dataclass(frozen=True, eq=False)
class Loaded:
    """What the viewer receives."""

    description: Description
    tensors: bytes
    live: "LiveModel | None" = None
    """the model itself, if it runs on the server"""


@dataclass(frozen=True)
class Target:
    """What `clearhead open` was asked to show: a run, a module FILE.py:NAME, or a run and its module."""

    run: Path | None = None
    module: str = ""
    image: tuple[int, int, int] | None = None
    """channels, height and width, if they cannot be found"""

    @property
    def id(self) -> str:
        return run_id(self.run) if self.run is not None and not self.module else OPENED


@dataclass
class Catalog:
    """The list of models, and those that are loaded. One model is loaded at a time."""

    target: Target | None = None
    runs: Path = RUNS
    loaded: dict[tuple[str, int], Loaded] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def opened(self) -> str:
        return SHIPPED if self.target is None else self.target.id

    def models(self) -> list[Listed]:
        """The opened model, the shipped checkpoint, and all runs, newest first."""
        listed = [Listed(SHIPPED, SHIPPED_TITLE)]
        if self.target is not None and self.target.id == OPENED:
            listed.insert(0, Listed(OPENED, printable(self.target.module or str(self.target.run))))
        runs = {path: summarize(path) for path in self.run_paths()}
        newest = sorted(runs, key=lambda path: (run_id(path) != self.opened, -runs[path].changed, path.name))
        return listed + [listed_run(path, runs[path]) for path in newest]

    def run_paths(self) -> list[Path]:
        """The runs in runs/, and an opened one from elsewhere."""
        names = os.listdir(self.runs) if self.runs.is_dir() else []
        paths = [self.runs / name for name in names if not name.startswith(".")]
        paths = [path for path in paths if os.path.lexists(path / CONFIG)]
        target = None if self.target is None or self.target.module else self.target.run
        return paths if target is None or target in paths else [target, *paths]

    def load(self, model_id: str) -> Loaded:
        """LookupError for an id that is not in the list; a run that has a newer checkpoint is loaded again."""
        if model_id == SHIPPED:
            return Loaded(*shipped())
        if self.target is not None and model_id == self.target.id == OPENED:
            target, key = self.target, (model_id, 0)
        else:
            path = {run_id(path): path for path in self.run_paths()}.get(model_id)
            if path is None:
                raise LookupError("this model is not in the list any more; reload the page")
            target, key = Target(run=path), (model_id, best_version(path))
        if (loaded := self.loaded.get(key)) is not None:
            return loaded  # without waiting for another model that is being loaded
        with self.lock:
            if key not in self.loaded:
                loaded = load_target(target)
                others = [(other, value) for other, value in self.loaded.items() if other[0] != model_id]
                self.loaded = dict([*others[1 - MAX_LOADED :], (key, loaded)])
            return self.loaded[key]


def run_id(path: Path) -> str:
    return f"run-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"


def best_version(path: Path) -> int:
    try:
        return (path / BEST).lstat().st_mtime_ns
    except OSError:
        return 0


def listed_run(path: Path, summary: RunSummary) -> Listed:
    accuracies = (("test", summary.test_accuracy), ("validation", summary.best_validation_accuracy))
    accuracy = next((f"{name} accuracy {value:.2%}" for name, value in accuracies if value is not None), "")
    detail = ", ".join(filter(None, [summary.recipe, accuracy, summary.state]))
    return Listed(run_id(path), printable(path.name), printable(detail), printable(problem_of(path, summary)))


def problem_of(path: Path, summary: RunSummary) -> str:
    """Why the page does not show a run; "" if it does."""
    if summary.state == "unreadable":
        return f"This run cannot be read: {summary.problem}"
    if summary.state == "no checkpoint yet" or not saved_steps(path):
        return f"This run has no checkpoint yet; train it with: clearhead resume {path}"
    try:
        config = RunConfig.from_dict(from_json(read_regular(path / CONFIG, MAX_JSON_BYTES)))
    except (ValueError, LookupError, OSError) as error:
        return f"This run cannot be read: {error}"
    if isinstance(config.model, ModuleConfig):
        return (
            "This run was trained by clearhead.fit and contains no code; name its module: "
            f"clearhead open {path} --model FILE.py:NAME"
        )
    return "" if isinstance(config.model, VisionConfig) else no_images(path, config.task)


def load_target(target: Target) -> Loaded:
    """Imports torch."""
    from clearhead.inference.run import Run
    from clearhead.insight.doctor.loading import load
    from clearhead.models.vit import VisionTransformer

    module = load(target.module, Path.cwd()) if target.module else None
    if target.run is not None:
        run = Run(target.run, module)
        if isinstance(run.model, VisionTransformer) and module is None:
            return load_run(run)
        module, source = run.model, f"clearhead.open_run({str(run.path)!r}, model=...).model"
    else:
        source = target.module.rpartition(":")[2]
    assert module is not None
    return load_module(module, target, source)


def load_run(run: "Run") -> Loaded:
    """The model and test examples of an image run."""
    description = describe_run(run)
    examples = run_examples(run)
    if not runs_in_browser(run.model, description):
        live = live_model(run.model, description.input)
        return Loaded(live_description(live, description), pack_tensors(examples), live)
    return Loaded(description, pack_tensors(weights_of(run.model) | examples))


def load_module(module: "nn.Module", target: Target, source: str) -> Loaded:
    from clearhead.models.vit import VisionTransformer

    title = printable(target.module or str(target.run))
    spec = find_input(module, target.image)
    classes = find_classes(module)
    if type(module) is VisionTransformer and spec.height == module.config.image_shape[0]:
        module.eval()
        description = describe_vision(module, spec, title=title, source=source, classes=classes)
        if runs_in_browser(module, description):
            return Loaded(description, pack_tensors(weights_of(module) | pictures(spec)))
    live = live_model(module, spec, find_patch_size(module))
    placeholder = Description(kind="live", title=title, source=source, input=spec, classes=classes)
    return Loaded(live_description(live, placeholder), pack_tensors(pictures(spec)), live)


def live_model(module: "nn.Module", spec: InputSpec | None, patch_size: int | None = None) -> "LiveModel":
    from clearhead.page.live import LiveModel

    assert spec is not None
    try:
        return LiveModel(module, spec, patch_size)
    except Exception as error:
        shape = (1, spec.channels, spec.height, spec.width)
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{type(module).__name__} cannot be shown with an image {shape}: {first_line}") from error


def live_description(live: "LiveModel", description: Description) -> Description:
    return replace(
        description,
        kind="live",
        config=None,
        input=live.spec,
        grid=live.grid,
        num_prefix_tokens=live.num_prefix_tokens,
        layers=live.layers,
        unresolved=live.unresolved,
        classes=description.classes if len(description.classes) == live.num_classes else (),
    )


def runs_in_browser(model: "nn.Module", description: Description) -> bool:
    tokens = math.prod(description.grid or (1,)) + description.num_prefix_tokens
    beta = (description.config or {}).get("beta")
    is_small = sum(parameter.numel() for parameter in model.parameters()) * tokens <= MAX_BROWSER_WORK
    return is_small and (beta is None or math.isfinite(beta))  # JSON has no infinity
