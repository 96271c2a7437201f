"""The state of a run: captured in a checkpoint and restored from it, bit for bit, for any number of ranks.

`capture_state` and `restore` are collectives: all ranks call them. Only rank 0 reads and writes files.

A checkpoint holds the config that it was saved with, protected by its manifest; config.json is a plain file that
anybody may edit or damage. Where the two differ in a setting that determines the model's outputs, training is refused,
and inference uses the checkpoint's config. This is checked before memory is allocated for tensors.
"""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data.dataset import Dataset, Normalize, fold_in
from clearhead.files import from_json, sha256, to_json
from clearhead.models.config import ModelConfig, ModuleConfig, Seq2SeqConfig, build_model
from clearhead.tasks.task import changed_files
from clearhead.training.checkpoint import SMALL, Checkpoint
from clearhead.training.config import CHANGED_BY_RESUME, MAX_STEPS, RunConfig, changes_since_saved
from clearhead.training.context import TrainContext
from clearhead.training.distributed import check_same_shapes, gather_full, load_tensors, state_of
from clearhead.training.evaluation import NUM_SUMS
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import safetensors_header
from clearhead.validation import is_number

AFFECT_OUTPUTS = ("model.", "data.", "seed", "training.tta")
"""prefixes of settings that determine the outputs or their evaluation"""
TRAINING_ONLY = ("dropout", "drop_path")
"""suffixes of model settings that have no effect in inference"""
MAX_COPIES = 4
"""the largest allowed ratio of optimizer state to weights: two moments, a moving average, and one in reserve"""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Changes = dict[str, tuple[Any, Any]]
"""{"training.steps": (value in the checkpoint, value in config.json)}"""


@dataclass
class TrainState:
    """The progress of a run, equal on all ranks."""

    step: int = 0
    """number of updates"""
    sums: list[float] = field(default_factory=lambda: [0.0] * NUM_SUMS)
    """`metric_sums` since the previous training record"""
    best_step: int = 0
    best_score: list[float] = field(default_factory=list)
    """`Objective.score` of the best evaluation; [] before the first one"""
    evals_since_best: int = 0
    start_time: float = field(default_factory=time.monotonic)
    """of the monotonic clock, minus the training time before an interruption"""

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.start_time, 3)

    def update_best(self, score: list[float]) -> bool:
        """Record the score of an evaluation. Returns whether it is the best so far."""
        if self.best_score and score <= self.best_score:
            self.evals_since_best += 1
            return False
        self.best_step, self.best_score, self.evals_since_best = self.step, score, 0
        return True

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "start_time"}
        return values | {"seconds": self.seconds}

    @classmethod
    def from_json(cls, values: Any) -> "TrainState":
        """The inverse of `to_json`. ValueError for anything that it cannot have returned."""
        expected = dict.fromkeys(("step", "best_step", "evals_since_best"), is_index) | {
            "sums": lambda value: is_numbers(value) and len(value) == NUM_SUMS,
            "best_score": is_numbers,
            "seconds": is_finite,
        }
        if not isinstance(values, dict) or values.keys() != expected.keys():
            raise ValueError(f"train_state must have the fields {', '.join(sorted(expected))}, got {values!r:.80}")
        if invalid := [name for name, is_valid in expected.items() if not is_valid(values[name])]:
            raise ValueError(f"{invalid[0]} in train_state is invalid: {values[invalid[0]]!r:.60}")
        values = dict(values)
        return cls(start_time=time.monotonic() - values.pop("seconds"), **values)


