"""The configuration of a run: frozen dataclasses, validated when they are created, to and from JSON.

Importing this does not import torch.
"""

import math
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

from clearhead.data import TTA
from clearhead.files import from_json, to_json
from clearhead.models.config import (
    LanguageConfig,
    ModelConfig,
    ModuleConfig,
    PredictorConfig,
    Seq2SeqConfig,
    VisionConfig,
)
from clearhead.tasks import find_task
from clearhead.tasks.task import Task
from clearhead.validation import (
    check_choice,
    check_int,
    check_name,
    check_positive,
    check_range,
    is_number,
)

OptimizerName = Literal["adamw", "muon"]
FACTORY: Any = "factory"
"""in place of a name: the optimizer is made by a function that `clearhead.fit` was given"""
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["float32", "bf16", "auto"]
Compile = Literal["auto", "on", "off"]

MAX_SEED = 2**63 - 1
"""the largest seed that torch's generators accept"""
MAX_STEPS = 10**12
"""of steps and of epochs"""
EVAL_BATCH_SIZE = 512
"""the default of training.eval_batch_size"""
MAX_THREADS = 1024
"""with many more, the process dies silently when they are started"""

CHANGED_BY_RESUME = ("training.steps", "training.epochs", "training.threads")
"""settings that `clearhead resume` may change in config.json after a checkpoint was saved"""

