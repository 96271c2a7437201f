"""How a model is fitted, and a run as a whole: frozen configs, checked when they are made, to and from JSON.

Importing this does not import torch.
"""

import math
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

from clearhead.data.config import TTA, DataConfig
from clearhead.files import from_json, to_json
from clearhead.models.config import LanguageConfig, ModelConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.validation import (
    check_at_most,
    check_between,
    check_choice,
    check_count,
    check_name,
    check_positive,
    is_number,
)

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["float32", "bf16", "auto"]
Compile = Literal["auto", "on", "off"]
ObjectiveName = Literal[
    "classification",
    "token-classification",
    "binary-classification",
    "regression",
    "set-pointer",
    "seq2seq",
    "causal-lm",
]

MOST_SEED = 2**63 - 1
"""torch's generators take no more"""
MOST_STEPS = 10**12
"""of steps and of epochs: more than anybody lives to see"""
MOST_THREADS = 1024
"""many more, and the process ends without a word when they are started"""

CHANGED_BY_RESUME = ("training.steps", "training.epochs", "training.threads")
"""settings that `clearhead resume` may have recorded in config.json since a checkpoint was saved"""

MODELS: dict[str, type] = {
    "predictor": PredictorConfig,
    "vision": VisionConfig,
    "seq2seq": Seq2SeqConfig,
    "language": LanguageConfig,
}
"""what a model config is called in a file"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights follow their gradients."""

    name: OptimizerName = "adamw"
    """adamw for all weights, or muon for the matrices inside blocks and the convolutions, and adamw for the rest"""
    lr: float = 1e-3
    """AdamW's learning rate after the warm-up"""
    muon_lr: float = 0.02
    """Muon's learning rate after the warm-up"""
    weight_decay: float = 0.01
    """share of a matrix taken off at each step, times its learning rate; norms, biases and embeddings keep theirs"""
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.95
    """Muon's"""
    schedule: Schedule = "cosine"
    warmup: int = 0
    """steps in which the learning rate rises from 0"""
    final_lr_fraction: float = 0.0
    """share of the learning rate that is left at the end; of no effect when it is constant"""
    grad_clip: float = 1.0
    """longest gradient: a longer one is shortened to this; 0 for no limit"""

    def __post_init__(self) -> None:
        check_choice(name=(self.name, OptimizerName), schedule=(self.schedule, Schedule))
        check_between(self, 0, math.inf, "lr", "muon_lr", "weight_decay", "grad_clip")
        check_between(self, 0, 1, "beta1", "beta2", "momentum")
        check_count(self, "warmup")
        if not is_number(self.final_lr_fraction) or not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(
                f"final_lr_fraction must be a share from 0 to 1, got {self.final_lr_fraction!r}; try 0 or 0.1"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, in which portions, and what happens on the way."""

    steps: int = 0
    """updates of the weights; or 0, and epochs instead"""
    epochs: int = 0
    """passes over the training examples; or 0, and steps instead"""
    batch_size: int = 128
    """examples in an update, over all processes"""
    grad_accum_steps: int = 1
    """portions that a batch is worked off in, for want of memory: the update is the same"""
    label_smoothing: float = 0.0
    """share of the target that is spread over all classes"""
    ema: float = 0.0
    """decay of the weights' moving average, which is what gets evaluated; 0 for none"""
    evaluate_every: int = 0
    """steps between evaluations; 0 for once an epoch"""
    checkpoint_every: int = 0
    """steps between checkpoints; 0 for each evaluation. A best result and the end are always kept"""
    keep_checkpoints: int = 2
    """newest checkpoints that stay, beside the best"""
    patience: int = 0
    """evaluations without a better one before training ends early; 0 for never"""
    log_every: int = 10
    """steps that one record of the training loss is about"""
    precision: Precision = "float32"
    """arithmetic of training: float32, bf16 autocast, or auto, which times both before the first step and records the
    faster one; evaluation is always float32"""
    compile: Compile = "auto"
    """torch.compile; auto is on with a GPU"""
    tta: TTA = "none"
    """at the test, and only there, the mean of the answers for several views of an image: flip adds its mirror image,
    shift both of them a pixel to two sides"""
    threads: int = 0
    """processor threads; 0 for torch's own choice"""

    def __post_init__(self) -> None:
        one_of_two = "set one of steps and epochs above 0 and the other to 0"
        check_count(self, "steps", "epochs", advice=one_of_two)
        check_count(self, "evaluate_every", "threads", "checkpoint_every", "patience")
        check_at_most(MOST_STEPS, steps=self.steps, epochs=self.epochs)
        check_at_most(MOST_THREADS, threads=self.threads)
        check_positive(
            batch_size=self.batch_size,
            grad_accum_steps=self.grad_accum_steps,
            keep_checkpoints=self.keep_checkpoints,
            log_every=self.log_every,
        )
        check_choice(precision=(self.precision, Precision), compile=(self.compile, Compile), tta=(self.tta, TTA))
        check_between(self, 0, 1, "label_smoothing", "ema")
        if (self.steps > 0) == (self.epochs > 0):
            raise ValueError(
                f"training lasts a number of steps or of epochs, got steps={self.steps}, epochs={self.epochs}; "
                f"{one_of_two}"
            )
        if self.grad_accum_steps > self.batch_size:
            raise ValueError(
                f"a batch must have an example for each portion, got batch_size={self.batch_size}, "
                f"grad_accum_steps={self.grad_accum_steps}; try grad_accum_steps={self.batch_size} or less"
            )

    def n_steps(self, steps_per_epoch: int) -> int:
        return self.steps or self.epochs * steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Attention that is kept while it is learnt, for `clearhead look RUN --training-dynamics`."""

    inputs: int = 0
    """validation examples that are looked at; 0 for no probe"""
    every: int = 0
    """steps between two looks; 0 for about 40 looks in all"""

    def __post_init__(self) -> None:
        check_count(self, "inputs", "every")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run depends on."""

    recipe: str
    """where these numbers come from"""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig
    objective: ObjectiveName = "classification"
    """what is asked of the model: see training/objective.py"""
    seed: int = 0
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)

    def __post_init__(self) -> None:
        check_choice(objective=(self.objective, ObjectiveName))
        check_count(self, "seed")
        check_at_most(MOST_SEED, seed=self.seed)
        if self.training.tta != "none" and not isinstance(self.model, VisionConfig):
            raise ValueError(f"only images have several views, got tta={self.training.tta!r}; set it to 'none'")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file; the model's `kind` says which config it is."""
        (kind,) = [name for name, kind in MODELS.items() if type(self.model) is kind]
        values = asdict(self)
        return values | {"model": {"kind": kind} | values["model"]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        if isinstance(values, dict) and isinstance(
            values.get("data"), dict
        ):  # runs without `fit` were trained on center-cropped pictures
            values = values | {"data": {"fit": "crop"} | values["data"]}
        return read(cls, values, "a run")

    def changes_since(self, before: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """{"training.steps": (what it was, what it is)}"""
        then, now = flat(before.to_dict()), flat(self.to_dict())
        return {name: (then.get(name), now.get(name)) for name in now | then if then.get(name) != now.get(name)}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training": {"steps": 5}} -> {"training.steps": 5}"""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def changes_since_saved(saved: Any, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """{"training.steps": (value in the checkpoint, value in config.json)}, given the config in a checkpoint's state.

    Checkpoints of earlier versions contain no config, or not all settings: those are not compared.
    """
    then = flat(saved) if isinstance(saved, dict) else {}
    now = flat(from_json(to_json(config.to_dict())))  # with lists instead of tuples
    return {name: (then[name], now[name]) for name in sorted(then.keys() & now.keys()) if then[name] != now[name]}


def read(kind: Any, values: Any, what: str) -> Any:
    """A config from plain values; its fields that are configs are read in the same way."""
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be written as names and values, got {values!r}; see config.json of a run")
    if kind == ModelConfig:
        name, values = values.get("kind"), {key: value for key, value in values.items() if key != "kind"}
        check_name(name, MODELS, "kind of model")
        kind = MODELS[name]  # type: ignore[index]
    types = get_type_hints(kind)
    for name in values:
        check_name(name, types, f"field of {what}")
    nested = {
        name: read(types[name], value, name)
        for name, value in values.items()
        if types[name] == ModelConfig or is_dataclass(types[name])
    }
    missing = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{what} needs all of its fields, got no {', '.join(missing)}; add what is missing")
    return kind(**(values | nested))
