"""The reference scheduler end to end: tiny tiers, many requests, outputs compared with forwards without a cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from disk_case import Clock
from hicache.engine import CacheEngine, CacheRequest
from hicache.errors import OutOfSlots, PromptTooLong
from hicache.serving.passes import Chunk
from hicache.serving.request import Request, RequestOutput
from hicache.serving.scheduler import Scheduler
from hybrid_case import tiny_qwen3_next
from serving_case import (
    VOCAB,
    assert_released,
    plain_greedy,
    prompt,
    shared,
    tiny_engine,
    tiny_llama,
    tiny_runner,
    token_bytes,
)


def _scheduler(engine: CacheEngine, model: Any, **settings: Any) -> Scheduler:
    return Scheduler(engine, tiny_runner(model, engine), **settings)


def _serve(engine: CacheEngine, scheduler: Scheduler, requests: list[Request]) -> dict[str, RequestOutput]:
    """Serve all requests, with `engine.check()` after every step. Returns outputs by request id."""
    for request in requests:
        scheduler.submit(request)
    outputs: dict[str, RequestOutput] = {}
    while scheduler.num_unfinished:
        outputs.update({output.request_id: output for output in scheduler.step()})
        engine.check()
    return outputs


def test_pages_are_exchanged_while_others_are_served(device: str) -> None:
    """Three long prompts, of which device and host together hold nearly all pages, are repeated while another request
    decodes. Each prompt waits for free pages, has a staged load, and gets the answer without a cache. The other
    request gets tokens meanwhile."""
    model = shared(tiny_llama, device=device)
    prompts, short = [prompt(240, seed) for seed in range(3)], prompt(20, 9)
    with tiny_engine(model, device_tokens=384, host_bytes=400 * token_bytes(model)) as engine:
        scheduler = _scheduler(engine, model, chunk_tokens=32)
        _serve(engine, scheduler, [Request(f"first{at}", tokens, 1) for at, tokens in enumerate(prompts)])
        scheduler.submit(Request("short", short, 80))
        num_beside = 0
        for at, tokens in enumerate(prompts):
            scheduler.submit(Request(f"again{at}", tokens, 4))
            outputs = dict[str, RequestOutput]()
            while f"again{at}" not in outputs:
                num_before = engine.stats()["admit.exchange_pending_attempts"]
                outputs.update({output.request_id: output for output in scheduler.step()})
                num_beside += (
                    engine.stats()["admit.exchange_pending_attempts"] > num_before and scheduler.num_running > 0
                )
                engine.check()
            assert outputs[f"again{at}"].tokens == plain_greedy(model, tokens, 4)
            assert outputs[f"again{at}"].hit.tokens > 150
        assert (num_beside > 3 or device != "cpu") and engine.stats()["exchange.loads"] > 3
        scheduler.abort_all()
        assert_released(engine)


SPEEDS = {  # seconds of a pass over n tokens of a prompt from position p on
    "slow": lambda n, p: 0.02 + n / 100,
    "slower than any pass may be": lambda n, p: 1.0 + n / 40,
    "fast": lambda n, p: 0.002 + n / 20_000,
    "by attention": lambda n, p: 0.02 + n * (1 + p / 1024) / 300,
}


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_long_prompt_does_not_stop_concurrent_streams(speed: str) -> None:
    """While another request decodes, passes over a prompt take at most `max_pass_s` after the first one, unless the
    smallest chunk takes longer, and at least half of it while tokens are left. Without other requests they take at most
    four times as long."""
    model, clock, passes = shared(tiny_llama, device="cpu"), Clock(), list[tuple[int, float]]()
    with tiny_engine(model, device_tokens=8192) as engine:
        runner = tiny_runner(model, engine)

        class Slow:
            def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
                for chunk in chunks:
                    if not chunk.is_decode:
                        passes.append((chunk.end - chunk.start, SPEEDS[speed](chunk.end - chunk.start, chunk.start)))
                        clock.now_s += passes[-1][1]
                return runner.forward(chunks)

        scheduler = Scheduler(engine, Slow(), max_pass_s=0.5, clock=clock)
        scheduler.submit(Request("stream", prompt(4, seed=1), 60))
        scheduler.step()
        scheduler.submit(Request("long", prompt(450, seed=2), 1))
        while scheduler.num_unfinished:
            scheduler.step()
        concurrent = passes.copy()
        scheduler.run([Request("alone", prompt(450, seed=3), 1)])
    assert all(seconds <= 2 for _, seconds in passes[len(concurrent) :]) and len(passes) < 2 * len(concurrent)
    (_, first), *later = concurrent
    assert first == SPEEDS[speed](4, 0) and sum(size for size, _ in later) == 450
    assert all(seconds <= 0.5 or size <= 16 for size, seconds in later)
    complete = [seconds for _, seconds in later[3:-1]]
    assert all(seconds >= 0.25 for seconds in complete) and (len(later) == 1) == (speed == "fast")


def test_a_prompt_that_never_fits_fails_alone() -> None:
    """A request that is too long for the device or the request table fails with PromptTooLong. Other requests are
    served."""
    model = shared(tiny_llama)
    with tiny_engine(model, device_tokens=128, max_context_len=512) as engine:
        requests = [
            Request("device", prompt(200, seed=1), 2),
            Request("table", prompt(20, seed=2), 500),
            Request("grows", prompt(100, seed=3), 60),
            Request("fits", prompt(60, seed=4), 4),
        ]
        outputs = _serve(engine, _scheduler(engine, model), requests)
        assert_released(engine)
    settings = {"device": "device_tokens", "table": "max_context_len", "grows": "device_tokens"}
    for name, setting in settings.items():
        assert outputs[name].finish_reason == "error"
        assert isinstance(outputs[name].error, PromptTooLong) and setting in str(outputs[name].error)
    # The tokens generated before the device was full are correct.
    grown = outputs["grows"].tokens
    assert len(grown) >= 20 and grown == plain_greedy(model, prompt(100, seed=3), len(grown), grown)
    assert outputs["fits"].tokens == plain_greedy(model, prompt(60, seed=4), 4)


def test_a_stalled_request_fails_after_the_timeout() -> None:
    """If no running request could free slots for a waiting one, it fails after the timeout instead of hanging."""
    model = shared(tiny_llama)
    with tiny_engine(model, device_tokens=128) as engine:
        scheduler = _scheduler(engine, model, stall_timeout_s=60.0, clock=itertools.count(step=10.0).__next__)
        lease = engine.acquire(CacheRequest("not the scheduler's", prompt(100, seed=1)))
        output = scheduler.run([Request("r", prompt(60, seed=2), 2)])[0]
        engine.release(lease)
        assert_released(engine)
    assert output.finish_reason == "error" and isinstance(output.error, OutOfSlots)


def test_states_of_a_long_prompt_hit() -> None:
    """A prompt of 2250 tokens in chunks of 2048 leaves states at 2048, at powers of two below, at the last multiple of
    64 and at its end."""
    model = shared(tiny_qwen3_next, max_position_embeddings=4096)
    settings = {"device_tokens": 5120, "max_context_len": 3072, "mamba_chunk_tokens": 64, "mamba_size": 14}
    with tiny_engine(model, **settings, page_size=1, mamba_track_interval=256) as engine:
        scheduler = _scheduler(engine, model, chunk_tokens=2048)

        def serve(name: str, tokens: np.ndarray) -> RequestOutput:
            (output,) = scheduler.run([Request(name, tokens, 3)])
            assert output.error is None
            return output

        tokens = prompt(2250, 5)
        first = serve("first", tokens)
        assert first.cached_len == 0
        # A prompt of 2048 tokens hits at most 2047. The first request of this prompt hits the state at 1024 of the
        # longer prompt, the next one its own state at 1984.
        for num_tokens, hit in ((2250, 2240), (2225, 2048), (2048, 1024), (2048, 1984)):
            again = serve(f"again {num_tokens}", tokens[:num_tokens])
            assert again.cached_len == hit, num_tokens
            if num_tokens == 2250:
                assert again.tokens == first.tokens
        longer = np.concatenate([tokens, [int(first.tokens[0])], prompt(40, 6) % VOCAB])
        assert serve("longer", longer).cached_len >= 2250
        engine.check()
