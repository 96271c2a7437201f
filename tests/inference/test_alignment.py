import pytest
import torch

from clearhead.inference import g2p
from clearhead.inference.g2p import Pronunciation, pictures_of_word, sharpest, written
from clearhead.inference.run import Run


@pytest.mark.parametrize(("ended", "last"), [(True, ("<eos>",)), (False, ())])
def test_what_is_aligned_is_what_is_said(trained, monkeypatch, ended, last):
    monkeypatch.setattr(g2p, "pronounce", lambda run, words: [[Pronunciation(("K", "AE"), -1.0, ended)]])
    assert written(Run(trained / "pronounce"), "cab") == ("K", "AE", *last)


def test_pictures_of_a_word(trained):
    run = Run(trained / "pronounce")
    found = {name: figure for name, _, figure in pictures_of_word(run, "Cab")}
    assert list(found) == ["alignment.png", "cross.png", "encoder.png", "decoder.png", "heads.png"]
    axes = found["alignment.png"].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("cab")
    assert [label.get_text() for label in axes.get_yticklabels()] == list(written(run, "cab"))


def test_the_sharpest_layer_is_drawn():
    sharp, blurred = torch.eye(4).expand(1, 2, 4, 4), torch.full((1, 2, 4, 4), 0.25)
    address, weights = sharpest({"one": blurred, "two": sharp})
    assert address == "two"
    assert torch.equal(weights, torch.eye(4))
