"""What a visitor does in the page, in a real browser, held to what torch computes: draw, look inside, cause."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead
from clearhead.data.dataset import Normalize
from clearhead.page.describe import shipped, shipped_model

VIEWER = "document.getElementById('clearhead').viewer"
SIZES = [(1400, 900), (1024, 768), (390, 844)]
ROWS, COLUMNS, PATCH = 7, 7, 4
OVERLAY = """() => {
  const canvas = document.querySelector('[data-layer-role=overlay]');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return Array.from(data);
}"""


@pytest.fixture(scope="module")
def model():
    return shipped_model()


@pytest.fixture(scope="module")
def normalize():
    description, _ = shipped()
    return Normalize(description.input.mean, description.input.std)


@pytest.fixture
def open_viewer(shipped_link, new_page, wait_for):
    """open_viewer(hash): the page of the shipped checkpoint with a state, after its first pass."""

    def open_viewer(fragment, **options):
        page = new_page(shipped_link, **options)
        page.goto("about:blank")
        page.goto(f"{shipped_link.partition('?')[0]}#{fragment}")
        wait_for(page, f"{VIEWER}?.result")
        settle(page)
        return page

    return open_viewer


def settle(page):
    """Waits until the engine has answered all calls of the page, and the page shows the answers."""
    previous = None
    while (shown := bars_of(page)) != previous:
        previous = shown
        page.wait_for_timeout(250)


def pixels_of(page):
    values = page.evaluate(f"Array.from({VIEWER}.session.input.pixels)")
    return torch.tensor(values, dtype=torch.uint8).view(1, 1, 28, 28)


def bars_of(page):
    rows = page.locator("[data-part=bars] [data-class]")
    pairs = rows.evaluate_all("rows => rows.map(row => [row.dataset.class, Number(row.dataset.probability)])")
    return dict(pairs)


@torch.no_grad()
def probabilities(model, normalize, pixels, hidden=()):
    pixels = pixels.clone()
    for patch in hidden:
        row, column = divmod(patch, COLUMNS)
        pixels[..., row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 0
    return model(normalize(pixels))[0].softmax(0)


def check_bars(page, expected):
    shown = bars_of(page)
    assert set(shown) == {str(digit) for digit in range(10)}
    for digit, probability in shown.items():
        assert probability == pytest.approx(float(expected[int(digit)]), abs=1e-4)


def patch_center(page, patch):
    box = page.locator("[data-part=grid]").bounding_box()
    row, column = divmod(patch, COLUMNS)
    return box["x"] + (column + 0.5) * box["width"] / COLUMNS, box["y"] + (row + 0.5) * box["height"] / ROWS


def test_the_story_of_the_first_visit(shipped_link, new_page, wait_for, model, normalize):
    """A 3 draws itself, one stroke makes it an 8, and without one patch it is a 3 again."""
    page = new_page(shipped_link)
    wait_for(page, f"{VIEWER}?.state.story === 'close'")
    settle(page)
    before = probabilities(model, normalize, pixels_of(page))
    assert before.argmax() == 3
    check_bars(page, before)

    page.get_by_role("button", name="Show me").click()
    wait_for(page, f"{VIEWER}.state.story === 'hide'")
    settle(page)
    closed = probabilities(model, normalize, pixels_of(page))
    assert closed.argmax() == 8
    check_bars(page, closed)

    page.get_by_role("button", name="Hide it").click()
    hidden = wait_for(page, f"{VIEWER}.state.edits.hiddenPatches.length && {VIEWER}.state.edits.hiddenPatches")
    wait_for(page, f"{VIEWER}.state.story === 'done'")
    settle(page)
    assert len(hidden) == 1
    after = probabilities(model, normalize, pixels_of(page), hidden)
    assert after.argmax() == 3
    check_bars(page, after)
    new_stroke = (pixels_of(page)[0, 0].float() > 0).view(ROWS, PATCH, COLUMNS, PATCH).any(3).any(1).flatten()
    assert new_stroke[hidden[0]]


def test_the_pen_belongs_to_the_visitor(shipped_link, new_page, wait_for, model, normalize):
    page = new_page(shipped_link)
    wait_for(page, f"{VIEWER}?.state.story === 'drawing'")
    box = page.locator("[data-part=pad] canvas").first.bounding_box()

    def at(x, y):
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    page.mouse.move(*at(0.5, 0.2))
    page.mouse.down()
    page.mouse.move(*at(0.5, 0.5), steps=8)
    page.mouse.move(*at(0.5, 0.8), steps=8)
    page.mouse.up()
    settle(page)
    assert page.evaluate(f"{VIEWER}.state.story") != "drawing"
    page.get_by_role("button", name="Clear").first.click()
    page.wait_for_timeout(200)
    assert "Draw a digit" in page.inner_text("[data-part=pad]")
    page.mouse.move(*at(0.5, 0.2))
    page.mouse.down()
    page.mouse.move(*at(0.5, 0.8), steps=16)
    page.mouse.up()
    settle(page)
    pixels = pixels_of(page)
    assert pixels.max() > 200
    expected = probabilities(model, normalize, pixels)
    assert expected.argmax() == 1
    check_bars(page, expected)


@pytest.mark.parametrize("patch", [10, 24, 31])
def test_the_overlay_is_the_attention_row_of_the_hovered_patch(open_viewer, wait_for, model, normalize, patch):
    page = open_viewer("s=e&e=3&l=1&h=1")
    page.mouse.move(*patch_center(page, patch))
    wait_for(page, f"{VIEWER}.session.hover === {patch}")
    page.wait_for_timeout(100)
    trace = clearhead.look(model, normalize(pixels_of(page)))
    row = trace["blocks.1.attn"].weights(head=1, rows=[patch])[0, 0, 0].detach().numpy()
    assert len(row) == ROWS * COLUMNS
    colors = np.array(page.evaluate(OVERLAY), dtype=float).reshape(-1, 4)
    intensity = colors[:, :3].sum(1) * colors[:, 3]
    brightest = np.argsort(-row)[:5]
    assert intensity.argmax() == row.argmax()
    assert (np.diff(intensity[brightest]) <= 1e-9).all()
    weak = row < 0.2 * row.max()
    assert intensity[weak].max() <= intensity[brightest[0]]


def test_a_hidden_patch_moves_the_bars_as_torch_says(open_viewer, wait_for, model, normalize):
    page = open_viewer("s=e&e=3&k=h")
    check_bars(page, probabilities(model, normalize, pixels_of(page)))
    for n, patch in enumerate((24, 17), start=1):
        page.mouse.click(*patch_center(page, patch))
        wait_for(page, f"{VIEWER}.state.edits.hiddenPatches.length === {n}")
    settle(page)
    hidden = page.evaluate(f"{VIEWER}.state.edits.hiddenPatches")
    assert sorted(hidden) == [17, 24]
    check_bars(page, probabilities(model, normalize, pixels_of(page), hidden))
    page.get_by_role("button", name="Reset").click()
    settle(page)
    check_bars(page, probabilities(model, normalize, pixels_of(page)))


def test_an_ablated_head_moves_the_bars_as_edit_does(open_viewer, wait_for, model, normalize):
    page = open_viewer("s=e&e=3")
    page.locator("[data-part=wall] [data-layer='2'][data-head='0']").first.click()
    page.get_by_role("button", name="Set to zero", exact=True).click()
    wait_for(page, f"{VIEWER}.state.edits.heads.length === 1")
    settle(page)
    with clearhead.edit(model, "pool.attn", head=0, pattern="zero"):
        expected = probabilities(model, normalize, pixels_of(page))
    check_bars(page, expected)


def test_the_state_survives_a_reload(open_viewer, wait_for):
    page = open_viewer("s=e&e=7&l=0&h=1&q=12&x=24.30&b=0.5")
    expected = page.evaluate(f"JSON.stringify({VIEWER}.state)")
    shown = bars_of(page)
    page.reload()
    wait_for(page, f"{VIEWER}?.result")
    settle(page)
    assert page.evaluate(f"JSON.stringify({VIEWER}.state)") == expected
    state = json.loads(expected)
    assert (state["example"], state["layer"], state["head"], state["pins"]) == (7, 0, 1, [12])
    assert (state["edits"]["hiddenPatches"], state["edits"]["beta"]) == ([24, 30], 0.5)
    assert bars_of(page) == pytest.approx(shown, abs=1e-5)


def test_the_page_works_by_keyboard_alone(open_viewer, wait_for, model, normalize):
    """Tab reaches every panel; arrows, Enter, H and Z do what the pointer does; ? explains them."""
    page = open_viewer("s=e&e=3")
    reached = set()
    while "head-panel" not in reached:
        page.keyboard.press("Tab")
        part = page.evaluate("document.activeElement?.closest('[data-part]')?.dataset.part ?? ''")
        is_new, reached = part not in reached, reached | {part}
        if is_new and page.evaluate("document.activeElement?.dataset.part === 'grid'"):
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowDown")
            chosen = page.evaluate(f"{VIEWER}.session.hover")
            page.keyboard.press("Enter")
            assert page.evaluate(f"{VIEWER}.state.pins") == [chosen]
            page.keyboard.press("h")
            wait_for(page, f"{VIEWER}.state.edits.hiddenPatches.length === 1")
        if page.evaluate(f"document.activeElement.matches('.ch-wall-cell') && !{VIEWER}.state.edits.heads.length"):
            page.keyboard.press("ArrowRight")
            page.keyboard.press("z")
            wait_for(page, f"{VIEWER}.state.edits.heads.length === 1")
    assert {"pad", "grid", "wall", "cause", "aggregates", "head-panel"} <= reached
    settle(page)
    (edit,) = page.evaluate(f"{VIEWER}.state.edits.heads")
    hidden = page.evaluate(f"{VIEWER}.state.edits.hiddenPatches")
    assert hidden == [chosen]
    with clearhead.edit(model, edit["layer"], head=edit["head"], pattern="zero"):
        check_bars(page, probabilities(model, normalize, pixels_of(page), hidden))
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_every_screen(open_viewer, size, theme):
    page = open_viewer("s=e&e=5", viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator(f".ch-viewer[data-theme={theme}]").count() == 1
    is_named = "e.ariaLabel || e.innerText || e.labels?.length || e.title"
    controls = page.locator("button:visible, select:visible, input:visible")
    assert controls.evaluate_all(f"all => all.filter(e => !({is_named})).length") == 0


def test_a_picture_is_uploaded(open_viewer, wait_for, model, normalize, tmp_path):
    digit = pixels_of(open_viewer("s=e&e=3"))[0, 0].numpy()
    Image.fromarray(digit).resize((280, 280), Image.Resampling.NEAREST).save(tmp_path / "digit.png")
    page = open_viewer("s=e&e=0")
    page.get_by_role("tab", name="Picture").or_(page.get_by_role("button", name="Picture")).or_(
        page.get_by_role("radio", name="Picture")
    ).first.click()
    page.locator("input[type=file]").set_input_files(tmp_path / "digit.png")
    wait_for(page, f"{VIEWER}.state.source === 'picture' && !{VIEWER}.session.input.empty")
    settle(page)
    check_bars(page, probabilities(model, normalize, pixels_of(page)))
    assert np.abs(pixels_of(page)[0, 0].numpy().astype(int) - digit).mean() < 40


def test_malformed_addresses_give_a_working_page(open_viewer):
    page = open_viewer("s=e&e=99999&l=77&h=-9&q=5000.x&x=1e9.-4&b=NaN&z=9-9z&d=%00%ff~&p=!!!")
    assert sum(bars_of(page).values()) == pytest.approx(1.0, abs=1e-3)
