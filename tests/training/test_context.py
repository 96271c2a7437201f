import json
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.data.dataset import Images
from clearhead.nn import masks
from clearhead.training import context
from clearhead.training.context import (
    autocast,
    build_context,
    check_masks,
    check_microbatches,
    compile_model,
    faster_precision,
    isolated_torch_state,
    malloc_tuning,
)
from clearhead.training.distributed import Ranks
from clearhead.training.loop import train


def test_ranks_share_initial_weights_but_not_dropout_masks(config):
    built = []
    for rank in range(2):
        with isolated_torch_state(1):
            ctx = build_context(replace(config, seed=7), Ranks(rank), shard=False, report=pytest.fail)
            built.append((ctx.model.state_dict(), torch.rand(3)))
    (first, drawn), (second, drawn_by_the_other) = built
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(drawn, drawn_by_the_other)


def test_evaluation_and_checkpoint_intervals_default_to_one_epoch(config):
    training = replace(config.training, evaluate_every=0, checkpoint_every=0, steps=0, epochs=3)
    ctx = build_context(replace(config, training=training), Ranks(), shard=False, report=pytest.fail)
    assert ctx.evaluate_every == ctx.checkpoint_every == ctx.batches.steps_per_epoch == 5
    assert ctx.n_steps == 15


def test_num_classes_must_match_the_data(config):
    config = replace(config, model=replace(config.model, num_classes=4))
    with pytest.raises(ValueError, match="mnist has 3 classes, got a model for 4"):
        build_context(config, Ranks(), shard=False, report=pytest.fail)


def test_patience_without_validation_examples_is_reported(config, monkeypatch):
    patient = replace(config, training=replace(config.training, patience=2))
    build_context(patient, Ranks(), shard=False, report=pytest.fail)
    data = config.data.load(config.seed)
    none = replace(data, validation=Images(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0)))
    monkeypatch.setattr(type(config.data), "read", lambda task, seed: none)
    build_context(config, Ranks(), shard=False, report=pytest.fail)
    reports = []
    build_context(patient, Ranks(), shard=False, report=reports.append)
    assert [line.startswith("patience ") for line in reports] == [True]


def test_shard_with_one_process_is_reported_as_without_effect(config):
    reports = []
    assert not build_context(config, Ranks(), shard=True, report=reports.append).is_sharded
    assert [line.startswith("--shard has no effect with one process") for line in reports] == [True]


def test_batch_needs_one_example_per_rank_and_microbatch(config):
    check_microbatches(config, world_size=5)  # 10 examples, 2 microbatches
    with pytest.raises(ValueError, match=r"at least .* = 12, got batch_size=10, world_size=6, grad_accum_steps=2"):
        check_microbatches(config, world_size=6)


def test_learned_positions_must_cover_the_longest_example(sequences):
    def built(context):
        model = replace(sequences.model, pos_embed="learned", context_length=context)
        return build_context(replace(sequences, model=model), Ranks(), shard=False, report=pytest.fail)

    longest = max(int(part.lengths.max()) for part in (built(99).data.train, built(99).data.test))
    assert built(longest).model.config.context_length == longest
    with pytest.raises(
        ValueError,
        match=f"at least {longest}, .* got context_length={longest - 1}; set --model.context-length {longest}",
    ):
        built(longest - 1)


