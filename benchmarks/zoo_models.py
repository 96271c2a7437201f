"""Builds the architectures of zoo_architectures.json: published models with tiny random weights, and their inputs.

    build({"library": "transformers", "name": "bert"})  ->  model, args, kwargs

Hugging Face models start from their default config, whose sizes are reduced by the rules below; the list may add
settings for one architecture. The other libraries are built from the keyword arguments in the list.
"""

import importlib
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from peers import torchvision_or_stand_in

Entry = dict[str, Any]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
BATCH, LENGTH, IMAGE, VOCAB, FRAMES = 2, 8, 32, 64, 32


def build(entry: Entry, attention: str | None = None) -> Built:
    """The model in eval mode and its inputs. `attention` chooses the implementation of Hugging Face ("eager")."""
    torch.manual_seed(0)
    torchvision_or_stand_in()
    builders = {"transformers": hugging_face, "timm": timm_model}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = builders.get(entry["library"])
        model, args, kwargs = builder(entry, attention) if builder else from_path(entry)
    spread_parameters(model)
    return model.eval(), args, kwargs


@torch.no_grad()
def spread_parameters(model: nn.Module) -> None:
    """Replace matrices that are nearly constant, so that attention at initialization is neither uniform nor zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point() and parameter.numel() > 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if not bool(torch.isfinite(parameter).all()) or float(parameter.float().std()) < 0.03:
                parameter.copy_(noise * (len(parameter) / parameter.numel()) ** 0.5)


# Hugging Face

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("n_heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_kv_heads", "encoder_num_heads"), 2),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 2),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "encoder_num_layers", "decoder_num_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_dim", "mlp_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("dim_feedforward", "encoder_intermediate_size", "decoder_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "global_head_dim", "dim_head"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCAB),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("image_size", "img_size"), IMAGE),
    **dict.fromkeys(("vision_hidden_size", "text_hidden_size", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("sliding_window", "window_size"), 4),
    **dict.fromkeys(("n_query_tokens", "num_queries", "num_query_tokens"), 4),
    "max_source_positions": FRAMES // 2,
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
PER_STAGE = {"depths": 2, "num_heads": 2, "num_attention_heads": 2}
"""sizes that are lists with an element for each stage"""
LEFT_OUT = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "per_layer_config"),
    *("out_features", "out_indices", "_out_features", "_out_indices", "stage_names"),
}
ONE_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "block_types")


def hugging_face(entry: Entry, attention: str | None = None) -> Built:
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[entry["name"]]
    settings = reduced(cls().to_dict())
    merge(settings, entry.get("config", {}))
    settings.pop("model_type", None)
    config = cls(**settings)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModel.from_config(config, **options).float()
    kwargs = hugging_face_inputs(model, config, entry)
    return model, (), kwargs


def reduced(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config and of the configs inside it, with sizes of at most those above."""
    result: dict[str, Any] = {}
    num_layers = 2
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            result[name] = reduced(value)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            result[name] = min(value, SIZES[name])
        elif name in ONE_PER_LAYER and isinstance(value, list | tuple):
            result[name] = one_of_each(list(value), num_layers)
        elif name in PER_STAGE and isinstance(value, list | tuple):
            result[name] = [min(size, PER_STAGE[name]) for size in value]
        elif name not in LEFT_OUT:
            result[name] = value
    return result


def one_of_each(kinds: list[Any], count: int) -> list[Any]:
    """As many different kinds of layers as fit into `count`."""
    different = list(dict.fromkeys(map(str, kinds)))
    return (different + [str(kinds[0])] * count)[:count] if kinds and isinstance(kinds[0], str) else kinds[:count]


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            merge(settings[name], value)
        else:
            settings[name] = value


def hugging_face_inputs(model: nn.Module, config: Any, entry: Entry) -> dict[str, Any]:
    """The inputs that the list names ("text", "image", ...), or those that it gives by shape."""
    generator = torch.Generator().manual_seed(2)
    kind = entry.get("inputs", "text")
    parameters = inspect.signature(model.forward).parameters
    specs = kind if isinstance(kind, dict) else {}
    if not isinstance(kind, dict):
        for part in kind.split(" and "):
            specs |= INPUTS[part](config)
        if "decoder_input_ids" in parameters and config.is_encoder_decoder:
            specs["decoder_input_ids"] = ["ids", BATCH, LENGTH - 2]
    return {name: make_input(spec, generator) for name, spec in specs.items()}


