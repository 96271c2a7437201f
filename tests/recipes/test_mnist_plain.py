from clearhead.recipes.mnist_plain import mnist_plain
from clearhead.tasks.objectives import Classification


def test_mnist_plain_has_the_documented_sizes():
    config = mnist_plain()
    model = config.model
    assert config.data.limit == 40_000
    assert not config.data.augmentation.is_on
    assert (model.num_heads, model.norm, model.pos_embed, model.output_projection) == (1, "none", "none", False)
    assert (model.patch_size, model.width, model.depth) == (7, 64, 4)
    assert model.mlp_dim == model.width  # an MLP [d, d, d]
    assert (model.patch_embed, model.pooling, model.head_mlp_dim) == ("patch", "cls", 0)
    assert (model.image_size, model.in_channels, model.num_classes) == (28, 1, 10)
    assert isinstance(config.task.objective, Classification)
