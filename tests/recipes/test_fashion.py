from clearhead.recipes.fashion import fashion
from clearhead.recipes.mnist import mnist


def test_the_model_of_mnist_on_other_pictures():
    assert fashion().model == mnist().model
    assert fashion().optimizer == mnist().optimizer
    assert fashion().data.name == "fashion"


def test_clothes_are_mirrored_in_training_and_so_may_be_at_the_test():
    assert fashion().data.augmentation.flip
    assert fashion().training.views == "mirror"
