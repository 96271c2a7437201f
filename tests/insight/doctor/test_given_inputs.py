"""The caller's own inputs, and what an examination leaves behind: nothing."""

import random

import pytest
import torch
from torch import nn

from clearhead import examine


class Graph(nn.Module):
    """No rule fills `edges`, (B,L,L) or (L,L)."""

    def __init__(self):
        super().__init__()
        self.linear, self.pos_embed = nn.Linear(8, 8), nn.Parameter(torch.randn(16, 8))

    def forward(self, x, edges, *, scale=1.0):
        return x + scale * edges @ self.linear(x + self.pos_embed[: x.shape[1]])


def features(batch_size=2, length=6):
    return torch.randn(batch_size, length, 8)


@pytest.mark.parametrize(
    "inputs",
    [
        (features(), torch.ones(2, 6, 6).tril()),
        {"x": features(), "edges": torch.ones(2, 6, 6).tril()},
        (features(), {"edges": torch.ones(2, 6, 6).tril(), "scale": 0.5}),
        (features(7), torch.ones(7, 6, 6).tril()),
    ],
    ids=["by position", "by name", "both", "large batch"],
)
def test_own_inputs_are_examined(inputs):
    report = examine(Graph(), inputs)
    assert report["causality"].verdict == "fine", report
    assert not report.faults, report
    assert "given float32" in report.call


def test_own_inputs_show_faults():
    report = examine(Graph(), (features(), torch.ones(2, 6, 6)))
    assert "causality" in {finding.check for finding in report.faults}


def test_own_token_ids_are_changed_within_their_values(zoo):
    report = examine(zoo.GPT(), (torch.tensor([[3, 4, 5, 3, 6, 3, 4]]),))
    assert report["causality"].verdict == "fine"
    assert examine(zoo.MaskDropped(), torch.tensor([[3, 4, 5, 3, 6, 3, 4]]))["causality"].verdict == "fault"


def test_source_and_target_may_be_given():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    report = examine(model, {"src": features(3, 6), "tgt": features(3, 5), "tgt_mask": later})
    assert "tgt_mask" not in report.faults
    assert "given" in report.call


def test_missing_inputs_are_named_with_a_way_to_give_them():
    with pytest.raises(ValueError, match=r"required parameter 'edges' .*inputs=\{\"x\": ..., \"edges\": ...\}"):
        examine(Graph())
    with pytest.raises(ValueError, match=r"missing a required argument: 'edges'"):
        examine(Graph(), (features(),))
    with pytest.raises(ValueError, match=r"does not accept the given inputs: RuntimeError"):
        examine(Graph(), (features(), torch.ones(2, 5, 5)))
    with pytest.raises(ValueError, match=r"none of the given inputs is a tensor"):
        examine(Graph(), {"x": 3, "edges": 4})


class Failing(Graph):
    """Fails in the tenth call."""

    num_calls = 0

    def forward(self, x, edges, *, scale=1.0):
        type(self).num_calls += 1
        if type(self).num_calls >= 10:
            raise KeyboardInterrupt if type(self).num_calls == 10 else RuntimeError
        return super().forward(x, edges, scale=scale)


def global_state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


def module_state(module):
    return {
        path: (
            part.training,
            set(vars(part)),
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks),
            [(p.requires_grad, p.grad, p._version, p.tolist()) for p in part.parameters(recurse=False)],
        )
        for path, part in module.named_modules()
    }


@pytest.mark.parametrize("kind", ["right", "faulty", "fails"])
def test_nothing_is_left_behind(zoo, kind):
    inputs = (features(), torch.ones(2, 6, 6).tril())
    module = {"right": Graph, "faulty": zoo.MaskDropped, "fails": Failing}[kind]().train()
    before, state = global_state(), module_state(module)
    kept = [x.clone() for x in inputs]
    if kind == "fails":
        with pytest.raises(KeyboardInterrupt):
            examine(module, inputs)
    else:
        examine(module, None if kind == "faulty" else inputs)
    assert global_state() == before
    assert module_state(module) == state
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))


def test_findings_link_to_a_paragraph_of_the_documentation(zoo):
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    anchors = {line[4:].lower().replace(",", "").replace(" ", "-") for line in page.splitlines() if line[:4] == "### "}
    report = examine(zoo.MaskDropped())
    for finding in report.findings:
        assert finding.docs.partition("#")[2] in anchors, finding
    assert report["causality"].docs in str(report)
    assert all("docs" in finding for finding in report.to_dict()["findings"])
    checks = {"cache", "loss", "patches", "logits", "input", "shared modules", "heads", "length", "dependency"}
    assert {check.replace(" ", "-") for check in checks} <= anchors
