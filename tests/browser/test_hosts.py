"""The three hosts of the viewer in a real browser: the local server, one HTML file, and a notebook."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from torch import nn

import clearhead
from clearhead.data.dataset import Normalize
from clearhead.page.describe import export_html, shipped, shipped_model
from clearhead.viewer import Description, document, pack_tensors

VIEWER = "document.getElementById('clearhead').viewer"
MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    image_size, in_channels, patch_size = 16, 3, 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        return self.head(self.encoder(self.embed(images).flatten(2).mT).mean(1))
"""
HOSTILE = "</script><script>window.hacked = 1</script><!--<img src=x onerror='window.hacked=1'>"


@pytest.fixture(scope="module")
def shipped_logits():
    """(N,V) of the shipped checkpoint for its examples, by torch."""
    description, tensors = shipped()
    images = torch.from_numpy(load(tensors)["examples.pixels"])
    with torch.no_grad():
        return shipped_model()(Normalize(description.input.mean, description.input.std)(images)).numpy()


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """An HTML file of a run, and the run."""
    run = clearhead.open_run(trained / "mnist")
    path = tmp_path_factory.mktemp("exported") / "mnist.html"
    path.write_text(export_html(run), encoding="utf-8")
    return path, run


@pytest.fixture
def shown_logits(wait_for, ask_engine):
    """shown_logits(page, example): the logits of a test example that is chosen by the address."""

    def shown_logits(page, example):
        page.evaluate(f"window.location.hash = 's=e&e={example}'")
        state = f"{VIEWER}.state"
        wait_for(page, f"{state}.source === 'example' && {state}.example === {example}")
        return np.array(ask_engine(page, "run(pixels, noEdits)", "Array.from(answer.logits)"))

    return shown_logits


# The local server


def test_the_opening_link_leads_to_a_page_that_predicts(shipped_link, new_page, viewer_result):
    page = new_page(shipped_link)
    assert page.url == shipped_link.partition("?")[0]
    assert len(viewer_result(page)) == 10
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    port = shipped_link.rpartition(":")[2].partition("/")[0]
    assert cookie["name"] == f"clearhead-{port}"
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert "token" not in page.evaluate("JSON.stringify(performance.getEntriesByType('navigation').map((e) => e.name))")
    assert len(page.workers) == 1
    assert page.locator("select#host-model option").count() == 1


def test_the_shipped_checkpoint_predicts_as_torch_does(
    shipped_link, new_page, viewer_result, shown_logits, shipped_logits
):
    page = new_page(shipped_link)
    viewer_result(page)
    for example in (0, 7, 42, len(shipped_logits) - 1):
        logits = shown_logits(page, example)
        np.testing.assert_allclose(logits, shipped_logits[example], atol=1e-4)


def test_a_page_without_the_link_is_refused(shipped_link, new_page, watch):
    watch.expected.append("status of 403")
    page = new_page(shipped_link.partition("?")[0])
    assert "clearhead open" in page.inner_text("body")


def test_runs_are_chosen_from_a_list(trained, serve, new_page, viewer_result, wait_for, shown_logits):
    with serve(trained.parent) as link:
        page = new_page(link)
        viewer_result(page)
        options = page.locator("#host-model option").all_inner_texts()
        assert any(text.startswith("mnist ") for text in options)
        assert not any(text.startswith("reverse ") for text in options)
        page.locator(".host-models summary").click()
        reasons = page.locator(".host-models li").all_inner_texts()
        assert any(text.startswith("reverse: ") and "clearhead look" in text for text in reasons)
        page.select_option("#host-model", label=next(text for text in options if text.startswith("mnist ")))
        wait_for(page, f"window.location.search.startsWith('?model=run-') && {VIEWER}?.result")
        run = clearhead.open_run(trained / "mnist")
        pixels = np.array(page.evaluate(f"Array.from({VIEWER}.session.examples.pixels.slice(0, 784))"), dtype=np.uint8)
        with torch.no_grad():
            expected = run.model(run.normalize(torch.from_numpy(pixels).view(1, 1, 28, 28)))[0].numpy()
        np.testing.assert_allclose(shown_logits(page, 0), expected, atol=1e-4)