@dataclass(frozen=True)
class DataInfo:
    """The description of the training data in a checkpoint, for inference without the data itself."""

    classes: tuple[str, ...]
    vocab: tuple[str, ...]
    normalize: Normalize | None
    files: dict[str, str]

    @staticmethod
    def to_json(data: Dataset) -> dict[str, Any]:
        normalize = {"mean": list(data.normalize.mean), "std": list(data.normalize.std)} if data.normalize else None
        values = {"classes": list(data.classes), "vocab": list(data.vocab), "normalize": normalize}
        return values | {"files": dict(data.files), "skipped": list(data.skipped)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "DataInfo":
        """The inverse of `to_json`, from a checkpoint's state. ValueError if it is invalid."""
        values = state.get("data")
        if not isinstance(values, dict):
            raise ValueError(f"data in a checkpoint must be an object, got {values!r:.60}")
        texts = {name: values.get(name, []) for name in ("classes", "vocab")}
        files, normalize = values.get("files", {}), values.get("normalize")
        for name, value in texts.items():
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise ValueError(f"{name} in a checkpoint must be a list of strings, got {value!r:.60}")
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError(f"files in a checkpoint must map paths to digests, got {files!r:.60}")
        if normalize is not None and not is_normalize(normalize):
            raise ValueError(f"normalize in a checkpoint must be a mean and a std per channel, got {normalize!r:.80}")
        parsed = normalize and Normalize(tuple(normalize["mean"]), tuple(normalize["std"]))
        return cls(tuple(texts["classes"]), tuple(texts["vocab"]), parsed, files)

    def check_matches(self, config: RunConfig) -> None:
        """ValueError unless there is a class name for each output of the model, and a token for each id."""
        expected = config.task.label_counts(config.model)
        for name, n in expected.items():
            if (length := len(getattr(self, name))) != n:
                raise ValueError(f"{name} in the checkpoint must have {n} entries, as its model has, got {length}")


def capture_state(ctx: TrainContext, state: TrainState) -> Checkpoint | None:
    """The checkpoint of the current state; None on all ranks but 0."""
    keep = ctx.ranks.is_main
    averages = {} if ctx.ema is None else ctx.ema.averages
    optim = {f"optim.{name}": tensor for name, tensor in ctx.optimizers.state_tensors().items()}
    optim |= {f"ema.{name}": tensor for name, tensor in averages.items()}
    model, optimizer = gather_full(state_of(ctx.model), keep), gather_full(optim, keep)
    for suffix, rng_state in rng_states(ctx.ranks.device).items():
        for rank, rng_state_of_rank in enumerate(ctx.ranks.all_gather(rng_state)):
            optimizer[f"random.rank{rank}{suffix}"] = rng_state_of_rank
    saved = {"train_state": state.to_json(), "environment": ctx.environment(), "data": DataInfo.to_json(ctx.data)}
    saved["config"] = from_json(to_json(ctx.config.to_dict()))  # turns tuples into lists, as reading it back will
    return Checkpoint(state.step, model, optimizer, saved) if keep else None


def restore(
    ctx: TrainContext, checkpoint: Checkpoint | None, report: Callable[[str], None], requested: Collection[str] = ()
) -> TrainState:
    """Load the checkpoint of rank 0 on all ranks; without one, return the initial state.

    Differences between its config and the current one are reported, except those in `requested`.
    """
    ranks = ctx.ranks
    saved = ranks.broadcast_json(None if checkpoint is None else checkpoint.state)
    if saved is None:
        return TrainState()
    check_files(saved, ctx.data.files)
    state = TrainState.from_json(saved.get("train_state"))
    load_tensors(state_of(ctx.model), ranks.broadcast_tensors(checkpoint.model if checkpoint else {}))
    optimizer = ranks.broadcast_tensors(checkpoint.optimizer if checkpoint else {})
    ctx.optimizers.load_state_tensors(with_prefix("optim.", optimizer))
    if ctx.ema is not None:
        load_tensors(ctx.ema.averages, with_prefix("ema.", optimizer))
    restore_rng(ctx, with_prefix("random.", optimizer), state.step)
    announce_changes(saved.get("config"), ctx.config, report, requested)
    report_environment_changes(saved.get("environment"), ctx.environment(), report)
    return state


def check_files(state: dict[str, Any], digests: Mapping[str, str]) -> None:
    """ValueError if data files have changed since the checkpoint.

    Other files would be split differently into training and validation examples, so that training examples could become
    validation examples.
    """
    if changed := changed_files(DataInfo.from_state(state).files, digests):
        raise ValueError(
            f"the run's data has changed: {', '.join(changed)}; restore the original files, or train a new run"
        )


@contextmanager
def changed_file_messages(run: RunDirectory | None, config: RunConfig) -> Iterator[None]:
    """If changed data files cause an error inside this context, such as another vocabulary size, report the change."""
    try:
        yield
    except (ValueError, LookupError):
        if run and (latest := run.latest_checkpoint()):
            check_files(latest.state, config.task.digests())
        raise


def load_eval_weights(ctx: TrainContext, checkpoint: Checkpoint | None) -> None:
    """Load the weights that evaluations of this checkpoint used into the model."""
    weights = eval_weights(checkpoint.model, checkpoint.optimizer) if checkpoint else {}
    load_tensors(state_of(ctx.model), ctx.ranks.broadcast_tensors(weights))


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random generators that dropout uses."""
    states = {"": torch.get_rng_state()}
    if device.type == "cuda":
        states[".cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states[".mps"] = torch.mps.get_rng_state()
    return states


def restore_rng(ctx: TrainContext, states: dict[str, Tensor], step: int) -> None:
    """Restore this rank's random generators. A rank that the checkpoint does not contain gets a new seed."""
    rank, device = ctx.ranks.rank, ctx.ranks.device
    torch.manual_seed(fold_in(ctx.config.seed, "dropout", rank, step))
    try:
        if f"rank{rank}" in states:
            torch.set_rng_state(states[f"rank{rank}"])
        if f"rank{rank}.cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states[f"rank{rank}.cuda"], device)
        if f"rank{rank}.mps" in states and device.type == "mps":
            torch.mps.set_rng_state(states[f"rank{rank}.mps"])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"invalid random state in the checkpoint of step {step}: {error}") from None


