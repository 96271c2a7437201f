"""A trained run: the model of its best checkpoint, and everything that inference needs to use it.

    run = clearhead.open_run("runs/mine")
    run.predict(["photo.jpg"]), run.evaluate("test"), run.sample("Once"), run.look("photo.jpg"), run.metrics
    run.report("report.html")

Each method accepts the inputs of the run's own task. Dims: B batch, C channels, L length, V classes.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead.data.batches import tta_mean
from clearhead.data.dataset import Dataset, Examples
from clearhead.messages import html_table
from clearhead.models.config import ModelConfig, ModuleConfig, build_model
from clearhead.models.shapes import Shapes, shapes
from clearhead.tasks.language import LanguageTask
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.report import Outputs, Prediction, Report
from clearhead.tasks.task import PartName, Task, changed_files
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig
from clearhead.training.curves import Curves, read_curves
from clearhead.training.distributed import load_tensors, state_of
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory
from clearhead.training.run_summary import RunSummary, summarize
from clearhead.training.state import DataInfo, config_for_inference, state_digest

if TYPE_CHECKING:
    from clearhead.insight.trace import AttentionTrace
    from clearhead.models.generate import Sampling

Announce = Callable[[str], None]
MAX_WORDS = 1000
"""words of `pronounce` that a report evaluates, because a beam search over all of them takes minutes"""
MAIN_METRICS = ("word_error_rate", "exact_match", "accuracy", "loss")
"""those that are recorded and shown first"""
Inputs = Tensor | str | Path | Sequence[str | Path] | Sequence[int]


def open_run(path: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None) -> "Run":
    """A run by its path, or by its name in runs/. A run of `clearhead.fit` needs its module, or a function without
    arguments that builds it: a run never contains code."""
    return Run(path, model)


def load(run: str | Path) -> nn.Module:
    """The model of a run's best checkpoint, in eval mode. Its inputs and outputs are those of training: for `reverse`,
    ids (B,16) -> logits (B,16,10); for normalized images, (B,C,height,width) -> (B,V); for `words` and `text`, ids
    (B,L) -> (B,L,V); for `pronounce`, letters (B,K) and the phones before each position (B,Q) -> (B,Q,V)."""
    return open_run(run).model


def environment_in(state: Mapping[str, Any]) -> dict[str, str | int | bool]:
    """The environment that a checkpoint records; {} if it is missing or invalid."""
    values = state.get("environment")
    if not isinstance(values, dict) or not all(isinstance(value, str | int | bool) for value in values.values()):
        return {}
    return values


def build_run_model(path: Path, config: ModelConfig, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """The model that a run's config describes; the user's own one, if the run was trained by `clearhead.fit`."""
    if not isinstance(config, ModuleConfig):
        if model is not None:
            raise ValueError(f"{path} contains the description of its model; open it without model=")
        return build_model(config)
    if model is None:
        raise ValueError(
            f"{path} was trained by clearhead.fit, and a run contains no code; pass the model in Python: "
            f"clearhead.open_run({str(path)!r}, model={config.name})"
        )
    from clearhead.training.custom import build_module

    module = build_module(model)
    if state_digest(state_of(module)) != config.sha256:
        n = sum(weight.numel() for weight in module.parameters())
        raise ValueError(
            f"{path} holds the weights of a {config.name} with {config.parameters:,} parameters, got a "
            f"{type(module).__name__} with {n:,}, whose names or shapes of weights differ"
        )
    return module


class Run:
    """The best checkpoint of a run: `model`, `config`, `step`, `path`, class names and preprocessing."""

    def __init__(self, path: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None):
        directory = RunDirectory.open(path)
        self.path = directory.path
        best = directory.best_checkpoint()
        if best is None:
            raise LookupError(f"{path} has no checkpoint yet; continue training with: clearhead resume {path}")
        self.step = best.step
        self.config = config_for_inference(directory, best)
        with torch.random.fork_rng(devices=[]):
            self.model = build_run_model(self.path, self.config.model, model)
        load_tensors(state_of(self.model), eval_weights(best.model, best.optimizer))
        self.model.eval()
        data = DataInfo.from_state(best.state)
        data.check_matches(self.config)
        self.classes, self.vocab, self.data_files = data.classes, data.vocab, data.files
        self.normalize = data.normalize
        self.environment = environment_in(best.state)
        """what results depend on besides the config: precision, threads, processes, device, version of PyTorch"""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, recipe={self.config.recipe!r}, step={self.step})"

    def _repr_html_(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        rows = [
            ("run", self.path),
            ("recipe", self.config.recipe),
            ("model", type(self.model).__name__),
            ("parameters", f"{parameters:,}"),
            ("step of the best checkpoint", f"{self.step:,}"),
            ("input", self.task.input_kind),
            *([("classes", ", ".join(self.classes))] if self.classes else []),
        ]
        return html_table([], rows)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl in their order: {"kind": "train", "step": 50, "loss": ...}, ..."""
        return RunDirectory.open(self.path).records()

    @property
    def task(self) -> Task:
        return self.config.task

    @property
    def model_config(self) -> Any:
        return self.config.model

    @property
    def eval_batch_size(self) -> int:
        return self.config.training.eval_batch_size

    def predict(self, inputs: Inputs, *, invert: bool = False) -> list[Prediction]:
        """Images, as files or uint8 (B,C,height,width): a prediction for each; `invert` swaps dark and light, because
        MNIST's digits are white on black. Digits (L,): a prediction for each digit or for the sequence, with
        a warning if L differs from that of training. Words: the pronunciation of each."""
        predictions = self.task.predict(self, inputs, invert=invert)
        if warning := self.task.input_warning(self, inputs):
            warnings.warn(warning, stacklevel=2)
        return predictions

    def evaluate(self, part: PartName = "test") -> dict[str, Any]:
        """Metrics on a part of the run's data, as `clearhead evaluate` prints them: loss and accuracy, or word and
        phoneme error rates."""
        from clearhead.inference.evaluate import evaluate_run

        return evaluate_run(self, part)

    def sample(
        self, prompt: str = "", *, n: int = 1, max_new_tokens: int = 300, strategy: "Sampling | None" = None
    ) -> list[str]:
        """n continuations of a prompt, including the prompt, by a language model (`words`, `text`)."""
        from clearhead.models.generate import Sampling

        if not isinstance(self.task, LanguageTask):
            raise ValueError(
                f"sampling needs a language model (recipes words and text), got {self.path}, which takes "
                f"{self.task.input_kind}; try clearhead predict {self.path}"
            )
        return self.task.sample(self, prompt, strategy or Sampling(), n=n, max_new_tokens=max_new_tokens)

    def look(self, example: Inputs, *, invert: bool = False) -> "AttentionTrace":
        """The attention of every layer for one input: an image file or uint8 (C,height,width), a set of images,
        digits, a word to be pronounced, or text."""
        return self.task.trace(self, self.task.example(self, example, invert=invert))

    def report(
        self,
        out: str | Path = "report.html",
        *,
        epochs: Sequence[float] = (),
        samples: Sequence[int] = (0,),
        mistakes: int = 16,
        embed: bool = False,
    ) -> Path:
        """Write a report of this run to a .html or .md file: settings, curves, results, mistakes, and the attention for
        the test examples `samples`. `clearhead.report` compares several runs."""
        from clearhead.inference.report import report

        return report(self, out, epochs=epochs, samples=samples, mistakes=mistakes, embed=embed)

    def check_data_files(self) -> None:
        """ValueError if data files have changed: test examples may have been used in training, and ids may differ."""
        if changed := changed_files(self.data_files, self.task.digests()):
            raise ValueError(
                f"the data of {self.path} has changed since training: {', '.join(changed)}; restore the original files"
            )

    @torch.inference_mode()
    def logits(self, inputs: Tensor) -> Tensor:
        """The model's outputs for its own kind of inputs; for images the mean over the views of `training.tta`."""
        parts = inputs.split(self.eval_batch_size)  # as in an evaluation, so that both compute the same logits
        return torch.cat([tta_mean(self.model, part, self.config.training.tta) for part in parts])


