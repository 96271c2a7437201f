import inspect
import subprocess
import sys
from itertools import combinations

import matplotlib
import pytest
import torch
from matplotlib.text import Text

from clearhead.lab import all_claims, convolutions, draw, expressivity, keys, plots
from clearhead.lab import run as run_claim
from clearhead.lab.claim import Curve, Result, below, equals, settings
from clearhead.lab.lstm import MODEL_NAMES
from clearhead.lab.masks_and_training import weight_change
from clearhead.lab.plots import save
from clearhead.lab.temperature import measure
from clearhead.nn.attention import MultiHeadAttention, softargmax

CLAIMS = {claim.slug: claim for claim in all_claims()}
FROM_RESULTS = [
    slug
    for slug, claim in CLAIMS.items()
    if getattr(inspect.signature(claim.figure).parameters.get("result"), "default", None) is inspect.Parameter.empty
]
"""figures that can be drawn only after the experiment"""
FIGURES = [slug for slug in CLAIMS if slug not in FROM_RESULTS]


def draw_claim(slug, result=None, **settings):
    return draw(CLAIMS[slug], settings, result)


SETTINGS = {
    "num_keys": 2,
    "num_tokens": 20,
    "beta": 2.0,
    "alpha": 10.0,
    "mask_value": -10.0,
    "step_size": 0.1,
    "kernel_size": 7,
    "edge_probability": 0.1,
    "length": 12,
    "num_queries": 3,
}
"""values other than the defaults"""


NOT_RANDOM = ("sequential-depth", "class-token", "input-size", "parallelism")
"""figures of sizes and counts, which do not depend on the seed"""


