"""Overlapped prefill: the device computes a request from its beginning while a store reads its pages from the end.

The test sets the number of reads between two steps, so it decides where computing and reading meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from disk_case import Clock
from family_case import tiny_family
from hicache.engine import CacheEngine, CacheRequest
from hicache.serving.prefill_meter import PrefillMeter
from hicache.serving.request import Request, RequestOutput
from hicache.serving.scheduler import Scheduler
from prefetch_case import PacedStore
from serving_case import (
    assert_released,
    geometry_of,
    plain_greedy,
    prompt,
    shared,
    tiny_engine,
    tiny_llama,
    tiny_runner,
)
from waiting import eventually

PAGE, CHUNK, NEW = 16, 40, 4
NUM_PAGES = 40
FAMILIES = {"full": None, "latent": "deepseek_v3", "window": "mistral", "hybrid": "qwen3_next"}


def _model(family: str) -> Any:
    row = FAMILIES[family]
    return shared(tiny_llama, device="cpu") if row is None else tiny_family(row)


def _engine(model: Any, store: PacedStore, **settings: Any) -> CacheEngine:
    """An engine with one reader, which reads two pages at a time, and with capacity for all prompts."""
    advanced = {"transfer_chunk_tokens": 2 * PAGE, "staging_bytes": 1 << 20}
    advanced |= {"disk_reader_threads": 1, "disk_io_timeout_s": 1e8}
    defaults = {"prefetch_mode": "auto", "prefill_tokens_per_s": "auto", "host_bytes": 8 << 20, "device_tokens": 1024}
    return tiny_engine(model, store=store, **{**defaults, "advanced": advanced, **settings})


def _scheduler(engine: CacheEngine, model: Any) -> Scheduler:
    return Scheduler(engine, tiny_runner(model, engine), chunk_tokens=CHUNK)


@contextmanager
def _restarted(model: Any, *prompts: np.ndarray, **settings: Any) -> Iterator[Any]:
    """An engine over a store that has the pages of these prompts. The store only reads when the test allows it."""
    store = PacedStore(Clock())
    with _engine(model, store) as engine:
        _scheduler(engine, model).run([Request(f"f{n}", tokens, 1) for n, tokens in enumerate(prompts)])
        engine.flush()
    store.hold()
    store.num_reads.clear()
    with _engine(model, store, **settings) as engine:
        try:
            yield engine, store
            store.allow()
            assert_released(engine)
        finally:
            store.allow()


def _serve(
    engine: CacheEngine, store: PacedStore, scheduler: Scheduler, reads: Iterable[int]
) -> dict[str, RequestOutput]:
    """Run steps until all requests end, with `reads[i]` reads after step i. All accounts hold after each step. Each
    step begins when the next read has reached the store."""
    outputs, prefetcher = dict[str, RequestOutput](), engine.inspect.prefetcher
    assert prefetcher is not None

    def settle() -> None:
        eventually(lambda: engine.poll() or store.held or not prefetcher.is_busy())

    for num_reads in reads:
        settle()
        outputs.update({output.request_id: output for output in scheduler.step()})
        engine.check()
        if not scheduler.num_unfinished:
            return outputs
        for _ in range(num_reads):
            settle()
            if not store.held:
                break
            before = store.num_ended
            store.allow(1)
            eventually(lambda before=before: store.num_ended > before)
    raise AssertionError("a request has not ended")


@pytest.mark.parametrize("family", FAMILIES)
def test_computing_meets_what_comes(family: str) -> None:
    """The answer equals the answer without a cache. If reads are as fast as computing, about half of the prompt is
    read, and no page is read twice. With recurrent states the loaded state replaces the computed one."""
    model, tokens = _model(family), prompt(NUM_PAGES * PAGE + 5, seed=1)
    with _restarted(model, tokens) as (engine, store):
        scheduler = _scheduler(engine, model)
        scheduler.submit(Request("a", tokens, NEW))
        output = _serve(engine, store, scheduler, itertools.repeat(1, 200))["a"]
        assert output.tokens == plain_greedy(model, tokens, NEW)
        assert max(store.num_reads.values(), default=0) <= 1
        stats = engine.stats()
        assert stats["prefetch.overlapped_requests"] == 1
        assert output.hit.disk + output.computed_tokens == len(tokens)
        assert 0.25 <= output.hit.disk / len(tokens) <= 0.75
        assert stats["prefetch.overlap_loaded_tokens"] == output.hit.disk == stats["admit.disk_hit_tokens"]


def test_nobody_waits_for_a_store_that_brings_nothing() -> None:
    """If a store reads no page, or none after the first, the request joins the pages that were read and computes all
    others."""
    model, tokens = _model("full"), prompt(NUM_PAGES * PAGE + 5, seed=1)
    for reads in ([0] * 50, [0, 1, 0] + [0] * 50):
        with _restarted(model, tokens) as (engine, store):
            scheduler = _scheduler(engine, model)
            scheduler.submit(Request("a", tokens, NEW))
            output = _serve(engine, store, scheduler, reads)["a"]
            assert output.tokens == plain_greedy(model, tokens, NEW)
            assert output.hit.disk == PAGE * sum(store.num_reads.values()) == len(tokens) - output.computed_tokens
            assert bool(output.hit.disk) == any(reads)


def test_of_two_with_one_prefix_one_computes_and_one_reads() -> None:
    """Of two requests with one prefix, one computes its pages and the other reads them. Each page is read once and
    computed once, except for a pass's worth of tokens where reading and computing meet."""
    model, tokens = _model("full"), prompt(NUM_PAGES * PAGE + 5, seed=1)
    with _restarted(model, tokens) as (engine, store):
        scheduler = _scheduler(engine, model)
        for name in "ab":
            scheduler.submit(Request(name, tokens, NEW))
        outputs = _serve(engine, store, scheduler, itertools.repeat(1, 200))
        assert {output.tokens for output in outputs.values()} == {plain_greedy(model, tokens, NEW)}
        assert max(store.num_reads.values()) == 1
        assert sum(output.computed_tokens for output in outputs.values()) <= len(tokens) * 0.75 + 2 * PAGE


