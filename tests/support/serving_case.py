"""Helpers of the tests of the runner and the scheduler: tiny random models, tiny engines, and answers without a
cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hicache.build.factory import build_engine
from hicache.config import EngineConfig
from hicache.engine import CacheEngine, Lease
from hicache.layout import ModelGeometry
from hicache.serving.attention import Attention
from hicache.serving.runner import Chunk, ModelRunner
from hicache.serving.support import check_supported
from hicache.storage import PageStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 97


def tiny_llama(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    head_dim: int = 16,
    vocab: int = VOCAB,
    kernel: str = "sdpa",
    device: str = DEVICE,
) -> Any:
    """A Llama model with some thousand weights in float32."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        eos_token_id=None,
        # This range is larger than the default, so that logits differ by more than rounding.
        initializer_range=0.2,
        attn_implementation=kernel,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval().to(device)


@functools.cache
def shared(build: Callable[..., Any], *args: Any, **changes: Any) -> Any:
    """Return `build(*args, **changes)`, which runs once per session. Tests must not change the model."""
    return build(*args, **changes)


@functools.cache
def geometry_of(model: Any) -> ModelGeometry:
    """Return `check_supported(model)`, which runs once per model."""
    return check_supported(model)


def tiny_runner(model: Any, engine: CacheEngine, attention: Attention = "auto") -> ModelRunner:
    return ModelRunner(model, engine, geometry_of(model), attention=attention)


def decode(runner: ModelRunner, leases: Sequence[Lease], tokens: Sequence[int]) -> torch.Tensor:
    """Run a pass over the last token of each lease, `tokens[i]`. Returns logits [requests, vocab]."""
    chunks = []
    for lease, token in zip(leases, tokens, strict=True):
        sequence = np.zeros(lease.length, dtype=np.int64)  # the pass reads only the last token
        sequence[-1] = token
        chunks.append(Chunk(lease, sequence, lease.length - 1, lease.length))
    return runner.forward(chunks)


def tiny_engine(
    model: Any, geometry: ModelGeometry | None = None, store: PageStore | None = None, **settings: Any
) -> CacheEngine:
    """An engine with pages of 16 tokens (4 on the device) for `model`, not started. `geometry`: that of the model, if
    known. `store`: the store of its disk tier."""
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
        "prefill_tokens_per_s": 0,  # loads must not depend on measured times
        "host_bytes": 0,
        "advanced": {"transfer_chunk_tokens": 64, "staging_bytes": 1 << 20},
    }
    return build_engine(EngineConfig.from_dict({**defaults, **settings}), geometry or geometry_of(model), store=store)


def assert_released(engine: CacheEngine) -> None:
    """Assert that every row is free, and that every slot is free or evictable."""
    engine.flush()
    engine.check()
    stats = engine.stats()
    assert stats["engine.leases"] == stats["device.protected_tokens"] == 0
    assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == engine.pool.size
    assert engine.req_to_token.available_size() == engine.req_to_token.size


def token_bytes(model: Any) -> int:
    """KV bytes of one token in float32."""
    config = model.config
    return int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4)


def prompt(length: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int64)


@torch.inference_mode()
def plain_logits(model: Any, tokens: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
    """Logits [len, vocab] of one forward pass over all tokens, without any cache."""
    ids = torch.tensor(np.asarray(tokens), device=model.device)[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def plain_greedy(model: Any, tokens: npt.NDArray[np.int64], num_new: int, draft: Sequence[int] = ()) -> tuple[int, ...]:
    """The greedy continuation of `tokens` by `num_new` tokens, by complete forward passes without a cache.

    `draft`: guessed tokens that one pass verifies, as in speculative decoding. Guessed tokens change the number of
    passes, not the answer.
    """
    sequence, draft = tokens.tolist(), list(draft)[: num_new - 1]
    while len(sequence) < len(tokens) + num_new:
        greedy = plain_logits(model, [*sequence, *draft])[len(sequence) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(draft, greedy, strict=False)) if a != b), len(draft))
        sequence += greedy[: accepted + 1]
        draft = []
    return tuple(sequence[len(tokens) :])


@torch.inference_mode()
def generate(model: Any, tokens: npt.NDArray[np.int64], max_new_tokens: int) -> tuple[int, ...]:
    """The greedy continuation of `tokens`, int64 [len], by transformers' `generate` with its own cache.

    This reference shares no code with the runner, the pools or the engine. `generate` is called so that it ignores the
    model's own generation settings, and does not change them.
    """
    ids = torch.from_numpy(tokens).to(model.device)[None]
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            ),
        )
    finally:
        model.generation_config = settings
    return tuple(output[0, len(tokens) :].tolist())
