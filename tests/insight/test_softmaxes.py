"""SoftmaxTracker follows a softmax output through every operation that preserves its rows."""

import gc

import pytest
import torch
import torch.nn.functional as F

from clearhead.insight.axes import axis_after_shape_op, dropout_rate, is_in_place
from clearhead.insight.softmaxes import SoftmaxTracker

WEIGHTS = torch.rand(2, 3, 4, 5).softmax(-1)

SHAPE_OPS = {
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
    "merged with queries": (lambda x: x.flatten(2), None),
    "split": (lambda x: x.view(2, 3, 2, 10), None),
    "part of the keys": (lambda x: x[..., :3], 3),
    "every second key": (lambda x: x[..., ::2], 3),
    "one key": (lambda x: x[..., 0], None),
}


@pytest.mark.parametrize(("shape_op", "axis"), SHAPE_OPS.values(), ids=SHAPE_OPS)
def test_the_softmax_axis_is_found_after_a_shape_operation(shape_op, axis):
    assert axis_after_shape_op(shape_op, WEIGHTS, 3, (WEIGHTS,), {}, shape_op(WEIGHTS)) == axis


def test_the_softmax_axis_of_a_single_key_is_found():
    weights = torch.ones(2, 3, 4, 1)
    for shape_op, axis in (
        (lambda x: x.transpose(1, 3), 1),
        (lambda x: x.view(6, 4, 1), 2),
        (lambda x: x.flatten(0, 1), 2),
    ):
        assert axis_after_shape_op(shape_op, weights, 3, (weights,), {}, shape_op(weights)) == axis


def started():
    tracker, weights = SoftmaxTracker(), WEIGHTS.clone()
    tracker.start(weights, (weights, -1), {})
    return tracker, weights


def test_operations_after_dropout_are_also_applied_to_the_undropped_tensor():
    tracker, weights = started()
    torch.manual_seed(0)
    dropped = tracker.call("dropout", F.dropout, (weights, 0.5, True), {})
    masked_keys = torch.arange(5) == 0
    masked = tracker.call("masked_fill", torch.Tensor.masked_fill, (dropped, masked_keys, 0.0), {})
    merged = tracker.call("flatten", torch.flatten, (masked, 0, 1), {})
    result = tracker.get(merged)
    assert torch.equal(result.undropped, WEIGHTS.masked_fill(masked_keys, 0.0).flatten(0, 1))
    assert not torch.equal(merged, result.undropped)
    assert (result.axis, result.dropout, result.merged_heads(merged.shape)) == (2, 0.5, 3)


@pytest.mark.parametrize("in_place", [True, False])
def test_in_place_dropout_changes_only_the_tensor_of_the_model(in_place):
    tracker, weights = started()
    dropped = tracker.call("dropout", F.dropout, (weights, 0.5, True, in_place), {})
    assert torch.equal(tracker.get(dropped).undropped, WEIGHTS)
    tracker.call("mul_", torch.Tensor.mul_, (dropped, 3.0), {})
    torch.testing.assert_close(tracker.get(dropped).undropped, 3 * WEIGHTS)
    assert torch.equal(weights, WEIGHTS) != in_place


def test_without_dropout_the_undropped_tensor_is_the_tensor_itself():
    tracker, weights = started()
    out = tracker.call("to", torch.Tensor.to, (weights, torch.float64), {})
    assert tracker.get(out).before_dropout(out) is out
    out = tracker.call("dropout", F.dropout, (weights, 0.5, False), {})
    assert tracker.get(out).dropout == 0


def test_a_factor_of_another_shape_ends_the_tracking():
    tracker, weights = started()
    out = tracker.call("mul", torch.mul, (weights, torch.ones(7, 1, 1, 1, 1)), {})
    assert tracker.get(out) is None
    gate = torch.rand(2, 3).softmax(-1)
    tracker.start(gate, (gate,), {"dim": -1})
    out = tracker.call("linear", F.linear, (gate, torch.ones(4, 3)), {})
    assert tracker.get(out) is None  # linear mixes the keys


def test_entries_are_removed_with_their_tensors():
    tracker, weights = started()
    assert len(tracker) == 1
    del weights
    gc.collect()
    assert len(tracker) == 0


def test_dropout_rate_is_read_from_the_call():
    keep = torch.zeros_like(WEIGHTS)
    keep[0] = 4 / 3
    assert dropout_rate("dropout", WEIGHTS, (WEIGHTS, 0.3), {}) == 0.3
    assert dropout_rate("dropout", WEIGHTS, (WEIGHTS,), {"p": 0.2, "training": False}) == 0
    assert dropout_rate("mul", WEIGHTS, (WEIGHTS, keep), {}) == pytest.approx(0.25)
    assert dropout_rate("mul", WEIGHTS, (WEIGHTS, (keep > 0).float()), {}) == 0  # a mask
    assert dropout_rate("mul", WEIGHTS, (WEIGHTS, torch.rand_like(WEIGHTS) + 1), {}) == 0
    assert dropout_rate("masked_fill", WEIGHTS, (WEIGHTS, keep), {}) == 0
    assert dropout_rate("mul", WEIGHTS.to("meta"), (WEIGHTS.to("meta"), keep.to("meta")), {}) == 0


def test_in_place_operations_are_recognized_by_name():
    assert is_in_place("mul_", (), {})
    assert is_in_place("__imul__", (), {})
    assert not is_in_place("__mul__", (), {})
    assert is_in_place("dropout", (), {"inplace": True})
