from dataclasses import replace

import pytest
import torch

from clearhead.inference import sample
from clearhead.inference.run import Run
from clearhead.inference.sample import MOST_LETTERS, continued, draw_samples
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Sampling
from clearhead.models.language import LanguageModel


@pytest.fixture(scope="module")
def words(trained):
    return Run(trained / "words")


@pytest.fixture(scope="module")
def text(trained):
    return Run(trained / "text")


def test_words_begin_as_asked_and_end_by_themselves(words):
    found = draw_samples(words, "un", Sampling(seed=1), n=20, n_tokens=5)
    assert len(found) == 20
    assert all(word.startswith("un") and len(word) <= 2 + MOST_LETTERS for word in found)
    assert len(set(found)) > 10
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in found)


def test_a_text_goes_on_for_as_long_as_asked(text):
    (found,) = draw_samples(text, "To be", Sampling(seed=1), n=1, n_tokens=200)
    assert found.startswith("To be")
    assert len(found) == 5 + 200
    (other,) = draw_samples(text, "", Sampling(seed=1), n=1, n_tokens=10)
    assert len(other) == 10


@pytest.mark.parametrize("name", ["words", "text"])
def test_a_seed_writes_the_same_again(trained, name):
    run = Run(trained / name)
    first, again, other = (draw_samples(run, "", Sampling(seed=seed), n=3, n_tokens=150) for seed in (1, 1, 2))
    assert first == again != other


def test_many_are_written_in_portions_that_differ(words, text, monkeypatch):
    monkeypatch.setattr(sample, "AT_ONCE", 4)
    for run in (words, text):
        found = draw_samples(run, "", Sampling(seed=1), n=10, n_tokens=20)
        assert len(found) == 10
        assert found[:4] == draw_samples(run, "", Sampling(seed=1), n=4, n_tokens=20)
        assert found[:4] != found[4:8]


def test_the_likeliest_alone_is_greedy(text):
    one, two = (draw_samples(text, "To", Sampling(top_k=1, seed=seed), n=1, n_tokens=30) for seed in (1, 2))
    assert one == two == draw_samples(text, "To", Sampling(temperature=1e-4), n=1, n_tokens=30)


@pytest.mark.parametrize("pos_embed", ["rotary", "learned"])
@pytest.mark.parametrize("length", [1, 3, 8, 20])
def test_a_model_never_reads_more_than_its_context(pos_embed, length):
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=5, context_length=8, pos_embed=pos_embed)
    )
    longest = []
    model.blocks[0].register_forward_pre_hook(
        lambda stack, args, kwargs: longest.append(args[0].shape[1] + kwargs["cache"].length), with_kwargs=True
    )
    prompt = torch.zeros(2, length, dtype=torch.long)
    found = continued(model, prompt, Sampling(seed=0), 30)
    assert found.shape == (2, length + 30)
    assert torch.equal(found[:, :length], prompt)
    assert max(longest) <= 8


def test_more_of_a_text_begins_like_less_of_it():
    torch.manual_seed(0)
    model, prompt = (
        LanguageModel(LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=50, context_length=8)),
        torch.zeros(2, 3),
    )
    less, more = (continued(model, prompt.long(), Sampling(seed=1), n) for n in (17, 40))
    assert torch.equal(less, more[:, : 3 + 17])


def test_portions_of_a_long_text_are_not_drawn_alike():
    """Logits that do not depend on the text: the same draws in each portion would repeat it."""
    model = LanguageModel(LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=50, context_length=8))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    tokens = continued(model, torch.zeros(1, 1, dtype=torch.long), Sampling(seed=3), 40)[0].tolist()
    assert len(set(tokens)) > 20


def test_a_short_table_of_places_ends_a_word(words, monkeypatch):
    model = LanguageModel(replace(words.config.model, pos_embed="learned", context_length=5)).eval()
    monkeypatch.setattr(words, "model", model)
    assert max(map(len, draw_samples(words, "ab", Sampling(seed=0), n=20, n_tokens=1))) <= 5


def test_what_cannot_be_written(words, text, trained):
    with pytest.raises(LookupError, match="got 'ä'"):
        draw_samples(words, "ä", Sampling(), n=1, n_tokens=1)
    with pytest.raises(ValueError, match=r"words or text writes, got .*, which answers about words; ask it with"):
        draw_samples(Run(trained / "pronounce"), "", Sampling(), n=1, n_tokens=1)
    for n, n_tokens in ((0, 5), (5, 0), (10**30, 5), (5, 10**30)):
        with pytest.raises(ValueError, match=f"must be from 1 to 1000000, got n={n}, n_tokens={n_tokens}; choose"):
            draw_samples(text, "", Sampling(), n=n, n_tokens=n_tokens)
