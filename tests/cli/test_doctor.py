import json
import re
import sys

import pytest

from clearhead.cli.look import PARAMETER_RULES
from clearhead.cli.main import main

FILE = """
from torch import nn
from clearhead import LanguageModel, SequencePredictor
from clearhead.models.config import LanguageConfig, PredictorConfig

print("the user's own words")
SMALL = {"width": 8, "depth": 1, "num_heads": 2, "hidden": 16}

def right():
    return LanguageModel(LanguageConfig(n_tokens=11, context=16, **SMALL))

class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SequencePredictor(PredictorConfig(n_inputs=5, n_outputs=3, **SMALL))

    def forward(self, x):
        return self.inner(x)

class Leaves(nn.Module):
    def forward(self, x):
        raise SystemExit(0)

class Odd(nn.Module):
    def forward(self, x, edges):
        return x
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "doctors_patient", raising=False)
    (tmp_path / "doctors_patient.py").write_text(FILE)
    yield
    sys.modules.pop("doctors_patient", None)


def test_a_module_without_a_fault(capsys):
    assert main(["doctor", "doctors_patient:right"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("doctors_patient:right: forward(ids=ids (5,7) below 11)")
    assert "fine         causality" in captured.out
    assert captured.out.endswith("no faults, no warnings, 1 note\n")
    assert captured.err == "the user's own words\n"  # and not among the answer
    assert max(map(len, captured.out.splitlines())) <= 120


def test_a_file_may_be_named_with_its_suffix(capsys):
    assert main(["doctor", "doctors_patient.py:right"]) == 0
    assert capsys.readouterr().out.startswith("doctors_patient.py:right: forward(ids=ids (5,7) below 11)")


def test_a_fault_is_exit_code_1(capsys):
    assert main(["doctor", "doctors_patient:Wrong"]) == 1
    assert "FAULT        causality" in capsys.readouterr().out


def test_an_encoder_may_see_both_ways(capsys):
    assert main(["doctor", "doctors_patient:Wrong", "--no-causal", "--width", "5", "--length", "6"]) == 0
    out = capsys.readouterr().out
    assert "features (5,6,5)" in out
    assert "causality" not in out


def test_programs_get_the_same(capsys):
    assert main(["doctor", "doctors_patient:Wrong", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["module"] == "doctors_patient:Wrong"
    assert report["faults"] == sum(finding["verdict"] == "fault" for finding in report["findings"]) == 1


def test_help_has_the_rules(capsys):
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert PARAMETER_RULES in out
    assert max(map(len, out.splitlines())) <= 83


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "the following arguments are required: MODULE; see clearhead doctor --help"),
        ("doctors_patient", "expected FILE.py:NAME"),
        ("nowhere:GPT", "no module 'nowhere' in this folder"),
        ("doctors_patient:Odd", "required parameter 'edges' of forward()"),
        ("doctors_patient:Leaves", "forward() of doctors_patient:Leaves exits Python"),
        ("doctors_patient:Wrong --width 0", "width must be at least 1, got 0"),
        (
            "doctors_patient:Wrong --length 2",
            "length must be at least 3, got 2",
        ),
        ("doctors_patient:Wrong --width 4", "accepts none of features (5,7,4)"),
        ("doctors_patient:Wrong --causal", "doctor has no option --causal; did you mean --no-causal?"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert main(["doctor", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.replace("the user's own words\n", "")
    assert captured.err.replace("the user's own words\n", "").count("\n") == 1


ODD = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

class Meta(Linear):
    def forward(self, x): return self.linear(x).to("meta")

class MetaBuffer(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(8, device="meta"))
    def forward(self, x): return self.linear(x) + self.b

class Tires(Linear):
    def forward(self, x):
        self.calls += 1
        if self.calls > 10:
            raise RuntimeError("too tired")
        return self.linear(x)

class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")

class NoText(Linear):
    def forward(self, x): raise Mute

class NotMade(Linear):
    def __init__(self): raise Mute

class Leaves(Linear):
    def forward(self, x): raise GeneratorExit

class NoSuper(nn.Module):
    def __init__(self): pass
    def forward(self, x): return x

class NoState(Linear):
    def state_dict(self, *args, **options): return None
    def forward(self, x): return self.linear(x)

class NotTrained(Linear):
    def train(self, mode=True): raise RuntimeError("no")
    def forward(self, x): return self.linear(x)

class Huge(Linear):
    def forward(self, x): return self.linear(x)[:, :, None].expand(5, 7, 10**9, 8)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Meta", "Meta must return a tensor (batch, ...), .* on the meta device"),
        ("MetaBuffer", "the module has lazy parameters, or tensors on the meta device"),
        ("Tires", "failed: RuntimeError: too tired"),
        ("NoText", "accepts none of .*: Mute: "),
        ("NotMade", "could not be built: Mute: "),
        ("Leaves", "failed: GeneratorExit"),
        ("NoSuper", "failed: AttributeError: "),
        ("NoState", "failed: TypeError: "),
        ("NotTrained", "failed: RuntimeError: no"),
        ("Huge", "failed: RuntimeError: "),
    ],
)
def test_a_module_that_fails_in_an_odd_way_is_one_line(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(ODD)
    assert main(["doctor", f"odd.py:{name}", "--width", "8"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), err)
    assert main(["shapes", f"odd.py:{name}", "--width", "8"]) == (0 if name in ("Tires", "NoState") else 2)
    assert capsys.readouterr().err.count("\n") <= 1
