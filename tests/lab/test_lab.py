import re
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import lab
from clearhead.cli.lab import TRAINING_TIME, duration
from clearhead.lab import CLAIMS, RENAMED, all_claims, find, suggestions

LAB = Path(lab.__file__).parent


def run_python(code):
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


def test_registry_lists_every_claim_under_its_slug():
    assert [claim.slug for claim in all_claims()] == list(CLAIMS)
    defined = [slug for path in LAB.glob("*.py") for slug in re.findall(r'^    slug="(.*)",$', path.read_text(), re.M)]
    assert sorted(defined) == sorted(CLAIMS)


@pytest.mark.parametrize("former", RENAMED)
def test_former_slug_suggests_the_new_one(former):
    assert former not in CLAIMS
    assert suggestions(former) == [RENAMED[former]]
    with pytest.raises(LookupError, match=rf"no claim named '{former}'; did you mean {RENAMED[former]}\?"):
        find(former)


def test_running_a_claim_imports_only_its_lesson():
    run_python("""
import sys
import clearhead.lab
assert "torch" not in sys.modules
clearhead.lab.run("temperature")
from clearhead.lab import CLAIMS
assert {lesson for lesson in CLAIMS.values() if f"clearhead.lab.{lesson}" in sys.modules} == {"temperature"}
""")


def test_help_and_suggestions_do_not_import_torch():
    run_python("""
import sys
from clearhead.cli.main import main
assert main(["lab", "--help"]) == 0
assert main(["lab", "elongated-key"]) == 2
assert "torch" not in sys.modules
""")


def test_training_time_in_the_help_is_the_sum_of_all_claims():
    assert duration(sum(claim.seconds for claim in all_claims() if claim.trains)) == TRAINING_TIME
