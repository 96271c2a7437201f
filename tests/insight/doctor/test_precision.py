import torch

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.gradient import check_precision


def found_in(module):
    return check_precision(call(module, None, None))


def test_a_module_without_dtypes_of_its_own_is_fine(ward):
    assert [finding.verdict for finding in found_in(ward.GPT(ward.Safe))] == ["fine"]


def test_what_breaks_is_told_with_its_place(ward):
    findings = found_in(ward.HardFloat())
    assert {finding.verdict for finding in findings} == {"warning"}
    assert ["float64" in findings[0].text, "bfloat16" in findings[1].text] == [True, True]
    assert all("(attention.py:" in finding.text for finding in findings)


def test_large_negative_numbers_do_not_fit_into_float16(ward):
    (found,) = found_in(ward.GPT())
    assert found.verdict == "warning"
    assert "breaks in float16" in found.text


def test_a_quiet_change_of_dtype_is_told(ward):
    assert any("bfloat16 becomes float32 inside" in finding.text for finding in found_in(ward.Upcast()))


def test_what_overflows_in_silence_is_a_fault_in_the_modules_own_dtype(ward):
    class Overflows(ward.GPT):
        def forward(self, idx):
            x = super().forward(idx)
            return x + torch.full_like(x, 60000) * 2 - 120000

    for module, verdict in ((Overflows(ward.Safe), "warning"), (Overflows(ward.Safe).half(), "fault")):
        (found,) = [finding for finding in found_in(module) if "float16 the" in finding.text]
        assert found.verdict == verdict
