import json
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.data import datasets
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


def test_every_process_begins_with_the_same_weights_and_drops_something_else(config):
    built = []
    for rank in range(2):
        with isolated_torch_state(1):
            ctx = build_context(replace(config, seed=7), Ranks(rank), shard=False, report=pytest.fail)
            built.append((ctx.model.state_dict(), torch.rand(3)))
    (first, drawn), (second, drawn_too) = built
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(drawn, drawn_too)


def test_evaluations_are_once_an_epoch_and_checkpoints_with_them_unless_said(config):
    training = replace(config.training, evaluate_every=0, checkpoint_every=0, steps=0, epochs=3)
    ctx = build_context(replace(config, training=training), Ranks(), shard=False, report=pytest.fail)
    assert ctx.evaluate_every == ctx.checkpoint_every == ctx.batches.steps_per_epoch == 5
    assert ctx.n_steps == 15


def test_the_model_has_as_many_classes_as_the_data(config):
    config = replace(config, model=replace(config.model, num_classes=4))
    with pytest.raises(ValueError, match="mnist, which has 3 classes, got num_classes=4"):
        build_context(config, Ranks(), shard=False, report=pytest.fail)


def test_patience_without_examples_to_validate_on_is_told(config, monkeypatch):
    patient = replace(config, training=replace(config.training, patience=2))
    build_context(patient, Ranks(), shard=False, report=pytest.fail)
    data = datasets.load_dataset(config.data, config.seed)
    none = replace(data, validation=Images(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0)))
    monkeypatch.setattr(datasets, "load_dataset", lambda config, seed: none)
    build_context(config, Ranks(), shard=False, report=pytest.fail)
    said = []
    build_context(patient, Ranks(), shard=False, report=said.append)
    assert [line.startswith("patience ") for line in said] == [True]


def test_one_process_that_is_to_split_the_weights_says_that_it_cannot(config):
    said = []
    assert not build_context(config, Ranks(), shard=True, report=said.append).is_sharded
    assert [line.startswith("--shard has no effect with one process") for line in said] == [True]


def test_each_process_needs_an_example_for_each_portion(config):
    check_microbatches(config, world_size=5)  # 10 examples, 2 portions
    with pytest.raises(ValueError, match=r"at least .* = 12, got batch_size=10, world_size=6, grad_accum_steps=2"):
        check_microbatches(config, world_size=6)


