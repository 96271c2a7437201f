import json
import math
import os
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from clearhead.cli.main import main
from clearhead.cli.predict import candidates_text, num_ordered
from clearhead.inference.run import Run
from clearhead.models.generate import Beam
from clearhead.tasks.pronunciation import Pronunciation, pronounce


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "more/deep").mkdir(parents=True)
    for name in ("a.png", "more/b.jpg", "more/deep/c.webp"):
        Image.fromarray(np.full((30, 40), 100, np.uint8)).save(tmp_path / name)
    (tmp_path / "more/notes.txt").write_text("not an image")
    return tmp_path


def run_predict(capsys, *argv):
    assert main(["predict", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_each_image_has_a_line_and_folders_are_searched(trained, digits, capsys):
    lines = run_predict(capsys, trained / "mnist", digits / "a.png", digits / "more").splitlines()
    assert [line.split()[0] for line in lines] == [str(digits / n) for n in ("a.png", "more/b.jpg", "more/deep/c.webp")]
    assert all("%" in line for line in lines)


def test_json_has_all_probabilities(trained, digits, capsys):
    (row,) = json.loads(run_predict(capsys, trained / "mnist", digits / "a.png", "--json"))
    assert row["input"] == str(digits / "a.png")
    assert set(row["probabilities"]) == set("0123456789")
    assert row["probability"] == row["probabilities"][row["label"]]


def test_invert_equals_inverted_images(trained, digits, capsys):
    Image.fromarray(np.full((30, 40), 155, np.uint8)).save(digits / "light.png")
    (plain,) = json.loads(run_predict(capsys, trained / "mnist", digits / "a.png", "--json"))
    (inverted,) = json.loads(run_predict(capsys, trained / "mnist", digits / "light.png", "--invert", "--json"))
    assert plain["probabilities"] == inverted["probabilities"]


def test_predictions_for_digits(trained, capsys):
    ids = ["3", "1", "4", "1", "5", "9", "2", "6", "5", "3", "5", "8", "9", "7", "9", "3"]
    inputs, predictions = run_predict(capsys, trained / "reverse", "--ids", *ids).splitlines()
    assert inputs == "digits       " + " ".join(ids)
    assert predictions.startswith("predictions  ")
    assert len(predictions.partition("(")[0].split()) == 17
    assert len(json.loads(run_predict(capsys, trained / "reverse", "--ids", *ids, "--json"))) == 16
    assert main(["predict", str(trained / "reverse"), "--ids", "3", "1", "4"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: ")
    assert err.endswith("was trained on sequences of 16 digits, got 3; its prediction is unreliable\n")
    (line,) = run_predict(capsys, trained / "sum", "--ids", *ids).splitlines()
    assert line.startswith(" ".join(ids) + "  ")
    assert "%" not in line


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("RUN/mnist", 2, "before --ensemble), or --ids, got neither"),
        ("RUN/mnist a.png --ids 1", 2, "got both"),
        ("RUN/mnist nowhere.png", 1, "No such file or directory: nowhere.png"),
        ("RUN/mnist 3 1 4", 2, "mnist takes images, got '3', which is neither a file nor a folder"),
        ("RUN/mnist empty", 2, "no images in empty"),
        ("RUN/mnist bad.png", 2, "cannot read the image bad.png: the file is"),
        ("RUN/mnist pipe.png", 2, "cannot read the image pipe.png: it is a pipe or a device and not a file"),
        ("RUN/mnist a.png bomb.webp", 2, "cannot read the image bomb.webp: it has more than 25,000,000 pixels"),
        ("RUN/mnist --ids 3", 2, "takes images, got digits"),
        ("RUN/reverse a.png", 2, "takes digits, got 'a.png'; pass one sequence of digits: --ids"),
        ("RUN/reverse --ids 3 x", 2, "--ids: invalid int value: 'x'"),
        ("RUN/reverse --ids 33", 2, "ids must be from 0 to 9, got 33"),
        (f"RUN/reverse --ids {'3' * 30}", 2, f"ids must be from 0 to 9, got {'3' * 30}"),
        ("RUN/reverse --ids 3 --beam 2", 2, "--beam and --ensemble need words and a run of pronounce, got"),
        ("RUN/mnits a.png", 2, "did you mean"),
    ],
)
def test_predict_errors_are_one_line(trained, digits, capsys, monkeypatch, argv, code, message):
    monkeypatch.chdir(digits)
    (digits / "empty").mkdir()
    os.mkfifo("pipe.png")
    (digits / "bomb.webp").write_bytes(
        bytes.fromhex("524946461a000000574542505650384c0e0000002fffffff0fffffffff888808")
    )
    (digits / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n but not really")
    assert main(["predict", *argv.replace("RUN", str(trained)).split()]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_words_are_listed_with_the_next_best_candidates(trained, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.tasks.pronunciation.MAX_PHONES", 12)
    header, *lines = run_predict(capsys, trained / "pronounce", "cab", "BAD", "--beam", 3).splitlines()
    assert header.split() == ["word", "phones", "probability", "score"]
    lines = lines[: lines.index("")]
    assert [line.split()[0] for line in lines[::3]] == ["cab", "BAD"]
    assert len(lines) == 6
    assert all(line.split()[-2].endswith("%") or line.endswith(" *") for line in lines)
    one, two = json.loads(run_predict(capsys, trained / "pronounce", "cab", "bad", "--json"))
    assert (one["input"], two["input"]) == ("cab", "bad")
    assert set(one["candidates"][0]) == {"phones", "score", "ended", "probability", "score_per_token"}
    best = one["candidates"][0]
    assert best["score_per_token"] == pytest.approx(best["score"] / (len(best["phones"]) + best["ended"]))


def test_truncated_candidates_are_marked(trained, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.tasks.pronunciation.MAX_PHONES", 1)
    lines = run_predict(capsys, trained / "pronounce", "cab", "--beam", 5).splitlines()
    assert sum(" ... " in line for line in lines) >= 4  # one candidate may have ended without any phone


def test_ensemble_of_a_run_with_itself_equals_the_run(trained, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.tasks.pronunciation.MAX_PHONES", 12)
    alone = run_predict(capsys, trained / "pronounce", "cab", "bad")
    assert run_predict(capsys, trained / "pronounce", "cab", "bad", "--ensemble", trained / "pronounce") == alone


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("RUN/pronounce xyz", "unknown token 'x' in 'xyz'; the vocabulary is 'abcd'"),
        ("RUN/pronounce --ids 3", "takes words, got digits"),
        ("RUN/pronounce cab --invert", "--invert needs images, got"),
        ("RUN/pronounce --ensemble RUN/pronounce cab", "before --ensemble), or --ids, got neither"),
        ("RUN/pronounce cab --ensemble RUN/words", "an ensemble needs runs of the recipe pronounce, got"),
        ("RUN/words hello", "takes text, got 'hello'; generate text with: clearhead sample"),
    ],
)
def test_predict_word_errors_are_one_line(trained, capsys, argv, message):
    assert main(["predict", *argv.replace("RUN", str(trained)).split()]) == 2
    assert message in capsys.readouterr().err


def test_candidates_are_ordered_by_the_score_shown():
    """A longer pronunciation with a lower probability may come first; its score explains why."""
    longer, shorter = (
        Pronunciation(("TH", "ER", "OW", "AH"), math.log(0.168)),
        Pronunciation(("TH", "ER", "OW"), math.log(0.207)),
    )
    header, first, second, _, note = candidates_text(["thorough"], [[longer, shorter]]).splitlines()
    assert header.endswith("probability   score")
    assert (first.split()[-2:], second.split()[-2:]) == (["16.8%", "-0.357"], ["20.7%", "-0.394"])
    assert note == "Ordered by score, the mean log-probability per token (phones and end of sequence)."


def test_candidates_less_probable_than_the_greedy_one_are_marked():
    greedy, longer = Pronunciation(("K",), math.log(0.5)), Pronunciation(("K", "AE", "B"), math.log(0.4))
    assert longer.score_per_token > greedy.score_per_token
    lines = candidates_text(["cab"], [[greedy, longer]]).splitlines()
    assert not lines[1].endswith("*")
    assert lines[2].endswith(" *")
    assert lines[-1] == "* less probable than the greedy candidate, and therefore listed after it"


@pytest.mark.parametrize("size", [2, 5, 9])
def test_scores_decrease_except_for_marked_candidates(trained, size):
    run = Run(trained / "pronounce")
    words = ["cab", "bad", "a", "abcd", "dcba", "bb"]
    greedy = [ways[0] for ways in pronounce(run, words, Beam(1))]
    for ways, least in zip(pronounce(run, words, Beam(size)), greedy, strict=True):
        n = num_ordered(ways)
        shown = [way.score_per_token for way in ways]
        assert all(after <= way + 1e-6 for way, after in pairwise(shown[:n]))
        assert all(way.score < least.score for way in ways[n:])


def run_sample(capsys, *argv):
    assert main(["sample", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_sample_prints_one_word_per_line(trained, capsys):
    assert len(run_sample(capsys, trained / "words").splitlines()) == 10
    lines = run_sample(capsys, trained / "words", "--prompt", "re", "--n", 3, "--seed", 1, "--top-p", 0.9).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("re") for line in lines)


def test_sample_prints_a_text_of_the_given_length(trained, capsys):
    (text,) = json.loads(
        run_sample(capsys, trained / "text", "--tokens", 40, "--temperature", 0.5, "--top-k", 5, "--json")
    )
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
def test_sample_errors_are_one_line(trained, capsys, argv, message):
    assert main(["sample", *argv.replace("RUN", str(trained)).split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
