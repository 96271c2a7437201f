"""Models of other libraries: no fault in right ones, and the known defects are found and can be reproduced."""

import importlib
import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch

from clearhead import examine

ROOT = Path(__file__).parents[3]
FILE = Path(__file__).with_name("catalogue") / "published.py"
SPEC = importlib.util.spec_from_file_location("doctor_published", FILE)
PUBLISHED = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PUBLISHED)
SECTION = (ROOT / "docs/doctor.md").read_text().partition("## Found in published libraries")[2].partition("\n## ")[0]
REPRODUCTIONS = dict(re.findall(r"\n([^\n]+):\n\n<!-- [^\n]+ -->\n```python\n(.*?)```", SECTION, re.DOTALL))
SAMPLE = [
    "GPT2LMHeadModel",
    "Llama, grouped queries",
    "Gemma2ForCausalLM",
    "BloomForCausalLM",
    "T5",
    "BartForConditionalGeneration",
    "RobertaModel",
    "ConvBertModel",
    "FunnelModel",
    "Dinov2Model",
    "timm ViT, registers",
    "timm Twins",
    "vit-pytorch SimpleViT",
    "x-transformers Decoder, rotary",
    "nn.LSTM",
]
"""models of every library, among them those that were blamed in error"""

# x-transformers scripts a function when it is imported; libraries use what torch deprecates
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Lets the libraries import torchvision, as in tests/oracles."""
    runpy.run_path(str(ROOT / "tests/oracles/conftest.py"))
    for name in ("timm", "transformers", "vit_pytorch", "x_transformers"):
        pytest.importorskip(name)


@pytest.mark.parametrize("name", SAMPLE)
def test_right_models_have_no_fault(name):
    build, causal = PUBLISHED.MODELS[name]
    torch.manual_seed(0)
    report = examine(build(), causal=causal)
    assert not report.faults, report


@pytest.mark.parametrize("name", ["FSMT", "ProphetNet", "Nystromformer", "YOSO"])
def test_defects_are_found(name):
    build, causal, check = PUBLISHED.DEFECTS[name]
    torch.manual_seed(0)
    report = examine(build(), causal=causal)
    assert check in {finding.check for finding in (*report.faults, *report.warnings)}, report


def test_every_reproduction_is_short_and_uses_no_code_of_ours():
    assert len(REPRODUCTIONS) == SECTION.count("```python") == 8
    for code in REPRODUCTIONS.values():
        assert "clearhead" not in code
        assert len(code.strip().splitlines()) <= 14


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_defects_are_reproduced_without_our_code(name):
    """Each block ends with an assertion that holds only while the defect exists."""
    assert "assert" in REPRODUCTIONS[name]
    exec(compile(REPRODUCTIONS[name], name, "exec"), {})
