"""Every causal language model family of transformers, and whether it is served: data.

`docs/models.md` shows these rows and the tests hold them. `family_case` makes the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 12


@dataclass(frozen=True)
class Family:
    """`kind`: "full", "window" or "hybrid" for a family that is served; "" for one that is refused with `reason` in the
    message. `changes`: of its configuration."""

    kind: str = ""
    reason: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


# The version of transformers with these families, and the families of which there is no small model.
TRANSFORMERS = "5.23"
UNTRIED = {
    "blt": "its byte patches come from a second model",
    "gemma4_assistant": "it drafts for another model, whose cache it reads",
}

# Latent attention expands to a key for each head.
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "v_head_dim": 6, "kv_lora_rank": 12}
_LIKE_BERT: dict[str, Any] = {"is_decoder": True}
_LIKE_ROBERTA: dict[str, Any] = {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_LIKE_BART: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Family] = {
    "afmoe": Family("window"),
    "apertus": Family("full"),
    "arcee": Family("full"),
    "aria_text": Family("full"),
    "axk1": Family("full", changes=_LATENT),
    "axk2": Family(reason="layers of type indexed_attention"),
    "bailing_hybrid": Family("hybrid", changes={**_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "bamba": Family("hybrid", changes={"attn_layer_indices": [1, 3]}),
    "bart": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "beam": Family("window"),
    "bert": Family("full", changes=_LIKE_BERT),
    "bert-generation": Family("full", changes=_LIKE_BERT),
    "big_bird": Family("full", changes=_LIKE_BERT),
    "bigbird_pegasus": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "biogpt": Family("full"),
    "bitnet": Family("full"),
    "blenderbot": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "blenderbot-small": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "bloom": Family(reason="no way to be told positions"),
    "camembert": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "codegen": Family("full", changes={"rotary_dim": 4}),
    "cohere": Family("full"),
    "cohere2": Family("window"),
    "cohere2_moe": Family("window"),
    "cohere_compass_text": Family(
        "full",
        changes={
            "layer_types": ["full_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
    "cpmant": Family(reason="no way to be told positions"),
    "ctrl": Family("full"),
    "cwm": Family("window", changes={"bos_token_id": 1}),
    "data2vec-text": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "dbrx": Family(
        "full",
        changes={
            "d_model": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            "max_seq_len": 512,
        },
    ),
    "deepseek_v2": Family("full", changes={**_LATENT, "num_experts_per_tok": 2}),
    "deepseek_v3": Family("full", changes=_LATENT),
    "deepseek_v32": Family(reason="layers of type indexed_attention"),
    "deepseek_v4": Family(reason="layers of type compressed_sparse_attention, heavily_compressed_attention"),
    "diffllama": Family("full"),
    "doge": Family(reason="best keys alone, a choice that rounding makes", changes={"keep_window_size": 12}),
    "dots1": Family(
        "window",
        changes={
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "layer_types": _ALTERNATING,
            "sliding_window": 12,
        },
    ),
    "dots3_note": Family(reason="vary from layer to layer", changes={"num_key_value_heads": 4}),
    "dots3_note_text": Family(reason="vary from layer to layer", changes={"num_key_value_heads": 4}),
    "electra": Family("full", changes=_LIKE_BERT),
    "emu3": Family("full", changes={"pad_token_id": 0, "bos_token_id": 1}),
    "ernie": Family("full", changes=_LIKE_BERT),
    "ernie4_5": Family("full"),
    "ernie4_5_moe": Family("full"),
    "exaone4": Family("window"),
    "exaone_moe": Family("window"),
    "falcon": Family("full"),
    "falcon_h1": Family("hybrid", changes={"mamba_d_head": 8, "mamba_n_heads": 4}),
    "falcon_mamba": Family(reason="recurrent layers alone"),
    "flex_olmo": Family("full"),
    "flint": Family("window"),
    "fuyu": Family("full"),
    "gemma": Family("full"),
    "gemma2": Family("window"),
    "gemma3": Family("window"),
    "gemma3_text": Family("window"),
    "gemma3n": Family(
        "window",
        changes={
            "num_kv_shared_layers": 2,
            "layer_types": _ALTERNATING,
            "activation_sparsity_pattern": [0.0, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
        },
    ),
    "gemma3n_text": Family(
        "window",
        changes={
            "num_kv_shared_layers": 2,
            "layer_types": _ALTERNATING,
            "activation_sparsity_pattern": [0.0, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
        },
    ),
    "gemma4": Family("window"),
    "gemma4_text": Family(
        "window",
        changes={
            "layer_types": [*_ALTERNATING, *_ALTERNATING],
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 3,
            "global_head_dim": 16,
        },
    ),
    "gemma4_unified": Family("window"),
    "gemma4_unified_assistant": Family("window"),
    "gemma4_unified_text": Family(
        "window", changes={"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}
    ),
    "git": Family(
        "full",
        changes={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            }
        },
    ),
    "glm": Family("full"),
    "glm4": Family("full"),
    "glm4_moe": Family("full"),
    "glm4_moe_lite": Family("full", changes=_LATENT),
    "glm_moe_dsa": Family(reason="layers of type indexed_attention"),
    "got_ocr2": Family("full"),
    "gpt-sw3": Family("full"),
    "gpt2": Family("full"),
    "gpt_bigcode": Family("full"),
    "gpt_neo": Family(
        reason="other results over a cached prefix",
        changes={"attention_types": [[["global", "local"], 2]], "window_size": 12, "num_layers": 4},
    ),
    "gpt_neox": Family("full"),
    "gpt_neox_japanese": Family(reason="view size is not compatible"),
    "gpt_oss": Family("window"),
    "gptj": Family("full", changes={"rotary_dim": 4}),
    "granite": Family("full"),
    "granite_swa": Family("window"),
    "granitemoe": Family("full"),
    "granitemoe_swa": Family("window"),
    "granitemoehybrid": Family("hybrid", changes={"layer_types": ["mamba", "attention", "mamba", "attention"]}),
    "granitemoeshared": Family("full"),
    "helium": Family("full"),
    "hrm_text": Family("full"),
    "hunyuan_v1_dense": Family("full", changes={"head_dim": 8}),
    "hunyuan_v1_moe": Family("full", changes={"head_dim": 8}),
    "hy_v3": Family("full"),
    "hy_v4": Family(reason="layers of type indexed_attention"),
    "hyperclovax": Family("full"),
    "inkling2_text": Family(reason="layers of type hybrid_sliding"),
    "inkling_text": Family(reason="layers of type hybrid_sliding"),
    "internlm3": Family("full"),
    "iquestcoder": Family("full"),
    "jais2": Family("full"),
    "jamba": Family(
        reason="other results over a cached prefix", changes={"attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    "jetmoe": Family("full"),
    "kimi_linear": Family("hybrid", changes={**_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "kolibri1": Family("window"),
    "laguna": Family("window", changes={"layer_types": _ALTERNATING}),
    "lfm2": Family("hybrid", changes={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": Family("hybrid", changes={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm3": Family("hybrid"),
    "llama": Family("full"),
    "llama4": Family("chunked", changes={"attention_chunk_size": 16}),
    "llama4_text": Family("chunked", changes={"attention_chunk_size": 16}),
    "longcat_flash": Family("full", changes=_LATENT),
    "mamba": Family(reason="recurrent layers alone"),
    "mamba2": Family(
        reason="recurrent layers alone", changes={"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8}
    ),
    "marian": Family(
        reason="no way to be told positions", changes={**_LIKE_BART, "pad_token_id": 1, "decoder_start_token_id": 1}
    ),
    "mbart": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "megatron-bert": Family("full", changes=_LIKE_BERT),
    "mellum": Family("window", changes={"layer_types": _ALTERNATING}),
    "mimo_v2_flash": Family("window", changes={"v_head_dim": 4}),
    "minicpm3": Family("full", changes=_LATENT),
    "minimax": Family(reason="uses cache of its own"),
    "minimax_m2": Family("full"),
    "minimax_m3_vl_text": Family(
        reason="layers of type minimax_m3_sparse",
        changes={"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]},
    ),
    "ministral": Family("window", changes={"head_dim": 8}),
    "ministral3": Family("full"),
    "mistral": Family("window"),
    "mixtral": Family("full"),
    "mllama": Family(
        reason="layers that attend to another input",
        changes={"cross_attention_layers": [1], "bos_token_id": 0, "pad_token_id": 0},
    ),
    "modernbert-decoder": Family("window", changes={"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "moshi": Family(reason="other results over a cached prefix"),
    "moss_transcribe_diarize": Family("full"),
    "mpt": Family(reason="no way to be told positions"),
    "musicgen": Family(reason="no way to be told positions"),
    "musicgen_melody": Family(reason="no way to be told positions"),
    "mvp": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "nanochat": Family("full"),
    "nemotron": Family("full", changes={"num_key_value_heads": 2, "head_dim": 8}),
    "nemotron_h": Family(reason="other results over a cached prefix", changes={"n_groups": 2}),
    "olmo": Family("full"),
    "olmo2": Family("full"),
    "olmo3": Family("window"),
    "olmo_hybrid": Family("hybrid"),
    "olmoe": Family("full"),
    "openai-gpt": Family(reason="no key-value cache"),
    "opt": Family("full"),
    "pegasus": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "persimmon": Family("full"),
    "phi": Family("full"),
    "phi3": Family("full"),
    "phi4_multimodal": Family(
        "full",
        changes={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 8,
                "input_size": 16,
            },
        },
    ),
    "phimoe": Family("full"),
    "plbart": Family(reason="no way to be told positions", changes=_LIKE_BART),
    "prophetnet": Family(
        reason="no way to be told positions",
        changes={
            "decoder_ffn_dim": 48,
            "num_decoder_layers": 2,
            "num_encoder_layers": 2,
            "num_decoder_attention_heads": 4,
            "num_encoder_attention_heads": 4,
        },
    ),
    "qwen2": Family("full"),
    "qwen2_moe": Family("full"),
    "qwen3": Family("full"),
    "qwen3_5": Family("hybrid"),
    "qwen3_5_moe": Family("hybrid"),
    "qwen3_5_moe_text": Family("hybrid"),
    "qwen3_5_text": Family("hybrid"),
    "qwen3_moe": Family("full"),
    "qwen3_next": Family("hybrid"),
    "qwen4_exp": Family(
        reason="layers of type indexed_attention",
        changes={
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "ple_layer_ids": [],
            "hc_lowrank": 8,
            "ngram_vocab_size_base": 100,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "qwen4_exp_text": Family(
        reason="layers of type indexed_attention",
        changes={
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "ple_layer_ids": [],
            "hc_lowrank": 8,
            "ngram_vocab_size_base": 100,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "recurrent_gemma": Family(reason="layers of type sliding_attention beside linear_attention"),
    "reformer": Family(
        reason="no key-value cache",
        changes={"is_decoder": True, "axial_pos_embds_dim": (16, 16), "attention_head_size": 8},
    ),
    "rembert": Family("full", changes=_LIKE_BERT),
    "roberta": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "roberta-prelayernorm": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "roc_bert": Family("full", changes=_LIKE_BERT),
    "roformer": Family(reason="no way to be told positions"),
    "rwkv": Family(reason="no key-value cache"),
    "seed_oss": Family("full"),
    "smollm3": Family("full", changes={"num_hidden_layers": 4}),  # the fourth has no position embedding
    "solar_open": Family("full"),
    "stablelm": Family("full"),
    "starcoder2": Family("full"),
    "trocr": Family(reason="no way to be told positions"),
    "vaultgemma": Family("window"),
    "whisper": Family(reason="no way to be told positions", changes={**_LIKE_BART, "pad_token_id": 1}),
    "xglm": Family("full"),
    "xlm": Family(reason="no key-value cache"),
    "xlm-roberta": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "xlm-roberta-xl": Family(reason="does not number positions from 0", changes=_LIKE_ROBERTA),
    "xlnet": Family(
        reason="no key-value cache", changes={"d_head": 8, "d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48}
    ),
    "xlstm": Family(reason="no key-value cache"),
    "xmod": Family(
        reason="does not number positions from 0",
        changes={**_LIKE_ROBERTA, "default_language": "en_XX", "languages": ["en_XX"]},
    ),
    "youtu": Family("full", changes=_LATENT),
    "zamba": Family(
        reason="other results over a cached prefix",
        changes={
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 2,
            "num_key_value_heads": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "zamba2": Family(
        reason="other results over a cached prefix",
        changes={
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "zaya": Family("hybrid", changes={"num_experts_per_tok": 1}),
    # The same families otherwise.
    "bert, is_decoder=False": Family(reason="is not causal"),
    "doge, within keep_window_size": Family("full"),
    "falcon, alibi=True": Family(reason="attention biases (alibi)", changes={"alibi": True}),
    "gemma3_text, use_bidirectional_attention=True": Family(
        reason="is not causal", changes={"use_bidirectional_attention": True}
    ),
    "lfm2, full attention alone": Family("full"),
    "llama, rope_type=dynamic": Family(
        "full", changes={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "mistral, without a window": Family("full", changes={"sliding_window": None}),
    "nemotron_h, without a minimum time step": Family("hybrid", changes={"n_groups": 2, "time_step_min": 1e-30}),
    "phi3, rope_type=longrope": Family(
        "full",
        changes={
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [3.0, 5.0, 7.0, 9.0],
            },
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2, windows in some layers": Family(
        "window", changes={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "zamba2, without a minimum time step": Family(
        "hybrid",
        changes={
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "time_step_min": 1e-30,
        },
    ),
}