CPU = torch.device("cpu")


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize(("choice", "expected"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_dtype_does_not_depend_on_the_processor(monkeypatch, choice, has, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: has)
    with autocast(choice, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected


class Clock:
    """A clock that each step advances by the seconds of its precision."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.steps = 0.0, seconds, []
        monkeypatch.setattr(context.time, "perf_counter", lambda: self.now)

    def step(self, choice):
        self.steps.append(choice)
        self.now += self.seconds[choice]


@pytest.mark.parametrize(
    ("bf16_seconds", "expected"), [(0.5, "bf16"), (0.85, "bf16"), (0.9, "float32"), (1.0, "float32"), (20, "float32")]
)
def test_auto_precision_chooses_bf16_only_if_it_is_faster(monkeypatch, bf16_seconds, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: True)
    clock = Clock(monkeypatch, {"float32": 1.0, "bf16": bf16_seconds})
    chosen, reason = faster_precision(clock.step, CPU)
    assert chosen == expected
    assert "takes 1,000.0 ms in float32" in reason
    assert clock.steps.count("bf16") == clock.steps.count("float32") > 1
    assert clock.steps[:2] != clock.steps[1:3]  # the two alternate


def test_auto_precision_does_not_measure_bf16_without_native_support(monkeypatch):
    monkeypatch.setattr(context, "has_bf16", lambda device: False)
    assert faster_precision(pytest.fail, CPU) == ("float32", "this CPU has no native bf16")


def test_failed_compilation_is_reported_and_falls_back_to_eager(monkeypatch):
    def broken(model):
        def run(x):
            model(x)  # fails after the forward pass
            raise RuntimeError("no C++ compiler\nfollowed by a long traceback")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    reports, model = [], nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), reports.append) is model
    assert reports == ["torch.compile failed; training continues without it, more slowly: no C++ compiler"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


def test_warmup_of_the_compiled_model_has_no_side_effects(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: model(x))
    model, state = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.get_rng_state()
    fast = compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), pytest.fail)
    assert fast is not model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto compiles on a GPU")
@pytest.mark.parametrize("choice", ["off", "auto"])
def test_model_is_not_compiled_by_default_on_cpu(choice):
    model = nn.Linear(2, 2)
    assert compile_model(model, choice, pytest.fail, pytest.fail) is model


@pytest.mark.skipif("CLEARHEAD_TEST_PROCESSOR" not in os.environ, reason="no other processor is emulated")
def test_emulated_processor_is_in_effect():
    has = os.environ["CLEARHEAD_TEST_PROCESSOR"] == "bf16"
    assert context.has_bf16(CPU) == has
    assert has or torch.backends.cpu.get_cpu_capability() == "AVX2"


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

IN_A_NEW_PROCESS = """
import json, resource, torch
from clearhead.training.context import malloc_tuning

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_reallocation(mebibytes=48):
    for i in range(60):
        if i == 50:  # the heap has grown to its final size by now
            start = faults()
        torch.ones(mebibytes << 18)
    return faults() - start

def resident():
    return int(open("/proc/self/statm").read().split()[1])

before = faults_of_reallocation()
with malloc_tuning() as is_kept:
    inside, most = faults_of_reallocation(), resident()
released = most - resident()
print(json.dumps([is_kept, before, inside, released, faults_of_reallocation(24)]))
"""
"""Prints whether malloc is tuned, the page faults before and inside the context, the pages released at its end, and the
page faults after it for blocks that glibc keeps by default. A new process, because memory that other tests have freed
in this one would be reused in any case."""


def measure(**environment: str) -> tuple[bool, int, int, int, int]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], env=ours | environment, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


@glibc
def test_malloc_tuning_reuses_freed_memory_without_page_faults():
    is_kept, before, inside, released, after = measure()
    assert is_kept
    assert before > 100_000  # ten times 48 MiB in pages of 4 KiB
    assert inside < before / 4
    assert released > 10_000
    assert after < 10_000


@glibc
@pytest.mark.parametrize(
    "environment", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_ARENA_MAX": "1"}]
)
def test_malloc_settings_in_the_environment_take_precedence(environment):
    is_kept, _, inside, _, _ = measure(**environment)
    assert not is_kept
    assert inside > 100_000


def test_malloc_tuning_does_nothing_on_other_platforms(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with malloc_tuning() as is_kept:
        assert not is_kept


def built(config):
    with isolated_torch_state(threads=1):
        return build_context(config, Ranks(), shard=False, report=pytest.fail)


def test_correct_masks_pass_without_side_effects(sequences):
    ctx = built(sequences)
    ctx.model.train()
    before, random = [weight.clone() for weight in ctx.model.parameters()], torch.get_rng_state()
    assert check_masks(ctx)
    assert ctx.model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(now, old) for now, old in zip(ctx.model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in ctx.model.parameters())


def test_model_without_masks_is_not_checked(config):
    assert not check_masks(built(config))


def test_model_that_leaks_the_future_is_not_trained(sequences, tmp_path, monkeypatch):
    monkeypatch.setattr(
        masks, "causal", lambda q, k=None, device=None: torch.ones(q, k or q, dtype=torch.bool, device=device)
    )
    with pytest.raises(ValueError, match=r"got a model that leaks: output \d+ of .* when the later token \d+"):
        train(sequences, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run/checkpoints").glob("*"))


@pytest.mark.parametrize("sequences", ["seq2seq"], indirect=True)
def test_sources_as_long_as_the_context_are_checked(sequences):
    batch = built(sequences).batches.at(0)
    longest = max(batch.inputs.shape[1], batch.targets.shape[1])
    assert check_masks(
        built(replace(sequences, model=replace(sequences.model, pos_embed="learned", context_length=longest)))
    )


@pytest.mark.parametrize("sequences", ["seq2seq"], indirect=True)
@pytest.mark.parametrize("name", ["encode", "decode"])
def test_model_that_attends_to_padding_is_not_trained(sequences, monkeypatch, name):
    ctx = built(sequences)
    whole = getattr(ctx.model, name)

    def without_lengths(*args, source_lengths=None, **kwargs):
        return whole(*args, **kwargs)

    monkeypatch.setattr(ctx.model, name, without_lengths)
    with pytest.raises(ValueError, match=r"leaks: output \d+ of example \d+ changes .* the padding token \d+"):
        check_masks(ctx)
