from dataclasses import replace

import pytest
import torch

from clearhead.data import datasets
from clearhead.data.dataset import Images
from clearhead.training.context import build_context, check_microbatches, isolated_torch_state
from clearhead.training.distributed import Ranks


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
