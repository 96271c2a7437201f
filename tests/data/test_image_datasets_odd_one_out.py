import torch

from clearhead.data import image_datasets
from clearhead.tasks.sequences import OddOneOut

DATA = OddOneOut(set_size=6).load(4)
ALL = torch.arange(1000)


def test_exactly_one_image_per_set_has_a_different_class():
    for examples in (DATA.train, DATA.validation, DATA.test):
        members, position = examples.members(ALL)
        labels = examples.images.labels[members]
        odd = labels.gather(1, position[:, None])
        assert ((labels == odd).sum(1) == 1).all()
        rest = labels[torch.arange(6) != position[:, None]].view(1000, 5)
        assert (rest == rest[:, :1]).all()


def test_every_position_and_every_class_occurs():
    members, position = DATA.train.members(ALL)
    labels = image_datasets.load_images("train").labels[members]
    assert torch.bincount(position, minlength=6).min() > 120
    assert torch.bincount(labels.gather(1, position[:, None])[:, 0], minlength=10).min() > 60
    assert torch.bincount(labels.flatten(), minlength=10).min() > 400


def test_inputs_are_the_flattened_normalized_images():
    members, position = DATA.test.members(ALL[:5])
    inputs, targets = DATA.test.get_batch(ALL[:5])
    assert inputs.shape == (5, 6, 784)
    assert torch.equal(targets, position)
    expected = image_datasets.MNIST_NORMALIZE(image_datasets.load_images("t10k").images[members.flatten()])
    assert torch.equal(inputs, expected.view(5, 6, 784))


def test_splits_share_no_image():
    train, validation = set(DATA.train.pool.tolist()), set(DATA.validation.pool.tolist())
    assert not train & validation
    assert len(train) + len(validation) == 60_000
    assert DATA.test.images is image_datasets.load_images("t10k")


def test_splits_use_independent_random_streams():
    train, validation, test = (split.members(ALL)[1] for split in (DATA.train, DATA.validation, DATA.test))
    for a, b in ((train, validation), (train, test), (validation, test)):
        assert abs((a == b).float().mean() - 1 / 6) < 0.06


def test_a_set_does_not_depend_on_the_batch():
    some = torch.tensor([700, 3])
    for full, split in zip(DATA.train.members(ALL), DATA.train.members(some), strict=True):
        assert torch.equal(full[some], split)
