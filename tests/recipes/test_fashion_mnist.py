from clearhead.recipes.fashion_mnist import fashion_mnist
from clearhead.recipes.mnist import mnist


def test_the_model_of_mnist_on_other_pictures():
    assert fashion_mnist().model == mnist().model
    assert fashion_mnist().optimizer == mnist().optimizer
    assert fashion_mnist().data.name == "fashion-mnist"


def test_clothes_are_mirrored_in_training_and_so_may_be_at_the_test():
    assert fashion_mnist().data.augmentation.flip
    assert fashion_mnist().training.tta == "flip"
