"""The workspace and the case folder of benchmarks/campaign."""

import pytest


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """The workspace of a campaign; the environment variables that it sets are restored afterwards."""
    from benchmarks.campaign import runs

    with pytest.MonkeyPatch.context() as patch:
        for name in runs.CACHES:
            patch.setenv(name, "")
        yield runs.Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture
def case(tmp_path):
    (tmp_path / "case").mkdir()
    return tmp_path / "case"
