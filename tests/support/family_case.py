"""Every causal language model family of transformers as a model with some ten thousand weights.

A model has the default configuration of its family with small sizes, and the `changes` of its row in family_table.py.
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

# Size of each attribute that a configuration may have.
_NAMES_OF_SIZE = {
    32: "hidden_size embedding_size input_embedding_size output_embedding_size mamba_d_ssm",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff "
    "intermediate_size_mlp dense_intermediate_size shared_intermediate_size",
    4: "num_attention_heads n_routed_experts num_experts num_local_experts linear_num_value_heads "
    "mamba_n_heads mamba_num_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk zero_expert_num "
    "linear_num_key_heads index_n_heads",
    8: "head_dim dim_head linear_key_head_dim linear_value_head_dim linear_head_dim kv_lora_rank q_lora_rank "
    "o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim index_topk swa_head_dim "
    "hidden_size_per_layer_input mamba_d_state mamba_head_dim ssm_state_size pronunciation_embed_dim "
    "shape_embed_dim router_hidden_size",
    512: "max_position_embeddings",
    16: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size rel_extent mamba_d_head shared_experts_intermediate_size",
    1: "n_group topk_group",
}
_SIZES: dict[str, Any] = {
    **{name: size for size, names in _NAMES_OF_SIZE.items() for name in names.split()},
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    "sliding_window": WINDOW,
    # This range is larger than the default, so that logits differ by more than rounding.
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
    # Two layers are enough if all layers are equal; four layers show every pattern of layer kinds.
    is_full = row in FAMILIES and FAMILIES[row].kind == "full"
    requested = {**_SIZES, "num_hidden_layers": 2 if is_full else 4}
    sizes = {key: size for key, size in requested.items() if values.get(names.get(key, key)) is not None}
    of_row = FAMILIES[row].changes if row in FAMILIES else {}
    return type(default)(**{**sizes, **_NO_TOKENS, **of_row, **changes})


def tiny_family(row: str, device: str = DEVICE, **changes: Any) -> Any:
    """A random model of a row in the table, in float32. On the device "meta" the model has shapes but no weights."""
    config = tiny_config(row, **changes)
    build = getattr(hf, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.split(",", maxsplit=1)[0]])
    if type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        build = hf.AutoModelForCausalLM.from_config  # for some families this class builds a model of text and more
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
