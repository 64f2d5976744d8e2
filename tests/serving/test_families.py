"""Hybrid and sliding-window models end to end: scheduler, runner and engine give the tokens of no cache at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache import CacheEngine, EngineConfig, build_engine
from hicache.serving.request import Request, Result
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from hicache.serving.support import check_supported
from hybrid_case import tiny_gemma, tiny_mistral, tiny_qwen3_next
from serving_case import VOCAB, plain_greedy, prompt

MODELS = [
    pytest.param(tiny_qwen3_next, id="qwen3_next"),
    pytest.param(lambda **changes: tiny_gemma(40, **changes), id="gemma3"),
    pytest.param(lambda **changes: tiny_mistral(40, **changes), id="mistral"),
]
TURNS = 3


def engine_for(model: Any, **settings: Any) -> CacheEngine:
    """Pages of 16 tokens, 4 on the device; room for a few prompts of 200 tokens, and a host tier for more."""
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
    }
    return build_engine(EngineConfig.from_dict({**defaults, **settings}), check_supported(model))


def ask(scheduler: Scheduler, name: str, tokens: np.ndarray, max_new_tokens: int) -> Result:
    (result,) = scheduler.run([Request(name, tokens, max_new_tokens)])
    assert result.error is None
    return result


def hits(result: Result) -> int:
    return result.hit.device + result.hit.host + result.hit.disk


@pytest.mark.parametrize("make", MODELS)
def test_conversations_go_on_with_the_same_tokens(make: Callable[..., Any]) -> None:
    """Three conversations of three turns, more than the device holds: every answer is the one without a cache."""
    model = make()
    with engine_for(model) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine), chunk_tokens=64)
        talks = [prompt(150, seed) for seed in range(3)]
        reused = []
        for turn in range(TURNS):
            for talk, tokens in enumerate(talks):
                result = ask(scheduler, f"{talk}.{turn}", tokens, 20)
                assert result.tokens == plain_greedy(model, tokens, 20)
                reused.append(hits(result) / len(tokens))
                talks[talk] = np.concatenate([tokens, np.array(result.tokens), prompt(9, 10 * talk + turn)])
                engine.check()
        assert reused[:3] == [0.0] * 3 and min(reused[3:]) > 0.7
        engine.flush()
        engine.check()
        assert engine.stats()["restore.bytes"] > 0


@pytest.mark.parametrize("make", MODELS)
def test_requests_together_give_what_they_give_alone(make: Callable[..., Any]) -> None:
    """Four requests at a time over a common stem, in chunks, with preemptions when slots run out."""
    model = make()
    stem = prompt(90, 1)
    asked = [np.concatenate([stem, prompt(20 + 5 * n, n + 2)]) for n in range(6)]
    with engine_for(model, device_tokens=480, window_tokens=384, mamba_size=20) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine), chunk_tokens=48, max_running=4)
        results = {r.request_id: r for r in scheduler.run([Request(str(n), t, 24) for n, t in enumerate(asked)])}
        for n, tokens in enumerate(asked):
            assert results[str(n)].tokens == plain_greedy(model, tokens, 24), f"request {n}"
        engine.flush()
        engine.check()
        stats = engine.stats()
        assert stats["engine.leases"] == stats["device.protected_tokens"] == 0


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_same_prompt_again_hits(make: Callable[..., Any], page_size: int) -> None:
    """1024 tokens asked twice: all but the last page are reused, whatever the page, and the answer is the same."""
    model = make(max_position_embeddings=2048)
    settings = {"page_size": page_size, "host_page_size": 64, "host_bytes": 0, "device_tokens": 2560}
    with engine_for(model, **settings, mamba_chunk_tokens=64, mamba_track_interval=256, window_tokens=2048) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine))
        tokens = prompt(1024, 3)
        first, second = (ask(scheduler, name, tokens, 4) for name in ("first", "second"))
        assert hits(first) == 0 and first.tokens == second.tokens
        recurrent = engine._parts.states is not None
        assert hits(second) == (960 if recurrent or page_size == 64 else 1023)


def test_long_prompts_hit_behind_the_chunk() -> None:
    """A prompt of 9000 tokens in chunks of 8192: states at 8192, at the last multiple of 64, and at the end."""
    model = tiny_qwen3_next(max_position_embeddings=16384)
    settings = {"host_bytes": 0, "device_tokens": 20480, "max_context_len": 12288, "mamba_chunk_tokens": 64}
    with engine_for(model, **settings, page_size=1, mamba_track_interval=256) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine), chunk_tokens=8192)
        tokens = prompt(9000, 5)
        first = ask(scheduler, "first", tokens, 3)
        assert hits(first) == 0
        # 8192 tokens leave out their last: no state of fewer was kept by a longer prompt. It keeps one at 8128.
        for asked, reused in ((9000, 8960), (8900, 8192), (8192, 0), (8192, 8128)):
            again = ask(scheduler, f"again {asked}", tokens[:asked], 3)
            assert hits(again) == reused, asked
            if asked == 9000:
                assert again.tokens == first.tokens
        longer = np.concatenate([tokens, [int(first.tokens[0])], prompt(40, 6) % VOCAB])
        assert hits(ask(scheduler, "longer", longer, 3)) >= 9000
        engine.check()
