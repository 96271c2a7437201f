import pytest

from clearhead.cli.main import main


@pytest.fixture
def run_cli(capsys):
    """Runs a command that must succeed without writing to stderr, and returns its output."""

    def run(*argv):
        assert main(argv) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run
