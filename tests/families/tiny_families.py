"""Tiny random models of transformers' families, from their configuration classes alone: no weights, no network.

Most families build from one set of small numbers under the names their configuration accepts; `OPTIONS` holds what a
family needs beside or instead of them, `VARIANTS` options of known families that change how a block is wired. Widths,
head counts and lengths all differ, so that axes can be told apart. A fresh model has norm weights of one, biases and
multipliers of zero or one, at which many a wrong identity holds: `tiny_family` moves every parameter off its start.
"""

import inspect
from typing import Any

import torch
from perturbation import perturb
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTextToWaveform
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import NotDissectable, dissect
from microtome.capture.padding import call_options

LARGEST = 30_000_000  # parameters; some configurations have huge defaults under names of their own
LAYERS, HEADS, KV_HEADS, D_HEAD, D_MODEL, D_MLP, VOCABULARY = 3, 4, 2, 8, 32, 48, 120

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), D_MODEL),
    **dict.fromkeys(("lru_width",), D_MODEL),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"), D_MLP),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), D_MLP),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "d_kv", "head_dim"), D_HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    "num_key_value_heads": KV_HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LATENT = {"num_key_value_heads": HEADS}  # multi-head latent attention has as many keys as queries
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
DOTS3 = INDEXED | {"layer_types": ["indexed_attention"] * LAYERS, "shared_experts_intermediate_size": 16}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# parts of models that read more than text: each part gets the small numbers of its own class, and what is named here
QWEN_VISION = {"depth": 2, "num_heads": 4, "out_hidden_size": D_MODEL, "num_position_embeddings": 16}
QWEN3_5 = {"text_config": LINEAR_AND_FULL, "vision_config": QWEN_VISION}
MUSIC: dict[str, Any] = {
    "text_encoder": {},
    "audio_encoder": {"num_filters": 4, "codebook_size": 128, "codebook_dim": 8, "upsampling_ratios": [2, 2]},
    "decoder": {"num_codebooks": 1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"], LATENT
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), LINEAR_AND_FULL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN3_5),
    **dict.fromkeys(("musicgen", "musicgen_melody"), MUSIC),
    "blt": {
        "patcher_config": LATENT,
        "encoder_config": LATENT | {"hidden_size_global": D_MODEL},
        "decoder_config": LATENT | {"hidden_size_global": D_MODEL},
        "global_config": LATENT,
        "encoder_hash_byte_group_vocab": 50,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "convnext": {"patch_size": 2, "num_stages": 3, "hidden_sizes": [8, 16, 32], "depths": [1, 1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": D_MLP, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bailing_hybrid": LATENT | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"mlp_layer_types": ["dense"] * LAYERS, "adapter_in_dim": D_MODEL, "adapter_out_dim": D_MODEL},
        "audio_config": {"downsample_hidden_size": 8, "adapter_input_size": D_MODEL, "adapter_out_dim": D_MODEL},
    },
    "dots3_note_text": DOTS3,
    "emu3": {"text_config": {}, "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]}},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "funnel": {"block_sizes": [2, 2, 2], "d_head": D_HEAD, "d_inner": D_MLP, "architectures": ["FunnelModel"]},
    "fuyu": {"text_config": {}},
    "gemma3": {"text_config": {}, "vision_config": {}},
    "gemma3n_text": PER_LAYER
    | {"num_kv_shared_layers": 0, "laurel_rank": 8, "layer_types": ["full_attention"] * LAYERS},
    "gemma4": {"text_config": PER_LAYER, "vision_config": {"position_embedding_size": 16}},
    "gemma4_assistant": {
        "text_config": dict.fromkeys(PER_LAYER, 0) | {"num_kv_shared_layers": LAYERS},
        "backbone_hidden_size": D_MODEL,
    },
    "gemma4_text": PER_LAYER,
    "gemma4_unified": {"text_config": {}},
    "gemma4_unified_assistant": {"text_config": {}, "backbone_hidden_size": D_MODEL},
    "git": {"vision_config": {}},
    "got_ocr2": {"text_config": {}, "vision_config": {"output_channels": 8, "mlp_dim": D_MLP}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": HEADS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    }
    | LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {
        "text_config": {"intermediate_size_mlp": D_MLP},
        "vision_config": {"vision_output_dim": D_MODEL, "projector_input_dim": 48, "projector_output_dim": 48},
    },
    "longcat_flash": LATENT
    | {"ffn_hidden_size": D_MLP, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "num_layers": 2, "qk_head_dim": 8}
    | {"head_dim": 4},  # here the width of the rotated part
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "mllama": {  # without an image the layer of cross-attention is skipped
        "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 4},
        "vision_config": {"num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [1]},
    },
    "moss_transcribe_diarize": {"text_config": {}, "audio_config": {}},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {"num_blocks": 2, "ext_pw_out_channel": 32}},
    "qwen4_exp": {
        "text_config": {
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "hc_lowrank": 8,
            **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
            **{"indexer_budget": 64, "indexer_compress_ratio": 4},
        },
        "vision_config": QWEN_VISION,
    },
    "reformer": {
        "is_decoder": True,
        "attention_head_size": D_HEAD,
        "feed_forward_size": D_MLP,
        "axial_pos_embds": False,
        "attn_layers": ("local", "local", "local"),
        "local_attn_chunk_length": 8,
    },
    "speech_to_text": {"input_feat_per_channel": 24, "conv_channels": 16},
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    "xlm": {"emb_dim": D_MODEL},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "use_mamba_kernels": False},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "layer_types": ...,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


# options of known families that change how a block is wired
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon old": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    "falcon sequential": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
    "opt post-norm": ("opt", {"do_layer_norm_before": False}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama no groups": ("llama", {"num_key_value_heads": HEADS}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2 scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode many keys": ("gpt_bigcode", {"multi_query": False}),
    "granite multipliers": (
        "granite",
        {"residual_multiplier": 0.7, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "gemma2 capped": ("gemma2", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
}
ENCODERS = [
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta",
    "deberta-v2",
    "modernbert",
    "fnet",
    "camembert",
    "mpnet",
    "nomic_bert",
    "squeezebert",
    "convbert",
    "mobilebert",
    "funnel",
    "layoutlm",
    "esm",
    "nystromformer",
    "ibert",
    "longformer",
    "bert-generation",
    "roformer",
    "rembert",
]
SEQ2SEQ = [
    "t5",
    "mt5",
    "umt5",
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "blenderbot",
    "m2m_100",
    "whisper",
    "speech_to_text",
    "led",
    "prophetnet",
]
VISION = [
    "vit",
    "dinov2",
    "dinov2_with_registers",
    "deit",
    "beit",
    "clip_vision_model",
    "siglip_vision_model",
    "swin",
    "convnext",
]
AUDIO = [
    "wav2vec2",
    "hubert",
    "wavlm",
    "unispeech",
    "data2vec-audio",
    "wav2vec2-conformer",
    "audio-spectrogram-transformer",
]


def options(family: str) -> dict[str, Any]:
    """Small numbers under the names that the family's configuration accepts, and its own options."""
    return _small(CONFIG_MAPPING[family], OPTIONS.get(family, {}))


def _small(cls: type, own: dict[str, Any]) -> dict[str, Any]:
    """The same for one configuration class; a part (text_config, ...) for which there are own options is filled too."""
    accepted = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", {}))
    found = {name: value for name, value in SMALL.items() if name in accepted} | own
    for name, part in cls.sub_configs_defaults.items():
        if isinstance(found.get(name), dict):
            kind = CONFIG_MAPPING[part.model_type] if part.config_class is AutoConfig else part.config_class
            found[name] = _small(kind, found[name]) | {"model_type": kind.model_type}
    return {name: value for name, value in found.items() if value is not ...}


def tiny_family(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A perturbed tiny model in eval mode, causal where the family has such a head; RuntimeError if it is not tiny."""
    config = CONFIG_MAPPING[family](**options(family) | changes)
    build = AutoModelForCausalLM if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    if family in MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES:  # the causal class is that of a part
        build = AutoModelForTextToWaveform
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build.from_config(config).parameters())
    if size > LARGEST:
        raise RuntimeError(f"{family}: {size / 1e6:.0f} million parameters; give it options of its own")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build.from_config(config).eval().float()
    perturb(model, seed)
    return model


def inputs(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor] | None:
    """Two rows of model inputs for models that read no token ids (images, sounds); None for those that do."""
    name = model.main_input_name
    if name == "input_ids":
        return None
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    shapes = {
        "pixel_values": (2, 3, 16, 16),
        "input_values": (2, 1200),
        "input_features": (2, getattr(config, "num_mel_bins", 16), 24),
    }
    given = {}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = torch.randint(3, 100, (2, 5), generator=generator)
    if name == "input_values" and config.model_type == "audio-spectrogram-transformer":
        return {name: torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)}
    return {name: torch.randn(shapes[name], generator=generator), **given}


_CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
GROUPS = {
    "causal language models": _CAUSAL,
    "options of known families": list(VARIANTS),
    "encoders": [name for name in ENCODERS if name not in _CAUSAL],
    "encoder-decoders": [name for name in SEQ2SEQ if name not in _CAUSAL],
    "vision": VISION,
    "audio": AUDIO,
}
FAMILIES = [name for names in GROUPS.values() for name in names]


def built(name: str) -> nn.Module | str:
    """The tiny model of a family or variant, or why it does not build or run."""
    family, changes = VARIANTS.get(name, (name, {}))
    try:
        model = tiny_family(family, **changes)
        given = inputs(model)
        if given is None:
            given = {"input_ids": torch.randint(3, 100, (2, 9))}
            if getattr(model.config, "is_encoder_decoder", False):
                given["decoder_input_ids"] = torch.randint(3, 100, (2, 5))
        with torch.no_grad():
            model(**given, **call_options(model))
    except Exception as error:  # whatever a family says of a configuration that is none of its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    return model


def verdict(model: nn.Module) -> tuple[str, Anatomy | None]:
    """ "full", "part" or "refused", and the anatomy."""
    try:
        anatomy = dissect(model, inputs=inputs(model), again=True)
    except NotDissectable:
        return "refused", None
    has_head = model.get_output_embeddings() is not None if hasattr(model, "get_output_embeddings") else False
    offers_logits = any(site.kind == "logits" for site in anatomy.taps)
    return "full" if anatomy.is_whole and (offers_logits or not has_head) else "part", anatomy
