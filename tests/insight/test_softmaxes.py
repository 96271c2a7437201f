"""A tensor that came from a softmax is followed, whatever is done to it, until it is no longer rows of shares."""

import gc

import pytest
import torch
import torch.nn.functional as F

from clearhead.insight.softmaxes import SoftmaxTracker, dropout_rate, is_in_place, moved_axis

SHARES = torch.rand(2, 3, 4, 5).softmax(-1)

MOVES = {
    "transpose": (lambda x: x.transpose(1, 3), 1),
    "permute": (lambda x: x.permute(3, 0, 1, 2), 0),
    "mT": (lambda x: x.mT, 2),
    "join": (lambda x: x.flatten(0, 1), 2),
    "view": (lambda x: x.view(6, 4, 5), 2),
    "reshape after permute": (lambda x: x.permute(0, 3, 1, 2).reshape(2, 5, 12), 1),
    "unsqueeze": (lambda x: x.unsqueeze(-1), 3),
    "index": (lambda x: x[:, 1, None], 3),
    "expand": (lambda x: x.expand(2, 3, 4, 5), 3),
    "part of the queries": (lambda x: x[:, :, :2], 3),
    "joined with queries": (lambda x: x.flatten(2), None),
    "split": (lambda x: x.view(2, 3, 2, 10), None),
    "part of the keys": (lambda x: x[..., :3], None),
}


@pytest.mark.parametrize(("move", "axis"), MOVES.values(), ids=MOVES)
def test_the_axis_of_the_softmax_is_found_again(move, axis):
    assert moved_axis(move, SHARES, 3, (SHARES,), {}, move(SHARES)) == axis


def test_a_single_key_is_found_too():
    shares = torch.ones(2, 3, 4, 1)
    for move, axis in (
        (lambda x: x.transpose(1, 3), 1),
        (lambda x: x.view(6, 4, 1), 2),
        (lambda x: x.flatten(0, 1), 2),
    ):
        assert moved_axis(move, shares, 3, (shares,), {}, move(shares)) == axis


def started():
    trails, shares = SoftmaxTracker(), SHARES.clone()
    trails.start(shares, (shares, -1), {})
    return trails, shares


def test_steps_after_dropout_are_also_done_to_the_twin():
    trails, shares = started()
    torch.manual_seed(0)
    dropped = trails.follow("dropout", F.dropout, (shares, 0.5, True), {})
    hidden = torch.arange(5) == 0
    masked = trails.follow("masked_fill", torch.Tensor.masked_fill, (dropped, hidden, 0.0), {})
    joined = trails.follow("flatten", torch.flatten, (masked, 0, 1), {})
    trail = trails.of(joined)
    assert torch.equal(trail.twin, SHARES.masked_fill(hidden, 0.0).flatten(0, 1))
    assert not torch.equal(joined, trail.twin)
    assert (trail.axis, trail.dropout, trail.n_joined(joined.shape)) == (2, 0.5, 3)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_twin_is_not_changed_by_dropout_in_place_nor_the_models_tensor_by_us(in_place):
    trails, shares = started()
    dropped = trails.follow("dropout", F.dropout, (shares, 0.5, True, in_place), {})
    assert torch.equal(trails.of(dropped).twin, SHARES)
    trails.follow("mul_", torch.Tensor.mul_, (dropped, 3.0), {})
    torch.testing.assert_close(trails.of(dropped).twin, 3 * SHARES)
    assert torch.equal(shares, SHARES) != in_place


def test_without_dropout_the_tensor_itself_is_what_is_asked_for():
    trails, shares = started()
    out = trails.follow("to", torch.Tensor.to, (shares, torch.float64), {})
    assert trails.of(out).before_dropout(out) is out
    out = trails.follow("dropout", F.dropout, (shares, 0.5, False), {})
    assert trails.of(out).dropout == 0


def test_a_factor_of_another_shape_ends_the_trail():
    trails, shares = started()
    out = trails.follow("mul", torch.mul, (shares, torch.ones(7, 1, 1, 1, 1)), {})
    assert trails.of(out) is None
    gate = torch.rand(2, 3).softmax(-1)
    trails.start(gate, (gate,), {"dim": -1})
    out = trails.follow("linear", F.linear, (gate, torch.ones(4, 3)), {})
    assert trails.of(out) is None  # it mixes the shares themselves


def test_what_is_gone_is_forgotten():
    trails, shares = started()
    assert len(trails) == 1
    del shares
    gc.collect()
    assert len(trails) == 0


def test_the_rate_of_dropout_is_read_from_its_call():
    keep = torch.zeros_like(SHARES)
    keep[0] = 4 / 3
    assert dropout_rate("dropout", SHARES, (SHARES, 0.3), {}) == 0.3
    assert dropout_rate("dropout", SHARES, (SHARES,), {"p": 0.2, "training": False}) == 0
    assert dropout_rate("mul", SHARES, (SHARES, keep), {}) == pytest.approx(0.25)
    assert dropout_rate("mul", SHARES, (SHARES, (keep > 0).float()), {}) == 0  # a mask
    assert dropout_rate("mul", SHARES, (SHARES, torch.rand_like(SHARES) + 1), {}) == 0
    assert dropout_rate("masked_fill", SHARES, (SHARES, keep), {}) == 0
    assert dropout_rate("mul", SHARES.to("meta"), (SHARES.to("meta"), keep.to("meta")), {}) == 0


def test_names_tell_what_is_done_in_place():
    assert is_in_place("mul_", (), {})
    assert is_in_place("__imul__", (), {})
    assert not is_in_place("__mul__", (), {})
    assert is_in_place("dropout", (), {"inplace": True})