def image_shape(config: Any) -> list[int]:
    config = getattr(config, "vision_config", None) or config
    size = next((size for size in (getattr(config, name, None) for name in ("image_size", "img_size")) if size), IMAGE)
    channels = getattr(config, "num_channels", None) or 3
    return [channels, *((size, size) if isinstance(size, int) else tuple(size)[:2])]


def num_mel_bins(config: Any) -> int:
    config = next((c for c in (getattr(config, n, None) for n in ("encoder_config", "audio_config")) if c), config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "mel_bins")
    return next((size for size in (getattr(config, name, None) for name in names) if size), 80)


INPUTS: dict[str, Any] = {
    "text": lambda config: {"input_ids": ["ids", BATCH, LENGTH]},
    "text mask": lambda config: {"attention_mask": ["ones", BATCH, LENGTH]},
    "image": lambda config: {"pixel_values": ["float", BATCH, *image_shape(config)]},
    "video": lambda config: {"pixel_values": ["float", BATCH, 4, *image_shape(config)]},
    "video clips": lambda config: {"pixel_values_videos": ["float", BATCH, 4, *image_shape(config)]},
    "boxes": lambda config: {"bbox": ["ones", BATCH, LENGTH, 4]},
    "waveform": lambda config: {"input_values": ["float", BATCH, 1600]},
    "waveform channels": lambda config: {"input_values": ["float", BATCH, 1, 1920]},
    "features": lambda config: {"input_features": ["float", BATCH, num_mel_bins(config), FRAMES]},
    "features by time": lambda config: {"input_features": ["float", BATCH, FRAMES, num_mel_bins(config)]},
    "feature mask": lambda config: {"input_features_mask": ["ones", BATCH, FRAMES]},
    "past values": lambda config: {"past_values": ["float", BATCH, *past_values_shape(config)]},
}


def past_values_shape(config: Any) -> list[int]:
    length = getattr(config, "context_length", None) or 32
    return [length, getattr(config, "num_input_channels", 1)]


# timm, and models that are given by the path of their class


def timm_model(entry: Entry, attention: str | None = None) -> Built:
    import timm

    kwargs = {"num_classes": 5, **with_tuples(entry.get("kwargs", {}))}
    model = timm.create_model(entry["name"], pretrained=False, **kwargs)
    return model, inputs_of(entry, [["float", BATCH, 3, IMAGE, IMAGE]]), {}


def from_path(entry: Entry) -> Built:
    """`name` is module:class; `kwargs` may contain {"class": path, "kwargs": ...} for a part that is passed in."""
    return instantiate(entry["name"], entry.get("kwargs", {})), inputs_of(entry), {}


def instantiate(path: str, kwargs: dict[str, Any]) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)(**with_tuples(kwargs))


def with_tuples(value: Any) -> Any:
    """Lists of the JSON file as tuples, and descriptions of modules as modules."""
    if isinstance(value, list):
        return tuple(with_tuples(item) for item in value)
    if isinstance(value, dict):
        if set(value) == {"class", "kwargs"}:
            return instantiate(value["class"], value["kwargs"])
        return {name: with_tuples(item) for name, item in value.items()}
    return value


def inputs_of(entry: Entry, default: Any = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(make_input(spec, generator) for spec in entry.get("inputs", default))


def make_input(spec: Any, generator: torch.Generator) -> Any:
    """["ids", *shape], ["float", *shape], ["ones", *shape] or ["constant", value]; a list of these is a list."""
    if isinstance(spec[0], list):
        return [make_input(inner, generator) for inner in spec]
    kind, *shape = spec
    if kind == "constant":
        return shape[0]
    if kind == "ids":
        return torch.randint(3, VOCAB - 2, shape, generator=generator)
    return torch.ones(shape, dtype=torch.long) if kind == "ones" else torch.randn(shape, generator=generator)