def test_a_module_of_your_own_runs_in_torch(serve, new_page, viewer_result, ask_engine, tmp_path):
    (tmp_path / "browser_net.py").write_text(MODULE)
    namespace: dict = {}
    exec(MODULE, namespace)
    model = namespace["Net"]().eval()
    with serve(tmp_path, "browser_net.py:Net") as link:
        page = new_page(link)
        viewer_result(page)
        pixels = np.array(page.evaluate(f"Array.from({VIEWER}.session.input.pixels)"), dtype=np.uint8)
        x = torch.from_numpy(pixels).view(1, 3, 16, 16) / 255
        name = "encoder.layers.0.self_attn"
        with torch.no_grad():
            plain = model(x)[0].numpy()
            with clearhead.edit(model, name, head=1, pattern="zero"):
                edited = model(x)[0].numpy()
        zero = f"{{ ...noEdits, heads: [{{ layer: '{name}', head: 1, pattern: 'zero' }}] }}"
        logits = "Array.from(answer.logits)"
        np.testing.assert_allclose(ask_engine(page, "run(pixels, noEdits)", logits), plain, atol=1e-5)
        np.testing.assert_allclose(ask_engine(page, f"run(pixels, {zero})", logits), edited, atol=1e-5)
        for method in ("mean", "rollout", "relevance", "occlusion"):
            patches = ask_engine(page, f"attribute(pixels, {zero}, '{method}', 1)", "Array.from(answer.patches)")
            assert len(patches) == 16
        infinite = "{ ...noEdits, beta: Infinity }"
        assert ask_engine(page, f"headSteps(pixels, {infinite}, '{name}', 0)", "String(answer.beta)") == "Infinity"
        effects = ask_engine(page, "headEffects(pixels, noEdits, 2)", "Array.from(answer)")
        changes = np.exp(edited - np.logaddexp.reduce(edited)) - np.exp(plain - np.logaddexp.reduce(plain))
        assert effects[1] == pytest.approx(changes[2], abs=1e-5)


def test_a_module_that_cannot_be_shown_is_explained(serve, new_page, wait_for, watch, tmp_path):
    watch.expected.append("status of 422")
    (tmp_path / "broken_net.py").write_text("def net():\n    return 3\n")
    with serve(tmp_path, "broken_net.py:net") as link:
        page = new_page(link)
        text = wait_for(page, "document.querySelector('.host-problem')?.textContent")
        assert "nn.Module" in text


