"""The gate of the secondary tier under vLLM's own tiering manager: the speeds that it learns from the scheduler's
steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey

from disk_case import Clock
from hicache.storage import LmdbPageStore
from hicache.storage.process.service import StoreService, unserved_read
from vllm_offload_case import Cache, Engine
from vllm_tier_case import CHUNK_TOKENS, NUM_CHUNKS, Scheduler, key, scheduler
from waiting import BOUND_S

PROMPT = [key(number) for number in range(20)]
OTHER = [key(100 + number) for number in range(8)]


class SlowReads:
    """A disk whose reads take `page_s` of the clock for each page. `num_pages`: pages read so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock, page_s: float) -> None:
        self.page_s, self.num_pages = page_s, 0
        original = LmdbPageStore.get_into

        def get_into(store: LmdbPageStore, keys: Sequence[bytes], *args: Any, **kwargs: Any) -> list[bool]:
            clock.now_s += self.page_s * len(keys)
            self.num_pages += len(keys)
            return original(store, keys, *args, **kwargs)

        monkeypatch.setattr(LmdbPageStore, "get_into", get_into)


def compute(server: Scheduler, clock: Clock, chunks: Sequence[OffloadKey], seconds: float) -> None:
    """Schedule a request whose prompt no tier has, compute it in `seconds`, and store it."""
    with server.request() as context:
        assert not any(server.lookup(chunks, context))
        server.step(context.req_id)
        clock.now_s += seconds
        server.tiers[0].on_computed([(0, len(chunks) * CHUNK_TOKENS)])
        server.step()  # this step copies the computed chunks
        server.computed(chunks, context)
    server.until(lambda: not server.manager.has_pending_work())
    server.reset()


@pytest.mark.smoke
def test_what_is_computed_faster_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A prompt of 20 chunks was computed in 1 s. If a disk takes 0.1 s a chunk, every request computes it again, until
    the measured rate of the disk is older than a minute. If the disk has become fast, the prompt is loaded."""
    reads = SlowReads(monkeypatch, clock, 0.1)
    with scheduler(tmp_path, readers=1, prefill_tokens_per_s="auto") as server:
        gate = server.tiers[0].gate
        compute(server, clock, OTHER, 0.4)
        compute(server, clock, PROMPT, 1.0)
        assert server.load(OTHER) == [True] * 8
        assert (gate.unmeasured.value, reads.num_pages) == (1, 8)
        abandoned = gate.abandoned.value
        for declined in (1, 2):
            assert server.load(PROMPT) == [False] * 20
            assert (gate.declined.value, gate.abandoned.value, reads.num_pages) == (declined, abandoned, 8)
        clock.now_s += 61
        reads.page_s = 0.001
        assert server.load(PROMPT) == [True] * 20
        server.reset()
        assert server.load(PROMPT) == [True] * 20
        assert (gate.accepted.value, gate.unmeasured.value, reads.num_pages) == (1, 2, 48)


@pytest.mark.smoke
def test_a_part_is_loaded_where_the_whole_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A chunk is computed in 0.1 s and read in 0.3 s. The CPU tier has eight chunks after the first two. So loading two
    makes ten usable, which pays, and the bytes are right. The last ten chunks are computed."""
    SlowReads(monkeypatch, clock, 0.3)
    with scheduler(tmp_path, readers=1, prefill_tokens_per_s=10 * CHUNK_TOKENS) as server:
        for chunks in (PROMPT, OTHER):
            server.store(chunks)
        server.reset()
        assert server.load(PROMPT[2:10]) == [True] * 8  # this load shows the speed of the disk
        assert server.load(PROMPT) == [True] * 10 + [False] * 10
        gate = server.tiers[0].gate
        assert (gate.unmeasured.value, gate.accepted.value, gate.declined.value) == (1, 1, 0)
        assert server.load(OTHER) == [False] * 8


def test_what_the_cpu_tier_loses_meanwhile_is_weighed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A request lacks its last chunk, whose load does not pay, and waits for the GPU. Before this request runs, the CPU
    tier evicts the other chunks of its prompt. The gate then decides as for a new request: with two other requests, all
    chunks are read."""
    reads = SlowReads(monkeypatch, clock, 0.25)
    with scheduler(tmp_path, readers=1, prefill_tokens_per_s=10 * CHUNK_TOKENS) as server:
        for chunks in (PROMPT, OTHER):
            server.store(chunks)
        server.reset()
        assert server.load(OTHER) == [True] * 8  # one read, which shows the speed of the disk
        server.store(PROMPT[:19])
        reads.page_s = 0.0  # the clock does not advance while the chosen chunks are read
        with server.request() as context:
            assert server.lookup(PROMPT, context) == [True] * 19 + [False]
            server.reset()
            with server.request() as one, server.request() as two:
                server.step(one.req_id, two.req_id)
                assert server.lookup(PROMPT, context) == [True] * 20
        assert server.tiers[0].gate.declined.value == 1


def test_the_speed_of_prefill_outlives_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """After a restart one load shows the speed of the disk. The gate already decides about the next prompt, although no
    prompt has been computed since."""
    with scheduler(tmp_path, readers=1, prefill_tokens_per_s="auto") as server:
        compute(server, clock, OTHER, 0.4)
        compute(server, clock, PROMPT, 1.0)
    reads = SlowReads(monkeypatch, clock, 0.1)
    with scheduler(tmp_path, readers=1, prefill_tokens_per_s="auto") as server:
        assert server.load(OTHER) == [True] * 8 and server.load(PROMPT) == [False] * 20
        assert reads.num_pages == 8


@pytest.mark.smoke
def test_a_request_does_not_wait_for_a_disk_that_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The load of a request is in flight, and the disk returns nothing for a second, longer than computing takes. The
    request uses the chunks that were read and computes the other chunks, and no row stays pinned."""
    chunks = [key(number) for number in range(NUM_CHUNKS)]
    taken: list[Any] = []
    original = StoreService._read

    def read(service: StoreService, job: Any, token: Any) -> Any:
        taken.append(job)
        assert job.cancelled.wait(BOUND_S)
        return original(service, job, token) if job is taken[0] else unserved_read(job)

    with scheduler(tmp_path, readers=1, prefill_tokens_per_s=1e6) as server, server.request() as context:
        server.store(chunks)
        server.reset()
        monkeypatch.setattr(StoreService, "_read", read)
        server.until(lambda: server.ask(chunks, context) or taken)
        assert server.tiers[0].gate.abandoned.value == 0
        clock.now_s += 1.1
        found = server.lookup(chunks, context)
        assert found == [True] * 8 + [False] * (NUM_CHUNKS - 8)
        assert server.tiers[0].gate.abandoned.value == 1
        server.store([key(1000 + number) for number in range(NUM_CHUNKS)])


def test_the_spec_has_the_gate_before_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The spec puts the gate before its disk. With a known speed of prefill the first load shows the speed of the disk,
    and the next load is declined."""
    cache = Cache()
    disk = {"path": str(tmp_path), "budget": "64MB", "prefill_tokens_per_s": 1e12}
    engine = Engine(cache, {"cpu_bytes_to_use": 8 * cache.chunk_bytes, "disk": disk})
    chunks = [key(number) for number in range(4)]
    engine.store(chunks, [1, 2, 3, 4])
    engine.reset()
    SlowReads(monkeypatch, clock, 0.1)
    assert engine.load(chunks, [5, 6, 7, 8])
    engine.reset()
    assert not engine.load(chunks, [5, 6, 7, 8])
    assert engine.manager.secondary_tiers[0].gate.declined.value == 1
    engine.close()
