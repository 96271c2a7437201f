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
def test_classification_loss_equals_torch_cross_entropy(smoothing):
    logits, targets = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing) * 4
    torch.testing.assert_close(OBJECTIVES["classification"].loss(logits, batch(targets), smoothing), expected)


def test_label_smoothing_is_uniform_over_all_classes():
    logits, targets = torch.randn(1, 4), torch.tensor([1])
    logs = logits.log_softmax(-1)[0]
    expected = -(0.8 * logs[1] + 0.2 / 4 * logs.sum())
    torch.testing.assert_close(OBJECTIVES["classification"].loss(logits, batch(targets), 0.2), expected)


def test_mixup_loss_weights_both_targets_and_accuracy_uses_the_larger():
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0]])
    mixed = batch(torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([0.7, 0.3]))
    first, second = -logits[0].log_softmax(-1)[:2]
    loss = OBJECTIVES["classification"].loss(logits, mixed)
    torch.testing.assert_close(loss, 0.7 * first + 0.3 * second + 0.3 * first + 0.7 * second)
    assert OBJECTIVES["classification"].correct(logits, mixed).tolist() == [True, False]


def test_token_classification_averages_over_the_tokens_of_an_example():
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * 2
    torch.testing.assert_close(OBJECTIVES["token-classification"].loss(logits, batch(targets)), expected)
    assert OBJECTIVES["token-classification"].correct(F.one_hot(targets, 5), batch(targets)).shape == (2, 3)
    assert OBJECTIVES["token-classification"].correct(F.one_hot(targets, 5), batch(targets)).all()


def test_binary_classification_loss_and_accuracy():
    logits, targets = torch.tensor([[2.0], [-3.0], [1.0]]), torch.tensor([1.0, 0.0, 0.0])
    binary = OBJECTIVES["binary-classification"]
    expected = sum(math.log1p(math.exp(x)) for x in (-2, -3, 1))
    assert binary.loss(logits, batch(targets)).item() == pytest.approx(expected, rel=1e-6)
    assert binary.loss(torch.zeros(1, 1), batch(targets[:1]), 0.5).item() == pytest.approx(math.log(2))
    assert binary.correct(logits, batch(targets)).tolist() == [True, True, False]


def test_regression_loss_and_accuracy():
    outputs, targets = torch.tensor([[2.4], [2.6]]), torch.tensor([2.0, 2.0])
    assert OBJECTIVES["regression"].loss(outputs, batch(targets)).item() == pytest.approx(0.16 + 0.36)
    assert OBJECTIVES["regression"].correct(outputs, batch(targets)).tolist() == [True, False]


def test_set_pointer_is_a_permutation_equivariant_choice():
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
SEQ2SEQ, CAUSAL_LM = OBJECTIVES["seq2seq"], OBJECTIVES["causal-lm"]


def words_batch(inputs=SOURCES, targets=TARGETS):
    return Batch(inputs, targets, None, None, len(inputs))


def test_shift_right_prepends_bos():
    assert shift_right(TARGETS).tolist() == [[BOS, 3, 5, EOS], [BOS, 4, EOS, PAD], [BOS, 5, 6, 7]]


def test_seq2seq_loss_is_the_negative_log_probability():
    """The loss equals the negative score that generate() returns for its own sequence."""
    torch.manual_seed(0)
    model = Seq2Seq.from_config(Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=8, tgt_vocab_size=8)).eval()
    made = model.generate(SOURCES, bos_id=BOS, eos_id=None, max_new_tokens=4, source_lengths=(SOURCES != PAD).sum(1))
    batch = words_batch(targets=made.ids)
    outputs = SEQ2SEQ.compute_outputs(model, batch)
    torch.testing.assert_close(SEQ2SEQ.loss(outputs, batch), -made.scores.sum())


def test_seq2seq_loss_ignores_padding_and_smooths_per_token():
    outputs = torch.randn(3, 4, 8)
    for smoothing in (0.0, 0.1):
        expected = sum(
            F.cross_entropy(o[t != IGNORE_INDEX], t[t != IGNORE_INDEX], reduction="sum", label_smoothing=smoothing)
            for o, t in zip(outputs, TARGETS, strict=True)
        )
        torch.testing.assert_close(SEQ2SEQ.loss(outputs, words_batch(), smoothing), expected)


