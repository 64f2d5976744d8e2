"""The reference scheduler end to end: tiny tiers, many requests, answers compared with a model that has no cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hicache.engine import CacheEngine, CacheRequest
from hicache.errors import ConfigError, OutOfSlots, PromptTooLong, TransferError
from hicache.kernels.page_copy import PageMover
from hicache.serving.request import Request, Result, Sampling
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from serving_case import plain_greedy, prompt, tiny_engine, tiny_llama, token_bytes

PAGE = 16


def _tiers(model: Any, tmp_path: Path, *, device: int, host: int, **settings: Any) -> CacheEngine:
    return tiny_engine(
        model,
        device_tokens=device,
        host_bytes=host * token_bytes(model),
        disk={"path": str(tmp_path / "store"), "readers": 2},
        **settings,
    )


def _scheduler(engine: CacheEngine, model: Any, **settings: Any) -> Scheduler:
    return Scheduler(engine, ModelRunner(model, engine), **settings)


def _serve(engine: CacheEngine, scheduler: Scheduler, requests: list[Request]) -> dict[str, Result]:
    """Serve all, with the engine's own check after every step."""
    for request in requests:
        scheduler.submit(request)
    results: dict[str, Result] = {}
    while scheduler.num_unfinished:
        for result in scheduler.step():
            results[result.request_id] = result
        engine.check()
    return results


def _nothing_held(engine: CacheEngine) -> None:
    """Every row is back, and every slot is free or can be evicted: the tree's pages alone are left."""
    engine.flush()
    engine.check()
    assert engine.req_to_token.available_size() == engine.req_to_token.size
    stats = engine.stats()
    assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == engine.pool.size


@pytest.mark.parametrize("chunk_tokens", [24, 8192])
def test_answers_through_three_tiers_are_those_without_a_cache(tmp_path: Path, chunk_tokens: int) -> None:
    """Growing conversations over tiers too small for them: hits from all three, and every token as without a cache."""
    model = tiny_llama()
    talks = [prompt(length, seed=i) for i, length in enumerate([90, 70, 150, 110, 60])]
    tiers = {"device": 0, "host": 0, "disk": 0}
    with _tiers(model, tmp_path, device=192, host=256) as engine:
        scheduler = _scheduler(engine, model, chunk_tokens=chunk_tokens)
        for turn in range(4):
            for i in range(5) if turn % 2 == 0 else reversed(range(5)):
                results = _serve(engine, scheduler, [Request(f"{i}.{turn}", talks[i], 6)])
                result = results[f"{i}.{turn}"]
                assert result.tokens == plain_greedy(model, talks[i], 6)
                assert result.cached_len + result.computed_tokens == result.prompt_tokens == len(talks[i])
                assert result.cached_len % PAGE == 0
                for tier in tiers:
                    tiers[tier] += getattr(result.hit, tier)
                talks[i] = np.concatenate([talks[i], result.tokens, prompt(5, seed=turn)])
        _nothing_held(engine)
    assert all(tokens >= PAGE for tokens in tiers.values()), tiers


def test_many_requests_at_a_time(tmp_path: Path) -> None:
    """Twelve requests that share fronts, submitted at once to a device that holds three: all answers right."""
    model = tiny_llama()
    fronts = [prompt(64, seed=1), prompt(48, seed=2)]
    prompts = [np.concatenate([fronts[i % 2], prompt(3 + 7 * i, seed=20 + i)]) for i in range(12)]
    with _tiers(model, tmp_path, device=352, host=512, max_requests=6) as engine:
        scheduler = _scheduler(engine, model, chunk_tokens=40)
        requests = [Request(f"r{i}", tokens, 4 + i) for i, tokens in enumerate(prompts)]
        results = _serve(engine, scheduler, requests)
        _nothing_held(engine)
    for i, tokens in enumerate(prompts):
        assert results[f"r{i}"].tokens == plain_greedy(model, tokens, 4 + i)
        assert results[f"r{i}"].finish == "length"
    assert sum(result.cached_len for result in results.values()) > 0


def test_a_second_process_finds_the_first_ones_pages(tmp_path: Path) -> None:
    """After a restart over the same directory the prompts come from disk, and the answers stay the same."""
    model = tiny_llama()
    tokens = prompt(100, seed=3)
    answers = []
    for _ in range(2):
        with _tiers(model, tmp_path, device=256, host=256) as engine:
            answers.append(_serve(engine, _scheduler(engine, model), [Request("r", tokens, 5)])["r"])
    assert answers[0].hit.disk == 0 and answers[1].hit.disk == 96
    assert answers[0].tokens == answers[1].tokens == plain_greedy(model, tokens, 5)


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    """A seeded request draws the same tokens alone, among others, and behind a cached prefix."""
    model = tiny_llama()
    how = [Sampling(temperature=1.0, top_k=20 * (i % 2), top_p=0.9 if i % 3 else 1.0, seed=i) for i in range(6)]
    requests = [Request(f"r{i}", prompt(20 + 9 * i, seed=i), 12, sampling=how[i]) for i in range(6)]
    with tiny_engine(model) as engine:
        scheduler = _scheduler(engine, model)
        together = {result.request_id: result for result in scheduler.run(requests)}
        alone = {request.request_id: scheduler.run([request])[0] for request in requests}
    assert {name: result.tokens for name, result in together.items()} == {n: r.tokens for n, r in alone.items()}
    assert all(alone[f"r{i}"].cached_len > 0 for i in range(6))
    assert len({result.tokens for result in together.values()}) == 6


