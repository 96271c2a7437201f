from clearhead.recipes.mnist import mnist


def test_augmentation_crops_but_never_flips():
    config = mnist()
    assert config.data.augmentation.crop > 0
    assert not config.data.augmentation.flip
    assert config.training.tta == "none"


def test_training_uses_all_images_for_few_epochs():
    """Every epoch uses all training images except the validation split."""
    config = mnist()
    assert config.data.limit == config.training.steps == 0
    assert 1 <= config.training.epochs <= 3
