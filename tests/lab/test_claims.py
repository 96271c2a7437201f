import math

import pytest
import torch

from clearhead import lab
from clearhead.lab import all_claims, attention_weights, find, heads, keys, positions, suggestions, temperature
from clearhead.lab.claim import LESSONS, Result, at_least, settings
from clearhead.nn.positions import SinusoidalPosEmbed

ALL = all_claims()
CLAIMS = {claim.slug: claim for claim in ALL}

MISCONCEPTIONS = {
    "temperature": {"rule": temperature.softargmin},
    "saturation": {"scale": temperature.unscaled},
    "column-convention": {"keys_first": False},
    "perturbed-key": {"rule": keys.scaled_down},
    "scaled-key": {"rule": keys.divided_by_alpha},
    "permutation-equivariance": {"pos_embed": SinusoidalPosEmbed()},
    "pointwise-convolution": {"beta": 0.0},
    "convolution": {"beta": 0.5},
    "additive-mask": {"mask_value": -10.0},
    "fully-masked-row": {"boolean_mask": True},
    "hard-and-soft": {"beta": 1.0},
    "self-weight": {"same_projection": True},
    "permutation": {"by_position": False},
    "in-proj-weight": {"split": heads.first_rows},
    "head-outputs": {"mix_weights": True},
    "message-passing": {"mask_edges": False},
    "feed-forward": {"use_attention": True},
    "skip-connections": {"skip": False},
    "patch-embedding": {"stride": 2},
    "receptive-field": {"depth": 2},
    "train-and-eval-mode": {"eval_mode": False},
    "attention-map": {"flatten_batch": True},
    "cross-attention": {"queries_from_encoder": True},
    "multi-head": {"left_multiply": False},
    "heads-as-groups": {"one_kernel": True},
    "several-heads": {"num_heads": 1},
    "modern-parts": {"classic": True},
    "augmentation": {"crop": 0},
    "learned-positions": {"rule": positions.index_feature},
    "positions": {"with_positions": False},
    "gradient-path": {"with_attention": False},
    "sequential-depth": {"recurrent": True},
    "recurrence": {"with_attention": False},
    "layer-norm": {"batch_norm": True},
    "pre-norm": {"post_norm": True},
    "class-token": {"mean_pooling": True},
    "input-size": {"learned_positions": True},
    "parallelism": {"recurrent": True},
    "rotation": {"rotate": True},
    "plain-vit": {"plain": True},
}
"""the settings that turn each experiment into a test of the misconception"""


FAST = [claim.slug for claim in ALL if not claim.trains]
TRAINING = [claim.slug for claim in ALL if claim.trains]
MINUTES = ("plain-vit",)
"""claims whose training takes too long for every change; test_vision.py tests how the verdict is derived"""
WIDTHS = {
    "saturation": (64, 128, 192),
    "column-convention": (64, 128, 192),
    "gradient-path": (16, 32, 48),
    "sequential-depth": (16, 32, 48),
    "skip-connections": (32, 48, 64),
    **dict.fromkeys(TRAINING, (32, 48, 64)),
    "recurrence": (32, 40, 48),
    "modern-parts": (64, 72, 80),
}


def check_verdicts(slug, seeds, **fixed):
    claim = CLAIMS[slug]
    for seed in seeds:
        changes = {"seed": seed, **fixed}
        if "width" in settings(claim):
            changes["width"] = WIDTHS.get(slug, (8, 16, 32))[seed % 3]
        result = lab.run(slug, **changes)
        assert result.verdict == claim.expected, (changes, result.checks)


