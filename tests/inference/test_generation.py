import math
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from clearhead.data.vocab import BOS, EOS, Vocabulary
from clearhead.inference.run import Run
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Beam, Greedy, Sampling
from clearhead.models.language import LanguageModel
from clearhead.models.seq2seq import Seq2Seq
from clearhead.tasks import language, pronunciation
from clearhead.tasks.language import MAX_WORD_LETTERS, continue_text
from clearhead.tasks.pronunciation import (
    BEAM,
    Pronunciation,
    ensemble,
    predicted_phones,
    pronounce,
    sharpest,
    word_figures,
)

WORDS = ["cab", "a", "dddd", "bad", "abcabc", "ba"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(pronunciation, "MAX_PHONES", 12)  # a barely trained model rarely generates the end token


@pytest.fixture(scope="module")
def run(trained):
    return Run(trained / "pronounce")


def test_letters_and_phones_come_from_the_dictionary(run):
    assert run.vocab[3:] == tuple("abcd")
    assert run.classes[3:] == ("AE", "B", "D", "K")


def with_eval_batch_size(run, size):
    return replace(run.config, training=replace(run.config.training, eval_batch_size=size))


@pytest.mark.parametrize("batch_size", [1, 2, 256])
def test_batched_words_equal_single_words(run, monkeypatch, batch_size):
    batched = pronounce(run, WORDS)
    monkeypatch.setattr(run, "config", with_eval_batch_size(run, batch_size))
    for word, expected in zip(WORDS, batched, strict=True):
        (alone,) = pronounce(run, [word])
        assert [way.phones for way in alone] == [way.phones for way in expected]
        assert [way.score for way in alone] == pytest.approx([way.score for way in expected], abs=1e-4)


def test_a_batch_of_64_words_equals_single_words(run):
    words = ["".join(letters) for letters in product("abcd", repeat=3)]
    assert len(words) == 64
    for word, expected in zip(words, pronounce(run, words), strict=True):
        (alone,) = pronounce(run, [word])
        assert alone[0].phones == expected[0].phones
        assert alone[0].score == pytest.approx(expected[0].score, abs=1e-4)


def test_wide_beams_have_smaller_batches(run, monkeypatch):
    sizes, generate = [], run.model.generate
    monkeypatch.setattr(
        run.model, "generate", lambda source, *a, **k: sizes.append(len(source)) or generate(source, *a, **k)
    )
    monkeypatch.setattr(run, "config", with_eval_batch_size(run, 4))
    for beam in (Beam(1), BEAM, Beam(10), Beam(100)):
        pronounce(run, WORDS, beam)
    assert sizes == [4, 2, 4, 2, 2, 2, 2, *[1] * 6]


def test_a_score_is_the_log_probability_under_the_model(run):
    letters, phones = Vocabulary(run.vocab), Vocabulary(run.classes)
    for way in pronounce(run, ["cab"])[0]:
        ended = len(way.phones) < pronunciation.MAX_PHONES  # otherwise it was truncated
        target = [*phones.encode(way.phones), EOS] if ended else phones.encode(way.phones)
        logits = run.model(torch.tensor([letters.encode("cab")]), torch.tensor([[BOS, *target[:-1]]]))
        logs = logits.log_softmax(-1)[0, range(len(target)), target]
        assert way.score == pytest.approx(logs.sum().item(), abs=1e-4)


@pytest.mark.parametrize("beam", [BEAM, Beam(3, length_penalty=0)])
def test_the_best_candidate_is_at_least_as_probable_as_the_greedy_one(run, beam):
    for word in WORDS:
        ids = torch.tensor([Vocabulary(run.vocab).encode(word)])
        greedy = run.model.generate(
            ids, strategy=Greedy(), bos_id=BOS, eos_id=EOS, max_new_tokens=pronunciation.MAX_PHONES
        )
        assert pronounce(run, [word], beam)[0][0].score >= greedy.scores.item() - 1e-5


def test_an_ensemble_averages_runs(run, trained):
    other = copy(run)
    other.model = Seq2Seq.from_config(replace(run.model.config, width=8))
    both = pronounce(ensemble([run, other]), WORDS)
    assert pronounce(ensemble([run, run]), WORDS)[0][0].score == pytest.approx(
        pronounce(run, WORDS)[0][0].score, abs=1e-4
    )
    assert both not in (pronounce(run, WORDS), pronounce(other, WORDS))
    assert isinstance(run.model, Seq2Seq)  # the run itself is as before
    with pytest.raises(ValueError, match=r"needs runs of the recipe pronounce, got .*reverse"):
        ensemble([run, Run(trained / "reverse")])
    other.classes = run.classes[::-1]
    with pytest.raises(ValueError, match=r"must have the same letters and phones; those of .* differ"):
        ensemble([run, other])


def test_case_and_surrounding_spaces_are_ignored(run):
    assert pronounce(run, [" CaB "]) == pronounce(run, ["cab"])


def test_invalid_words_are_refused(run, trained):
    with pytest.raises(LookupError, match="unknown token 'z' in 'zeb'; the vocabulary is 'abcd'"):
        pronounce(run, ["Zeb"])
    with pytest.raises(ValueError, match="must have letters, got ' '"):
        pronounce(run, [" "])
    with pytest.raises(ValueError, match="at most 100 letters, got 101: 'aaaaaaaaaaaaaaaaaaaa'"):
        pronounce(run, ["a" * 101])
    with pytest.raises(ValueError, match=r"needs a run of the recipe pronounce, got .*words"):
        pronounce(Run(trained / "words"), ["cab"])


def test_probabilities_of_candidates_sum_to_at_most_one(run):
    ways = pronounce(run, ["ab"], Beam(8))[0]
    assert len({way.phones for way in ways}) == len(ways)
    assert sum(math.exp(way.score) for way in ways) < 1


def test_learned_positions_limit_the_length(run, monkeypatch):
    model = Seq2Seq.from_config(replace(run.config.model, pos_embed="learned", context_length=5)).eval()
    monkeypatch.setattr(run, "model", model)
    assert all(len(way.phones) <= 5 for way in pronounce(run, ["cab"])[0])


@pytest.mark.parametrize(("ended", "last"), [(True, ("<eos>",)), (False, ())])
def test_predicted_phones_have_the_end_token_if_it_was_reached(trained, monkeypatch, ended, last):
    monkeypatch.setattr(pronunciation, "pronounce", lambda run, words: [[Pronunciation(("K", "AE"), -1.0, ended)]])
    assert predicted_phones(Run(trained / "pronounce"), "cab") == ("K", "AE", *last)


def test_figures_of_a_word(trained):
    run = Run(trained / "pronounce")
    found = {name: figure for name, _, figure in word_figures(run, "Cab")}
    assert list(found) == ["alignment.png", "cross.png", "encoder.png", "decoder.png", "heads.png"]
    axes = found["alignment.png"].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("cab")
    assert [label.get_text() for label in axes.get_yticklabels()] == list(predicted_phones(run, "cab"))


def test_sharpest_finds_the_layer_of_lowest_entropy():
    sharp, blurred = torch.eye(4).expand(1, 2, 4, 4), torch.full((1, 2, 4, 4), 0.25)
    name, weights = sharpest({"one": blurred, "two": sharp})
    assert name == "two"
    assert torch.equal(weights, torch.eye(4))


@pytest.fixture(scope="module")
def words(trained):
    return Run(trained / "words")


@pytest.fixture(scope="module")
def text(trained):
    return Run(trained / "text")


def test_words_begin_with_the_prompt_and_end_by_themselves(words):
    found = words.task.sample(words, "un", Sampling(seed=1), n=20, max_new_tokens=5)
    assert len(found) == 20
    assert all(word.startswith("un") and len(word) <= 2 + MAX_WORD_LETTERS for word in found)
    assert len(set(found)) > 10
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in found)