def report_environment_changes(saved: Any, current: dict[str, Any], report: Callable[[str], None]) -> None:
    """Report differences between the environment of a checkpoint and the current one."""
    if not isinstance(saved, dict):
        raise ValueError(f"environment in a checkpoint must be an object, got {saved!r:.60}")
    changes = {name: value for name, value in current.items() if saved.get(name, value) != value}
    if changes:
        effect = "will differ" if "precision" in changes else "may differ in the last digits"
        listed = "; ".join(f"{name} was {saved[name]}, is {value}" for name, value in changes.items())
        report(f"results {effect} from those of an uninterrupted run: {listed}")


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEPS


def is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < sys.float_info.max


def is_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_finite, values))


def is_normalize(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"mean", "std"} or not all(map(is_numbers, value.values())):
        return False
    return len(value["mean"]) == len(value["std"]) > 0 and min(value["std"]) > 0


def config_for_inference(run: RunDirectory, checkpoint: Checkpoint) -> RunConfig:
    """The run's config. If it differs from the checkpoint's in a setting that determines the outputs, the checkpoint's
    config, with the paths of config.json. Differences are reported."""
    config = RunConfig.from_dict(run.config)
    changes = changes_in(config, checkpoint)
    if conflicts := {name: change for name, change in changes.items() if affects_outputs(name)}:
        run.report(
            f"{run.path / 'config.json'} does not match the checkpoint of step {checkpoint.step}; using the "
            f"checkpoint's own config: {describe_changes(conflicts)}"
        )
        saved = RunConfig.from_dict(checkpoint.state["config"])
        if type(saved.data) is type(config.data):
            paths = {name: getattr(config.data, name) for name in config.task.file_fields}
            saved = replace(saved, data=replace(saved.data, **paths))
        config = saved
        changes = {}
    check_model_matches(config.model, checkpoint.model)
    if other_changes := {name: change for name, change in changes.items() if name not in CHANGED_BY_RESUME}:
        run.report(
            f"{run.path / 'config.json'} has changed since the checkpoint of step {checkpoint.step} was saved, "
            f"without effect on the outputs: {describe_changes(other_changes)}"
        )
    return config


