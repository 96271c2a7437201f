from clearhead.recipes.mnist import mnist


def test_digits_are_moved_but_never_mirrored():
    config = mnist()
    assert config.data.augmentation.crop > 0
    assert not config.data.augmentation.flip
    assert config.training.tta == "none"


def test_what_is_learned_fits_the_time_that_is_promised():
    """All training images but those set apart are seen in each of few epochs."""
    config = mnist()
    assert config.data.limit == config.training.steps == 0
    assert 1 <= config.training.epochs <= 3
