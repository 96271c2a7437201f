from clearhead.recipes.fashion_mnist import fashion_mnist
from clearhead.recipes.mnist import mnist


def test_fashion_mnist_uses_the_mnist_model_and_optimizer():
    assert fashion_mnist().model == mnist().model
    assert fashion_mnist().optimizer == mnist().optimizer
    assert fashion_mnist().data.name == "fashion-mnist"


def test_flip_augmentation_is_matched_by_flip_tta():
    assert fashion_mnist().data.augmentation.flip
    assert fashion_mnist().training.tta == "flip"
