import math

import pytest
import torch

from clearhead import LanguageModel, Seq2Seq
from clearhead.models.config import LanguageConfig, Seq2SeqConfig
from clearhead.models.generate import Beam, Greedy, Sampling, keep_top_k, keep_top_p

EOS = 3


def sharpened(model):
    """Scales the logits of random weights so that token probabilities differ clearly."""
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model.double()


def language_model(pos_embed="rotary", seed=0, **fields):
    torch.manual_seed(seed)
    config = LanguageConfig(
        width=16, depth=2, num_heads=2, vocab_size=7, pos_embed=pos_embed, tie_weights=False, **fields
    )
    return sharpened(LanguageModel.from_config(config))


def seq2seq(seed=0):
    torch.manual_seed(seed)
    return sharpened(
        Seq2Seq.from_config(Seq2SeqConfig(width=16, depth=2, num_heads=2, src_vocab_size=6, tgt_vocab_size=7))
    )


def prompts(n=4, length=3):
    return torch.randint(0, 7, (n, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def log_probability(model, prompt, ids, length):
    """The model's log-probability of the first `length` new tokens."""
    log_p = model(torch.cat([prompt, ids])[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:length, 0].sum()


STRATEGIES = [
    Greedy(),
    Sampling(seed=0),
    Sampling(temperature=0.7, top_k=4, top_p=0.9, seed=3),
    Beam(1),
    Beam(4),
    Beam(4, 0.0),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("pos_embed", ["learned", "sinusoidal", "rotary", "alibi"])
def test_cached_generation_equals_uncached(strategy, pos_embed):
    model = language_model(pos_embed)
    cached = model.generate(prompts(), strategy=strategy, max_new_tokens=8, eos_id=EOS)
    plain = model.generate(prompts(), strategy=strategy, max_new_tokens=8, eos_id=EOS, use_cache=False)
    assert torch.equal(cached.candidates, plain.candidates)
    assert torch.equal(cached.lengths, plain.lengths)
    torch.testing.assert_close(cached.scores, plain.scores)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_cached_seq2seq_generation_equals_uncached(strategy):
    model, source = seq2seq(), torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(5))
    options = {"bos_id": 0, "eos_id": EOS, "max_new_tokens": 8, "source_lengths": torch.tensor([5, 2, 3, 1])}
    cached, plain = (model.generate(source, strategy=strategy, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached.candidates, plain.candidates)
    torch.testing.assert_close(cached.scores, plain.scores)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_scores_are_the_model_log_probabilities(strategy):
    model = language_model()
    out = model.generate(prompts(), strategy=strategy, max_new_tokens=8, eos_id=EOS)
    for row, prompt in enumerate(prompts()):
        for ids, length, score in zip(out.candidates[row], out.lengths[row], out.scores[row], strict=True):
            torch.testing.assert_close(log_probability(model, prompt, ids, length), score)


@pytest.mark.parametrize("strategy", STRATEGIES[:1] + STRATEGIES[3:], ids=str)
def test_batched_generation_equals_single_examples(strategy):
    model, source = seq2seq(), torch.randint(0, 6, (64, 5), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([5, 2, 3, 1, 4, 5, 3, 2]).repeat(8)
    batched = model.generate(source, strategy=strategy, bos_id=0, eos_id=EOS, max_new_tokens=8, source_lengths=lengths)
    for row in range(0, 64, 7):
        length = lengths[row]
        single = model.generate(
            source[row : row + 1, :length], strategy=strategy, bos_id=0, eos_id=EOS, max_new_tokens=8
        )
        n = single.ids.shape[1]
        assert torch.equal(batched.candidates[row, :, :n], single.candidates[0])
        assert (batched.candidates[row, :, n:] == EOS).all()
        torch.testing.assert_close(batched.scores[row], single.scores[0])


def test_sequences_are_padded_with_eos_after_eos():
    out = language_model(seed=1).generate(
        prompts(20), strategy=Sampling(temperature=2.0), max_new_tokens=12, eos_id=EOS
    )
    assert (out.lengths < 12).any()
    for ids, length in zip(out.ids, out.lengths[:, 0], strict=True):
        assert (ids[: length - 1] != EOS).all()
        assert (ids[length:] == EOS).all()


def test_greedy_selects_the_argmax_at_each_step():
    model, ids = language_model(), prompts()
    out = model.generate(ids, max_new_tokens=5)
    for step in range(5):
        with torch.no_grad():
            assert torch.equal(model(ids)[:, -1].argmax(-1), out.ids[:, step])
        ids = torch.cat([ids, out.ids[:, step : step + 1]], dim=1)


def test_sampling_follows_the_model_distribution():
    model, n = language_model(), 4000
    prompt = prompts(1).expand(n, -1)
    with torch.no_grad():
        expected = model(prompt[:1])[0, -1].softmax(-1)
    drawn = model.generate(prompt, strategy=Sampling(), max_new_tokens=1).ids[:, 0]
    frequencies = torch.bincount(drawn, minlength=7) / n
    assert (frequencies - expected).abs().max() < 4 * math.sqrt(0.25 / n)
    assert expected.max() < 0.9


def test_the_seed_determines_the_sample():
    model = language_model()
    first, again, other = (
        model.generate(prompts(), strategy=Sampling(seed=s), max_new_tokens=12).ids for s in (1, 1, 2)
    )
    unseeded, other_unseeded = (model.generate(prompts(), strategy=Sampling(), max_new_tokens=12).ids for _ in range(2))
    assert not torch.equal(unseeded, other_unseeded)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_low_temperature_top_k_1_and_tiny_top_p_are_greedy():
    model = language_model()
    greedy = model.generate(prompts(), max_new_tokens=6).ids
    for strategy in (Sampling(temperature=1e-4), Sampling(temperature=1e-300), Sampling(top_k=1), Sampling(top_p=1e-6)):
        assert torch.equal(model.generate(prompts(), strategy=strategy, max_new_tokens=6).ids, greedy)


def test_top_k_and_top_p_keep_the_most_probable_tokens():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [[False, True, False, True]]
    assert keep_top_k(logits, 9).isfinite().all()
    assert keep_top_p(logits, 0.4).isfinite().tolist() == [[False, True, False, False]]
    assert keep_top_p(logits, 0.41).isfinite().tolist() == [[False, True, False, True]]
    assert keep_top_p(logits, 0.75).isfinite().tolist() == [[False, True, True, True]]
    assert keep_top_p(logits, 1.0).isfinite().all()


def test_generation_restores_the_training_mode():
    model = language_model(dropout=0.5).train()
    model.dropout.eval()
    first, again = (model.generate(prompts(), max_new_tokens=6).ids for _ in range(2))
    assert torch.equal(first, again)
    assert model.training
    assert not model.dropout.training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: Sampling(temperature=0),
            "temperature must be above 0, got 0",
        ),
        (lambda m: Sampling(seed=-1), "seed must be an integer from 0 to 9223372036854775807, got -1"),
        (lambda m: Sampling(seed=2**63), "seed must be an integer"),
        (lambda m: Sampling(top_k=0), "top_k must be at least 1"),
        (lambda m: Sampling(top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (lambda m: m.generate(prompts()[0], max_new_tokens=2), r"prompt must be ids \(B,L\)"),
        (lambda m: m.generate(prompts(length=0), max_new_tokens=2), r"one token, got shape \(\d, 0\)"),
        (lambda m: m.generate(prompts(n=0), max_new_tokens=2), "at least one example"),
        (lambda m: m.generate(prompts(), max_new_tokens=2, eos_id=1.5), "eos_id must be a token id from 0 to 6, .*1.5"),
        (lambda m: m.generate(prompts(), max_new_tokens=0), "max_new_tokens must be a positive integer, got 0"),
        (lambda m: m.generate(prompts(), max_new_tokens=2, eos_id=7), "eos_id must be a token id from 0 to 6, .*got 7"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(language_model())


def test_generation_beyond_the_learned_position_table_raises():
    with pytest.raises(ValueError, match="must fit the learned position table of 5 rows, got 11"):
        language_model("learned", context_length=5).generate(prompts(), max_new_tokens=9)
