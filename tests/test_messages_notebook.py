"""Objects in notebooks: escaped HTML, figures as images, one progress bar, nothing shown twice."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import clearhead
from clearhead import lab
from clearhead.drawing import new_figure
from clearhead.insight.doctor.report import Finding as DoctorFinding
from clearhead.insight.doctor.report import Report
from clearhead.lab.claim import Check, Finding, Result
from clearhead.messages import NotebookBar, escaped, html_table, is_notebook
from clearhead.training.loop import TrainResult
from clearhead.training.progress import Display

HOSTILE = "<script>alert(1)</script>&\x1b[31m\u202e"
PNG = b"\x89PNG\r\n\x1a\n"


def assert_harmless(html):
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html


class HostileModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(HOSTILE, nn.MultiheadAttention(8, 2, batch_first=True))

    def forward(self, x):
        return self.get_submodule(HOSTILE)(x, x, x)[0]


@pytest.fixture
def hostile_trace():
    return clearhead.look(HostileModel(), torch.randn(1, 3, 8))


def test_text_is_escaped():
    assert_harmless(escaped(HOSTILE))
    assert escaped("W_Q kᵀ 猫") == "W_Q kᵀ 猫"


def test_every_part_of_a_table_is_escaped():
    for part in (
        html_table([HOSTILE], []),
        html_table([], [[HOSTILE]]),
        html_table([], [], caption=HOSTILE),
        html_table([], [], footer=HOSTILE),
    ):
        assert_harmless(part)


def test_columns_are_aligned():
    html = html_table(["name", "size"], [["a", 1]], right={1})
    assert html.count("text-align: left") == html.count("text-align: right") == 2


def test_trace_and_its_records(hostile_trace):
    (record,) = hostile_trace.values()
    for shown in (hostile_trace, record):
        assert_harmless(shown._repr_html_())
        assert "\x1b" not in repr(shown)
        assert "\u202e" not in repr(shown)
        assert "3 x 3" in shown._repr_html_()
    assert "<th" in hostile_trace._repr_html_()


def test_trace_says_what_was_not_kept():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    trace = clearhead.look(model, torch.randn(1, 3, 8), keep="last")
    assert "and 1 more, not kept" in trace._repr_html_()
    assert "and 1 more, not kept" in repr(trace).splitlines()


def test_doctor_report():
    report = Report(HOSTILE, HOSTILE, (DoctorFinding(HOSTILE, "fault", HOSTILE),))
    assert_harmless(report._repr_html_())
    assert "1 fault" in report._repr_html_()
    assert "\x1b" not in repr(report)
    real = clearhead.examine(nn.TransformerEncoderLayer(16, 2, batch_first=True), causal=False)
    assert repr(real) == str(real)
    assert all(finding.check in real._repr_html_() for finding in real.findings)


def test_lab_results_claims_and_findings():
    claim, result = lab.find("temperature"), lab.run("temperature")
    assert "Verdict: holds" in result._repr_html_()
    assert repr(result).splitlines()[0] == "holds"
    assert repr(result).count("  pass  ") == len(result.checks)
    assert escaped(claim.statement) in claim._repr_html_()
    assert repr(claim).startswith("temperature (demonstration): Softargmax")
    assert Finding(claim, result)._repr_html_() == claim._repr_html_() + result._repr_html_()
    assert "not run" in Finding(claim, None)._repr_html_()
    assert repr(Finding(claim, None)).endswith("not run")
    assert_harmless(Result((Check(HOSTILE, 1.0, HOSTILE, True),))._repr_html_())


def test_shapes():
    shapes = clearhead.shapes("vit_mnist_plain")
    assert repr(shapes) == str(shapes)
    html = shapes._repr_html_()
    assert "Total params" in html
    assert "patch_embed" in html
    assert html.count("<tr>") < 40  # equal blocks share a line


def test_train_result():
    result = TrainResult("finished", 1200, 1100, {"loss": 0.25, "accuracy": 0.5, "part": HOSTILE, "seconds": 9.0})
    html = result._repr_html_()
    assert "1,200" in html
    assert "test accuracy" in html
    assert "0.5000" in html
    assert "seconds" not in html
    assert "<script" not in html
    page = TrainResult("stopped", 3, None, None)._repr_html_()
    assert "test" not in page
    assert "best" not in page


def test_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clearhead.train("reverse", "small", changes={"training.steps": 2}, quiet=True)
    html = clearhead.open_run("small")._repr_html_()
    assert "SequencePredictor" in html
    assert "reverse" in html
    assert "runs/small" in html


def test_figure_is_an_image():
    figure = new_figure(2, 1)
    figure.subplots().plot([0, 1])
    assert figure._repr_png_().startswith(PNG)
    assert figure._repr_png_() == figure._repr_png_()


def test_is_notebook_only_with_a_kernel(monkeypatch):
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert is_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_notebook()


class Cell:
    """Records what is displayed, in place of IPython.display."""

    def __init__(self):
        self.shown = []

    def display(self, shown, display_id):
        assert display_id
        self.shown.append(repr(shown))
        return self

    def update(self, shown):
        self.shown[-1] = repr(shown)


@pytest.fixture
def cell(monkeypatch):
    cell = Cell()
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    return cell


def test_bar_is_updated_in_place(cell):
    bar = NotebookBar(10)
    bar.update(3, "loss 1.0", force=True)
    bar.update(4, "loss 0.5")  # too soon to be shown
    assert cell.shown == ["3/10  loss 1.0"]
    bar.update(10, force=True)
    assert cell.shown == ["10/10  loss 0.5"]
    assert 'value="10" max="10"' in bar._repr_html_()
    bar.update(10, HOSTILE)
    assert_harmless(bar._repr_html_())


def test_training_in_a_notebook_shows_one_bar_and_each_line_once(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    clearhead.train("reverse", "small", changes={"training.steps": 4, "training.evaluate_every": 2})
    (bar,) = cell.shown
    assert bar.startswith("4/4  loss")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == len(set(lines))
    assert not any(line.startswith("step ") for line in lines)  # the bar shows them


def test_quiet_training_shows_no_bar(cell, capsys):
    with Display(quiet=True).training(10, 0, 1):
        pass
    assert not cell.shown
    assert capsys.readouterr().out == ""


CELLS = (
    "import clearhead, torch\nfrom torch import nn",
    "clearhead.train('reverse', 'small', changes={'training.steps': 20})",
    "trace = clearhead.open_run('small').look([1] * 16)\ntrace",
    "trace.plot()",
    "clearhead.lab.run('temperature')",
    "clearhead.shapes('reverse')",
)


@pytest.mark.slow
def test_objects_in_a_real_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    document = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(document, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    imports, train, trace, plot, result, shapes = (cell.outputs for cell in document.cells)
    assert not imports
    bars = [output for output in train if "<progress" in output.get("data", {}).get("text/html", "")]
    assert len(bars) == 1
    assert 'value="20" max="20"' in bars[0]["data"]["text/html"]
    text = "".join(output["text"] for output in train if output["output_type"] == "stream")
    assert len(re.findall(r"^saved in", text, re.MULTILINE)) == 1
    assert [output["output_type"] for output in train].count("execute_result") == 1
    for outputs, mime in ((trace, "text/html"), (plot, "image/png"), (result, "text/html"), (shapes, "text/html")):
        assert len(outputs) == 1
        assert mime in outputs[0]["data"]
