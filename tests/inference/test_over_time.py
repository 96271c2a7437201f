import math

import pytest
import torch

from clearhead.inference.explain import changed_most, entropies, entropy_if_alike, in_order


def test_entropies_have_a_place_for_each_layer_and_head():
    uniform, sharp = torch.full((3, 2, 4, 5, 8), 1 / 8), torch.eye(8)[:5].expand(3, 2, 1, 5, 8)
    table = entropies([uniform, sharp])
    assert table.shape == (3, 2, 4)
    assert torch.allclose(table[:, 0], torch.full((3, 4), math.log(8)))
    assert table[:, 1, 0].tolist() == [0, 0, 0]
    assert table[:, 1, 1:].isnan().all()


def test_layers_are_in_the_order_of_their_numbers():
    ordered = ["pool", "blocks.0.attn", "blocks.2.attn", "blocks.10.attn"]
    assert in_order({ordered[i] for i in (3, 1, 0, 2)}) == ordered
    assert in_order(reversed(ordered)) == ordered


def test_alike_is_over_the_keys_that_may_be_seen():
    """A query of a causal model sees no later key: entropies reach the mean of log 1, log 2 ... log K, not log K."""
    weights = torch.ones(2, 3, 4, 5, 5).tril()
    alike = weights / weights.sum(-1, keepdim=True)
    assert entropy_if_alike(alike) == pytest.approx(entropies([alike]).max().item())
    sharp = alike.clone()
    sharp[0] = torch.eye(5)  # what is seen at one step may be seen
    assert entropy_if_alike(sharp) == pytest.approx(entropy_if_alike(alike))
    assert entropy_if_alike(torch.full((2, 3, 4, 5, 8), 1 / 8)) == pytest.approx(math.log(8))


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_the_head_that_changed_most(place):
    table = torch.ones(3, 2, 2)
    table[1, place[0], place[1]] = 3
    table[2, 1, 1] = math.nan
    assert changed_most(table) == place
