from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.gradient import check_norms


def found_in(module):
    return check_norms(call(module, None, None).subject)


def test_a_norm_for_each_place_is_fine(ward):
    assert found_in(ward.GPT()).verdict == "fine"


def test_a_norm_that_serves_twice_is_a_warning(ward):
    found = found_in(ward.GPT(block=ward.SharedNorm))
    assert found.verdict == "warning"
    assert found.text.startswith("blocks.0.norm1, blocks.1.norm1: used 2 times")


def test_a_block_that_runs_twice_has_its_norms_run_twice(ward):
    class SharedBlocks(ward.GPT):
        def __init__(self):
            super().__init__()
            self.blocks[1] = self.blocks[0]

    assert found_in(SharedBlocks()).verdict == "fine"
