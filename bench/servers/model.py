"""The model of random weights. Its only file is the configuration, because the server generates the weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

_8B = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 262144,
    "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false}"""
_TINY = """{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256}"""

_LOG_DECAY = -6.0  # log decay of linear attention, with which states depend on hundreds of tokens


def write_config(folder: Path, small: bool, num_layers: int = 0) -> Path:
    """Write the configuration of the model to a new folder in `folder`, and return the new folder. `num_layers`: number
    of layers; 0 means the default."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = json.loads(_8B) | (json.loads(_TINY) if small else {})
    config |= {"num_hidden_layers": num_layers} if num_layers else {}
    (model / "config.json").write_text(json.dumps(config))
    return model


def fill_with_normals(model: torch.nn.Module) -> None:
    """Fill the weights with normal random numbers, which are equal in each process. The `dummy` weights of servers are
    too small: with them, no token depends on keys and values, and keys and values compress to a third. With normal
    random numbers, tokens depend on attention."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(_LOG_DECAY if name.endswith("A_log") else 1)
            else:
                generator = torch.Generator(weight.device).manual_seed(number)
                weight.normal_(0, 4 / math.sqrt(weight.shape[-1]), generator=generator)
