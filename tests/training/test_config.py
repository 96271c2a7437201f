import json
import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from clearhead.data import Augmentation
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.tasks.images import Mnist
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig, flat

STACK = {"width": 8, "depth": 1, "num_heads": 2}
MODELS = [
    PredictorConfig(**STACK, in_features=3, out_features=3),
    VisionConfig(**STACK, image_size=(8, 4), patch_size=4, num_classes=2),
    Seq2SeqConfig(**STACK, src_vocab_size=3, tgt_vocab_size=4),
    LanguageConfig(**STACK, vocab_size=5),
]
RUN = RunConfig(
    recipe="test",
    model=MODELS[1],
    data=Mnist(augmentation=Augmentation(crop=2)),
    training=TrainingConfig(epochs=2, tta="flip"),
    seed=3,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_config_round_trips_through_json(model):
    run = replace(RUN, model=model, training=TrainingConfig(steps=5))
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_config_does_not_import_torch():
    code = "import sys, clearhead.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", [OptimizerConfig, TrainingConfig, RunConfig])
def test_config_has_at_most_16_fields(kind):
    assert len(fields(kind)) <= 16


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (
            ("training", "batchsize"),
            "unknown field of training 'batchsize'; did you mean batch_size\\? Choose from steps, ",
        ),
        (("optimizer", "weight-decay"), "'weight-decay'; did you mean weight_decay"),
        (("model", "n_head"), "'n_head'; did you mean num_heads"),
        (("data", "augmentation", "flipp"), "unknown field of augmentation 'flipp'; did you mean flip"),
        (("sed",), "unknown field of a run 'sed'; did you mean seed"),
    ],
)
def test_unknown_field_suggests_the_nearest_name(path, match):
    values = RUN.to_dict()
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = 1
    with pytest.raises(LookupError, match=match):
        RunConfig.from_dict(values)


def test_unknown_model_kind_suggests_the_nearest_name():
    values = RUN.to_dict()
    values["model"]["kind"] = "visoin"
    with pytest.raises(LookupError, match=r"unknown kind of model 'visoin'; did you mean vision"):
        RunConfig.from_dict(values)


def test_missing_and_malformed_fields_are_named():
    values = RUN.to_dict()
    del values["training"], values["seed"]
    with pytest.raises(ValueError, match="a run lacks the fields training"):
        RunConfig.from_dict(values)
    with pytest.raises(ValueError, match="training must be a JSON object, got 3"):
        RunConfig.from_dict(RUN.to_dict() | {"training": 3})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps": 3}, "the other to 0, got steps=3, epochs=2"),
        ({"epochs": 0}, "the other to 0, got steps=0, epochs=0"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"grad_accum_steps": 200}, "at most batch_size, got batch_size=128, grad_accum_steps=200"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\)"),
        ({"precision": "fp32"}, r"precision must be one of .*, got 'fp32'; did you mean float32\?"),
        ({"precision": "fp8"}, "precision must be one of float32, bf16, auto, got 'fp8'"),
        ({"patience": 1.5}, "patience must be a non-negative integer, got 1.5; try patience=0"),
        ({"steps": -5}, "steps must be a non-negative integer, got -5; set one of steps and epochs above 0 and"),
        ({"epochs": 1.5}, "epochs must be a non-negative integer, got 1.5; set one of steps and epochs above 0"),
        ({"compile": "maybe"}, "compile must be one of auto, on, off"),
    ],
)
def test_invalid_training_config_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(RUN.training, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": "sgd"}, "name must be one of adamw, muon, got 'sgd'"),
        ({"lr": float("nan")}, "lr must be a finite number >= 0, got nan; try lr=0.001"),
        ({"muon_lr": -0.1}, "got -0.1; try muon_lr=0.02"),
        ({"lr": "0.1"}, "lr must be a finite number >= 0, got '0.1'"),
        ({"beta2": 1}, r"beta2 must be in \[0, 1\), got 1; try beta2=0.999"),
        ({"final_lr_fraction": 2.0}, r"final_lr_fraction must be in \[0, 1\], got 2.0"),
        ({"warmup": -1}, "warmup must be a non-negative integer"),
    ],
)
def test_invalid_optimizer_config_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        OptimizerConfig(**changes)


def test_tta_requires_images():
    with pytest.raises(ValueError, match="test-time augmentation is for images"):
        replace(RUN, model=MODELS[0])


def test_epochs_are_converted_to_steps():
    assert RUN.training.n_steps(steps_per_epoch=7) == 14
    assert TrainingConfig(steps=3).n_steps(steps_per_epoch=7) == 3


def test_threads_and_learning_rates_out_of_range_are_refused():
    with pytest.raises(ValueError, match="threads must be at most 1,024, got 100000"):
        TrainingConfig(steps=1, threads=100_000)
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got inf"):
        OptimizerConfig(lr=math.inf)


def test_seed_is_limited_to_the_range_of_torch():
    fine = replace(RUN, seed=2**63 - 1)
    torch.manual_seed(fine.seed)
    with pytest.raises(ValueError, match="seed must be at most"):
        replace(fine, seed=2**63)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_changes_since_maps_fields_to_old_and_new_values(model):
    run = replace(RUN, model=model, training=TrainingConfig(steps=5))
    assert flat({"a": 1, "b": {"c": {"d": 2}}}) == {"a": 1, "b.c.d": 2}
    assert run.changes_since(RunConfig.from_dict(json.loads(json.dumps(run.to_dict())))) == {}
    other = replace(run, seed=4, training=replace(run.training, batch_size=7))
    assert other.changes_since(run) == {"seed": (3, 4), "training.batch_size": (run.training.batch_size, 7)}


def test_config_of_an_earlier_version_is_refused_in_one_line():
    values = RUN.to_dict()
    values["model"]["hidden"] = values["model"].pop("mlp_dim")
    with pytest.raises(ValueError, match="made by an earlier version of Clearhead") as caught:
        RunConfig.from_dict(values)
    assert "\n" not in str(caught.value)