def check_config_matches(run: Path, config: RunConfig, checkpoint: Checkpoint) -> Changes:
    """ValueError if config and checkpoint differ in a setting that determines the outputs, or in the shapes of the
    weights. Returns the other differences, without paths."""
    changes = changes_in(config, checkpoint)
    if conflicts := {name: change for name, change in changes.items() if affects_outputs(name)}:
        raise ValueError(
            f"{run / 'config.json'} does not match the checkpoint of step {checkpoint.step}: "
            f"{describe_changes(conflicts)}; restore config.json: the checkpoint's state.json contains a copy"
        )
    check_model_matches(config.model, checkpoint.model)
    return changes


def changes_in(config: RunConfig, checkpoint: Checkpoint) -> Changes:
    """Settings that differ from those in the checkpoint, without paths: files may be moved, and their contents are
    compared by digest."""
    changes = changes_since_saved(checkpoint.state.get("config"), config)
    paths = [f"data.{name}" for name in config.task.file_fields]
    return {name: change for name, change in changes.items() if name not in paths}


def affects_outputs(name: str) -> bool:
    is_training_only = name.endswith(TRAINING_ONLY) or name.startswith("data.augmentation.")
    return name.startswith(AFFECT_OUTPUTS) and not is_training_only


def announce_changes(
    saved: Any, config: RunConfig, report: Callable[[str], None], requested: Collection[str] = ()
) -> None:
    """Report settings in config.json that differ from the checkpoint's, except the `requested` changes."""
    changes = changes_since_saved(saved, config)
    if unexpected := {name: change for name, change in changes.items() if name not in requested}:
        report(f"config.json has changed since the checkpoint was saved: {describe_changes(unexpected)}")


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in changes.items())


def check_tensor_files(model: Path, optimizer: Path, config: Any) -> None:
    """ValueError unless these files are as large as those of the model that the config describes.

    Only headers are read, because a sparse file with a valid digest may claim to be of any size.
    """
    tensors = {name: meta_tensor(name, *entry) for name, entry in safetensors_header(model).items()}
    check_model_matches(RunConfig.from_dict(config).model, tensors)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    if (size := os.lstat(optimizer).st_size) > MAX_COPIES * weights + SMALL:
        raise ValueError(f"{optimizer.name} has {size:,} bytes for {weights:,} bytes of weights")


def meta_tensor(name: str, dtype: str, shape: list[int]) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"{name!r:.60} has the unknown type {dtype!r:.20}")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the names, types and shapes of a model's state, in alphabetical order."""
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in sorted(tensors.items())]
    return sha256("".join(lines).encode())


def check_model_matches(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless a model built from this config has exactly these parameters and buffers.

    The model is built on the meta device, so a config that describes an enormous model costs nothing. A user's own
    model cannot be built; the digest of its names and shapes is compared.
    """
    if isinstance(config, ModuleConfig):
        if state_digest(tensors) != config.sha256:
            raise ValueError(f"the weights in the checkpoint are not those of the {config.name} in config.json")
        return
    blocks = config.depth + (config.decoder_blocks if isinstance(config, Seq2SeqConfig) else 0)
    if blocks > len(tensors):  # each block has parameters: do not build a billion of them to find that out
        raise ValueError(
            f"config.json does not match the checkpoint: it describes {blocks} blocks, but the checkpoint contains "
            f"{len(tensors)} tensors; restore config.json"
        )
    try:
        with torch.device("meta"):
            expected = build_model(config).state_dict()
    except (RuntimeError, OverflowError) as error:  # more elements than a 64-bit number can count
        raise ValueError(f"config.json describes a model that cannot be built: {error}; restore config.json") from None
    check_same_shapes(tensors, expected)
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype != expected[name].dtype]:
        raise ValueError(f"{wrong[0]} is {tensors[wrong[0]].dtype} in the checkpoint, not {expected[wrong[0]].dtype}")
