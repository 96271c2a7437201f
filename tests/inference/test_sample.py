from dataclasses import replace

import pytest
import torch

from clearhead.inference import generation as sample
from clearhead.inference.generation import MAX_WORD_LETTERS, continue_text, draw_samples
from clearhead.inference.run import Run
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Sampling
from clearhead.models.language import LanguageModel


@pytest.fixture(scope="module")
def words(trained):
    return Run(trained / "words")


@pytest.fixture(scope="module")
def text(trained):
    return Run(trained / "text")


def test_words_begin_with_the_prompt_and_end_by_themselves(words):
    found = draw_samples(words, "un", Sampling(seed=1), n=20, max_new_tokens=5)
    assert len(found) == 20
    assert all(word.startswith("un") and len(word) <= 2 + MAX_WORD_LETTERS for word in found)
    assert len(set(found)) > 10
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in found)


def test_text_has_max_new_tokens(text):
    (found,) = draw_samples(text, "To be", Sampling(seed=1), n=1, max_new_tokens=200)
    assert found.startswith("To be")
    assert len(found) == 5 + 200
    (other,) = draw_samples(text, "", Sampling(seed=1), n=1, max_new_tokens=10)
    assert len(other) == 10


@pytest.mark.parametrize("name", ["words", "text"])
def test_a_seed_reproduces_the_samples(trained, name):
    run = Run(trained / name)
    first, again, other = (draw_samples(run, "", Sampling(seed=seed), n=3, max_new_tokens=150) for seed in (1, 1, 2))
    assert first == again != other


def test_batches_of_samples_differ(words, text, monkeypatch):
    monkeypatch.setattr(sample, "SAMPLING_BATCH_SIZE", 4)
    for run in (words, text):
        found = draw_samples(run, "", Sampling(seed=1), n=10, max_new_tokens=20)
        assert len(found) == 10
        assert found[:4] == draw_samples(run, "", Sampling(seed=1), n=4, max_new_tokens=20)
        assert found[:4] != found[4:8]


def test_top_k_1_is_greedy(text):
    one, two = (draw_samples(text, "To", Sampling(top_k=1, seed=seed), n=1, max_new_tokens=30) for seed in (1, 2))
    assert one == two == draw_samples(text, "To", Sampling(temperature=1e-4), n=1, max_new_tokens=30)


@pytest.mark.parametrize("pos_embed", ["rotary", "learned"])
@pytest.mark.parametrize("length", [1, 3, 8, 20])
def test_generation_stays_within_the_context(pos_embed, length):
    torch.manual_seed(0)
    model = LanguageModel.from_config(
        LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=5, context_length=8, pos_embed=pos_embed)
    )
    longest = []
    model.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: longest.append(args[0].shape[1] + kwargs["cache"].self_attn.length), with_kwargs=True
    )
    prompt = torch.zeros(2, length, dtype=torch.long)
    found = continue_text(model, prompt, Sampling(seed=0), 30)
    assert found.shape == (2, length + 30)
    assert torch.equal(found[:, :length], prompt)
    assert max(longest) <= 8


def test_a_longer_text_extends_a_shorter_one():
    torch.manual_seed(0)
    model, prompt = (
        LanguageModel.from_config(LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=50, context_length=8)),
        torch.zeros(2, 3),
    )
    less, more = (continue_text(model, prompt.long(), Sampling(seed=1), n) for n in (17, 40))
    assert torch.equal(less, more[:, : 3 + 17])


def test_chunks_of_a_long_text_have_different_random_numbers():
    """Logits that do not depend on the text: the same draws in each chunk would repeat it."""
    model = LanguageModel.from_config(LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=50, context_length=8))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    tokens = continue_text(model, torch.zeros(1, 1, dtype=torch.long), Sampling(seed=3), 40)[0].tolist()
    assert len(set(tokens)) > 20


def test_learned_positions_limit_the_length_of_a_word(words, monkeypatch):
    model = LanguageModel.from_config(replace(words.config.model, pos_embed="learned", context_length=5)).eval()
    monkeypatch.setattr(words, "model", model)
    assert max(map(len, draw_samples(words, "ab", Sampling(seed=0), n=20, max_new_tokens=1))) <= 5


def test_invalid_requests_are_refused(words, text, trained):
    with pytest.raises(LookupError, match="'ä'"):
        draw_samples(words, "ä", Sampling(), n=1, max_new_tokens=1)
    with pytest.raises(
        ValueError, match=r"needs a language model .*, got .*, which takes words; try clearhead predict"
    ):
        draw_samples(Run(trained / "pronounce"), "", Sampling(), n=1, max_new_tokens=1)
    for n, max_new_tokens in ((0, 5), (5, 0), (10**30, 5), (5, 10**30)):
        with pytest.raises(ValueError, match=f"must be from 1 to 1000000, got {n} and {max_new_tokens}"):
            draw_samples(text, "", Sampling(), n=n, max_new_tokens=max_new_tokens)
