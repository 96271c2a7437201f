import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.data.batches import Batch
from clearhead.data.dataset import Images, SequencePairs
from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, PAD
from clearhead.models.config import Seq2SeqConfig, build_model
from clearhead.models.seq2seq import Seq2Seq
from clearhead.tasks.objectives import (
    BinaryClassification,
    CausalLM,
    Classification,
    Regression,
    SequenceToSequence,
    SetPointer,
    TokenClassification,
    shift_right,
)
from clearhead.training import evaluation as home
from clearhead.training.distributed import Ranks
from clearhead.training.evaluation import (
    compute_metrics,
    evaluate,
    metric_sums,
    microbatches,
    to_device,
)
from clearhead.training.loop import train
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory

OBJECTIVES = {
    "classification": Classification(),
    "token-classification": TokenClassification(),
    "binary-classification": BinaryClassification(),
    "regression": Regression(),
    "set-pointer": SetPointer(),
    "seq2seq": SequenceToSequence(),
    "causal-lm": CausalLM(),
}

X = torch.zeros(4, 1)


def batch(targets, targets_b=None, lam=None):
    return Batch(X[: len(targets)], targets, targets_b, lam, len(targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_are_torchs_cross_entropy(smoothing):
    logits, targets = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing) * 4
    torch.testing.assert_close(OBJECTIVES["classification"].loss(logits, batch(targets), smoothing), expected)


def test_label_smoothing_spreads_its_share_over_all_classes():
    logits, targets = torch.randn(1, 4), torch.tensor([1])
    logs = logits.log_softmax(-1)[0]
    expected = -(0.8 * logs[1] + 0.2 / 4 * logs.sum())
    torch.testing.assert_close(OBJECTIVES["classification"].loss(logits, batch(targets), 0.2), expected)


def test_a_blend_is_asked_for_both_and_counts_as_the_larger():
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0]])
    blend = batch(torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([0.7, 0.3]))
    first, second = -logits[0].log_softmax(-1)[:2]
    loss = OBJECTIVES["classification"].loss(logits, blend)
    torch.testing.assert_close(loss, 0.7 * first + 0.3 * second + 0.3 * first + 0.7 * second)
    assert OBJECTIVES["classification"].correct(logits, blend).tolist() == [True, False]


def test_each_token_is_asked_and_an_example_is_their_mean():
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * 2
    torch.testing.assert_close(OBJECTIVES["token-classification"].loss(logits, batch(targets)), expected)
    assert OBJECTIVES["token-classification"].correct(F.one_hot(targets, 5), batch(targets)).shape == (2, 3)
    assert OBJECTIVES["token-classification"].correct(F.one_hot(targets, 5), batch(targets)).all()


def test_yes_or_no():
    logits, targets = torch.tensor([[2.0], [-3.0], [1.0]]), torch.tensor([1.0, 0.0, 0.0])
    yes_no = OBJECTIVES["binary-classification"]
    expected = sum(math.log1p(math.exp(x)) for x in (-2, -3, 1))
    assert yes_no.loss(logits, batch(targets)).item() == pytest.approx(expected, rel=1e-6)
    assert yes_no.loss(torch.zeros(1, 1), batch(targets[:1]), 0.5).item() == pytest.approx(math.log(2))
    assert yes_no.correct(logits, batch(targets)).tolist() == [True, True, False]


def test_a_number():
    outputs, targets = torch.tensor([[2.4], [2.6]]), torch.tensor([2.0, 2.0])
    assert OBJECTIVES["regression"].loss(outputs, batch(targets)).item() == pytest.approx(0.16 + 0.36)
    assert OBJECTIVES["regression"].correct(outputs, batch(targets)).tolist() == [True, False]


def test_the_odd_one_is_a_choice_among_the_elements():
    scores, targets = torch.randn(3, 6, 1), torch.tensor([0, 5, 3])
    odd = OBJECTIVES["set-pointer"]
    torch.testing.assert_close(
        odd.loss(scores, batch(targets)), -scores[..., 0].log_softmax(1)[range(3), targets].sum()
    )
    shuffle = torch.randperm(6)
    moved = torch.argsort(shuffle)[targets]
    torch.testing.assert_close(odd.loss(scores[:, shuffle], batch(moved)), odd.loss(scores, batch(targets)))
    assert torch.equal(odd.correct(scores[:, shuffle], batch(moved)), odd.correct(scores, batch(targets)))


WORDS = SequencePairs.of([[3, 4, 5], [6], [4, 4]], [[3, 5, EOS], [4, EOS], [5, 6, 7, EOS]])
SOURCES, TARGETS = WORDS.get_batch(torch.arange(3))
WRITTEN, NEXT = OBJECTIVES["seq2seq"], OBJECTIVES["causal-lm"]


def words_batch(inputs=SOURCES, targets=TARGETS):
    return Batch(inputs, targets, None, None, len(inputs))


