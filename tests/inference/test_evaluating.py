import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.pronounce import parts
from clearhead.inference import evaluate
from clearhead.inference.evaluate import edit_distance, error_rates, learnt, loss_and_accuracy, nearest, words_to_score
from clearhead.inference.g2p import Pronunciation
from clearhead.inference.run import Run
from clearhead.training.run_directory import RunDirectory

PHONES = st.lists(st.sampled_from(["AA", "B", "K"]), max_size=7)


def slow_distance(one, other):
    """The definition, for short sequences."""
    if not one or not other:
        return len(one) + len(other)
    same = slow_distance(one[1:], other[1:]) + (one[0] != other[0])
    return min(same, slow_distance(one[1:], other) + 1, slow_distance(one, other[1:]) + 1)


@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_distance_is_its_definition(one, other):
    assert edit_distance(one, other) == slow_distance(one, other)


@given(PHONES, PHONES, PHONES)
def test_distance_is_a_distance(one, two, three):
    assert edit_distance(one, two) == edit_distance(two, one)
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)


def test_the_nearest_pronunciation_counts():
    assert nearest(("B", "AA"), [("K", "K", "K"), ("B", "AA", "K")]) == (1, 3)
    assert nearest(("B", "AA"), [("B",), ("B", "AA")]) == (0, 2)


def test_rates_by_hand(trained, monkeypatch):
    words = {"cab": (("K", "AE", "B"), ("K", "D", "B")), "bad": (("B", "AE", "D"),), "a": (("AE",),)}
    said = {"cab": ("K", "D", "B"), "bad": ("B", "D"), "a": ("K", "K")}
    monkeypatch.setattr(evaluate, "pronounce", lambda run, asked, how: [[Pronunciation(said[w], -1.0)] for w in asked])
    found = error_rates(Run(trained / "pronounce"), words)
    assert (found.words, found.wrong, found.phones, found.errors) == (3, 2, 7, 3)
    assert (found.word_error_rate, found.phoneme_error_rate) == (2 / 3, 3 / 7)


def test_words_of_the_run_or_of_a_file(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    assert set(words_to_score(run, "test")) == {"cab", "bad"}
    assert len(words_to_score(run, "validation")) == 20
    (tmp_path / "own").write_text("ab\tAE1 B\n")
    assert words_to_score(run, "test", tmp_path / "own") == {"ab": (("AE", "B"),)}
    with pytest.raises(ValueError, match="there must be words to score, got none"):
        error_rates(run, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cab\tK EH1 B", r"own: .*one of those learnt, AE B D K, got 'EH' in K EH B; .*, or remove its line"),
        ("xab\tK AE B", r"own: .*one of those learnt, 'abcd', got 'x' in 'xab'; .*, or remove its line"),
    ],
)
def test_what_the_run_cannot_read_or_write_is_no_mistake_of_its_own(trained, tmp_path, line, message):
    """Such as the phones of a dictionary with stress: every word would be wrong."""
    (tmp_path / "own").write_text(f"ab\tAE B\n{line}\n")
    with pytest.raises(LookupError, match=message):
        words_to_score(Run(trained / "pronounce"), "test", tmp_path / "own")


def test_words_that_were_learnt_are_counted(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    train, held = parts(run.config.data)["train"], parts(run.config.data)["validation"]
    mixed = dict.fromkeys([*list(train)[:3], *held, "zzz"], (("B",),))
    assert learnt(run, mixed) == 3
    monkeypatch.chdir(tmp_path)
    assert learnt(run, mixed) is None


def test_data_that_has_changed_measures_nothing(trained, tmp_path, monkeypatch):
    run = Run(trained / "pronounce")
    monkeypatch.chdir(tmp_path)
    for name in ("my.dict", "my.test"):
        (tmp_path / name).write_text((trained.parent / name).read_text() + "abba AE B B AE\n" * (name == "my.dict"))
    message = r"measured on the data of its training, got other bytes in my\.dict; put the old ones back"
    with pytest.raises(ValueError, match=message):
        words_to_score(run, "validation")
    with pytest.raises(ValueError, match=message):
        loss_and_accuracy(run, "validation")
    assert learnt(run, {"cab": (("B",),)}) is None


@pytest.mark.parametrize("name", ["mnist", "reverse", "words", "pronounce"])
def test_any_run_is_measured_as_its_training_did(trained, monkeypatch, name):
    monkeypatch.chdir(trained.parent)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    for key, value in loss_and_accuracy(Run(trained / name), "test").items():
        assert value == pytest.approx(record[key], rel=1e-5)


def test_a_part_must_have_examples(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(ValueError, match="must have test examples, got none; try --part validation"):
        loss_and_accuracy(Run(trained / "text"), "test")
    assert loss_and_accuracy(Run(trained / "text"), "validation")["loss"] > 0