@pytest.mark.parametrize("seed", range(5))
def test_seq2seq_is_correct_iff_greedy_decoding_returns_the_target(seed):
    torch.manual_seed(seed)
    model = Seq2Seq.from_config(Seq2SeqConfig(width=8, depth=1, num_heads=2, src_vocab_size=8, tgt_vocab_size=8)).eval()
    lengths = (SOURCES != PAD).sum(1)
    generated = model.generate(SOURCES, bos_id=BOS, eos_id=EOS, max_new_tokens=4, source_lengths=lengths).ids
    generated = F.pad(generated, (0, 4 - generated.shape[1]), value=EOS)
    after_end = ((generated == EOS).cumsum(1) > 1) & (generated == EOS)
    own = generated.masked_fill(after_end, IGNORE_INDEX)  # its greedy output, and the same with one token changed
    changed = own.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 8
    targets = torch.stack([own[0], changed[1], own[2]])
    batch = words_batch(targets=targets)
    assert SEQ2SEQ.correct(SEQ2SEQ.compute_outputs(model, batch), batch).tolist() == [True, False, True]


def test_causal_lm_loss_is_the_mean_over_unmasked_tokens():
    outputs, batch = torch.randn(3, 4, 8), words_batch()
    for smoothing in (0.0, 0.1):
        expected = sum(
            F.cross_entropy(o[t != IGNORE_INDEX], t[t != IGNORE_INDEX], label_smoothing=smoothing)
            for o, t in zip(outputs, TARGETS, strict=True)
        )
        torch.testing.assert_close(CAUSAL_LM.loss(outputs, batch, smoothing), expected)
    assert torch.equal(CAUSAL_LM.loss_mask(batch), TARGETS != IGNORE_INDEX)
    perfect = F.one_hot(TARGETS.clamp(min=0), 8)
    sums = metric_sums(
        CAUSAL_LM.loss(outputs, batch), CAUSAL_LM.correct(perfect, batch), CAUSAL_LM.loss_mask(batch)
    ).tolist()
    assert sums[1:] == [3, 9, 9, 3]


def test_causal_lm_is_scored_by_loss_and_others_by_accuracy():
    lower_loss, higher_accuracy = {"loss": 1.0, "accuracy": 0.3}, {"loss": 1.1, "accuracy": 0.4}
    assert CAUSAL_LM.score(lower_loss) > CAUSAL_LM.score(higher_accuracy)
    assert SEQ2SEQ.score(lower_loss) < SEQ2SEQ.score(higher_accuracy)


@pytest.mark.parametrize(
    "name",
    ["classification", "token-classification", "binary-classification", "regression", "set-pointer", "causal-lm"],
)
def test_compute_outputs_passes_only_the_inputs(name):
    assert (
        OBJECTIVES[name].compute_outputs(lambda inputs: inputs + 1, batch(torch.zeros(4))).tolist() == (X + 1).tolist()
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_microbatches_add_up(name):
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


def test_microbatches_of_a_mixup_batch_keep_both_targets():
    mixed = Batch(X, torch.arange(4), torch.arange(4).flip(0), torch.rand(4), 9)
    parts = microbatches(mixed, 2)
    assert torch.equal(torch.cat([part.targets_b for part in parts]), mixed.targets_b)
    assert torch.equal(torch.cat([part.lam for part in parts]), mixed.lam)
    assert {part.num_global for part in parts} == {9}
    assert microbatches(mixed, 1) == [mixed]


def test_to_device_moves_a_batch_only_if_needed():
    mixed = Batch(X, torch.arange(4), None, torch.rand(4), 9)
    assert to_device(mixed, torch.device("cpu")) is mixed
    moved = to_device(mixed, torch.device("meta"))
    assert moved.inputs.device == moved.targets.device == moved.lam.device == torch.device("meta")
    assert moved.targets_b is None


def test_metric_sums_of_unequal_batches_add_up():
    correct = torch.tensor([True, True, True, False, False])
    parts = metric_sums(torch.tensor(3.0), correct[:1]) + metric_sums(torch.tensor(5.0), correct[1:])
    assert compute_metrics(parts.tolist()) == {"loss": 8 / 5, "accuracy": 3 / 5}
    assert sum(part.float().mean().item() for part in (correct[:1], correct[1:])) / 2 != 3 / 5


def test_exact_match_requires_every_token_of_an_example():
    correct = torch.tensor([[True, True, True], [True, False, True]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), correct).tolist()) == {
        "loss": 0.5,
        "accuracy": 5 / 6,
        "exact_match": 0.5,
    }


