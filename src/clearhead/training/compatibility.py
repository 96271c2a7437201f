"""Whether a checkpoint and the config.json beside it belong together: checked before any memory is allocated.

A checkpoint holds the config it was saved with, and its manifest protects that copy; config.json is a plain file that
anybody may edit or damage. Where the two differ in something that determines the model's outputs, training is refused,
and inference uses the checkpoint's copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clearhead.training.checkpoint import Checkpoint
from clearhead.training.config import CHANGED_BY_RESUME, RunConfig, changes_since_saved
from clearhead.training.run_directory import RunDirectory
from clearhead.training.tensor_headers import check_model_matches

PATHS = ("data.folder", "data.file", "data.train_file", "data.test_file")
"""where the data is: files may be moved, and their contents are compared by digest"""
AFFECT_OUTPUTS = ("model.", "data.", "objective", "seed", "training.tta")
"""beginnings of the names of settings that outputs or their evaluation depend on"""
ONLY_IN_TRAINING = ("dropout", "drop_path")
"""ends of the names of settings of a model that are switched off in inference"""


def config_for_inference(run: RunDirectory, found: Checkpoint) -> RunConfig:
    """The run's config; where it differs from the one that the checkpoint was saved with in a setting that determines
    the outputs, the latter, with the paths of config.json. Differences are reported."""
    config = RunConfig.from_dict(run.config)
    changes = changes_in(config, found)
    if fatal := {name: change for name, change in changes.items() if affects_outputs(name)}:
        run.report(
            f"{run.path / 'config.json'} does not match the checkpoint of step {found.step}, whose own config is used: "
            f"{described(fatal)}"
        )
        saved = RunConfig.from_dict(found.state["config"])
        paths = {name.removeprefix("data."): getattr(config.data, name.removeprefix("data.")) for name in PATHS}
        config = replace(saved, data=replace(saved.data, **paths))
        changes = {}
    check_model_matches(config.model, found.model)
    if harmless := {name: change for name, change in changes.items() if name not in CHANGED_BY_RESUME}:
        run.report(
            f"{run.path / 'config.json'} has changed since the checkpoint of step {found.step} was saved, "
            f"without effect on the outputs: {described(harmless)}"
        )
    return config


def check_config_matches(run: RunDirectory, config: RunConfig, found: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """ValueError where a config and a checkpoint differ in a setting that determines the outputs, or in the shapes of
    the weights. The other settings that differ, without paths."""
    changes = changes_in(config, found)
    if fatal := {name: change for name, change in changes.items() if affects_outputs(name)}:
        raise ValueError(
            f"{run.path / 'config.json'} does not match the checkpoint of step {found.step}: {described(fatal)}; "
            "restore config.json: the checkpoint's state.json contains a copy"
        )
    check_model_matches(config.model, found.model)
    return changes


def changes_in(config: RunConfig, found: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those in the checkpoint, without paths."""
    changes = changes_since_saved(found.state.get("config"), config)
    return {name: change for name, change in changes.items() if name not in PATHS}


def affects_outputs(name: str) -> bool:
    is_only_in_training = name.endswith(ONLY_IN_TRAINING) or name.startswith("data.augmentation.")
    return name.startswith(AFFECT_OUTPUTS) and not is_only_in_training


def announce_changes(found_config: Any, config: RunConfig, report: Callable[[str], None]) -> None:
    """Reports settings in config.json that differ from those the checkpoint was saved with."""
    if changes := changes_since_saved(found_config, config):
        report(f"config.json has changed since the checkpoint was saved: {described(changes)}")


def described(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in changes.items())