MODELS: dict[str, type] = {
    "predictor": PredictorConfig,
    "vision": VisionConfig,
    "seq2seq": Seq2SeqConfig,
    "language": LanguageConfig,
    "module": ModuleConfig,
}
"""the `kind` of a model config in config.json"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: OptimizerName = "adamw"
    """adamw for all weights, or muon for convolutions and the matrices inside blocks, and adamw for the rest"""
    lr: float = 1e-3
    """peak learning rate of AdamW"""
    muon_lr: float = 0.02
    """peak learning rate of Muon"""
    weight_decay: float = 0.01
    """decoupled weight decay of matrices; none for norms, biases and embeddings"""
    beta1: float = 0.9
    """decay of AdamW's mean of the gradients"""
    beta2: float = 0.999
    """decay of AdamW's mean of the squared gradients"""
    momentum: float = 0.95
    """momentum of Muon"""
    schedule: Schedule = "cosine"
    """course of the learning rate after the warm-up"""
    warmup: int = 0
    """steps of linear learning-rate warm-up"""
    final_lr_fraction: float = 0.0
    """learning rate at the end as a fraction of the peak; ignored by the constant schedule"""
    grad_clip: float = 1.0
    """clip the gradient norm to this value; 0 disables"""

    def __post_init__(self) -> None:
        check_choice(schedule=(self.schedule, Schedule))
        if self.name != FACTORY:
            check_choice(name=(self.name, OptimizerName))
        check_range(
            0,
            math.inf,
            defaults=OptimizerConfig,
            lr=self.lr,
            muon_lr=self.muon_lr,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
        )
        check_range(0, 1, defaults=OptimizerConfig, beta1=self.beta1, beta2=self.beta2, momentum=self.momentum)
        check_int(0, warmup=self.warmup)
        if not is_number(self.final_lr_fraction) or not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(f"final_lr_fraction must be in [0, 1], got {self.final_lr_fraction!r}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batches, evaluation, checkpoints and arithmetic."""

    steps: int = 0
    """number of updates; 0 to set epochs instead"""
    epochs: int = 0
    """passes over the training set; 0 to set steps instead"""
    batch_size: int = 128
    """examples per update, over all processes"""
    grad_accum_steps: int = 1
    """gradient-accumulation steps per batch: less memory, the same update"""
    eval_batch_size: int = EVAL_BATCH_SIZE
    """examples per forward pass in evaluation and inference, over all processes; fewer take less memory"""
    label_smoothing: float = 0.0
    """label smoothing of the cross-entropy loss"""
    ema: float = 0.0
    """decay of the exponential moving average of the weights, which is evaluated; 0 disables"""
    evaluate_every: int = 0
    """steps between evaluations; 0 for once per epoch"""
    checkpoint_every: int = 0
    """steps between checkpoints; 0 for every evaluation. The best and the last step are always saved"""
    keep_checkpoints: int = 2
    """latest checkpoints to keep besides the best"""
    patience: int = 0
    """stop early after this many evaluations without improvement; 0 disables"""
    log_every: int = 10
    """steps between records of the training loss, each a mean over these steps"""
    precision: Precision = "float32"
    """arithmetic of training: float32, bf16 autocast, or auto, which times both before the first step and records the
    faster one; evaluation always uses float32"""
    compile: Compile = "auto"
    """torch.compile; auto enables it on a GPU"""
    tta: TTA = "none"
    """test-time augmentation, on the test set only: the mean over the image and its mirror image (flip), or over both
    shifted by a pixel to two sides too (shift)"""
    threads: int = 0
    """CPU threads; 0 for torch's default"""

    def __post_init__(self) -> None:
        advice = "set one of steps and epochs above 0 and the other to 0"
        check_int(0, MAX_STEPS, hint=advice, steps=self.steps, epochs=self.epochs)
        check_int(0, MAX_THREADS, defaults=TrainingConfig, threads=self.threads)
        check_int(
            0,
            defaults=TrainingConfig,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            patience=self.patience,
        )
        check_positive(
            batch_size=self.batch_size,
            eval_batch_size=self.eval_batch_size,
            grad_accum_steps=self.grad_accum_steps,
            keep_checkpoints=self.keep_checkpoints,
            log_every=self.log_every,
        )
        check_choice(precision=(self.precision, Precision), compile=(self.compile, Compile), tta=(self.tta, TTA))
        check_range(0, 1, defaults=TrainingConfig, label_smoothing=self.label_smoothing, ema=self.ema)
        if (self.steps > 0) == (self.epochs > 0):
            raise ValueError(f"{advice}, got steps={self.steps}, epochs={self.epochs}")
        if self.grad_accum_steps > self.batch_size:
            raise ValueError(
                f"grad_accum_steps must be at most batch_size, got batch_size={self.batch_size}, "
                f"grad_accum_steps={self.grad_accum_steps}"
            )

    def n_steps(self, steps_per_epoch: int) -> int:
        return self.steps or self.epochs * steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Attention weights saved during training, for `clearhead look RUN --training-dynamics`."""

    inputs: int = 0
    """validation examples whose attention is saved; 0 disables"""
    every: int = 0
    """steps between snapshots; 0 for about 40 snapshots in all"""

    def __post_init__(self) -> None:
        check_int(0, inputs=self.inputs, every=self.every)

    def interval(self, n_steps: int) -> int:
        return self.every or max(1, n_steps // 40)

    def is_due(self, step: int, n_steps: int) -> bool:
        """At the beginning, at the end, and every few steps."""
        return self.inputs > 0 and (step % self.interval(n_steps) == 0 or step == n_steps)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: str
    """the recipe that these settings come from"""
    model: ModelConfig
    data: Task
    """the task, with the options of its data"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig
    seed: int = 0
    """random seed of the initial weights, the validation split, the order of the batches and dropout"""
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)

    def __post_init__(self) -> None:
        check_int(0, MAX_SEED, seed=self.seed)
        if self.training.tta != "none" and not isinstance(self.model, VisionConfig):
            raise ValueError(f"test-time augmentation is for images, got tta={self.training.tta!r}; set it to 'none'")

    @property
    def task(self) -> Task:
        """The same as `data`, where its methods matter rather than its options."""
        return self.data

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the model's `kind` and the data's `name` select their config classes."""
        (kind,) = [name for name, kind in MODELS.items() if type(self.model) is kind]
        values = asdict(self)
        return values | {"model": {"kind": kind} | values["model"], "data": self.data.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        model = values.get("model") if isinstance(values, dict) else None
        is_old_model = isinstance(model, dict) and "hidden" in model and "mlp_dim" not in model
        if is_old_model or (isinstance(values, dict) and "objective" in values):
            raise ValueError(
                "this run was made by an earlier version of Clearhead, with other names of settings and weights; "
                "train it again"
            )
        return read(cls, values, "a run")

    def changes_since(self, before: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """{"training.steps": (before, now)}"""
        then, now = flat(before.to_dict()), flat(self.to_dict())
        return {name: (then.get(name), now.get(name)) for name in now | then if then.get(name) != now.get(name)}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training": {"steps": 5}} -> {"training.steps": 5}"""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


def changes_since_saved(saved: Any, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """{"training.steps": (value in the checkpoint, value in config.json)}, given the config in a checkpoint's state.

    Settings that the checkpoint does not have are not compared.
    """
    then = flat(saved) if isinstance(saved, dict) else {}
    now = flat(from_json(to_json(config.to_dict())))  # with lists instead of tuples
    return {name: (then[name], now[name]) for name in sorted(then.keys() & now.keys()) if then[name] != now[name]}


def read(kind: Any, values: Any, what: str) -> Any:
    """A config from plain values, recursively."""
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be a JSON object, got {values!r:.80}")
    if kind == ModelConfig:
        name, values = values.get("kind"), {key: value for key, value in values.items() if key != "kind"}
        check_name(name, MODELS, "kind of model")
        kind = MODELS[name]  # type: ignore[index]
    if kind is Task:
        kind, values = find_task(values.get("name")), {key: value for key, value in values.items() if key != "name"}
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    for name in values:
        check_name(name, types, f"field of {what}")
    nested = {
        name: read(types[name], value, name)
        for name, value in values.items()
        if types[name] == ModelConfig or is_dataclass(types[name])
    }
    missing = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{what} lacks the fields {', '.join(missing)}")
    return kind(**(values | nested))
