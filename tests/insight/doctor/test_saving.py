from torch import nn

from clearhead.insight.doctor.gradient import check_saving


def test_names_without_a_wrapper_are_fine(ward):
    assert [finding.verdict for finding in check_saving(ward.GPT())] == ["fine"]


def test_the_wrapper_of_a_compiled_module_is_told(ward):
    inner, outer = ward.GPT(), nn.Module()
    outer._orig_mod = inner  # what torch.compile returns has it under this name
    for module in (outer, nn.Sequential(outer)):
        (found,) = check_saving(module)
        assert found.verdict == "warning"
        assert "_orig_mod.tokens.weight" in found.text


def test_a_plain_tensor_is_left_behind(ward):
    (found,) = check_saving(nn.Sequential(ward.PlainTensor()))
    assert found.verdict == "warning"
    assert found.text.startswith("0.mask is neither parameter nor buffer")