def test_a_device_without_room_takes_slots_from_the_youngest(tmp_path: Path) -> None:
    """Answers that outgrow the device preempt the youngest request, which goes on later with the same tokens."""
    model = tiny_llama()
    prompts = [prompt(40, seed=i) for i in range(4)]
    with _tiers(model, tmp_path, device=176, host=512) as engine:
        requests = [Request(f"r{i}", tokens, 60) for i, tokens in enumerate(prompts)]
        results = _serve(engine, _scheduler(engine, model), requests)
        _nothing_held(engine)
    assert sum(result.preemptions for result in results.values()) > 0
    assert results["r0"].preemptions == 0
    for i, tokens in enumerate(prompts):
        assert results[f"r{i}"].tokens == plain_greedy(model, tokens, 60)


def test_more_requests_than_rows_wait_their_turn() -> None:
    """With one row of the request table, requests run one after the other in the order they came."""
    model = tiny_llama()
    with tiny_engine(model, max_requests=1) as engine:
        results = _scheduler(engine, model).run([Request(f"r{i}", prompt(30, seed=i), 3) for i in range(4)])
        _nothing_held(engine)
    assert [result.request_id for result in results] == ["r0", "r1", "r2", "r3"]
    assert results[3].tokens == plain_greedy(model, prompt(30, seed=3), 3)


def test_a_prompt_that_never_fits_fails_alone() -> None:
    """Too long for the device or the table: that request's result carries PromptTooLong; the others are served."""
    model = tiny_llama()
    with tiny_engine(model, device_tokens=128, max_context_len=512) as engine:
        requests = [
            Request("device", prompt(200, seed=1), 2),
            Request("table", prompt(20, seed=2), 500),
            Request("grows", prompt(100, seed=3), 60),
            Request("fits", prompt(60, seed=4), 4),
        ]
        results = _serve(engine, _scheduler(engine, model), requests)
        _nothing_held(engine)
    knobs = {"device": "device_tokens", "table": "max_context_len", "grows": "device_tokens"}
    for name, knob in knobs.items():
        assert results[name].finish == "failed"
        assert isinstance(results[name].error, PromptTooLong) and knob in str(results[name].error)
    # Until the device was full, what it generated is right.
    grown = results["grows"].tokens
    assert len(grown) >= 20 and grown == plain_greedy(model, prompt(100, seed=3), len(grown))
    assert results["fits"].tokens == plain_greedy(model, prompt(60, seed=4), 4)


def test_an_end_token_ends_the_answer() -> None:
    """Generation stops behind the first end token, which belongs to the answer."""
    model = tiny_llama()
    tokens = prompt(30, seed=5)
    answer = plain_greedy(model, tokens, 12)
    end = answer[7]
    with tiny_engine(model) as engine:
        result = _scheduler(engine, model).run([Request("r", tokens, 12, eos_ids=frozenset([end]))])[0]
    assert result.finish == "eos"
    assert result.tokens == answer[: answer.index(end) + 1]


def test_an_aborted_request_gives_everything_back(tmp_path: Path) -> None:
    """Aborted while waiting, in the middle of its prompt or while decoding: nothing stays held, the rest goes on."""
    model = tiny_llama()
    with _tiers(model, tmp_path, device=192, host=256) as engine:
        scheduler = _scheduler(engine, model, chunk_tokens=16, max_running=2)
        for name, length in [("decodes", 20), ("prefills", 120), ("waits", 50), ("stays", 40)]:
            scheduler.submit(Request(name, prompt(length, seed=length), 30))
        while not all(active.handle.ready for active in scheduler._waiting):  # the disk has none of it
            engine.poll()
        for _ in range(5):
            scheduler.step()
        assert scheduler.num_unfinished == 4
        assert [scheduler.abort(name) for name in ("decodes", "prefills", "waits", "nobody")] == [True] * 3 + [False]
        engine.check()
        results = {result.request_id: result for result in scheduler.run()}
        _nothing_held(engine)
    assert {name: result.finish for name, result in results.items()} == {
        "decodes": "aborted",
        "prefills": "aborted",
        "waits": "aborted",
        "stays": "length",
    }
    started = results["decodes"].tokens
    assert 0 < len(started) < 30 and started == plain_greedy(model, prompt(20, seed=20), len(started))
    assert results["prefills"].tokens == results["waits"].tokens == ()
    assert results["stays"].tokens == plain_greedy(model, prompt(40, seed=40), 30)


