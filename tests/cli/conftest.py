import pytest

from clearhead.cli.main import main


@pytest.fixture
def told(capsys):
    """What a command that should work prints."""

    def run(*argv):
        assert main(argv) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run
