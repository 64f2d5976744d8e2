"""Configurations of known models: what geometry and work follow from, as in the `config.json` that each publishes."""

from __future__ import annotations

from typing import Any

_LLAMA = {"model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
_QWEN3 = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
    },
    "llama-3.1-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "deepseek-v3": {  # the other sizes are the defaults of transformers
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
    "gpt-oss-120b": {  # the other sizes are the defaults of transformers
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "max_position_embeddings": 262144,
    },
}