def test_a_table_of_places_must_reach_over_the_longest_example(sequences):
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
def test_a_precision_means_the_same_on_every_processor(monkeypatch, choice, has, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: has)
    with autocast(choice, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected


class Clock:
    """A clock that a step moves on by as many seconds as its precision takes."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.steps = 0.0, seconds, []
        monkeypatch.setattr(context.time, "perf_counter", lambda: self.now)

    def step(self, choice):
        self.steps.append(choice)
        self.now += self.seconds[choice]


@pytest.mark.parametrize(
    ("bf16_seconds", "expected"), [(0.5, "bf16"), (0.85, "bf16"), (0.9, "float32"), (1.0, "float32"), (20, "float32")]
)
def test_auto_takes_bf16_only_where_it_pays(monkeypatch, bf16_seconds, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: True)
    clock = Clock(monkeypatch, {"float32": 1.0, "bf16": bf16_seconds})
    chosen, reason = faster_precision(clock.step, CPU)
    assert chosen == expected
    assert "takes 1,000.0 ms in float32" in reason
    assert clock.steps.count("bf16") == clock.steps.count("float32") > 1
    assert clock.steps[:2] != clock.steps[1:3]  # in turns


def test_auto_does_not_try_what_the_processor_lacks(monkeypatch):
    monkeypatch.setattr(context, "has_bf16", lambda device: False)
    assert faster_precision(pytest.fail, CPU) == ("float32", "this CPU has no native bf16")


def test_a_failing_compiler_is_loud_and_training_goes_on(monkeypatch):
    def broken(model):
        def run(x):
            model(x)  # as far as the forward pass
            raise RuntimeError("no C++ compiler\nand a long story")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    said, model = [], nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), said.append) is model
    assert said == ["torch.compile failed; training continues without it, more slowly: no C++ compiler"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_rehearsal_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: model(x))
    model, state = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.get_rng_state()
    fast = compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), pytest.fail)
    assert fast is not model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto compiles on a GPU")
@pytest.mark.parametrize("choice", ["off", "auto"])
def test_nothing_is_compiled_unasked(choice):
    model = nn.Linear(2, 2)
    assert compile_model(model, choice, pytest.fail, pytest.fail) is model


@pytest.mark.skipif("CLEARHEAD_TEST_PROCESSOR" not in os.environ, reason="no other processor is imitated")
def test_the_guard_of_the_other_processor_it_is_imitated():
    has = os.environ["CLEARHEAD_TEST_PROCESSOR"] == "bf16"
    assert context.has_bf16(CPU) == has
    assert has or torch.backends.cpu.get_cpu_capability() == "AVX2"


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

IN_A_NEW_PROCESS = """
import json, resource, torch
from clearhead.training.context import malloc_tuning

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_taking_again(mebibytes=48):
    for i in range(60):
        if i == 50:  # the heap has its place for it by now
            start = faults()
        torch.ones(mebibytes << 18)
    return faults() - start

def resident():
    return int(open("/proc/self/statm").read().split()[1])

before = faults_of_taking_again()
with malloc_tuning() as is_kept:
    inside, most = faults_of_taking_again(), resident()
back = most - resident()
print(json.dumps([is_kept, before, inside, back, faults_of_taking_again(24)]))
"""
"""Whether memory is kept; pages that the system brought before and inside; those that it got back after, and those that
it brings from then on for blocks that glibc itself would keep. What other tests have left in this process would be
taken again in any case."""


def told(**settled: str) -> tuple[bool, int, int, int, int]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], env=ours | settled, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


@glibc
def test_what_is_free_is_taken_again_without_the_system():
    is_kept, before, inside, back, after = told()
    assert is_kept
    assert before > 100_000  # ten times 48 MiB in pages of 4 KiB
    assert inside < before / 4
    assert back > 10_000
    assert after < 10_000


@glibc
@pytest.mark.parametrize(
    "settled", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_ARENA_MAX": "1"}]
)
def test_what_the_environment_says_of_malloc_holds(settled):
    is_kept, _, inside, _, _ = told(**settled)
    assert not is_kept
    assert inside > 100_000


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with malloc_tuning() as is_kept:
        assert not is_kept


def built(config):
    with isolated_torch_state(threads=1):
        return build_context(config, Ranks(), shard=False, report=pytest.fail)


def test_whole_masks_pass_and_nothing_is_changed(sequences):
    ctx = built(sequences)
    ctx.model.train()
    before, random = [weight.clone() for weight in ctx.model.parameters()], torch.get_rng_state()
    assert check_masks(ctx)
    assert ctx.model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(now, old) for now, old in zip(ctx.model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in ctx.model.parameters())


def test_a_model_that_sees_all_at_once_has_no_such_masks(config):
    assert not check_masks(built(config))


def test_a_decoder_that_sees_the_future_is_never_trained(sequences, tmp_path, monkeypatch):
    monkeypatch.setattr(
        masks, "causal", lambda q, k=None, device=None: torch.ones(q, k or q, dtype=torch.bool, device=device)
    )
    with pytest.raises(ValueError, match=r"got a model that leaks: output \d+ of .* when the later token \d+"):
        train(sequences, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run/checkpoints").glob("*"))


@pytest.mark.parametrize("sequences", ["seq2seq"], indirect=True)
def test_sources_that_fill_the_table_of_places_are_checked_too(sequences):
    batch = built(sequences).batches.at(0)
    longest = max(batch.inputs.shape[1], batch.targets.shape[1])
    assert check_masks(
        built(replace(sequences, model=replace(sequences.model, pos_embed="learned", context_length=longest)))
    )


@pytest.mark.parametrize("sequences", ["seq2seq"], indirect=True)
@pytest.mark.parametrize("name", ["encode", "decode"])
def test_a_model_that_sees_padding_is_never_trained(sequences, monkeypatch, name):
    ctx = built(sequences)
    whole = getattr(ctx.model, name)

    def blind(*args, source_lengths=None, **kwargs):
        return whole(*args, **kwargs)

    monkeypatch.setattr(ctx.model, name, blind)
    with pytest.raises(ValueError, match=r"leaks: output \d+ of example \d+ changes .* the padding token \d+"):
        check_masks(ctx)