def test_the_decoder_is_given_the_begin_mark_and_the_targets_one_place_later():
    assert shift_right(TARGETS).tolist() == [[BOS, 3, 5, EOS], [BOS, 4, EOS, PAD], [BOS, 5, 6, 7]]


def test_what_is_written_costs_minus_the_logarithm_of_its_probability():
    """The same number that generation gives a sequence that it has written itself."""
    torch.manual_seed(0)
    model = Seq2Seq.from_config(Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=8, tgt_vocab_size=8)).eval()
    made = model.generate(SOURCES, bos_id=BOS, eos_id=None, max_new_tokens=4, source_lengths=(SOURCES != PAD).sum(1))
    batch = words_batch(targets=made.ids)
    outputs = WRITTEN.compute_outputs(model, batch)
    torch.testing.assert_close(WRITTEN.loss(outputs, batch), -made.scores.sum())


def test_padding_of_targets_costs_nothing_and_smoothing_is_per_token():
    outputs = torch.randn(3, 4, 8)
    for smoothing in (0.0, 0.1):
        expected = sum(
            F.cross_entropy(o[t != IGNORE_INDEX], t[t != IGNORE_INDEX], reduction="sum", label_smoothing=smoothing)
            for o, t in zip(outputs, TARGETS, strict=True)
        )
        torch.testing.assert_close(WRITTEN.loss(outputs, words_batch(), smoothing), expected)


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_right_just_when_greedy_decoding_writes_this_target(seed):
    torch.manual_seed(seed)
    model = Seq2Seq.from_config(Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=8, tgt_vocab_size=8)).eval()
    lengths = (SOURCES != PAD).sum(1)
    answers = model.generate(SOURCES, bos_id=BOS, eos_id=EOS, max_new_tokens=4, source_lengths=lengths).ids
    answers = F.pad(answers, (0, 4 - answers.shape[1]), value=EOS)
    after_end = ((answers == EOS).cumsum(1) > 1) & (answers == EOS)
    own = answers.masked_fill(after_end, IGNORE_INDEX)  # what it writes; and the same with one change
    changed = own.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 8
    targets = torch.stack([own[0], changed[1], own[2]])
    batch = words_batch(targets=targets)
    assert WRITTEN.correct(WRITTEN.compute_outputs(model, batch), batch).tolist() == [True, False, True]


def test_the_next_token_costs_the_mean_over_those_that_are_asked_for():
    outputs, batch = torch.randn(3, 4, 8), words_batch()
    for smoothing in (0.0, 0.1):
        expected = sum(
            F.cross_entropy(o[t != IGNORE_INDEX], t[t != IGNORE_INDEX], label_smoothing=smoothing)
            for o, t in zip(outputs, TARGETS, strict=True)
        )
        torch.testing.assert_close(NEXT.loss(outputs, batch, smoothing), expected)
    assert torch.equal(NEXT.loss_mask(batch), TARGETS != IGNORE_INDEX)
    perfect = F.one_hot(TARGETS.clamp(min=0), 8)
    sums = metric_sums(NEXT.loss(outputs, batch), NEXT.correct(perfect, batch), NEXT.loss_mask(batch)).tolist()
    assert sums[1:] == [3, 9, 9, 3]


def test_a_language_model_is_judged_by_its_loss_and_others_by_their_accuracy():
    surer, righter = {"loss": 1.0, "accuracy": 0.3}, {"loss": 1.1, "accuracy": 0.4}
    assert NEXT.score(surer) > NEXT.score(righter)
    assert WRITTEN.score(surer) < WRITTEN.score(righter)


@pytest.mark.parametrize(
    "name",
    ["classification", "token-classification", "binary-classification", "regression", "set-pointer", "causal-lm"],
)
def test_most_models_are_asked_with_their_inputs_alone(name):
    assert (
        OBJECTIVES[name].compute_outputs(lambda inputs: inputs + 1, batch(torch.zeros(4))).tolist() == (X + 1).tolist()
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_sums_so_portions_add_up(name):
    per_token = name in ("token-classification", "seq2seq", "causal-lm")
    shape = (4, 3, 5) if per_token else {"classification": (4, 5), "set-pointer": (4, 5, 1)}.get(name, (4, 1))
    outputs = torch.randn(shape)
    targets = torch.randint(5, (4, 3)) if per_token else torch.randint(2, (4,))
    targets = targets.float() if name in ("binary-classification", "regression") else targets
    objective, whole = OBJECTIVES[name], batch(targets)
    parts = microbatches(whole, 3)
    assert [len(part.targets) for part in parts] == [2, 1, 1]
    losses = [objective.loss(o, part) for o, part in zip(outputs.tensor_split(3), parts, strict=True)]
    torch.testing.assert_close(sum(losses), objective.loss(outputs, whole))


def test_portions_of_a_blend_keep_both_targets():
    blend = Batch(X, torch.arange(4), torch.arange(4).flip(0), torch.rand(4), 9)
    parts = microbatches(blend, 2)
    assert torch.equal(torch.cat([part.targets_b for part in parts]), blend.targets_b)
    assert torch.equal(torch.cat([part.lam for part in parts]), blend.lam)
    assert {part.num_global for part in parts} == {9}
    assert microbatches(blend, 1) == [blend]


def test_a_batch_that_is_there_is_not_moved_and_another_is():
    blend = Batch(X, torch.arange(4), None, torch.rand(4), 9)
    assert to_device(blend, torch.device("cpu")) is blend
    moved = to_device(blend, torch.device("meta"))
    assert moved.inputs.device == moved.targets.device == moved.lam.device == torch.device("meta")
    assert moved.targets_b is None


def test_counts_of_unequal_parts_add_up_where_means_would_not():
    right = torch.tensor([True, True, True, False, False])
    parts = metric_sums(torch.tensor(3.0), right[:1]) + metric_sums(torch.tensor(5.0), right[1:])
    assert compute_metrics(parts.tolist()) == {"loss": 8 / 5, "accuracy": 3 / 5}
    assert sum(part.float().mean().item() for part in (right[:1], right[1:])) / 2 != 3 / 5


def test_an_example_with_several_answers_is_whole_when_all_are_right():
    right = torch.tensor([[True, True, True], [True, False, True]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), right).tolist()) == {
        "loss": 0.5,
        "accuracy": 5 / 6,
        "exact_match": 0.5,
    }