def test_a_failed_load_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When copying a prefix up fails once the request starts over, and its answer is right; twice, it alone fails."""
    model = tiny_llama(device="cpu")
    tokens = prompt(100, seed=6)
    scatter, failures = PageMover.scatter, [0]

    def failing(*args: Any, **kwargs: Any) -> None:
        if failures[0] > 0:
            failures[0] -= 1
            raise RuntimeError("the link is down")
        scatter(*args, **kwargs)

    monkeypatch.setattr(PageMover, "scatter", failing)
    with _tiers(model, tmp_path, device=256, host=256) as engine:
        scheduler = _scheduler(engine, model)
        scheduler.run([Request("first", tokens, 2)])
        for name, num_failures in (("once", 1), ("twice", 2)):
            engine.flush()
            _push_out(engine, scheduler, name)
            failures[0] = num_failures
            result = scheduler.run([Request(name, tokens, 5)])[0]
            if name == "once":
                assert result.tokens == plain_greedy(model, tokens, 5)
            else:
                assert isinstance(result.error, TransferError) and result.finish == "failed"
            assert failures[0] == 0
            _nothing_held(engine)


def _push_out(engine: CacheEngine, scheduler: Scheduler, name: str) -> None:
    """Fill the device with another prompt."""
    result = scheduler.run([Request(f"other {name}", prompt(250, seed=len(name)), 2)])[0]
    assert result.finish == "length"
    engine.flush()


def test_a_request_that_cannot_start_and_waits_for_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing runs whose end could make room, the refusal becomes the request's error instead of a hang."""
    model = tiny_llama()
    monkeypatch.setattr("hicache.serving.scheduler._STALLED_S", 0.01)
    with tiny_engine(model, device_tokens=128) as engine:
        scheduler = _scheduler(engine, model)
        lease = engine.acquire(CacheRequest("not the scheduler's", prompt(100, seed=1)))
        result = scheduler.run([Request("r", prompt(60, seed=2), 2)])[0]
        engine.release(lease)
        _nothing_held(engine)
    assert result.finish == "failed" and isinstance(result.error, OutOfSlots)


def test_wrong_requests_are_refused_with_the_knob() -> None:
    """No tokens, nothing to generate, an id twice, impossible sampling: ConfigError that names it."""
    model = tiny_llama()
    with pytest.raises(ConfigError, match="at least one token"):
        Request("r", np.empty(0, dtype=np.int64), 1)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        Request("r", prompt(3, seed=0), 0)
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)
    with tiny_engine(model) as engine:
        scheduler = _scheduler(engine, model)
        scheduler.submit(Request("r", prompt(3, seed=0), 1))
        with pytest.raises(ConfigError, match="'r' is in use"):
            scheduler.submit(Request("r", prompt(3, seed=0), 1))
        with pytest.raises(ConfigError, match="chunk_tokens=0"):
            _scheduler(engine, model, chunk_tokens=0)
        scheduler.abort_all()


def test_the_auditors_time_is_no_waiting_time() -> None:
    """An auditor that takes a second does not add it to the time to first token of those who wait behind it."""
    model = tiny_llama()
    clock = [0.0]

    class Slow:
        def review(self, lease: Any, tokens: Any) -> None:
            clock[0] += 1000.0

    with tiny_engine(model, max_requests=1) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache.serving.scheduler.time.perf_counter", lambda: clock[0])
        results = _scheduler(engine, model, auditor=Slow()).run(
            [Request(f"r{i}", prompt(30, seed=i), 2) for i in range(3)]
        )
    assert clock[0] == 3000.0
    assert [result.ttft_s for result in results] == [0.0, 0.0, 0.0]


@pytest.mark.gpu
def test_a_load_on_the_device_is_awaited_layer_by_layer(tmp_path: Path) -> None:
    """On CUDA, a prefix that returns while the forward is queued behind its events gives the answer without a cache."""
    model = tiny_llama(layers=6)
    tokens = prompt(400, seed=7)
    with _tiers(model, tmp_path, device=512, host=2048) as engine:
        scheduler = _scheduler(engine, model)
        expected = plain_greedy(model, tokens, 8)
        for round_number in range(5):
            result = scheduler.run([Request(f"r{round_number}", tokens, 8)])[0]
            assert result.tokens == expected
            assert result.hit.host == (384 if round_number else 0)
            scheduler.run([Request(f"o{round_number}", prompt(500, seed=round_number), 2)])
            engine.flush()
        torch.cuda.synchronize()
