"""Hybrid, window, chunked and latent models end to end: scheduler, runner and engine give the tokens of no cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from family_case import tiny_family
from hicache import CacheEngine, EngineConfig, build_engine
from hicache.serving.request import Request, RequestOutput
from hicache.serving.scheduler import Scheduler
from hybrid_case import tiny_gemma, tiny_mistral, tiny_qwen3_next
from serving_case import VOCAB, geometry_of, plain_greedy, prompt, shared, tiny_runner

MODELS: dict[str, Callable[..., Any]] = {
    "qwen3_next": partial(shared, tiny_qwen3_next),
    "gemma3": partial(shared, tiny_gemma, 40),
    "mistral": partial(shared, tiny_mistral, 40),
    **{
        row: partial(shared, tiny_family, row, max_position_embeddings=4096)
        for row in ("gemma4_text", "llama4_text", "falcon_h1", "lfm2", "deepseek_v3", "kimi_linear")
    },
}


def models(by_default: str) -> pytest.MarkDecorator:
    """Each model; by default, those named."""
    marks = {name: () if name in by_default.split() else pytest.mark.long for name in MODELS}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def engine_for(model: Any, **settings: Any) -> CacheEngine:
    """Pages of 16 tokens, 4 on the device; capacity for a few prompts of 200 tokens, and a host tier for more."""
    defaults: dict[str, Any] = {
        "device_tokens": 640,
        "host_bytes": 8 << 20,
        "page_size": 4,
        "host_page_size": 16,
        "window_tokens": 320,
        "mamba_size": 14,
        "mamba_chunk_tokens": 16,
        "mamba_track_interval": 16,
        "max_requests": 4,
        "max_context_len": 2048,
        "dtype": "float32",
        "device": str(model.device),
        "model_id": "tiny",
        "prefill_tokens_per_s": 0,  # what is loaded is to depend on no time
    }
    return build_engine(EngineConfig.from_dict({**defaults, **settings}), geometry_of(model))


def serve(scheduler: Scheduler, name: str, tokens: np.ndarray, max_new_tokens: int) -> RequestOutput:
    (output,) = scheduler.run([Request(name, tokens, max_new_tokens)])
    assert output.error is None
    return output


@models("qwen3_next gemma3 gemma4_text deepseek_v3")
def test_concurrent_requests_have_the_tokens_of_no_cache(name: str) -> None:
    """Four concurrent requests with a common prefix, in chunks, with preemptions when slots run out."""
    model = MODELS[name]()
    prefix = prompt(90, 1)
    prompts = [np.concatenate([prefix, prompt(20 + 5 * n, n + 2)]) for n in range(6)]
    with engine_for(model, device_tokens=480, window_tokens=384, mamba_size=20) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=48, max_running=4)
        outputs = {o.request_id: o for o in scheduler.run([Request(str(n), t, 24) for n, t in enumerate(prompts)])}
        for n, tokens in enumerate(prompts):
            answer = outputs[str(n)].tokens
            assert answer == plain_greedy(model, tokens, 24, answer), f"request {n}"
        engine.flush()
        engine.check()
        stats = engine.stats()
        assert stats["engine.leases"] == stats["device.protected_tokens"] == 0


@pytest.mark.parametrize(("name", "page_size"), [("lfm2", 1), ("qwen3_next", 64), ("mistral", 64)])
def test_the_same_prompt_again_hits(name: str, page_size: int) -> None:
    """1024 tokens served twice: the second request hits all but the last page, for any page size, with the same
    tokens."""
    model = MODELS[name]()
    settings = {"page_size": page_size, "host_page_size": 64, "host_bytes": 0, "device_tokens": 2560}
    with engine_for(model, **settings, mamba_chunk_tokens=64, mamba_track_interval=256, window_tokens=2048) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        tokens = prompt(1024, 3)
        first, second = (serve(scheduler, which, tokens, 4) for which in ("first", "second"))
        assert first.cached_len == 0 and first.tokens == second.tokens
        is_hybrid = bool(geometry_of(model).recurrent_layers)
        assert second.cached_len == (960 if is_hybrid or page_size == 64 else 1023)


def test_states_of_a_long_prompt_hit() -> None:
    """A prompt of 2250 tokens in chunks of 2048 leaves states at 2048, at powers of two below, at the last multiple of
    64 and at its end."""
    model = shared(tiny_qwen3_next, max_position_embeddings=4096)
    settings = {"host_bytes": 0, "device_tokens": 5120, "max_context_len": 3072, "mamba_chunk_tokens": 64}
    with engine_for(model, **settings, page_size=1, mamba_track_interval=256) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=2048)
        tokens = prompt(2250, 5)
        first = serve(scheduler, "first", tokens, 3)
        assert first.cached_len == 0
        # A prompt of 2048 tokens hits at most 2047: first the state at 1024 of the longer one, then its own at 1984.
        for num_tokens, hit in ((2250, 2240), (2225, 2048), (2048, 1024), (2048, 1984)):
            again = serve(scheduler, f"again {num_tokens}", tokens[:num_tokens], 3)
            assert again.cached_len == hit, num_tokens
            if num_tokens == 2250:
                assert again.tokens == first.tokens
        longer = np.concatenate([tokens, [int(first.tokens[0])], prompt(40, 6) % VOCAB])
        assert serve(scheduler, "longer", longer, 3).cached_len >= 2250
        engine.check()
