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

print("printed by the user's file")
SMALL = {"width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16}

def right():
    return LanguageModel.from_config(LanguageConfig(vocab_size=11, context_length=16, **SMALL))

class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SequencePredictor.from_config(PredictorConfig(in_features=5, out_features=3, **SMALL))

    def forward(self, x):
        return self.inner(x)

class Exits(nn.Module):
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
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    (tmp_path / "user_model.py").write_text(FILE)
    yield
    sys.modules.pop("user_model", None)


def test_module_without_fault_has_exit_code_0(capsys):
    assert main(["doctor", "user_model:right"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("user_model:right: forward(ids=ids (5,7) below 11)")
    assert "fine         causality" in captured.out
    assert captured.out.endswith("no faults, no warnings, 1 note\n")
    assert captured.err == "printed by the user's file\n"  # not in the report
    assert max(map(len, captured.out.splitlines())) <= 120


def test_file_name_may_have_its_suffix(capsys):
    assert main(["doctor", "user_model.py:right"]) == 0
    assert capsys.readouterr().out.startswith("user_model.py:right: forward(ids=ids (5,7) below 11)")


def test_fault_has_exit_code_1(capsys):
    assert main(["doctor", "user_model:Wrong"]) == 1
    assert "FAULT        causality" in capsys.readouterr().out


def test_no_causal_skips_the_causality_check(capsys):
    assert main(["doctor", "user_model:Wrong", "--no-causal", "--width", "5", "--length", "6"]) == 0
    out = capsys.readouterr().out
    assert "features (5,6,5)" in out
    assert "causality" not in out


def test_json_output_has_the_same_findings(capsys):
    assert main(["doctor", "user_model:Wrong", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["module"] == "user_model:Wrong"
    assert report["faults"] == sum(finding["verdict"] == "fault" for finding in report["findings"]) == 1


def test_help_lists_the_parameter_rules(capsys):
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert PARAMETER_RULES in out
    assert max(map(len, out.splitlines())) <= 83


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "the following arguments are required: MODULE; see clearhead doctor --help"),
        ("user_model", "expected FILE.py:NAME"),
        ("nowhere:GPT", "no module 'nowhere' in this folder"),
        ("user_model:Odd", "required parameter 'edges' of forward()"),
        ("user_model:Exits", "forward() of user_model:Exits exits Python"),
        ("user_model:Wrong --width 0", "width must be at least 1, got 0"),
        (
            "user_model:Wrong --length 2",
            "length must be at least 3, got 2",
        ),
        ("user_model:Wrong --width 4", "accepts none of features (5,7,4)"),
        ("user_model:Wrong --causal", "doctor has no option --causal; did you mean --no-causal?"),
    ],
)
def test_errors_are_one_line(capsys, argv, message):
    assert main(["doctor", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.replace("printed by the user's file\n", "")
    assert captured.err.replace("printed by the user's file\n", "").count("\n") == 1


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

class FailsLater(Linear):
    def forward(self, x):
        self.calls += 1
        if self.calls > 10:
            raise RuntimeError("too many calls")
        return self.linear(x)

class NoMessage(Exception):
    def __str__(self): raise RuntimeError("no text")

class NoText(Linear):
    def forward(self, x): raise NoMessage

class FailsInInit(Linear):
    def __init__(self): raise NoMessage

class Exits(Linear):
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
        ("FailsLater", "failed: RuntimeError: too many calls"),
        ("NoText", "accepts none of .*: NoMessage: "),
        ("FailsInInit", "could not be built: NoMessage: "),
        ("Exits", "failed: GeneratorExit"),
        ("NoSuper", "failed: AttributeError: "),
        ("NoState", "failed: TypeError: "),
        ("NotTrained", "failed: RuntimeError: no"),
        ("Huge", "failed: RuntimeError: "),
    ],
)
def test_unusual_failures_of_a_module_are_one_line(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(ODD)
    assert main(["doctor", f"odd.py:{name}", "--width", "8"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), err)
    assert main(["shapes", f"odd.py:{name}", "--width", "8"]) == (0 if name in ("FailsLater", "NoState") else 2)
    assert capsys.readouterr().err.count("\n") <= 1


OWN = """
import torch
import torch.nn.functional as F

def inputs():
    return torch.randn(2, 6, 5), {"edges": torch.ones(2, 6, 6).tril()}

def unshifted(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
"""


def test_own_inputs_and_an_own_loss_are_loaded(capsys, tmp_path):
    (tmp_path / "user_model.py").write_text(FILE + OWN)
    assert main(["doctor", "user_model.py:Odd", "--inputs", "user_model.py:inputs"]) == 0
    assert "x=given float32 (2, 6, 5)" in capsys.readouterr().out
    assert main(["doctor", "user_model.py:right", "--loss", "user_model.py:unshifted"]) == 1
    assert "docs/doctor.md#loss" in capsys.readouterr().out
