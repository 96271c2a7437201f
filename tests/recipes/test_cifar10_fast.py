from clearhead.models.config import build_model
from clearhead.recipes.cifar10_fast import cifar10_fast
from clearhead.training.optim import param_groups


def test_flip_augmentation_is_matched_by_shift_tta():
    assert cifar10_fast().data.augmentation.flip
    assert cifar10_fast().training.tta == "shift"


def test_muon_optimizes_most_weights_including_convolutions():
    config = cifar10_fast()
    hidden, decayed, kept = param_groups(build_model(config.model), config.optimizer.name)
    counts = [sum(weight.numel() for weight in weights) for weights in (hidden, decayed, kept)]
    assert counts[0] > 0.8 * sum(counts)
    assert any(weight.dim() == 4 for weight in hidden)
    assert not any(weight.dim() == 4 for weight in decayed + kept)
