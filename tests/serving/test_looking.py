from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.data import datasets
from clearhead.data.characters import BYTES
from clearhead.serving import looking
from clearhead.serving.looking import digits, file, look_at, sample, text
from clearhead.serving.pronouncing import Spoken
from clearhead.serving.session import Session

ALWAYS = ["wall.png", "head.png"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("mnist", [*ALWAYS, "heads.png", "patches.png", "aggregates.png"]),
        ("reverse", [*ALWAYS, "tokens.png", "heads.png"]),
        ("oddity", [*ALWAYS, "tokens.png", "heads.png"]),
        ("sum", [*ALWAYS, "tokens.png", "heads.png"]),
    ],
)
def test_pictures_of_every_kind_of_run(trained, tmp_path, run, expected):
    session = Session(trained / run)
    pictures = look_at(session, sample(session, 1), tmp_path)
    assert [path.name for path, _ in pictures] == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path, _ in pictures)
    assert all(parameter.grad is None for parameter in session.model.parameters())


def test_a_sample_is_the_test_sets(trained):
    session = Session(trained / "mnist")
    pixels, _ = datasets.load(session.config.data, 0).test.take(torch.tensor([3]))
    example = sample(session, 3)
    assert torch.equal(example.image, pixels[0])
    assert torch.equal(example.inputs, session.normalise(pixels))
    assert example.answer.startswith(session.predict(pixels)[0].answer)
    with pytest.raises(LookupError, match="a number from 0 to 9999, got 10000"):
        sample(session, 10_000)


def test_files_and_digits(trained, tmp_path):
    session = Session(trained / "mnist")
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(tmp_path / "a.png")
    plain, inverted = (file(session, tmp_path / "a.png", invert=invert) for invert in (False, True))
    assert torch.equal(plain.image, 255 - inverted.image)
    reverse = Session(trained / "reverse")
    example = digits(reverse, [3, 1, 4])
    assert (example.tokens, example.inputs.tolist()) == (("3", "1", "4"), [[3, 1, 4]])
    ways = {"reverse": "--ids 3 1 4", "pronounce": "--text WORD", "text": "--text TEXT", "oddity": "--sample 0"}
    for name, way in ways.items():
        with pytest.raises(ValueError, match=f"takes no single picture, got .*a.png; try {way}"):
            file(Session(trained / name), tmp_path / "a.png")


def test_of_a_long_text_the_end_is_drawn_as_far_as_the_model_reads(trained):
    session = Session(trained / "text")
    session.config = replace(session.config, model=replace(session.config.model, context=5))
    assert text(session, "To be, or not").tokens == ("r", "space", "n", "o", "t")
    with pytest.raises(ValueError, match="a text has characters, got ''; write some"):
        text(session, "")


@pytest.mark.parametrize(("ended", "answer"), [(True, "K AE"), (False, "K AE ...")])
def test_a_word_is_answered_as_predict_answers_it(trained, monkeypatch, ended, answer):
    monkeypatch.setattr(looking, "pronounce", lambda session, words: [[Spoken(("K", "AE"), -1.0, ended)]])
    assert text(Session(trained / "pronounce"), "cab").answer == answer


def test_half_of_a_letter_is_no_other_letter(trained):
    session = Session(trained / "text")
    session.symbols, session.model = BYTES, lambda ids: torch.eye(256)[ids].roll(1, -1)
    session.config = replace(session.config, data=replace(session.config.data, level="byte"))
    example = text(session, "a ü")
    assert example.tokens == ("a", "space", "\\xc3", "\\xbc")
    assert example.answer == r"'\xbd' after '\xbc'"


def test_an_example_of_a_file_that_has_changed_is_not_taken_for_one_of_the_test_set(trained, monkeypatch, tmp_path):
    """Its letters would have other ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.words").write_text("".join(f"{a}{b}{a}\n" for a in "bcdefghé" for b in "abcdefgh"))
    with pytest.raises(ValueError, match=r"got other bytes in my\.words; put the old ones back"):
        sample(Session(trained / "words"), 0)


def test_a_run_without_a_test_set_has_no_sample(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(LookupError, match="has no test examples, got --sample 0; try --text instead"):
        sample(Session(trained / "text"), 0)
