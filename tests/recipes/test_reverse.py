import pytest
import torch
import torch.nn.functional as F

import clearhead
from clearhead.data import datasets
from clearhead.recipes.launch import train
from clearhead.recipes.registry import config_of


def test_the_length_is_also_the_models_context():
    config = config_of("reverse", {"data.length": 5})
    assert (config.data.length, config.model.context_length) == (5, 5)


@pytest.fixture(scope="module")
def reversing(tmp_path_factory):
    """The trained model, its test, and the unseen digits with their answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reverse"))
        outcome = train("reverse", changes={"training.precision": "float32"}, quiet=True)
        model = clearhead.load("runs/reverse-0")
    data = datasets.load_dataset(config_of("reverse").data, seed=0)
    return model, outcome, *data.test.get_batch(torch.arange(len(data.test)))


@pytest.mark.slow
def test_every_unseen_sequence_is_reversed(reversing, tmp_path, monkeypatch):
    """R2.5: 100.00% of 10,000."""
    assert reversing[1].test["exact_match"] == 1
    monkeypatch.chdir(tmp_path)
    assert train("reverse", changes={"seed": 1, "training.precision": "float32"}, quiet=True).test["exact_match"] == 1


@pytest.mark.slow
def test_every_answer_looks_most_at_the_flipped_place(reversing):
    model, _, ids, _ = reversing
    (layer,) = (seen := clearhead.look(model, ids)).values()
    assert seen.verify()[layer.name] < 1e-5
    assert torch.equal(layer.weights().argmax(-1), torch.arange(16).flip(0).expand(len(ids), 1, 16))


@pytest.mark.slow
def test_without_its_head_it_guesses_and_with_equal_weights_it_knows_the_bag_of_digits(reversing):
    """zero: no token hears of another, and its own digit says nothing about the one at the flipped place: 1 in 10.

    uniform: each token hears the mean of all values, which tells how often each digit is there, but not where. With
    only that, naming the commonest digit is best, and naming one of the sixteen at random is what anybody can do. The
    model lies between (at 18 to 19%): it answers with what is frequent, and was never taught to choose the commonest.
    """
    model, _, ids, targets = reversing
    (address,) = clearhead.look(model, ids[:1])
    right = {}
    for to in ("zero", "uniform"):
        with clearhead.edit(model, address, pattern=to), torch.no_grad():
            right[to] = (model(ids).argmax(-1) == targets).float().mean().item()
    shares = F.one_hot(ids, 10).float().mean(1)  # of each digit in each sequence
    anybody, best = shares.square().sum(1).mean().item(), shares.amax(1).mean().item()
    assert right["zero"] == pytest.approx(0.1, abs=0.005)
    assert anybody + 0.01 < right["uniform"] < best