@pytest.mark.parametrize("slug", FAST)
def test_claim_has_the_expected_verdict_over_seeds_and_widths(slug):
    check_verdicts(slug, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("slug", [slug for slug in TRAINING if slug not in MINUTES])
def test_training_claim_has_the_expected_verdict_with_one_seed(slug):
    check_verdicts(slug, (0,), num_seeds=1)


@pytest.mark.soak
@pytest.mark.parametrize("slug", TRAINING)
def test_training_claim_has_the_expected_verdict_over_seeds_and_widths(slug):
    check_verdicts(slug, range(6))


@pytest.mark.parametrize("slug", TRAINING)
def test_training_claims_average_several_seeds(slug):
    assert settings(CLAIMS[slug])["num_seeds"].default >= 3


def test_claims_are_ordered_by_lesson():
    assert [claim.lesson for claim in ALL] == sorted((claim.lesson for claim in ALL), key=LESSONS.index)


@pytest.mark.parametrize("slug", [slug for slug in FAST if CLAIMS[slug].expected == "holds"])
def test_misconception_is_refuted(slug):
    assert lab.run(slug, **MISCONCEPTIONS[slug]).verdict == "refuted"


DIFFERENCE = "largest difference between formula and measurement"


@pytest.mark.parametrize(
    ("slug", "changes", "name"),
    [
        ("scaled-key", {"beta": -1.0}, "change of A_a for z_a > 0"),
        ("scaled-key", {"beta": -1.0}, "change of A_a for z_a < 0"),
        ("scaled-key", {"rule": keys.divided_by_alpha}, f"weights: {DIFFERENCE}"),
        ("scaled-key", {"rule": keys.divided_by_alpha}, f"output: {DIFFERENCE}"),
        ("hard-and-soft", {"beta": -math.inf}, "hard self-attention: difference from one-hot rows"),
        ("permutation", {"beta": 1.0}, "identity: largest error"),
        ("convolution", {"border_mask": False}, "largest difference from conv1d"),
        ("fully-masked-row", {"mask_value": -1.0}, "difference of the weights from 1/n"),
        ("hard-and-soft", {"beta": 1.0}, "hard, two tied keys: difference from the mean of their values"),
        (
            "saturation",
            {"scale": temperature.unscaled},
            "scaled: fraction of logits with a gradient below 1e-6",
        ),
        ("class-token", {"mean_pooling": True}, "class token: number of encoder outputs that the logits depend on"),
        ("train-and-eval-mode", {"dropout": 0.0}, "training mode: difference between two passes"),
        ("train-and-eval-mode", {"eval_mode": False}, "evaluation mode: change of the weights"),
        ("saturation", {"scale": temperature.unscaled}, "scaled, 1000 added to all logits: relative entropy"),
        ("feed-forward", {"use_attention": True}, "number of input positions that one output depends on"),
        ("gradient-path", {"forget_bias": 8.0}, "LSTM without attention: gradient ratio × 16"),
        ("skip-connections", {"skip": False}, "Xavier + GELU, with skips: gradient, 24 layers / 2 layers"),
        ("layer-norm", {"batch_norm": True}, "layer norm: change of one token's output"),
        ("attention-map", {"flatten_batch": True}, "change of an example's map when the other examples change"),
    ],
)
def test_changed_setting_fails_the_related_check(slug, changes, name):
    assert name in {check.name for check in lab.run(slug, **changes).checks if not check.passed}


def test_perturbation_formulas_fail_for_weights_other_than_softargmax(monkeypatch):
    def squared(q, k, v, beta):
        weights = (1 + beta * q @ k.mT).square()
        weights = weights / weights.sum(-1, keepdim=True)
        return weights @ v, weights

    monkeypatch.setattr(keys, "attend_reference", squared)
    refuted = {check.name for check in keys.run_perturbed_key().checks if not check.passed}
    assert "relative error of the first-order formula" in refuted
    assert any(name.startswith("error of the second-order mean") for name in refuted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slug", "fails"),
    [
        ("self-weight", {0}),
        ("positions", {0}),
        ("several-heads", {0, 1}),
        ("modern-parts", {1, 2, 3, 4}),
        ("augmentation", {1, 2, 3}),
        ("recurrence", {2, 7}),
    ],
)
def test_misconception_of_a_training_claim_fails_the_related_checks(slug, fails):
    checks = lab.run(slug, num_seeds=1, **MISCONCEPTIONS[slug]).checks
    assert {i for i, check in enumerate(checks) if not check.passed} == fails


def test_transposed_scores_are_width_by_width():
    assert [check.value for check in attention_weights.run_column_convention(keys_first=False).checks[2:4]] == [
        768,
        768,
    ]


def test_nan_refutes_the_claim():
    assert Result((at_least("a", math.nan, 0.0),)).verdict == "refuted"


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.slug)
def test_claim_has_a_lesson_texts_and_a_seed(claim):
    assert claim.lesson in LESSONS
    assert "seed" in settings(claim)
    for text in (claim.statement, claim.misconception, claim.formula):
        assert text
    assert claim.try_next.startswith("clearhead ")