def drawn_texts(figure):
    """All visible texts of the figure."""
    figure.canvas.draw()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        if axes.get_legend():
            texts += [*axes.get_legend().get_texts(), axes.get_legend().get_title()]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [tick.label2 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def legibility_problems(figure):
    """Text that is too small, clipped, or overlaps other text."""
    texts = drawn_texts(figure)
    boxes = [Text.get_window_extent(text) for text in texts]
    width, height = figure.bbox.size
    problems = [f"small: {text.get_text()}" for text in texts if text.get_fontsize() < plots.SMALL_SIZE]
    for text, box in zip(texts, boxes, strict=True):
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height:
            problems.append(f"clipped: {text.get_text()}")
    for (one, first), (other, second) in combinations(zip(texts, boxes, strict=True), 2):
        if first.padded(-2).overlaps(second.padded(-2)):
            problems.append(f"overlap: {one.get_text()} | {other.get_text()}")
    return problems


@pytest.mark.parametrize("slug", FIGURES)
def test_figure_is_legible_and_depends_on_the_seed(slug):
    pictures = set()
    for seed in (0, 1):
        figure = draw_claim(slug, seed=seed)
        assert tuple(figure.get_size_inches()) == plots.FIGURE_SIZE
        assert figure.get_suptitle()  # the headline states the claim
        assert not legibility_problems(figure), seed
        check_color_bars(figure)
        pictures.add(bytes(figure.canvas.buffer_rgba()))
    assert len(pictures) == (1 if slug in NOT_RANDOM else 2)


@pytest.mark.parametrize("slug", FIGURES)
def test_figure_is_legible_with_other_settings(slug):
    figure = draw_claim(slug, seed=2, **SETTINGS)
    assert not legibility_problems(figure)


def recurrence_result(lengths, accuracy, gradient):
    """A result of `recurrence` with constant accuracies and geometric gradients."""
    curves = []
    for name in MODEL_NAMES:
        curves += [
            Curve("digit accuracy", name, lengths, tuple(accuracy for _ in lengths)),
            Curve("phoneme accuracy", name, (6,), (accuracy,)),
            Curve("gradient", name, lengths, tuple(gradient**n for n in range(len(lengths)))),
            Curve("milliseconds", name, lengths, tuple(10.0 * accuracy + n for n in range(len(lengths)))),
        ]
    return Result((equals("one", 1, 1, 0),), tuple(curves))


@pytest.mark.parametrize(
    ("lengths", "accuracy", "gradient"), [((6, 12, 24), 1.0, 0.5), ((4, 8, 16, 32, 64, 128), 0.0, 1e-12)]
)
def test_recurrence_figure_is_legible_and_draws_the_result(lengths, accuracy, gradient):
    result = recurrence_result(lengths, accuracy, gradient)
    figure = draw_claim("recurrence", result)
    assert tuple(figure.get_size_inches()) == plots.FIGURE_SIZE
    assert not legibility_problems(figure)
    drawn = {(line.get_label(), *line.get_ydata()) for axes in figure.axes for line in axes.lines}
    assert drawn == {
        (curve.name, *curve.y) for curve in result.curves if curve.quantity in ("digit accuracy", "milliseconds")
    }
    heights = [bar.get_height() for axes in figure.axes for bar in axes.patches]
    assert heights == [accuracy] * len(MODEL_NAMES)


def test_figure_that_needs_a_result_is_none_without_one():
    assert draw_claim("recurrence", None) is None
    assert draw_claim("temperature", None) is not None


HEADS = ("1 head of width 32", "4 heads of width 8", "32 heads of width 1")


@pytest.mark.parametrize("slug", [slug for slug in FROM_RESULTS if slug != "recurrence"])
@pytest.mark.parametrize("steps", [(300,), (100, 200, 400, 800, 1600)])
def test_every_curve_of_a_result_is_drawn_legibly(slug, steps):
    checks = (equals("accuracy", 1, 1, 0),)
    curves = tuple(
        Curve(quantity, name, steps, tuple(0.9 - 0.1 * n for n in range(len(steps))))
        for quantity in ("accuracy", "gap between training and test accuracy")
        for name in HEADS
    )
    figure = draw_claim(slug, Result(checks, curves))
    assert not legibility_problems(figure)
    lines = [(line.get_label(), *line.get_ydata()) for axes in figure.axes for line in axes.lines]
    bars = [bar.get_height() for axes in figure.axes for bar in axes.patches]
    if len(steps) > 1:
        assert sorted(lines) == sorted((curve.name, *curve.y) for curve in curves)
        assert [text.get_text() for text in figure.legends[0].get_texts()] == list(HEADS)
    else:
        assert bars == [curve.y[0] for curve in curves]


def test_named_points_are_drawn_as_grouped_bars():
    names = "training images, test images, shifted test images"
    curves = (
        Curve(names, "without crops", (0, 1, 2), (0.9, 0.7, 0.2)),
        Curve(names, "crops", (0, 1, 2), (0.8, 0.75, 0.6)),
    )
    figure = draw_claim("augmentation", Result((equals("one", 1, 1, 0),), curves))
    assert not legibility_problems(figure)
    (axes,) = figure.axes
    assert {(bars.get_label(), *(bar.get_height() for bar in bars)) for bars in axes.containers} == {
        (curve.name, *curve.y) for curve in curves
    }
    assert [tick.get_text().replace("\n", " ") for tick in axes.get_xticklabels()] == names.split(", ")


def test_positions_figure_shows_the_best_guess_without_order():
    checks = (
        equals("reversal with positions: accuracy", 1.0, 1, 0),
        equals("reversal without positions: accuracy minus that of the best guess", -0.01, 0, 0.02),
        equals("reversal without positions: accuracy", 0.24, 0.2, 0.1),
        equals("odd one out of 16, without positions: accuracy", 0.97, 1, 0.1),
    )
    figure = draw_claim("positions", Result(checks))
    assert not legibility_problems(figure)
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx([1.0, 0.24, 0.25, 0.97])


def test_skip_connections_figure_has_two_bars_per_initialization():
    ratios = {"Xavier + GELU": (60.0, 1e-7), "He + ReLU": (300.0, 0.5), "orthogonal + tanh": (10.0, 0.25)}
    curves = tuple(
        Curve("gradient ratio", f"{name}, {kind}", (24,), (values[number],))
        for number, kind in enumerate(("with skips", "without skips"))
        for name, values in ratios.items()
    )
    figure = draw_claim("skip-connections", Result((equals("one", 1, 1, 0),), curves))
    assert not legibility_problems(figure)
    assert {bar.get_height() for bar in figure.axes[1].patches} == {value for pair in ratios.values() for value in pair}


@pytest.mark.parametrize("slug", [slug for slug in FROM_RESULTS if slug != "recurrence"])
def test_result_without_curves_is_drawn_as_one_bar_per_check(slug):
    checks = (
        equals("a check whose name is too long for one line of the figure", 0.5, 0.5, 0.1),
        equals("a check that fails", -0.25, 1.0, 0.0),
        equals("a third check", 1.0, 1.0, 0.0),
    )
    figure = draw_claim(slug, Result(checks))
    assert not legibility_problems(figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [check.value for check in checks]
    right, wrong = plots.CORRECT, plots.MISCONCEPTION
    assert [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == [right, wrong, right]


@pytest.mark.parametrize(
    ("slug", "drawn"),
    [
        ("permutation-equivariance", lambda figure: max(figure.axes[0].lines[0].get_ydata())),
        ("learned-positions", lambda figure: figure.axes[3].patches[0].get_height()),
        ("learned-positions", lambda figure: figure.axes[3].patches[1].get_height()),
        ("train-and-eval-mode", lambda figure: figure.axes[2].patches[1].get_height()),
        ("self-weight", lambda figure: figure.axes[1].patches[0].get_height()),
    ],
)
def test_figure_shows_the_measured_values(slug, drawn):
    parameters = inspect.signature(CLAIMS[slug].figure).parameters
    defaults = {name: p.default for name, p in parameters.items() if isinstance(p.default, int | float)}
    measured = [check.value for check in run_claim(slug, **defaults).checks]
    assert any(drawn(draw_claim(slug)) == pytest.approx(value, rel=1e-9) for value in measured)


def test_self_weight_figure_shows_the_trained_model():
    name = "trained to reverse: fraction of tokens with the largest weight on themselves"
    figure = draw_claim("self-weight", Result((equals(name, 0.25, 0, 0.5),)))
    assert 0.25 in [bar.get_height() for bar in figure.axes[1].patches]
    assert not legibility_problems(figure)


def test_legibility_check_detects_small_clipped_and_overlapping_text():
    figure, (left, right) = plots.subplots("AB")
    plots.label_axes(left, "a title that is far too long for half of a figure and is therefore clipped at both ends")
    plots.label(right, 0.5, 0.5, "one")
    plots.label(right, 0.5, 0.5, "other")
    right.text(0.1, 0.1, "tiny", fontsize=8)
    assert {fault.split(":")[0] for fault in legibility_problems(figure)} == {"clipped", "overlap", "small"}


def check_color_bars(figure):
    """Maps with the same color limits share a color bar, whose ends are the smallest and the largest value."""
    groups = {}
    for image in (image for axes in figure.axes for image in axes.images if image.get_array().ndim == 2):
        groups.setdefault(image.get_clim(), []).append(image)
    for (low, high), maps in groups.items():
        arrays = [image.get_array() for image in maps]
        assert low == min(array.min() for array in arrays)
        assert high == max(array.max() for array in arrays)
        bars = [image.colorbar for image in maps if image.colorbar]
        assert bars or all(image.get_cmap().N == 2 for image in maps)  # two colors need no scale
        for bar in bars:
            assert (bar.vmin, bar.vmax) == pytest.approx((low, high))
            assert (bar.get_ticks()[0], bar.get_ticks()[-1]) == pytest.approx((low, high))


@pytest.mark.parametrize("slug", FIGURES)
def test_saved_figures_are_reproducible(slug, tmp_path):
    torch.manual_seed(7)
    one = draw_claim(slug, seed=3)
    torch.manual_seed(8)
    other = draw_claim(slug, seed=3)
    for suffix, start in {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}.items():
        first = save(one, tmp_path / "new" / f"first{suffix}").read_bytes()
        assert first.startswith(start)
        assert save(other, tmp_path / f"second{suffix}").read_bytes() == first
    assert save(one, tmp_path / "again.pdf").read_bytes() == first


def test_suffix_selects_the_file_format(tmp_path):
    figure, _ = plots.subplots()
    with pytest.raises(ValueError, match=r"saved as \.png, \.svg, \.pdf, got 'mask\.jpg'; try mask\.png"):
        save(figure, tmp_path / "mask.jpg")
    assert save(figure, tmp_path / "MASK.PNG").exists()


def test_figure_uses_the_changed_settings():
    figure = draw_claim("scaled-key", alpha=5.0, unknown=True)
    assert any("alpha = 5" in axes.get_title() for axes in figure.axes)


def test_figure_parameters_are_settings_of_the_claim():
    assert all(CLAIMS[slug].trains for slug in FROM_RESULTS)
    for slug in FIGURES:
        parameters = inspect.signature(CLAIMS[slug].figure).parameters
        assert "seed" in parameters
        assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters.values())
        assert set(parameters) <= {*settings(CLAIMS[slug]), "result"}


def test_drawing_preserves_random_state_and_rc_params():
    random, rc = torch.get_rng_state(), dict(matplotlib.rcParams)
    for slug in FIGURES:
        draw_claim(slug).canvas.draw()
    assert torch.equal(torch.get_rng_state(), random)
    assert dict(matplotlib.rcParams) == rc


def test_matplotlib_is_imported_only_for_drawing_and_pyplot_never():
    code = """
import sys
from clearhead.lab import draw, find, run
run("additive-mask")
assert "matplotlib" not in sys.modules
draw(find("additive-mask"))
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_color_scale_ignores_non_finite_values():
    figure, (axes,) = plots.subplots()
    (image,) = plots.heat_maps(figure, [axes], [torch.tensor([[0.5, float("-inf")], [2.0, float("nan")]])], "")
    assert image.get_clim() == (0.5, 2.0)


def test_scaled_softargmax_has_larger_gradients():
    soft, hard = (measure(64, beta, 8, torch.Generator().manual_seed(0)).gradient_norm for beta in (1 / 8, 1.0))
    assert soft > 1.5 * hard


def test_influence_equals_the_norm_of_jacobian_blocks():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    conv = convolutions.ConvStack(4, 3, 1).double()
    norms = conv.layers[0].weight.square().sum(dim=(0, 1)).sqrt()  # a convolution is linear: its taps are its Jacobian
    expected = torch.cat([torch.zeros(1), norms / norms.max(), torch.zeros(1)])
    torch.testing.assert_close(convolutions.influence(conv, x), expected.double().detach())
    assert (convolutions.influence(MultiHeadAttention(4, 2).double(), x) > 0).all()


def test_offset_weights_are_identity_or_uniform():
    weight = torch.eye(3, dtype=torch.float64)
    sharp, even = (expressivity.offset_weights(expressivity.pointwise(weight, None, 5, beta)) for beta in (50.0, 0.0))
    torch.testing.assert_close(sharp, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(even, torch.full((5, 5), 0.2, dtype=torch.float64))


def test_construction_errors_decrease_with_beta():
    for error in (expressivity.simple_errors(0, 3, 6) | expressivity.convolution_errors(0, 3, 6, 3)).values():
        assert error(50.0) < 1e-9 < 1e-3 < error(1.0)


def test_output_change_follows_from_the_weight_of_the_scaled_key():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    before, after = softargmax(scores), softargmax(keys.scale_first(scores, 3.0))
    torch.testing.assert_close(keys.output_change(before, after, values), (after - before) @ values)


def test_weights_do_not_change_in_evaluation_mode():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    x = torch.randn(3, 2)
    assert weight_change(model, x, training=False) == 0
    assert weight_change(model, x, training=True) > 0


def test_headline_of_a_refuted_claim_says_so():
    refuted, note = Result((below("x", 2.0, 1.0),)), "(does not hold with these settings)"
    assert draw_claim("temperature", refuted, num_keys=3).get_suptitle().endswith(f"\n{note}")
    assert note not in draw_claim("temperature", Result((below("x", 0.0, 1.0),)), num_keys=3).get_suptitle()
    assert note not in draw_claim("temperature", None).get_suptitle()


def test_constant_matrices_use_a_scale_from_0_to_1():
    figure, axes = plots.subplots("AB")
    images = plots.heat_maps(figure, axes, [torch.full((2, 2), 1 / 6), torch.full((2, 2), 1 / 6)], "weight")
    assert [image.get_clim() for image in images] == [(0, 1), (0, 1)]