def test_no_examples_count_nothing():
    none = metric_sums(torch.tensor(0.0), torch.zeros(0, 3, dtype=torch.bool))
    assert none.tolist() == [0.0] * 5


def test_a_loss_that_is_counted_needs_no_gradient():
    loss = torch.tensor(1.0, requires_grad=True) * 2
    assert not metric_sums(loss, torch.ones(1, dtype=torch.bool)).requires_grad


def test_what_was_not_asked_for_counts_neither_as_right_nor_as_wrong():
    right = torch.tensor([[True, False, True], [True, False, False]])
    asked = torch.tensor([[True, False, False], [True, True, False]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), right, asked).tolist()) == {
        "loss": 0.5,
        "accuracy": 2 / 3,
        "exact_match": 0.5,
    }
    everywhere = torch.ones_like(asked)
    assert torch.equal(metric_sums(torch.tensor(1.0), right, everywhere), metric_sums(torch.tensor(1.0), right))


class Rows(nn.Module):
    """Scores that are the pixels of the first row; dropout would spoil them."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.9)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        assert len(images)
        return self.dropout(images[:, 0, 0])


def images(n):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (n, 1, 2, 3), generator=generator)
    return Images(pixels.float(), torch.randint(3, (n,), generator=generator))


def test_it_is_loss_and_accuracy_over_all_examples_without_dropout(monkeypatch):
    monkeypatch.setattr(home, "BATCH_SIZE", 4)
    data, model = images(10), Rows()
    scores = data.images[:, 0, 0]
    found = evaluate(model, OBJECTIVES["classification"], data, None)
    assert found["accuracy"] == (scores.argmax(1) == data.labels).double().mean().item()
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-6)
    assert model.calls == 3
    assert model.training


def test_processes_share_the_examples_each_once(monkeypatch):
    """A process without a share of the last batch still asks the model, as the others do, and counts nothing."""
    monkeypatch.setattr(home, "BATCH_SIZE", 4)
    data, whole = images(9), torch.zeros(5, dtype=torch.float64)
    sums, calls = [], []
    monkeypatch.setattr(Ranks, "all_reduce_sum", lambda self, numbers: sums.append(numbers.clone()) or numbers + 1)
    for rank in range(3):
        model = Rows()
        evaluate(model, OBJECTIVES["classification"], data, None, Ranks(rank, 3))
        calls.append(model.calls)
    evaluate(Rows(), OBJECTIVES["classification"], data, None)
    *parts, whole = sums
    assert calls == [3, 3, 3]
    assert min(part[1] for part in parts) < max(part[1] for part in parts)
    torch.testing.assert_close(sum(parts), whole)


def test_flip_averaging_is_the_mean_of_both_answers():
    data = images(7)
    found = evaluate(Rows(), OBJECTIVES["classification"], data, None, tta="flip")
    scores = data.images[:, 0, 0]
    mean = (scores + scores.flip(-1)) / 2
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(mean, data.labels).item(), rel=1e-6)
    assert found["loss"] != pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-3)


def test_evaluation_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    evaluate(Rows(), OBJECTIVES["classification"], images(3), None)
    assert torch.equal(torch.get_rng_state(), expected)


def test_evaluation_is_in_float32_whatever_the_precision_of_training(config, tmp_path):
    train(replace(config, training=replace(config.training, precision="bf16")), tmp_path / "run", quiet=True)
    run = RunDirectory.open(tmp_path / "run")
    data, found = config.data.load(0), run.best_checkpoint()
    model = build_model(config.model)
    model.load_state_dict(eval_weights(found.model, found.optimizer))
    expected = evaluate(model, config.task.objective, data.test, data.normalize)
    tested = run.records()[-1]
    assert {name: tested[name] for name in expected} == expected