def test_same_seed_gives_identical_results():
    torch.manual_seed(1)
    first = lab.run("perturbed-key", seed=3)
    torch.manual_seed(2)
    assert lab.run("perturbed-key", seed=3) == first


@pytest.mark.parametrize("slug", CLAIMS)
def test_run_preserves_the_random_state(slug):
    before = torch.get_rng_state()
    lab.run(slug, **({"steps": 2, "num_seeds": 1} if CLAIMS[slug].trains else {}))
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_slugs_and_settings_suggest_similar_names():
    with pytest.raises(LookupError, match=r"^no claim named 'scaled'; did you mean scaled-key\? Run clearhead lab"):
        find("scaled")
    with pytest.raises(LookupError, match=r"^no claim named 'xyz'; run clearhead lab to list all \d+$"):
        find("xyz")
    with pytest.raises(ValueError, match=r"^scaled-key has no setting 'alhpa'; did you mean alpha\? Its settings are"):
        lab.run("scaled-key", alhpa=3)


@pytest.mark.parametrize(
    ("text", "slugs"),
    [
        ("mask", ["additive-mask", "fully-masked-row"]),  # a word of the slug
        ("MASKS", ["additive-mask"]),
        ("norms", ["layer-norm", "pre-norm"]),
        ("dropout", ["train-and-eval-mode"]),  # a word of the formula
        ("temprature", ["temperature"]),  # a misspelled slug
        ("", []),
    ],
)
def test_suggestions_by_slug_text_and_spelling(text, slugs):
    assert suggestions(text) == slugs


def test_claims_that_depend_on_random_weights_are_experiments():
    assert {claim.slug for claim in ALL if claim.kind == "experiment"} >= EXPERIMENTS
    assert not any(claim.trains for claim in ALL if claim.kind == "demonstration")
    assert not EXPERIMENTS & {claim.slug for claim in ALL if claim.kind == "demonstration"}


EXPERIMENTS = {
    "saturation",
    "self-weight",
    "several-heads",
    "positions",
    "gradient-path",
    "recurrence",
    "skip-connections",
    "pre-norm",
    "modern-parts",
    "augmentation",
}


@pytest.mark.parametrize(
    ("slug", "changes"),
    [
        ("perturbed-key", {"width": 512}),
        ("perturbed-key", {"step_size": 0.1}),
        ("perturbed-key", {"beta": 2.0, "width": 64}),
        ("scaled-key", {"alpha": 1.0}),
        ("scaled-key", {"alpha": 0.5}),
        ("scaled-key", {"alpha": 1000.0, "beta": 10.0}),
        ("scaled-key", {"width": 512}),
        ("hard-and-soft", {"beta": 50.0}),
        ("saturation", {"num_keys": 2, "width": 64}),
        ("saturation", {"num_keys": 256}),
        ("saturation", {"width": 4096}),
        ("input-size", {"context_length": 40}),
        ("head-outputs", {"num_heads": 16}),
    ],
)
def test_claim_holds_with_other_settings(slug, changes):
    result = lab.run(slug, **changes)
    assert result.verdict == "holds", [check for check in result.checks if not check.passed]
