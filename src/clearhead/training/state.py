"""What a run is besides its config: to a checkpoint and back, bit for bit, over any number of processes."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.data.dataset import Dataset, Normalize
from clearhead.data.datasets import changed_files, digests
from clearhead.data.prng import fold_in
from clearhead.files import from_json, to_json
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.compatibility import announce_changes
from clearhead.training.config import MAX_STEPS, RunConfig
from clearhead.training.context import TrainContext
from clearhead.training.distributed import gather_full, load_tensors
from clearhead.training.objectives import NUM_SUMS
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory
from clearhead.validation import is_number


@dataclass
class TrainState:
    """How far a run is. Equal in all processes."""

    step: int = 0
    """updates made"""
    sums: list[float] = field(default_factory=lambda: [0.0] * NUM_SUMS)
    """counts since the last training record: see metrics.counts"""
    best_step: int = 0
    best_score: list[float] = field(default_factory=list)
    """see Objective.score; [] before the first evaluation"""
    evals_since_best: int = 0
    """evaluations since the best one"""
    began: float = field(default_factory=time.monotonic)
    """when the run would have begun, had it never been interrupted"""

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def update_best(self, score: list[float]) -> bool:
        """Whether this evaluation is the best so far, which is remembered."""
        if self.best_score and score <= self.best_score:
            self.evals_since_best += 1
            return False
        self.best_step, self.best_score, self.evals_since_best = self.step, score, 0
        return True

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "began"}
        return values | {"seconds": self.seconds}

    @classmethod
    def from_json(cls, values: Any) -> "TrainState":
        """ValueError for anything that `to_json` cannot have written."""
        expected = dict.fromkeys(("step", "best_step", "evals_since_best"), is_index) | {
            "sums": lambda value: is_numbers(value) and len(value) == NUM_SUMS,
            "best_score": is_numbers,
            "seconds": is_finite,
        }
        if not isinstance(values, dict) or values.keys() != expected.keys():
            raise ValueError(f"the progress of a run consists of {', '.join(sorted(expected))}, got {values!r:.80}")
        if wrong := [name for name, is_valid in expected.items() if not is_valid(values[name])]:
            raise ValueError(f"{wrong[0]} in the progress of a run is not valid: {values[wrong[0]]!r:.60}")
        values = dict(values)
        return cls(began=time.monotonic() - values.pop("seconds"), **values)


def is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEPS


def is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < sys.float_info.max


def is_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_finite, values))


def capture_state(ctx: TrainContext, state: TrainState) -> Checkpoint | None:
    """The run as it is; None in all processes but the first, which must ask too."""
    keep = ctx.ranks.is_main
    averages = {} if ctx.ema is None else ctx.ema.averages
    others = {f"optim.{name}": tensor for name, tensor in ctx.optimizers.state_tensors().items()}
    others |= {f"ema.{name}": tensor for name, tensor in averages.items()}
    model, optimizer = gather_full(ctx.model.state_dict(), keep), gather_full(others, keep)
    for kind, generator in random_states(ctx.ranks.device).items():
        for rank, bytes_of_rank in enumerate(ctx.ranks.all_gather(generator)):
            optimizer[f"random.rank{rank}{kind}"] = bytes_of_rank
    saved = {"train_state": state.to_json(), "environment": ctx.environment(), "data": about_data(ctx.data)}
    saved["config"] = from_json(to_json(ctx.config.to_dict()))  # with lists instead of tuples
    return Checkpoint(state.step, model, optimizer, saved) if keep else None


def about_data(data: Dataset) -> dict[str, Any]:
    """What is needed to ask the trained model something and to read its answer, where the data itself is not there."""
    normalize = {"mean": list(data.normalize.mean), "std": list(data.normalize.std)} if data.normalize else None
    known = {"classes": list(data.classes), "vocab": list(data.vocab), "normalize": normalize}
    return known | {"files": dict(data.files), "skipped": list(data.skipped)}


@dataclass(frozen=True)
class DataInfo:
    """What a checkpoint knows about the data that it was trained on: see `about_data`."""

    classes: tuple[str, ...]
    vocab: tuple[str, ...]
    normalize: Normalize | None
    files: dict[str, str]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "DataInfo":
        """ValueError for anything that `about_data` cannot have written. Earlier versions wrote no vocab or files."""
        about = state.get("data")
        if not isinstance(about, dict):
            raise ValueError(f"a checkpoint must describe its data, got {about!r:.60}")
        texts = {name: about.get(name, []) for name in ("classes", "vocab")}
        files, normalize = about.get("files", {}), about.get("normalize")
        for name, value in texts.items():
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise ValueError(f"{name} in a checkpoint must be a list of strings, got {value!r:.60}")
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError(f"files in a checkpoint must map paths to digests, got {files!r:.60}")
        if normalize is not None and not is_normalisation(normalize):
            raise ValueError(f"normalize in a checkpoint must be a mean and a std per channel, got {normalize!r:.80}")
        scale = normalize and Normalize(tuple(normalize["mean"]), tuple(normalize["std"]))
        return cls(tuple(texts["classes"]), tuple(texts["vocab"]), scale, files)

    def check_matches(self, config: RunConfig) -> None:
        """ValueError unless there is a name for each output of the model, and a symbol for each id that it knows."""
        match config.model:
            case VisionConfig(num_classes=n):
                expected = {"classes": n}
            case Seq2SeqConfig(src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size):
                expected = {"vocab": src_vocab_size, "classes": tgt_vocab_size}
            case LanguageConfig(vocab_size=n):
                expected = {"vocab": n}
            case PredictorConfig(out_features=n) if config.objective in ("classification", "token-classification"):
                expected = {"classes": n}
            case _:
                expected = {"classes": 2} if config.objective == "binary-classification" else {}
        for name, n in expected.items():
            if (found := len(getattr(self, name))) != n:
                raise ValueError(f"the checkpoint must name {n} {name}, as many as its model has, got {found}")


def is_normalisation(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"mean", "std"} or not all(map(is_numbers, value.values())):
        return False
    return len(value["mean"]) == len(value["std"]) > 0 and min(value["std"]) > 0


def restore(ctx: TrainContext, found: Checkpoint | None, report: Callable[[str], None]) -> TrainState:
    """Brings all processes to where the first one's checkpoint is; to the beginning without one."""
    ranks = ctx.ranks
    saved = ranks.broadcast_json(None if found is None else found.state)
    if saved is None:
        return TrainState()
    check_files(saved, ctx.data.files)
    state = TrainState.from_json(saved.get("train_state"))
    load_tensors(ctx.model.state_dict(), ranks.broadcast_tensors(found.model if found else {}))
    optimizer = ranks.broadcast_tensors(found.optimizer if found else {})
    ctx.optimizers.load_state_tensors(starting_with("optim.", optimizer))
    if ctx.ema is not None:
        load_tensors(ctx.ema.averages, starting_with("ema.", optimizer))
    restore_random(ctx, starting_with("random.", optimizer), state.step)
    announce_changes(saved.get("config"), ctx.config, report)
    announce(saved.get("environment"), ctx.environment(), report)
    return state


