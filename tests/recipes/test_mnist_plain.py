from clearhead.recipes.mnist_plain import mnist_plain


def test_r3_as_described():
    config = mnist_plain()
    model = config.model
    assert config.data.limit == 40_000
    assert not config.data.augmentation.is_on
    assert (model.n_heads, model.norm, model.positions, model.output_projection) == (1, "none", "none", False)
