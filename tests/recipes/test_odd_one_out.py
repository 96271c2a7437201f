import torch

from clearhead.models.config import build_model
from clearhead.recipes import config_of


def test_context_length_follows_the_set_size():
    config = config_of("odd-one-out", {"data.set_size": 4})
    assert (config.data.set_size, config.model.context_length) == (4, 4)


def test_scores_are_permutation_equivariant():
    config = config_of("odd-one-out")
    model = build_model(config.model).eval()
    sets, positions = config.data.load(0).test.get_batch(torch.arange(3))
    order = torch.randperm(sets.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(sets[:, order]), model(sets)[:, order], rtol=0, atol=1e-5)
    assert positions.max() < sets.shape[1]
