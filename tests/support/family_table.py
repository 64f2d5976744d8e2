"""A table of every causal language model family of transformers, which says whether hicache serves it.

docs/models.md shows these rows, and the tests check each of them. `family_case` makes the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 12


@dataclass(frozen=True)
class Family:
    """A row of the table. `kind`: "full", "window", "chunked" or "hybrid" if the family is served; "" if it is refused
    with `reason` in the message. `changes`: changes of its default configuration. `error`: words of the
    library's error in the message, if they differ from `reason`."""

    kind: str
    reason: str
    changes: Mapping[str, Any]
    error: str = ""


# The release of transformers that has these families, and the release before it; families that are new in the latest
# release; refusals that differ in the release before it; families without a small model.
LATEST, BEFORE = "5.24", "5.23"
NEW = {"apertus1p5_text", "dory", "exaone", "inkling2_loop_text", "lara_mini", "sarvam_mla", "sarvam_moe"}
REASONS_BEFORE = {"xlstm": "has no key-value cache"}
UNTRIED = {
    "blt": "its byte patches come from a second model",
    "gemma4_assistant": "it drafts for another model, and reads the cache of that model",
}

# Latent attention expands one latent row to a key for each head.
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "v_head_dim": 6, "kv_lora_rank": 12}
_LIKE_BERT: dict[str, Any] = {"is_decoder": True}
_LIKE_ROBERTA: dict[str, Any] = {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_LIKE_BART: dict[str, Any] = {
    "d_model": 32,
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _rows(names: str, kind: str = "", reason: str = "", error: str = "", **changes: Any) -> dict[str, Family]:
    """Rows for several families with equal entries; or for one family, whose difference from its defaults is named
    after a comma."""
    rows = [names] if "," in names else names.split()
    return dict.fromkeys(rows, Family(kind, reason, changes, error))


_ALL = (
    _rows(
        "apertus apertus1p5_text arcee aria_text biogpt bitnet cohere ctrl diffllama ernie4_5 ernie4_5_moe exaone "
        "falcon flex_olmo fuyu gemma glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox granite "
        "granitemoe granitemoeshared helium hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe llama "
        "minimax_m2 ministral3 mixtral moss_transcribe_diarize nanochat olmo olmo2 olmoe opt persimmon phi phi3 "
        "phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss solar_open stablelm starcoder2 xglm",
        "full"),
    _rows("bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert", "full", **_LIKE_BERT),
    _rows("axk1 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 sarvam_mla youtu", "full", **_LATENT),
    _rows("codegen gptj", "full", rotary_dim=4),
    _rows("hunyuan_v1_dense hunyuan_v1_moe", "full", head_dim=8),
    _rows("cohere_compass_text", "full", layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    _rows("dbrx", "full", d_model=32, attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}, max_seq_len=512),
    _rows("deepseek_v2", "full", num_experts_per_tok=2, **_LATENT),
    _rows("emu3", "full", pad_token_id=0, bos_token_id=1),
    _rows("git", "full", vision_config={**_VISION, "image_size": 8, "patch_size": 4}),
    _rows("nemotron", "full", num_key_value_heads=2, head_dim=8),
    _rows("phi4_multimodal", "full", vision_config=_VISION, audio_config={"hidden_size": 32, "intermediate_size": 48,
        "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 8, "input_size": 16}),
    _rows("smollm3", "full", num_hidden_layers=4),
    _rows("doge, within keep_window_size", "full"),
    _rows("lfm2, full attention alone", "full"),
    _rows("llama, rope_type=dynamic", "full",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    _rows("mistral, without a window", "full", sliding_window=None),
    _rows("phi3, rope_type=longrope", "full", max_position_embeddings=512, rope_parameters={"rope_type": "longrope",
        "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 5.0, 7.0, 9.0]},
        original_max_position_embeddings=128),
    _rows(
        "afmoe beam cohere2 cohere2_moe exaone4 exaone_moe flint gemma2 gemma3 gemma3_text gemma4 gemma4_unified "
        "gemma4_unified_assistant gpt_oss granite_swa granitemoe_swa kolibri1 mistral olmo3 vaultgemma",
        "window"),
    _rows("gemma3n gemma3n_text", "window", num_kv_shared_layers=2, layer_types=_ALTERNATING,
        activation_sparsity_pattern=[0.0] * 4, laurel_rank=8),
    _rows("laguna mellum", "window", layer_types=_ALTERNATING),
    _rows("cwm", "window", bos_token_id=1),
    _rows("dots1", "window", n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, layer_types=_ALTERNATING,
        sliding_window=WINDOW),
    _rows("gemma4_text", "window", layer_types=[*_ALTERNATING, *_ALTERNATING], num_hidden_layers=8,
        num_kv_shared_layers=3, global_head_dim=16),
    _rows("gemma4_unified_text", "window", attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=16),
    _rows("mimo_v2_flash", "window", v_head_dim=4),
    _rows("ministral", "window", head_dim=8),
    _rows("modernbert-decoder", "window", pad_token_id=1, bos_token_id=0, eos_token_id=2),
    _rows("qwen2, windows in some layers", "window", use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=2),
    _rows("llama4 llama4_text", "chunked", attention_chunk_size=16),
    _rows("lfm3 olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next", "hybrid"),
    _rows("bailing_hybrid kimi_linear", "hybrid", layer_types=["linear_attention", "full_attention"] * 2, **_LATENT),
    _rows("lfm2 lfm2_moe", "hybrid", layer_types=["conv", "full_attention"] * 2),
    _rows("bamba", "hybrid", attn_layer_indices=[1, 3]),
    _rows("falcon_h1", "hybrid", mamba_d_head=8, mamba_n_heads=4),
    _rows("granitemoehybrid", "hybrid", layer_types=["mamba", "attention"] * 2),
    _rows("zaya", "hybrid", num_experts_per_tok=1),
    _rows("nemotron_h, without a minimum time step", "hybrid", n_groups=2, time_step_min=1e-30),
    _rows("zamba2, without a minimum time step", "hybrid", num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2, time_step_min=1e-30),
    _rows("bart bigbird_pegasus blenderbot blenderbot-small mbart mvp pegasus plbart",
        reason="has a forward method without position_ids", **_LIKE_BART),
    _rows("bloom cpmant mpt musicgen musicgen_melody roformer trocr",
        reason="has a forward method without position_ids"),
    _rows("camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl",
        reason="does not number positions from 0", **_LIKE_ROBERTA),
    _rows("axk2 deepseek_v32 glm_moe_dsa hy_v4", reason="has layers of type indexed_attention"),
    _rows("openai-gpt rwkv xlm", reason="has no key-value cache"),
    _rows("xlstm", reason="has a forward method without position_ids"),
    _rows("dots3_note dots3_note_text", reason="has settings that vary from layer to layer", num_key_value_heads=4),
    _rows("falcon_mamba mamba", reason="has only recurrent layers"),
    _rows("inkling2_loop_text inkling2_text inkling_text", reason="has layers of type hybrid_sliding"),
    _rows("qwen4_exp qwen4_exp_text", reason="has layers of type indexed_attention",
        layer_types=["linear_attention", "full_attention"] * 2, ple_layer_ids=[], hc_lowrank=8,
        ngram_vocab_size_base=100, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
        indexer_compress_ratio=4),
    _rows("deepseek_v4", reason="has layers of type compressed_sparse_attention, heavily_compressed_attention"),
    _rows("doge", reason="has layers that attend only to the best keys, which depend on rounding", keep_window_size=12),
    _rows("gpt_neo", reason="gives different results with a cached prefix", attention_types=[[["global", "local"], 2]],
        window_size=12, num_layers=4),
    _rows("gpt_neox_japanese", reason="fails with a key-value cache", error="view size is not compatible"),
    _rows("jamba", reason="gives different results with a cached prefix", attn_layer_period=2, attn_layer_offset=1),
    _rows("mamba2", reason="has only recurrent layers", num_heads=8, head_dim=8, n_groups=2, state_size=8),
    _rows("marian", reason="has a forward method without position_ids",
        pad_token_id=1, decoder_start_token_id=1, **_LIKE_BART),
    _rows("minimax", reason="uses its own cache", error="uses cache of its own"),
    _rows("minimax_m3_vl_text", reason="has layers of type minimax_m3_sparse",
        layer_types=["full_attention", "minimax_m3_sparse"] * 2),
    _rows("mllama", reason="has layers that attend to another input", cross_attention_layers=[1], bos_token_id=0,
        pad_token_id=0),
    _rows("moshi", reason="gives different results with a cached prefix"),
    _rows("nemotron_h", reason="gives different results with a cached prefix", n_groups=2),
    _rows("prophetnet", reason="has a forward method without position_ids", decoder_ffn_dim=48, num_decoder_layers=2,
        num_encoder_layers=2, num_decoder_attention_heads=4, num_encoder_attention_heads=4),
    _rows("dory", reason="stores keys and values 2 times per pass"),
    _rows("lara_mini recurrent_gemma", reason="has layers of both types sliding_attention and linear_attention"),
    _rows("reformer", reason="has no key-value cache",
        axial_pos_embds_dim=(16, 16), attention_head_size=8, **_LIKE_BERT),
    _rows("whisper", reason="has a forward method without position_ids", pad_token_id=1, **_LIKE_BART),
    _rows("xlnet", reason="has no key-value cache", d_head=8, d_model=32, n_head=4, n_layer=2, d_inner=48),
    _rows("xmod", reason="does not number positions from 0", default_language="en_XX", languages=["en_XX"],
        **_LIKE_ROBERTA),
    _rows("zamba", reason="gives different results with a cached prefix",
        layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=2, num_key_value_heads=4, attn_layer_period=2, attn_layer_offset=1),
    _rows("zamba2", reason="gives different results with a cached prefix", num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2),
    _rows("bert, is_decoder=False", reason="is not causal"),
    _rows("falcon, alibi=True", reason="has attention biases (alibi)", alibi=True),
    _rows("gemma3_text, use_bidirectional_attention=True", reason="is not causal", use_bidirectional_attention=True),
)  # fmt: skip
FAMILIES = dict(sorted((row, family) for rows in _ALL for row, family in rows.items()))
