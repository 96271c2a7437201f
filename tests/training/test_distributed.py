"""Ranks and tensor gathering without a process group. test_distributed_runs.py trains with several ranks."""

import pytest
import torch
from torch import nn

from clearhead.training.distributed import (
    Ranks,
    current_ranks,
    full_tensor,
    gather_full,
    gradient_sync,
    is_sharded,
    load_tensors,
    local_shard,
    replicated,
    shard_like,
    to_local,
)


def test_unsharded_tensor_is_its_own_shard_and_full_tensor():
    x, like = torch.ones(2), torch.zeros(2)
    assert not is_sharded(x)
    assert to_local(x) is local_shard(x, like) is full_tensor(x, like) is shard_like(x, like) is x


def test_gather_full_returns_tensors_only_if_keep_is_set():
    model = nn.Linear(2, 2)
    assert gather_full(model.state_dict(), keep=False) == {}
    kept = gather_full(model.state_dict(), keep=True)
    assert kept.keys() == {"weight", "bias"}
    assert torch.equal(kept["weight"], model.weight)


def test_load_tensors_writes_into_the_model():
    model = nn.Linear(2, 2)
    load_tensors(model.state_dict(), {"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)})
    assert torch.equal(model.weight.detach(), torch.full((2, 2), 3.0))


@pytest.mark.parametrize(
    "other", [{"weight": torch.zeros(2, 3)}, {}, {"weight": torch.zeros(2, 2), "more": torch.zeros(1)}]
)
def test_load_tensors_refuses_mismatched_weights_and_changes_nothing(other):
    target = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"does not match the checkpoint"):
        load_tensors({"weight": target}, other)
    assert torch.equal(target, torch.ones(2, 2))


def test_single_process_collectives_are_the_identity():
    alone = Ranks()
    numbers = torch.tensor([1.0, 2.0])
    assert alone.is_main
    assert torch.equal(alone.all_reduce_sum(numbers), numbers)
    assert alone.broadcast_json({"a": 1}) == {"a": 1}
    assert alone.all_gather(numbers) == [numbers]
    model = torch.nn.Linear(1, 1)
    assert replicated(model, alone) is model
    with gradient_sync(model, is_last=False), current_ranks() as ranks:
        assert (ranks.rank, ranks.world_size) == (0, 1)