def test_metric_sums_of_an_empty_batch_are_zero():
    none = metric_sums(torch.tensor(0.0), torch.zeros(0, 3, dtype=torch.bool))
    assert none.tolist() == [0.0] * 5


def test_metric_sums_are_detached():
    loss = torch.tensor(1.0, requires_grad=True) * 2
    assert not metric_sums(loss, torch.ones(1, dtype=torch.bool)).requires_grad


def test_masked_tokens_do_not_count():
    correct = torch.tensor([[True, False, True], [True, False, False]])
    mask = torch.tensor([[True, False, False], [True, True, False]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), correct, mask).tolist()) == {
        "loss": 0.5,
        "accuracy": 2 / 3,
        "exact_match": 0.5,
    }
    everywhere = torch.ones_like(mask)
    assert torch.equal(metric_sums(torch.tensor(1.0), correct, everywhere), metric_sums(torch.tensor(1.0), correct))


class FirstRow(nn.Module):
    """Its logits are the pixels of the first row; active dropout would change them."""

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


def test_evaluate_returns_loss_and_accuracy_in_eval_mode():
    data, model = images(10), FirstRow()
    scores = data.images[:, 0, 0]
    found = evaluate(model, OBJECTIVES["classification"], data, None, batch_size=4)
    assert found["accuracy"] == (scores.argmax(1) == data.labels).double().mean().item()
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-6)
    assert model.calls == 3
    assert model.training


def test_ranks_evaluate_each_example_once(monkeypatch):
    """A rank without examples in the last batch calls the model as the others do and adds nothing to the sums."""
    data, whole = images(9), torch.zeros(5, dtype=torch.float64)
    sums, calls = [], []
    monkeypatch.setattr(Ranks, "all_reduce_sum", lambda self, numbers: sums.append(numbers.clone()) or numbers + 1)
    for rank in range(3):
        model = FirstRow()
        evaluate(model, OBJECTIVES["classification"], data, None, Ranks(rank, 3), batch_size=4)
        calls.append(model.calls)
    evaluate(FirstRow(), OBJECTIVES["classification"], data, None, batch_size=4)
    *parts, whole = sums
    assert calls == [3, 3, 3]
    assert min(part[1] for part in parts) < max(part[1] for part in parts)
    torch.testing.assert_close(sum(parts), whole)


def test_flip_tta_averages_the_logits_of_both_views():
    data = images(7)
    found = evaluate(FirstRow(), OBJECTIVES["classification"], data, None, tta="flip")
    scores = data.images[:, 0, 0]
    mean = (scores + scores.flip(-1)) / 2
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(mean, data.labels).item(), rel=1e-6)
    assert found["loss"] != pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-3)


def test_evaluation_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    evaluate(FirstRow(), OBJECTIVES["classification"], images(3), None)
    assert torch.equal(torch.get_rng_state(), expected)


def test_evaluation_is_in_float32_for_any_training_precision(config, tmp_path):
    train(replace(config, training=replace(config.training, precision="bf16")), tmp_path / "run", quiet=True)
    run = RunDirectory.open(tmp_path / "run")
    data, found = config.data.load(0), run.best_checkpoint()
    model = build_model(config.model)
    model.load_state_dict(eval_weights(found.model, found.optimizer))
    expected = evaluate(model, config.task.objective, data.test, data.normalize)
    tested = run.records()[-1]
    assert {name: tested[name] for name in expected} == expected
