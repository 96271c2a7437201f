"""Named model configs. Importing this module does not import torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clearhead.messages import unknown_name
from clearhead.models.config import LanguageConfig, ModelConfig, PredictorConfig, Seq2SeqConfig, VisionConfig


def reverse() -> PredictorConfig:
    """Reverses a sequence of digits: one post-norm block with one head."""
    # GELU, because with ReLU training fails for some seeds at the learning rate of the recipe
    return PredictorConfig(
        width=32,
        depth=1,
        num_heads=1,
        mlp_dim=64,
        norm="post",
        in_features=10,
        out_features=10,
        context_length=16,
        head_mlp_dim=32,
    )


def reverse_uva() -> PredictorConfig:
    """The model of the UvA tutorial on reversal: `reverse` with ReLU and a layer norm in the head."""
    return replace(reverse(), activation="relu", head_norm=True)


def vit_mnist_plain() -> VisionConfig:
    """A single-head vision transformer for MNIST without position embeddings, layer norms and output projection."""
    return VisionConfig(
        width=64,
        depth=4,
        num_heads=1,
        mlp_dim=64,
        activation="relu",
        norm="none",
        output_projection=False,
        image_size=28,
        in_channels=1,
        patch_size=7,
        num_classes=10,
        pos_embed="none",
    )


def vit_mnist() -> VisionConfig:
    """A standard vision transformer for MNIST, about as large as `vit_mnist_plain`."""
    return VisionConfig(
        width=64,
        depth=4,
        num_heads=4,
        mlp_dim=128,
        image_size=28,
        in_channels=1,
        patch_size=7,
        num_classes=10,
    )


def bert_cifar10() -> VisionConfig:
    """BERT's encoder with the 4x4 patches of a CIFAR-10 image as input embeddings, and BERT's layer-norm eps."""
    return VisionConfig(
        width=256,
        depth=12,
        num_heads=8,
        mlp_dim=1024,
        norm="post",
        norm_eps=1e-12,
        dropout=0.1,
        attention_dropout=0.1,
        image_size=32,
        patch_size=4,
        num_classes=10,
        head_mlp_dim=256,
        embed_norm=True,
        init="bert",
    )


def vit_cifar10() -> VisionConfig:
    """A small vision transformer for CIFAR-10: 64 patches of 4x4 pixels and a class token, 0.55 M parameters."""
    return VisionConfig(width=128, depth=4, num_heads=4, mlp_dim=256, image_size=32, patch_size=4, num_classes=10)


def vit_tiny() -> VisionConfig:
    """The vision transformer of the benchmarks: 65 tokens of width 192."""
    return VisionConfig(width=192, depth=6, num_heads=3, image_size=32, patch_size=4, num_classes=10)


def vit_base() -> VisionConfig:
    """ViT-B/16 (Dosovitskiy et al., 2021), for images of 224 x 224 pixels and 1000 classes."""
    return VisionConfig(width=768, depth=12, num_heads=12, image_size=224, patch_size=16, num_classes=1000)


def transformer_base() -> Seq2SeqConfig:
    """The base model of Vaswani et al. (2017), with a shared vocabulary of 37,000 tokens."""
    return Seq2SeqConfig(
        width=512,
        depth=6,
        num_heads=8,
        mlp_dim=2048,
        activation="relu",
        norm="post",
        dropout=0.1,
        src_vocab_size=37_000,
        tgt_vocab_size=37_000,
        tie_weights=True,
    )


def classic_lm() -> LanguageConfig:
    """A small language model with the parts of Vaswani et al. (2017); `modern_lm` has its size."""
    return LanguageConfig(
        width=128,
        depth=4,
        num_heads=4,
        mlp_dim=512,
        activation="relu",
        norm="post",
        vocab_size=65,
        context_length=64,
        pos_embed="sinusoidal",
    )


def modern_lm() -> LanguageConfig:
    """A small language model with the parts of today's: RMSNorm, SwiGLU, RoPE, grouped queries, QK-norm, no biases."""
    return LanguageConfig(
        width=128,
        depth=4,
        num_heads=4,
        num_kv_heads=2,
        qk_norm=True,
        mlp_dim=384,
        activation="swiglu",
        norm="pre",
        norm_layer="rmsnorm",
        bias=False,
        vocab_size=65,
        context_length=64,
        pos_embed="rotary",
    )


def gpt_tiny() -> LanguageConfig:
    """A character-level language model that trains on a laptop."""
    return LanguageConfig(width=128, depth=4, num_heads=4, vocab_size=65, context_length=64)


def gpt2_small() -> LanguageConfig:
    """GPT-2 small (Radford et al., 2019), 124 M parameters."""
    return LanguageConfig(
        width=768, depth=12, num_heads=12, dropout=0.1, attention_dropout=0.1, vocab_size=50_257, context_length=1024
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "reverse": reverse,
    "reverse_uva": reverse_uva,
    "vit_mnist": vit_mnist,
    "vit_mnist_plain": vit_mnist_plain,
    "bert_cifar10": bert_cifar10,
    "vit_cifar10": vit_cifar10,
    "vit_tiny": vit_tiny,
    "vit_base": vit_base,
    "transformer_base": transformer_base,
    "classic_lm": classic_lm,
    "modern_lm": modern_lm,
    "gpt_tiny": gpt_tiny,
    "gpt2_small": gpt2_small,
}


def preset(name: str, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a preset, optionally with changed fields: preset("vit_tiny", {"num_classes": 5})."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    config = PRESETS[name]()
    for field in changes or {}:
        if field not in vars(config):
            raise unknown_name(f"field of {type(config).__name__}", field, vars(config))
    return replace(config, **(changes or {}))


def list_presets() -> list[str]:
    """The names that `from_preset` accepts."""
    return sorted(PRESETS)
