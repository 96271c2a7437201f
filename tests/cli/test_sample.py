import json

import pytest

from clearhead.cli.main import main


def told(capsys, *argv):
    assert main(["sample", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_word_in_each_line(trained, capsys):
    assert len(told(capsys, trained / "words").splitlines()) == 10
    lines = told(capsys, trained / "words", "--prompt", "re", "--n", 3, "--seed", 1, "--top-p", 0.9).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("re") for line in lines)


def test_one_text_of_a_length(trained, capsys):
    (text,) = json.loads(told(capsys, trained / "text", "--tokens", 40, "--temperature", 0.5, "--top-k", 5, "--json"))
    assert len(text) == 40


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "RUN/words --temperature 0",
            "temperature must be above 0, got 0.0",
        ),
        ("RUN/words --top-k 0", "top_k must be at least 1, got 0; leave it out to keep all tokens"),
        ("RUN/words --top-p 0", "top_p must be above 0 and at most 1, got 0.0"),
        ("RUN/words --seed -1", "seed must be an integer from 0 to 9223372036854775807, got -1"),
        ("RUN/words --seed 1000000000000000000000", "seed must be an integer from 0 to"),
        ("RUN/words --n 0", "n and max_new_tokens must be from 1 to 1000000, got 0 and 300"),
        ("RUN/words --n -1", "from 1 to 1000000, got -1 and 300"),
        ("RUN/words --n 1000000000000000000000", "from 1 to 1000000, got 1000000000000000000000 and"),
        ("RUN/text --tokens 0", "from 1 to 1000000, got 1 and 0"),
        ("RUN/text --tokens 1000001", "from 1 to 1000000, got 1 and 1000001"),
        ("RUN/words --temperature nan", "temperature must be above 0, got nan"),
        ("RUN/words --top-p nan", "top_p must be above 0 and at most 1, got nan"),
        ("RUN/mnist", "which takes images; try clearhead predict"),
    ],
)
def test_mistakes_are_one_line(trained, capsys, argv, message):
    assert main(["sample", *argv.replace("RUN", str(trained)).split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
