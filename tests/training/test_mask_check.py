from dataclasses import replace

import pytest
import torch

from clearhead.nn import masks
from clearhead.training.context import build_context, check_masks, isolated_torch_state
from clearhead.training.distributed import Ranks
from clearhead.training.loop import train


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
