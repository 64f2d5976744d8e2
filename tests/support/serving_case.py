"""What the tests of the runner and the scheduler share: tiny random models, tiny engines, and answers without a
cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache.config import EngineConfig
from hicache.engine import CacheEngine
from hicache.factory import build_engine
from hicache.layout import ModelGeometry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 97


def tiny_llama(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    kernel: str = "sdpa",
    device: str = DEVICE,
) -> Any:
    """A Llama-architecture model of some thousand weights in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=None,
        # Larger than the default: logits that lie apart, so that rounding does not choose the token.
        initializer_range=0.2,
        attn_implementation=kernel,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval().to(device)


def tiny_engine(model: Any, **settings: Any) -> CacheEngine:
    """An engine with pages of 16 tokens (4 on the device) for `model`; not started."""
    config = model.config
    geometry = ModelGeometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    defaults: dict[str, Any] = {
        "device_tokens": 512,
        "page_size": 4,
        "host_page_size": 16,
        "max_requests": 8,
        "max_context_len": 1024,
        "dtype": "float32",
        "device": str(model.device),
        "model_id": "tiny",
        "prefetch_mode": "wait_complete",
        "transfer_chunk_tokens": 64,
        "staging_bytes": 1 << 20,
    }
    return build_engine(EngineConfig.from_dict({**defaults, **settings}), geometry)


def token_bytes(model: Any) -> int:
    """Bytes of KV of one token in float32."""
    config = model.config
    return int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4)


def prompt(length: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int64)


@torch.inference_mode()
def plain_logits(model: Any, tokens: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
    """Logits [len, vocab] of one forward pass over everything, without any cache."""
    ids = torch.tensor(np.asarray(tokens), device=model.device)[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def plain_greedy(model: Any, tokens: npt.NDArray[np.int64], num_new: int) -> tuple[int, ...]:
    """`num_new` tokens, each the most likely one after a whole forward pass over all before it."""
    sequence = tokens.tolist()
    for _ in range(num_new):
        sequence.append(int(plain_logits(model, sequence)[-1].argmax()))
    return tuple(sequence[len(tokens) :])
