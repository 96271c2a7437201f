"""Right published models, tiny and with random weights: the doctor must find no fault in them.

A builder returns the model; `MODELS` maps a name to (builder, whether the model is causal).
"""

import functools
import importlib

from torch import nn

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "d_ff": 32,
    "d_kv": 8,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_channels": 3,
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
}
GPT = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def hugging_face(model, config, options):
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def hf(model, base=TEXT, config=None, **options):
    """A builder for a model of Hugging Face Transformers; its config has the same name unless given."""
    for suffix in ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "MTModel", "Model"):
        if config is None and model.endswith(suffix):
            config = model.removesuffix(suffix) + "Config"
    return functools.partial(hugging_face, model, config, {**base, **options})


CAUSAL = {
    "GPT2LMHeadModel": hf("GPT2LMHeadModel", GPT),
    "GPTJForCausalLM": hf("GPTJForCausalLM", GPT, rotary_dim=4),
    "GPTNeoForCausalLM": hf(
        "GPTNeoForCausalLM",
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "GPTBigCodeForCausalLM": hf("GPTBigCodeForCausalLM", GPT),
    "CodeGenForCausalLM": hf("CodeGenForCausalLM", GPT, n_head=4, rotary_dim=4),
    "GPTNeoXForCausalLM": hf("GPTNeoXForCausalLM"),
    "LlamaForCausalLM": hf("LlamaForCausalLM"),
    "Llama, grouped queries": hf("LlamaForCausalLM", num_key_value_heads=1),
    "Llama, attention bias": hf("LlamaForCausalLM", attention_bias=True),
    "MistralForCausalLM": hf("MistralForCausalLM", sliding_window=4),
    "MixtralForCausalLM": hf("MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=1),
    "Qwen2ForCausalLM": hf("Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": hf("Qwen3ForCausalLM", head_dim=8),
    "GemmaForCausalLM": hf("GemmaForCausalLM", head_dim=8),
    "Gemma2ForCausalLM": hf("Gemma2ForCausalLM", head_dim=8, sliding_window=4),
    "PhiForCausalLM": hf("PhiForCausalLM"),
    "Phi3ForCausalLM": hf("Phi3ForCausalLM"),
    "StableLmForCausalLM": hf("StableLmForCausalLM"),
    "Starcoder2ForCausalLM": hf("Starcoder2ForCausalLM"),
    "OlmoForCausalLM": hf("OlmoForCausalLM"),
    "Olmo2ForCausalLM": hf("Olmo2ForCausalLM"),
    "CohereForCausalLM": hf("CohereForCausalLM"),
    "GraniteForCausalLM": hf("GraniteForCausalLM"),
    "NemotronForCausalLM": hf("NemotronForCausalLM"),
    "PersimmonForCausalLM": hf("PersimmonForCausalLM"),
    "OPTForCausalLM": hf("OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=16),
    "BloomForCausalLM": hf("BloomForCausalLM", n_layer=2, n_head=2),
    "FalconForCausalLM": hf("FalconForCausalLM", new_decoder_architecture=False),
    "Falcon, ALiBi": hf("FalconForCausalLM", alibi=True),
    "MptForCausalLM": hf(
        "MptForCausalLM", {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}
    ),
    "XGLMForCausalLM": hf("XGLMForCausalLM", BART, num_layers=2, attention_heads=2, ffn_dim=32),
    "BioGptForCausalLM": hf("BioGptForCausalLM"),
    "MambaForCausalLM": hf("MambaForCausalLM", state_size=4, expand=2, time_step_rank=4),
    "RwkvForCausalLM": hf("RwkvForCausalLM", context_length=64, attention_hidden_size=16),
    "OpenAIGPTLMHeadModel": hf("OpenAIGPTLMHeadModel", GPT),
    "GlmForCausalLM": hf("GlmForCausalLM", head_dim=8),
    "SmolLM3ForCausalLM": hf("SmolLM3ForCausalLM"),
    "CTRLLMHeadModel": hf("CTRLLMHeadModel", GPT, dff=32),
    "CLIPTextModel": hf("CLIPTextModel", config="CLIPTextConfig"),
    "T5": hf("T5ForConditionalGeneration", T5),
    "T5, gated": hf("T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu"),
    "MT5ForConditionalGeneration": hf("MT5ForConditionalGeneration", T5),
    "UMT5ForConditionalGeneration": hf("UMT5ForConditionalGeneration", T5),
    "SwitchTransformers": hf("SwitchTransformersForConditionalGeneration", T5, num_experts=2),
    "BartForConditionalGeneration": hf("BartForConditionalGeneration", BART),
    "MBartForConditionalGeneration": hf("MBartForConditionalGeneration", BART),
    "MarianMTModel": hf("MarianMTModel", BART),
    "PegasusForConditionalGeneration": hf("PegasusForConditionalGeneration", BART),
    "BlenderbotForConditionalGeneration": hf("BlenderbotForConditionalGeneration", BART),
    "M2M100ForConditionalGeneration": hf("M2M100ForConditionalGeneration", BART),
    "PLBartForConditionalGeneration": hf("PLBartForConditionalGeneration", BART),
}
ENCODERS = {
    "BertModel": hf("BertModel"),
    "BertForMaskedLM": hf("BertForMaskedLM"),
    "RobertaModel": hf("RobertaModel"),
    "DistilBertModel": hf("DistilBertModel", dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "AlbertModel": hf("AlbertModel", embedding_size=8),
    "ElectraModel": hf("ElectraModel", embedding_size=8),
    "DebertaModel": hf("DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DebertaV2Model": hf("DebertaV2Model", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "MPNetModel": hf("MPNetModel"),
    "ConvBertModel": hf("ConvBertModel", embedding_size=16, head_ratio=1, conv_kernel_size=3),
    "FNetModel": hf("FNetModel"),
    "XLMModel": hf("XLMModel", emb_dim=16, n_layers=2, n_heads=2, n_words=50),
    "ModernBertModel": hf("ModernBertModel"),
    "SqueezeBertModel": hf("SqueezeBertModel", embedding_size=16),
    "RoFormerModel": hf("RoFormerModel", embedding_size=16),
    "BigBirdModel": hf("BigBirdModel", attention_type="original_full"),
    "MobileBertModel": hf("MobileBertModel", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "ErnieModel": hf("ErnieModel"),
    "MegatronBertModel": hf("MegatronBertModel"),
    "RemBertModel": hf("RemBertModel", input_embedding_size=16, output_embedding_size=16),
    "EsmModel": hf("EsmModel", position_embedding_type="rotary", mask_token_id=4),
    "CamembertModel": hf("CamembertModel"),
    "T5EncoderModel": hf("T5EncoderModel", T5, "T5Config"),
    "FunnelModel": hf(
        "FunnelModel", {"vocab_size": 50, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]}
    ),
    "ViTModel": hf("ViTModel", IMAGE),
    "DeiTModel": hf("DeiTModel", IMAGE),
    "BeitModel": hf("BeitModel", IMAGE),
    "Dinov2Model": hf("Dinov2Model", IMAGE),
    "CLIPVisionModel": hf("CLIPVisionModel", IMAGE, "CLIPVisionConfig"),
    "SiglipVisionModel": hf("SiglipVisionModel", IMAGE, "SiglipVisionConfig"),
    "YolosModel": hf("YolosModel", {**IMAGE, "image_size": [32, 32]}, num_detection_tokens=3),
    "ViTMSNModel": hf("ViTMSNModel", IMAGE),
    "SwinModel": hf("SwinModel", SWIN),
    "Swinv2Model": hf("Swinv2Model", SWIN),
    "SegformerModel": hf(
        "SegformerModel",
        {
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "mlp_ratios": [2, 2, 2, 2],
        },
    ),
    "ConvNextModel": hf("ConvNextModel", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}),
    "PoolFormerModel": hf("PoolFormerModel", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}),
}


def timm(file, name, **options):
    return lambda: getattr(importlib.import_module(f"timm.models.{file}"), name)(**options)


SQUARE = {"img_size": 32, "num_classes": 5}
PLAIN = {**SQUARE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
STAGES = {"num_classes": 5, "depths": (1, 1, 1, 1)}
TIMM = {
    "timm ViT": timm("vision_transformer", "VisionTransformer", **PLAIN),
    "timm ViT, mean": timm("vision_transformer", "VisionTransformer", **PLAIN, global_pool="avg"),
    "timm ViT, attention pooling": timm(
        "vision_transformer", "VisionTransformer", **PLAIN, global_pool="map", class_token=False
    ),
    "timm ViT, registers": timm("vision_transformer", "VisionTransformer", **PLAIN, reg_tokens=4, init_values=1e-5),
    "timm ViT, relative positions": timm("vision_transformer_relpos", "VisionTransformerRelPos", **PLAIN),
    "timm DeiT, distilled": timm("deit", "VisionTransformerDistilled", **PLAIN),
    "timm BEiT": timm("beit", "Beit", **PLAIN),
    "timm EVA": timm("eva", "Eva", **PLAIN, use_rot_pos_emb=True),
    "timm CaiT": timm("cait", "Cait", **PLAIN),
    "timm XCiT": timm("xcit", "Xcit", **PLAIN),
    "timm Mixer": timm("mlp_mixer", "MlpMixer", **SQUARE, patch_size=8, embed_dim=24, num_blocks=2),
    "timm Swin": timm(
        "swin_transformer",
        "SwinTransformer",
        **SQUARE,
        patch_size=2,
        embed_dim=12,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
    ),
    "timm Swin v2": timm(
        "swin_transformer_v2",
        "SwinTransformerV2",
        **SQUARE,
        patch_size=2,
        embed_dim=12,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
    ),
    "timm TNT": timm(
        "tnt", "TNT", **SQUARE, patch_size=8, embed_dim=24, inner_dim=8, depth=2, num_heads_inner=2, num_heads_outer=3
    ),
    "timm ConViT": timm("convit", "ConVit", **PLAIN, local_up_to_layer=1),
    "timm PVT v2": timm(
        "pvt_v2",
        "PyramidVisionTransformerV2",
        num_classes=5,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 8, 8, 8),
        num_heads=(1, 2, 2, 2),
    ),
    "timm Twins": timm(
        "twins",
        "Twins",
        **SQUARE,
        embed_dims=(8, 8, 8, 8),
        num_heads=(1, 2, 2, 2),
        depths=(1, 1, 1, 1),
        sr_ratios=(8, 4, 2, 1),
    ),
    "timm PoolFormer": timm("metaformer", "MetaFormer", num_classes=5, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)),
    "timm ConvNeXt": timm("convnext", "ConvNeXt", **STAGES, dims=(8, 8, 8, 8)),
    "timm EdgeNeXt": timm("edgenext", "EdgeNeXt", **STAGES, dims=(8, 8, 16, 16), heads=(2, 2, 2, 2)),
    "timm FocalNet": timm("focalnet", "FocalNet", **STAGES, embed_dim=8),
    "timm DaViT": timm("davit", "DaVit", **STAGES, embed_dims=(8, 8, 8, 8), num_heads=(2, 2, 2, 2), window_size=2),
    "timm Sequencer": timm(
        "sequencer",
        "Sequencer2d",
        num_classes=5,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 8, 8, 8),
        hidden_sizes=(4, 4, 4, 4),
        patch_sizes=(7, 2, 1, 1),
    ),
    "timm ResNet": timm("resnet", "resnet10t", num_classes=5),
    "timm Hiera": timm(
        "hiera", "Hiera", img_size=(64, 64), num_classes=5, embed_dim=8, num_heads=1, stages=(1, 1, 1, 1)
    ),
    "timm NesT": timm(
        "nest", "Nest", **SQUARE, patch_size=4, num_levels=2, embed_dims=(8, 8), num_heads=(2, 2), depths=(1, 1)
    ),
}


def vit_pytorch(file, name, **options):
    return lambda: getattr(importlib.import_module(f"vit_pytorch.{file}"), name)(**options)


SIZE = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
VIT_PYTORCH = {
    "vit-pytorch ViT": vit_pytorch("vit", "ViT", **SIZE),
    "vit-pytorch ViT, mean": vit_pytorch("vit", "ViT", **SIZE, pool="mean"),
    "vit-pytorch SimpleViT": vit_pytorch("simple_vit", "SimpleViT", **SIZE),
    "vit-pytorch SimpleViT, registers": vit_pytorch("simple_vit_with_register_tokens", "SimpleViT", **SIZE),
    "vit-pytorch SimpleViT, QK-norm": vit_pytorch("simple_vit_with_qk_norm", "SimpleViT", **SIZE),
    "vit-pytorch DeepViT": vit_pytorch("deepvit", "DeepViT", **SIZE),
    "vit-pytorch CaiT": vit_pytorch("cait", "CaiT", **SIZE, cls_depth=1),
    "vit-pytorch parallel ViT": vit_pytorch("parallel_vit", "ViT", **SIZE),
    "vit-pytorch small datasets": vit_pytorch("vit_for_small_dataset", "ViT", **SIZE),
    "vit-pytorch CCT": vit_pytorch(
        "cct", "CCT", img_size=32, embedding_dim=16, num_layers=2, num_heads=2, num_classes=5
    ),
    "vit-pytorch CvT": vit_pytorch(
        "cvt", "CvT", num_classes=5, s1_emb_dim=8, s2_emb_dim=8, s3_emb_dim=8, s1_depth=1, s2_depth=1, s3_depth=1
    ),
    "vit-pytorch PiT": vit_pytorch("pit", "PiT", **{**SIZE, "depth": (1, 1)}),
    "vit-pytorch NesT": vit_pytorch(
        "nest",
        "NesT",
        image_size=32,
        patch_size=4,
        dim=8,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=5,
    ),
}


def x_transformers(layers, options, **wrapper):
    def build():
        x = importlib.import_module("x_transformers")
        stack = getattr(x, layers)(**{"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8, **options})
        return x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=stack, **wrapper)

    return build


OPTIONS = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5 bias": {"rel_pos_bias": True},
    "GLU": {"ff_glu": True, "ff_swish": True},
    "RMS norm": {"use_rmsnorm": True},
    "one key head": {"attn_one_kv_head": True},
    "QK-norm": {"attn_qk_norm": True},
    "memory": {"attn_num_mem_kv": 2},
    "talking heads": {"attn_pre_talking_heads": True},
    "post-norm": {"pre_norm": False},
    "sandwich": {"sandwich_norm": True},
}
X_TRANSFORMERS = {
    f"x-transformers {layers}, {name}": x_transformers(layers, options)
    for layers in ("Decoder", "Encoder")
    for name, options in OPTIONS.items()
}


def torch_layer(**options):
    return nn.TransformerEncoderLayer(16, 2, 32, **options)


TORCH = {
    "nn.TransformerEncoderLayer": lambda: torch_layer(batch_first=True),
    "nn.TransformerEncoderLayer, pre-norm": lambda: torch_layer(batch_first=True, norm_first=True),
    "nn.TransformerEncoderLayer, no bias": lambda: torch_layer(batch_first=True, bias=False),
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(
        torch_layer(batch_first=True), 2, enable_nested_tensor=False
    ),
    "nn.TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True),
    "nn.Transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    "nn.LSTM": lambda: nn.LSTM(16, 8, batch_first=True),
}
MODELS = {
    **{name: (build, True) for name, build in CAUSAL.items()},
    **{name: (build, False) for name, build in ENCODERS.items()},
    **{name: (build, False) for name, build in {**TIMM, **VIT_PYTORCH}.items()},
    **{name: (build, "Decoder" in name) for name, build in X_TRANSFORMERS.items()},
    **{name: (build, True) for name, build in TORCH.items()},
}
PROPHETNET = {f"num_{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
DEFECTS = {
    "timm GCViT": (
        timm("gcvit", "GlobalContextVit", num_classes=5, depths=(2, 1, 1, 1), num_heads=(2, 2, 2, 2), embed_dim=8),
        False,
        "batch",
    ),
    "FSMT": (hf("FSMTForConditionalGeneration", BART, src_vocab_size=50, tgt_vocab_size=50), True, "causality"),
    "ProphetNet": (
        hf("ProphetNetForConditionalGeneration", {"vocab_size": 50, "hidden_size": 16}, **PROPHETNET),
        True,
        "causality",
    ),
    "timm SwiftFormer": (
        timm("swiftformer", "SwiftFormer", layers=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_classes=5),
        False,
        "gradient",
    ),
    "Nystromformer": (hf("NystromformerModel", num_landmarks=4, segment_means_seq_len=8), False, "batch"),
    "YOSO": (hf("YosoModel", use_expectation=True), False, "padding"),
    "vit-pytorch RvT": (vit_pytorch("rvt", "RvT", **SIZE), False, "gradient"),
}
"""published models with a defect, which docs/doctor.md reproduces: builder, whether it is causal, and the check"""