def check_files(state: dict[str, Any], now: Mapping[str, str]) -> None:
    """With other words in a file, or other pictures in a folder, others would validate, some of them learnt already."""
    if changed := changed_files(DataInfo.from_state(state).files, now):
        raise ValueError(
            f"a run goes on with the data that it began with, got other bytes in {', '.join(changed)}; "
            "put the old ones back, or train anew"
        )


@contextmanager
def changed_file_messages(run: RunDirectory | None, config: RunConfig) -> Iterator[None]:
    """What data of other bytes may break inside (too few words, other letters) is told as that."""
    try:
        yield
    except (ValueError, LookupError):
        if run and (found := run.latest_checkpoint()):
            check_files(found.state, digests(config.data))
        raise


def use_weights(ctx: TrainContext, found: Checkpoint | None) -> None:
    """Gives the model the weights that were evaluated when this checkpoint was made."""
    weights = eval_weights(found.model, found.optimizer) if found else {}
    load_tensors(ctx.model.state_dict(), ctx.ranks.broadcast_tensors(weights))


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The generators that dropout draws from."""
    states = {"": torch.get_rng_state()}
    return states | ({".cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random(ctx: TrainContext, states: dict[str, Tensor], step: int) -> None:
    """This process's generators; a process that the checkpoint does not know starts a stream of its own."""
    rank, device = ctx.ranks.rank, ctx.ranks.device
    torch.manual_seed(fold_in(ctx.config.seed, "dropout", rank, step))
    try:
        if f"rank{rank}" in states:
            torch.set_rng_state(states[f"rank{rank}"])
        if f"rank{rank}.cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states[f"rank{rank}.cuda"], device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the random state in the checkpoint of step {step} cannot be used: {error}") from None


def announce(before: Any, now: dict[str, Any], report: Callable[[str], None]) -> None:
    if not isinstance(before, dict):
        raise ValueError(f"a checkpoint must say what it was trained with, got {before!r:.60}")
    changes = {name: value for name, value in now.items() if before.get(name, value) != value}
    if changes:
        how = "will differ" if "precision" in changes else "may differ in their last digits"
        told = "; ".join(f"{name} was {before[name]}, is {value}" for name, value in changes.items())
        report(f"numbers {how} from an uninterrupted run: {told}")


def starting_with(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