def test_text_has_max_new_tokens(text):
    (found,) = text.task.sample(text, "To be", Sampling(seed=1), n=1, max_new_tokens=200)
    assert found.startswith("To be")
    assert len(found) == 5 + 200
    (other,) = text.task.sample(text, "", Sampling(seed=1), n=1, max_new_tokens=10)
    assert len(other) == 10


@pytest.mark.parametrize("name", ["words", "text"])
def test_a_seed_reproduces_the_samples(trained, name):
    run = Run(trained / name)
    first, again, other = (run.task.sample(run, "", Sampling(seed=seed), n=3, max_new_tokens=150) for seed in (1, 1, 2))
    assert first == again != other


def test_batches_of_samples_differ(words, text, monkeypatch):
    monkeypatch.setattr(language, "SAMPLING_BATCH_SIZE", 4)
    for run in (words, text):
        found = run.task.sample(run, "", Sampling(seed=1), n=10, max_new_tokens=20)
        assert len(found) == 10
        assert found[:4] == run.task.sample(run, "", Sampling(seed=1), n=4, max_new_tokens=20)
        assert found[:4] != found[4:8]


def test_top_k_1_is_greedy(text):
    one, two = (text.task.sample(text, "To", Sampling(top_k=1, seed=seed), n=1, max_new_tokens=30) for seed in (1, 2))
    assert one == two == text.task.sample(text, "To", Sampling(temperature=1e-4), n=1, max_new_tokens=30)


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
    assert max(map(len, words.task.sample(words, "ab", Sampling(seed=0), n=20, max_new_tokens=1))) <= 5


def test_invalid_requests_are_refused(words, text, trained):
    with pytest.raises(LookupError, match="'ä'"):
        words.task.sample(words, "ä", Sampling(), n=1, max_new_tokens=1)
    with pytest.raises(
        ValueError, match=r"needs a language model .*, got .*, which takes words; try clearhead predict"
    ):
        Run(trained / "pronounce").sample("", n=1, max_new_tokens=1)
    for n, max_new_tokens in ((0, 5), (5, 0), (10**30, 5), (5, 10**30)):
        with pytest.raises(ValueError, match=f"must be from 1 to 1000000, got {n} and {max_new_tokens}"):
            text.task.sample(text, "", Sampling(), n=n, max_new_tokens=max_new_tokens)
