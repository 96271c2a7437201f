import pytest
import torch
import torch.nn.functional as F

import clearhead
from clearhead.recipes import config_of, train


def test_context_length_follows_the_data_length():
    config = config_of("reverse", {"data.length": 5})
    assert (config.data.length, config.model.context_length) == (5, 5)


@pytest.fixture(scope="module")
def trained_reverse(tmp_path_factory):
    """The trained model, its training result, and the inputs and targets of the test split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reverse"))
        outcome = train("reverse", changes={"training.precision": "float32"}, quiet=True)
        model = clearhead.load("runs/reverse-0")
    data = config_of("reverse").data.load(0)
    return model, outcome, *data.test.get_batch(torch.arange(len(data.test)))


@pytest.mark.slow
def test_every_test_sequence_is_reversed(trained_reverse, tmp_path, monkeypatch):
    """All 10,000 sequences, for two seeds."""
    assert trained_reverse[1].test["exact_match"] == 1
    monkeypatch.chdir(tmp_path)
    assert train("reverse", changes={"seed": 1, "training.precision": "float32"}, quiet=True).test["exact_match"] == 1


@pytest.mark.slow
def test_every_output_attends_most_to_the_mirrored_position(trained_reverse):
    model, _, ids, _ = trained_reverse
    (layer,) = (trace := clearhead.look(model, ids)).values()
    assert trace.verify()[layer.name] < 1e-5
    assert torch.equal(layer.weights().argmax(-1), torch.arange(16).flip(0).expand(len(ids), 1, 16))


@pytest.mark.slow
def test_accuracy_with_zeroed_and_uniform_attention_matches_theory(trained_reverse):
    """zero: no token gets information from another, and its own digit is independent of the target: accuracy 1/10.

    uniform: each token gets the mean of all values, which encodes the frequency of each digit but not its position.
    Predicting the most common digit is then optimal, and guessing one of the sixteen digits at random is the baseline.
    The model is in between (18 to 19%): it predicts frequent digits but was not trained to choose the most common one.
    """
    model, _, ids, targets = trained_reverse
    (name,) = clearhead.look(model, ids[:1])
    accuracy = {}
    for pattern in ("zero", "uniform"):
        with clearhead.edit(model, name, pattern=pattern), torch.no_grad():
            accuracy[pattern] = (model(ids).argmax(-1) == targets).float().mean().item()
    frequencies = F.one_hot(ids, 10).float().mean(1)  # of each digit in each sequence
    random_guess, best = frequencies.square().sum(1).mean().item(), frequencies.amax(1).mean().item()
    assert accuracy["zero"] == pytest.approx(0.1, abs=0.005)
    assert random_guess + 0.01 < accuracy["uniform"] < best
