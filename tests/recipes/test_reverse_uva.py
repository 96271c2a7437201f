"""The recipe compared with the network of the UvA tutorial, built from torch.nn modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.models.config import build_model
from clearhead.nn.positions import sinusoidal
from clearhead.recipes import config_of, train


class TutorialNetwork(nn.Module):
    """Input network, sinusoidal positions, one post-norm block and an output network, for one-hot digits."""

    def __init__(self):
        super().__init__()
        self.input_net = nn.Sequential(nn.Dropout(0.0), nn.Linear(10, 32))
        self.block = nn.TransformerEncoderLayer(32, 1, 64, dropout=0.0, activation="relu", batch_first=True)
        self.output_net = nn.Sequential(
            nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 10)
        )

    def forward(self, ids):
        x = self.input_net(F.one_hot(ids, 10).double())
        x = x + sinusoidal(torch.arange(ids.shape[1]), 32)
        return self.output_net(self.block(x))


def test_the_model_equals_the_tutorial_network():
    torch.manual_seed(0)
    model, tutorial = build_model(config_of("reverse-uva").model).double(), TutorialNetwork().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        tutorial.input_net[1].weight.copy_(model.embed.weight.T)
        tutorial.input_net[1].bias.copy_(model.embed.bias)
    tutorial.block = model.blocks[0].to_torch()
    for i, name in ((0, "fc1"), (1, "norm"), (4, "fc2")):
        tutorial.output_net[i].load_state_dict(model.head.get_submodule(name).state_dict())
    ids = torch.randint(0, 10, (4, 16))
    torch.testing.assert_close(model(ids), tutorial(ids))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in TutorialNetwork().parameters())


def test_hyperparameters_equal_the_tutorial():
    config = config_of("reverse-uva")
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.width, model.num_heads, model.depth, model.mlp_dim, model.norm) == (32, 1, 1, 64, "post")
    assert (model.dropout, model.input_dropout, model.mlp_dropout, model.pos_embed) == (0, 0, 0, "sinusoidal")
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.grad_clip) == ("adamw", 5e-4, 0.0, 5.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.schedule, optimizer.warmup) == (0.9, 0.999, "cosine", 50)
    assert (training.epochs, training.batch_size) == (10, 128)
    data = config.data.load(0)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [50_000, 1_000, 10_000]


def test_context_length_follows_the_data_length():
    config = config_of("reverse-uva", {"data.length": 5})
    assert (config.data.length, config.model.context_length) == (5, 5)


@pytest.mark.slow
def test_five_epochs_reverse_unseen_sequences(tmp_path, monkeypatch):
    """All ten epochs take about half a minute and make no error; validation is perfect after the third."""
    monkeypatch.chdir(tmp_path)
    assert train("reverse-uva", changes={"training.epochs": 5}, quiet=True).test["exact_match"] > 0.999
