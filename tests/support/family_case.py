"""Every causal language model family of transformers as a model with some ten thousand weights.

A model has its family's default configuration with small sizes and the changes of the table.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_table import FAMILIES, WINDOW
from serving_case import DEVICE, VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "dim_ff": 48,
    "dim_head": 8,
    "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "embedding_size": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "n_group": 1,
    "topk_group": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_topk": 8,
    "rel_extent": 16,
    "swa_head_dim": 8,
    "unpadded_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "pronunciation_embed_dim": 8,
    "shape_embed_dim": 8,
    "router_hidden_size": 8,
    "index_n_heads": 2,
    "shared_experts_intermediate_size": 16,
    # Larger than the default, so logits differ by more than rounding.
    "initializer_range": 0.2,
    "initializer_factor": 8.0,
    "init_std": 0.2,
}
_NO_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def tiny_config(row: str, **changes: Any) -> Any:
    """A small configuration of the text model of a row in the table, or of any family."""
    family = row.split(",", maxsplit=1)[0]
    default = CONFIG_MAPPING[family]()
    default = default.sub_configs.get("decoder", type(default))() if family.startswith("musicgen") else default
    default = default.get_text_config(decoder=True)
    values, names = default.to_dict(), default.attribute_map
    # Two layers show what equal layers do; four are enough for every pattern of kinds.
    is_full = row in FAMILIES and FAMILIES[row].kind == "full"
    wanted = {**_SIZES, "num_hidden_layers": 2 if is_full else 4}
    sizes = {key: size for key, size in wanted.items() if values.get(names.get(key, key)) is not None}
    of_row = FAMILIES[row].changes if row in FAMILIES else {}
    return type(default)(**{**sizes, **_NO_TOKENS, **of_row, **changes})


def tiny_family(row: str, device: str = DEVICE, **changes: Any) -> Any:
    """A random model of a row in the table, in float32. On the device "meta" it has shapes but no weights."""
    config = tiny_config(row, **changes)
    build = getattr(hf, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.split(",", maxsplit=1)[0]])
    if type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        build = hf.AutoModelForCausalLM.from_config  # some families name a class for more than text
    with torch.random.fork_rng(devices=[]), torch.device("meta") if device == "meta" else contextlib.nullcontext():
        torch.manual_seed(0)
        return build(config).eval().to(device)


def save_model(path: Path, config: Any) -> None:
    """Save a random model of `config` and a tokenizer with one token per byte in directory `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)
