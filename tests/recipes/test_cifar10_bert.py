from clearhead.data.image_datasets import CIFAR10_NORMALIZE
from clearhead.recipes.cifar10_bert import cifar10_bert
from clearhead.training.config import RunConfig


def test_augmentation_normalization_and_optimizer_settings():
    config = cifar10_bert()
    model, augmentation = config.model, config.data.augmentation
    assert (augmentation.crop, augmentation.flip, augmentation.cutout, augmentation.mixup) == (4, True, 0, 0)
    assert (CIFAR10_NORMALIZE.mean, CIFAR10_NORMALIZE.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert config.training.batch_size == 192
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw", 5e-4)
    assert (model.depth, model.num_heads, model.width, model.mlp_dim) == (12, 8, 256, 1024)
    assert (model.patch_size, model.patch_embed, model.pooling, model.pos_embed) == (4, "patch", "cls", "learned")
    assert (model.norm, model.activation, model.dropout, model.embed_norm) == ("post", "gelu", 0.1, True)
    assert model.head_mlp_dim == 256
    assert model.norm_eps == 1e-12
    assert model.grid == (8, 8)


def test_configs_without_norm_eps_keep_the_previous_default():
    values = cifar10_bert().to_dict()
    del values["model"]["norm_eps"]
    assert RunConfig.from_dict(values).model.norm_eps == 1e-5