def test_with_other_requests_the_rule_decides() -> None:
    """While another request decodes, a request whose prefix is read as fast as it is computed waits for the reads and
    computes nothing. When the other request has ended, it computes."""
    model, tokens = _model("full"), prompt(NUM_PAGES * PAGE + 5, seed=1)
    with _restarted(model, tokens) as (engine, store):
        engine.observe_prefill(1000, 1e6)
        engine.acquire(CacheRequest("other", prompt(20, seed=2)))
        scheduler = _scheduler(engine, model)
        scheduler.submit(Request("a", tokens, NEW))
        for _ in range(10):
            scheduler.step()
        assert not scheduler.num_running
        engine.cancel("other")
        eventually(lambda: scheduler.step() or scheduler.num_running == 1)
        output = _serve(engine, store, scheduler, itertools.repeat(1, 200))["a"]
        assert output.tokens == plain_greedy(model, tokens, NEW) and output.hit.disk > 0


@pytest.mark.parametrize(("overtake_s", "order"), [(15.0, "bac"), (0.0, "abc")])
@pytest.mark.parametrize("is_behind", [[False], [True, False]])
def test_the_bound_on_overtaking_holds_for_a_request_that_yields(
    is_behind: list[bool], overtake_s: float, order: str
) -> None:
    """While its store reads nothing, a preemptible request may be overtaken by a request submitted 10 s later, but not
    by one submitted 20 s later. The bound also holds if the device has often not finished the last pass."""
    model, tokens = _model("full"), prompt(NUM_PAGES * PAGE + 5, seed=1)
    looks = mock.PropertyMock(side_effect=itertools.cycle(is_behind))
    with _restarted(model, tokens) as (engine, store), mock.patch.object(PrefillMeter, "is_behind", looks):
        engine.observe_prefill(1000, 1e6)  # waiting for the store costs less, so the request stays preemptible
        scheduler = Scheduler(
            engine, tiny_runner(model, engine), chunk_tokens=400, max_overtake_s=overtake_s, clock=store.clock
        )
        scheduler.submit(Request("a", tokens, 1))
        eventually(lambda: scheduler.step() or scheduler.num_running == 1)
        for name in "bc":
            store.clock.now_s += 10.0
            scheduler.submit(Request(name, prompt(3 * CHUNK, seed=ord(name)), 1))
        eventually(lambda: engine.poll() or engine.stats()["prefetch.waiting_requests"] == 1)
        assert "".join(output.request_id for output in scheduler.run()) == order


def test_a_prompt_longer_than_the_room_on_the_host_joins_it_in_parts() -> None:
    """If the host has too few free pages for a prompt, the other pages are read after the first part has been loaded to
    the device."""
    model, tokens = _model("full"), prompt(NUM_PAGES * PAGE + 5, seed=1)
    page_bytes = geometry_of(model).layer_num * 2 * 2 * 16 * 4 * PAGE
    with _restarted(model, tokens, host_bytes=37 * page_bytes) as (engine, store):
        scheduler = _scheduler(engine, model)
        scheduler.submit(Request("a", tokens, NEW))
        output = _serve(engine, store, scheduler, itertools.repeat(3, 200))["a"]
        assert output.tokens == plain_greedy(model, tokens, NEW)
        assert output.hit.disk > 4 * PAGE