@dataclass(frozen=True, eq=False)
class ReportSource:
    """A run and its data, as far as they are available."""

    name: str
    path: Path
    config: RunConfig
    summary: RunSummary
    records: list[dict[str, Any]]
    run: Run | None
    """None before the first checkpoint, and for a model of the user whose code was not passed"""
    data: Dataset | None
    problem: str
    """why there is no data"""
    announce: Announce

    @classmethod
    def open(cls, run: Run | str | Path, announce: Announce) -> "ReportSource":
        directory = RunDirectory.open(run.path if isinstance(run, Run) else run)
        path, summary = directory.path, summarize(directory.path)
        announce(f"Reading {path} ...")
        config = RunConfig.from_dict(directory.config)
        can_open = bool(saved_steps(path)) and not isinstance(config.model, ModuleConfig)
        opened = run if isinstance(run, Run) else Run(path) if can_open else None
        config = config if opened is None else opened.config
        data, problem = None, ""
        try:
            if opened is not None:
                opened.check_data_files()
            data = config.task.load(config.seed)
        except (OSError, ValueError, LookupError) as error:
            problem = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error.args[0])
        return cls(path.resolve().name, path, config, summary, directory.records(), opened, data, problem, announce)

    @property
    def part(self) -> PartName:
        """The test set; the validation set of a run that has no test set."""
        return "test" if self.data is None or len(self.data.test) else "validation"

    @property
    def examples(self) -> Examples | None:
        """None if there are none, or if they cannot be read."""
        found = None if self.data is None else getattr(self.data, self.part)
        return found if found is not None and len(found) else None

    def check_samples(self, samples: Sequence[int]) -> None:
        if self.run is None or self.examples is None:
            return
        if wrong := [index for index in samples if not 0 <= index < len(self.examples)]:
            last = len(self.examples) - 1
            raise LookupError(f"the {self.part} set of {self.path} has examples from 0 to {last}, got {wrong[0]}")

    @cached_property
    def shapes(self) -> Shapes:
        """Of a model of ours."""
        return shapes(self.config.model)

    @property
    def parameters(self) -> int:
        model = self.config.model
        return model.parameters if isinstance(model, ModuleConfig) else self.shapes.parameters

    @cached_property
    def curves(self) -> Curves | None:
        try:
            return replace(read_curves(self.path), name=self.name)
        except ValueError:
            return None

    @property
    def seconds(self) -> float:
        return max((record.get("seconds", 0.0) for record in self.records), default=0.0)

    @cached_property
    def outputs(self) -> Outputs | None:
        """Predictions for all examples; None if there are none, and for `pronounce`, which has its own evaluation."""
        if self.run is None or self.data is None or self.examples is None or isinstance(self.config.task, Pronounce):
            return None
        from clearhead.inference.evaluate import predict_examples

        self.announce(f"Evaluating {len(self.examples):,} {self.part} examples of {self.path} ...")
        return predict_examples(self.run, self.part, self.examples, self.data.normalize)

    def predictions(self, n: int) -> Report | None:
        """The metrics, the first predictions and the most confident mistakes."""
        if self.run is None or self.examples is None:
            return None
        if isinstance(self.config.task, Pronounce):
            from clearhead.tasks.pronunciation import BEAM, report_words

            text = f"Pronouncing {self.part} words of {self.path} ..."
            return report_words(
                self.config.task, self.run, self.part, n, BEAM, lambda: self.announce(text), max_words=MAX_WORDS
            )
        return self.run.task.report(self.run, self.part, n, lambda: self.outputs, lambda: None)  # type: ignore[arg-type, return-value]

    @property
    def recorded_part(self) -> PartName:
        """The part of the data that `recorded_metrics` are about."""
        return "test" if any(record.get("kind") == "test" for record in self.records) else "validation"

    @property
    def recorded_metrics(self) -> dict[str, Any]:
        """Those of the last test record, or of the best validation record; {} before the first evaluation."""
        tests = [record for record in self.records if record.get("kind") == "test"]
        others = [record for record in self.records if record.get("kind") == "validation"]
        last = tests[-1:] or sorted(others, key=lambda record: record.get("accuracy", 0.0))[-1:]
        return {name: last[0][name] for name in MAIN_METRICS if name in last[0]} if last else {}
