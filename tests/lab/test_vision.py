import pytest
from torch import nn

from clearhead.lab import vision
from clearhead.lab.vision import ALL, PARTS, PLAIN, VARIANTS
from clearhead.models.config import build_model
from clearhead.models.presets import preset, vit_mnist_plain
from clearhead.recipes import config_of


def components_of(variant):
    """The components that the model of a variant contains."""
    model = build_model(config_of("mnist-plain", VARIANTS[variant]).model)
    names = dict(model.named_modules())
    return {
        "positions": any("pos_embed" in name for name, _ in model.named_parameters()),
        "norm": any(isinstance(module, nn.LayerNorm) for module in model.modules()),
        "output projection": any(name.endswith("out_proj") and isinstance(names[name], nn.Linear) for name in names),
    }


def test_each_variant_adds_one_component_and_the_last_adds_all():
    assert config_of("mnist-plain", VARIANTS[PLAIN]).model == vit_mnist_plain() == preset("vit_mnist_plain")
    assert components_of(PLAIN) == dict.fromkeys(PARTS, False)
    for part in PARTS:
        assert components_of(f"+ {part}") == {name: name == part for name in PARTS}
    assert components_of(ALL) == dict.fromkeys(PARTS, True)


def stub(monkeypatch, accuracies):
    by_changes = {str(changes): accuracies[name] for name, changes in VARIANTS.items()}
    monkeypatch.setattr(vision, "variant_accuracy", lambda changes, steps, seed: [by_changes[str(changes)]])


MEASURED = dict(zip(VARIANTS, (0.836, 0.887, 0.861, 0.833, 0.910), strict=True))


def test_verdict_requires_the_predicted_gains(monkeypatch):
    stub(monkeypatch, MEASURED)
    assert vision.run_plain_vit().verdict == "holds"
    assert vision.run_plain_vit(plain=True).verdict == "refuted"
    stub(monkeypatch, MEASURED | {ALL: 0.89, "+ positions": 0.90})  # not better than positions alone
    assert vision.run_plain_vit().verdict == "refuted"
    stub(monkeypatch, MEASURED | {"+ output projection": 0.90})  # as good as positions
    assert vision.run_plain_vit().verdict == "refuted"


def test_result_has_the_accuracy_of_each_variant(monkeypatch):
    stub(monkeypatch, MEASURED)
    curves = vision.run_plain_vit(steps=7).curves
    assert {curve.name: curve.y[0] for curve in curves} == pytest.approx(MEASURED)
    assert {curve.x for curve in curves} == {(7,)}


def test_variant_accuracy_depends_on_the_seed():
    one, other = (vision.variant_accuracy({"data.limit": 200}, 2, seed)[0] for seed in (0, 1))
    assert 0 < one < 1
    assert one != other