@contextmanager
def evil_site(html):
    """The address of another origin on this machine, as any page in the visitor's browser is, and what it was asked."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


def test_another_site_in_the_same_browser_reaches_nothing(shipped_link, new_page, viewer_result, watch):
    """The browser has the cookie, and the other site is even on the same host."""
    page = new_page(shipped_link)
    viewer_result(page)
    address = shipped_link.partition("?")[0]
    statuses = []
    html = f"""<body>
    <script src="{address}js/host.js"></script>
    <link rel="stylesheet" href="{address}viewer.css">
    <img src="{address}api/models">
    <iframe src="{address}"></iframe>
    <form id="form" method="post" target="frame" action="{address}api/models/shipped/run"><input name="x"></form>
    <iframe name="frame"></iframe>
    <script>
    window.results = [];
    const note = (text) => window.results.push(text);
    const attempt = (options) => fetch("{address}api/models", {{ credentials: "include", ...options }})
      .then((answer) => note(answer.type === "opaque" ? "opaque" : "read"), () => note("refused"));
    const attempts = [{{ credentials: "omit" }}, {{}}, {{ mode: "no-cors" }}, {{ method: "POST", body: "x" }},
      {{ method: "POST", body: "x", mode: "no-cors" }}, {{ method: "PUT" }}];
    Promise.all(attempts.map(attempt)).then(() => {{ window.done = true; document.getElementById("form").submit(); }});
    </script>"""
    with evil_site(html) as (evil, _):
        watch.origins.add(evil)
        other = page.context.new_page()
        other.on("response", lambda response: response.url.startswith(address) and statuses.append(response.status))
        other.on("requestfailed", lambda request: request.url.startswith(address) and statuses.append("failed"))
        other.goto(evil)
        for _ in range(500):
            other.wait_for_timeout(20)
            if other.evaluate("window.done") and len(statuses) >= 11:
                break
        results = other.evaluate("window.results")
        assert len(results) == 6
        assert "read" not in results
        assert len(statuses) >= 11
        assert set(statuses) <= {403, "failed"}
    viewer_result(page)


# One file


def test_an_exported_file_predicts_as_torch_does(exported, new_page, viewer_result, shown_logits):
    path, run = exported
    page = new_page(path.as_uri())
    viewer_result(page)
    assert len(page.workers) == 1
    size = 784
    for example in (0, 5, 11):
        slice_ = f"{VIEWER}.session.examples.pixels.slice({example * size}, {(example + 1) * size})"
        pixels = np.array(page.evaluate(f"Array.from({slice_})"), dtype=np.uint8)
        with torch.no_grad():
            expected = run.model(run.normalize(torch.from_numpy(pixels).view(1, 1, 28, 28)))[0].numpy()
        logits = shown_logits(page, example)
        assert np.argmax(logits) == np.argmax(expected)
        np.testing.assert_allclose(logits, expected, atol=0.02)  # the weights are float16


def test_the_shipped_model_as_a_file_is_small_and_fast(tmp_path, new_page, viewer_result):
    """At most 1 MB, and the first prediction soon after loading; the limit has room for a busy machine."""
    description, tensors = shipped()
    path = tmp_path / "shipped.html"
    path.write_text(document(description, tensors, title="Digits"), encoding="utf-8")
    assert path.stat().st_size < 1_000_000
    page = new_page(path.as_uri())
    viewer_result(page)
    milliseconds = page.evaluate(f"{VIEWER}.session.firstResultAt ?? performance.now()")
    print(f"first prediction within {milliseconds:.0f} ms")
    assert milliseconds < 5000


def test_a_file_can_send_nothing(exported, new_page, viewer_result, watch):
    """Whatever a script in the page tries, its policy forbids every request, and every other script."""
    watch.expected += ["Content Security Policy", "a request to http://127.0.0.1"]
    page = new_page(exported[0].as_uri())
    viewer_result(page)
    with evil_site("x") as (evil, requests):
        attempts = f"""async () => {{
          const tried = [];
          tried.push(await fetch("{evil}").then(() => "sent", () => "refused"));
          tried.push(await new Promise((done) => {{
            const image = new Image(); image.onload = () => done("sent"); image.onerror = () => done("refused");
            image.src = "{evil}/x.png";
          }}));
          const script = document.createElement("script"); script.textContent = "window.hacked = 1";
          document.body.append(script);
          const style = document.createElement("style"); style.textContent = "body {{ color: red }}";
          document.body.append(style);
          try {{ new WebSocket("{evil.replace("http", "ws")}").onopen = () => tried.push("sent"); }} catch {{}}
          tried.push(window.hacked ? "executed" : "refused");
          return tried;
        }}"""
        assert page.evaluate(attempts) == ["refused", "refused", "refused"]
        page.wait_for_timeout(200)
        assert not requests
    assert any("Content Security Policy" in problem for problem in watch.problems)


def test_hostile_names_do_not_break_out(tmp_path, new_page, viewer_result):
    description, tensors = shipped()
    names = (HOSTILE, "<!--", "<script>", "]]>", "\u2028\u2029", "&lt;b&gt;", "\x1b[31m", '"', "'", "\\u003c")
    hostile = replace(description, title=HOSTILE, classes=names, source=HOSTILE)
    path = tmp_path / "hostile.html"
    path.write_text(document(hostile, tensors, title=HOSTILE, notice=f"--> {HOSTILE} --!>"), encoding="utf-8")
    page = new_page(path.as_uri())
    viewer_result(page)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate(f"{VIEWER}.session.description.classes") == list(names)
    assert page.title() == HOSTILE
    assert page.locator("img[src=x]").count() == 0


def test_the_trace_of_a_sequence_is_shown(tmp_path, new_page, wait_for):
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    trace = clearhead.look(model, torch.randn(1, 5, 16))
    path = trace.save_html(tmp_path / "trace.html", tokens=["the", "cat", HOSTILE, "sat", "."])
    page = new_page(path.as_uri())
    weights = wait_for(page, f"{VIEWER}?.result && {VIEWER}.result.layers.map((l) => Array.from(l.weights))")
    for shown, record in zip(weights, trace.values(), strict=True):
        np.testing.assert_allclose(shown, record.weights()[0].detach().flatten().numpy(), atol=1e-3)
    assert page.evaluate("window.hacked") is None


def test_the_trace_of_an_image_is_shown_with_its_pixels(trained, tmp_path, new_page, viewer_result):
    run = clearhead.open_run(trained / "mnist")
    pixels = torch.randint(0, 256, (1, 28, 28), dtype=torch.uint8)
    trace = run.look(pixels)
    path = trace.save_html(tmp_path / "trace.html", image=pixels, grid=run.model.config.grid, classes=run.classes)
    page = new_page(path.as_uri())
    np.testing.assert_allclose(viewer_result(page), trace.output[0].detach().numpy(), atol=1e-5)
    assert page.evaluate(f"Array.from({VIEWER}.session.input.pixels)") == pixels.flatten().tolist()


# Notebooks


@pytest.fixture(scope="module")
def cell():
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    return clearhead.look(model, torch.randn(1, 5, 16))._repr_html_()


def test_a_notebook_shows_the_viewer_in_a_sandboxed_frame(cell, tmp_path, new_page, wait_for):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{cell}", encoding="utf-8")
    page = new_page(path.as_uri())
    page.wait_for_selector("iframe")
    frame = page.frames[1]
    assert wait_for(frame, f"{VIEWER}?.result?.layers.length") == 2
    assert frame.evaluate("window.origin") == "null"
    box, image = page.locator("iframe").bounding_box(), page.locator("img").bounding_box()
    assert box["y"] <= image["y"]
    assert box["y"] + box["height"] >= image["y"] + image["height"]
    assert "layers.1.self_attn" in page.locator("table").inner_text()


def test_a_notebook_whose_frames_are_removed_shows_an_image_and_a_table(cell, tmp_path, new_page):
    stripped = cell.partition("<iframe")[0] + cell.partition("</iframe>")[2]
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{stripped}", encoding="utf-8")
    page = new_page(path.as_uri(), java_script_enabled=False)
    image = page.locator("img")
    assert image.is_visible()
    assert image.bounding_box()["width"] > 100
    assert "layers.0.self_attn" in page.locator("table").inner_text()


def test_a_file_of_an_unknown_format_says_so(tmp_path, new_page, wait_for):
    """An empty trace has nothing to show, and does not end in an error."""
    description = Description(kind="trace", title="Empty", source="trace")
    path = tmp_path / "empty.html"
    path.write_text(document(description, pack_tensors({}), title="Empty"), encoding="utf-8")
    page = new_page(path.as_uri())
    assert wait_for(page, "document.body.innerText").strip()
