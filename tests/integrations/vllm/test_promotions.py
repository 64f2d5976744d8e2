"""Chunks that are read from the disk into vLLM's CPU tier while their request waits for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from hicache.integrations.vllm import HiCacheTier
from hicache.integrations.vllm.promotions import MAX_READS, Promotions
from hicache.storage import LmdbPageStore
from vllm_tier_case import Scheduler, key, place, scheduler
from waiting import eventually

ROWS = 8
# Names of vLLM's own policies are in lower case.
OURS = ["LRUPolicy", "ARCPolicy"]  # one policy of each of our two classes
PROMPT = [key(number) for number in range(4)]
OTHERS = [key(100 + number) for number in range(ROWS)]
FRESH = [key(200 + number) for number in range(ROWS)]


@contextlib.contextmanager
def only_on_disk(path: Path, policy: str, chunks: Sequence[OffloadKey]) -> Iterator[Scheduler]:
    """A server whose chunks are only on the disk. Every row of its CPU tier has another chunk, which two requests have
    used."""
    ours = {"cache_policy_module_path": "hicache.integrations.vllm"} if policy in OURS else {}
    extra = {"eviction_policy": policy, **ours}
    # At this speed every load pays, and so does every wait for rows, however slow this machine is.
    with scheduler(path, num_chunks=ROWS, extra=extra, prefill_tokens_per_s=1e-3) as server:
        for chunk in chunks:
            server.store([chunk])
        for _ in range(2):
            server.store(OTHERS)
            assert all(server.load(OTHERS))
        yield server


def longest_prefix(server: Scheduler, chunks: Sequence[OffloadKey], context: ReqContext) -> int:
    """The hits of vLLM's prefix lookup: the chunks before the first miss, when no lookup is pending."""
    place(chunks, context)
    hits = 0

    def is_known() -> bool:
        nonlocal hits
        found = [
            *itertools.takewhile(
                lambda result: result is not LookupResult.MISS,
                (server.manager.lookup(chunk, context) for chunk in chunks),
            )
        ]
        hits = len(found)
        return all(result is LookupResult.HIT for result in found)

    server.until(is_known)
    return hits


@contextlib.contextmanager
def answered(server: Scheduler, chunks: Sequence[OffloadKey]) -> Iterator[None]:
    """The disk has answered the look-ups of these chunks, and no request loads them yet."""
    (tier,) = server.tiers
    with server.request() as first:
        server.until(lambda: {tier.lookup(chunk, first) for chunk in chunks} == {LookupResult.HIT})
        yield


def reads_of(context: ReqContext) -> list[int]:
    promotions = context.get_state(Promotions)
    assert promotions is not None
    return list(promotions.reads.values())


@pytest.mark.smoke
@pytest.mark.parametrize("policy", OURS)
def test_what_a_waiting_request_brought_up_stays_until_it_is_scheduled(tmp_path: Path, policy: str) -> None:
    """Chunks that were read for a waiting request stay until it is scheduled. Each chunk is read once, although the
    request looks up one more chunk in each step, and other requests use their chunks."""
    with only_on_disk(tmp_path, policy, PROMPT) as server, server.request() as waiting:
        for n in range(1, len(PROMPT) + 1):
            assert server.lookup(PROMPT[:n], waiting) == [True] * n
            server.load(OTHERS[: ROWS - len(PROMPT)])
        assert reads_of(waiting) == [1] * len(PROMPT)
        with server.request() as other:
            assert server.manager.prepare_store(FRESH, other) is None
        server.manager.on_schedule_end(ScheduleEndContext((waiting.req_id,), ()))
        server.store(FRESH)


@pytest.mark.parametrize("policy", OURS)
def test_what_a_request_brought_up_is_evicted_when_it_is_aborted(tmp_path: Path, policy: str) -> None:
    with only_on_disk(tmp_path, policy, PROMPT) as server:
        with server.request() as aborted:
            assert all(server.lookup(PROMPT, aborted))
        server.store(FRESH)


@pytest.mark.parametrize("policy", [*OURS, "lru", "arc"])
def test_a_prompt_longer_than_the_cpu_tier_waits_for_a_bounded_number_of_reads(tmp_path: Path, policy: str) -> None:
    """A prompt longer than the CPU tier waits for a bounded number of reads. With hicache's policies its hit is as long
    as the CPU tier, and nothing is read twice."""
    chunks = [key(number) for number in range(ROWS + 4)]
    with only_on_disk(tmp_path, policy, chunks) as server:
        with server.request() as waiting:
            hits = longest_prefix(server, chunks, waiting)
            reads = reads_of(waiting)
        assert max(reads) <= MAX_READS
        if policy in OURS:
            assert (hits, max(reads)) == (ROWS, 1)


@pytest.mark.smoke
@pytest.mark.parametrize("policy", OURS)
def test_requests_wait_for_the_rows_of_those_before_them(tmp_path: Path, policy: str) -> None:
    """Twelve requests wait together, and the CPU tier has capacity for up to two more prompts. Each request hits all
    its chunks of the disk. Loads are chosen in the order of arrival, each chunk is read once, and waiting requests take
    no rows."""
    lengths = [6, 3, 4] * 4
    prompts = [[key(1000 * (n + 1) + i) for i in range(length)] for n, length in enumerate(lengths)]
    with only_on_disk(tmp_path, policy, [chunk for chunks in prompts for chunk in chunks]) as server:
        with contextlib.ExitStack() as opened:
            waiting = [(opened.enter_context(server.request()), chunks) for chunks in prompts]
            requests, chosen = [request for request, _ in waiting], list[ReqContext]()
            # A request whose look-up is answered earlier gets its rows earlier. So all answers are there before the
            # first request asks.
            with answered(server, [chunk for chunks in prompts for chunk in chunks]):
                assert [server.ask(chunks, request) for request, chunks in waiting] == [None] * len(waiting)
                server.step()

            def step() -> bool:
                """Look up the chunks of all waiting requests; the GPU runs the first request that has all its
                chunks."""
                answers = [(request, server.ask(chunks, request)) for request, chunks in waiting]
                candidates = [(request, server.tiers[0].gate.candidate(request.req_id)) for request, _ in waiting]
                chosen.extend(one for one, of in candidates if of is not None and of.loads and one not in chosen)
                ready = [(request, found) for request, found in answers if found is not None]
                assert all(all(found) for _, found in ready)
                if ready:
                    waiting[:] = [each for each in waiting if each[0] is not ready[0][0]]
                server.step(*[request.req_id for request, _ in ready[:1]])
                return not waiting

            eventually(step)
            assert chosen == requests
            assert [reads_of(request) for request in requests] == [[1] * length for length in lengths]
        server.store(FRESH)


@pytest.mark.smoke
@pytest.mark.parametrize("policy", OURS)
def test_nobody_waits_for_rows_that_nothing_gives_free(tmp_path: Path, policy: str) -> None:
    """The GPU reads from six of eight rows, and no other copy is in flight. A request does not wait for more rows: it
    uses the two rows that are free."""
    with only_on_disk(tmp_path, policy, PROMPT) as server, server.request() as other, server.request() as waiting:
        server.manager.prepare_load(OTHERS[:6], other)
        assert longest_prefix(server, PROMPT, waiting) == 2
        server.manager.complete_load(OTHERS[:6], other)


@pytest.mark.parametrize("policy", OURS)
def test_what_the_cpu_tier_had_of_a_prompt_stays_while_the_rest_is_read(tmp_path: Path, policy: str) -> None:
    """Two requests wait for chunks after a common prefix, which is not evicted until both are scheduled."""
    with only_on_disk(tmp_path, policy, PROMPT) as server, server.request() as one, server.request() as two:
        for waiting, rest in ((one, PROMPT[:2]), (two, PROMPT[2:])):
            assert server.lookup([*OTHERS[:3], *rest], waiting) == [True] * 5
        with server.request() as other:
            assert server.manager.prepare_store(FRESH[:2], other) is None
            server.step(one.req_id)  # this step frees two rows
            assert server.manager.prepare_store(FRESH[:4], other) is None
        server.step(two.req_id)
        server.store(FRESH)


@pytest.mark.parametrize("policy", OURS)
def test_what_nobody_waits_for_is_forgotten_though_nothing_is_evicted(tmp_path: Path, policy: str) -> None:
    """One request after the other reads a chunk, in a CPU tier that has capacity for all. The policy forgets chunks for
    which no request waits."""
    with only_on_disk(tmp_path, policy, PROMPT) as server:
        server.reset()
        for chunk in PROMPT:
            with server.request() as context:
                assert server.lookup([chunk], context) == [True]
                assert len(server.primary._policy._awaited) == 1


@pytest.mark.smoke
@pytest.mark.parametrize("policy", OURS)
def test_many_requests_of_one_prefix_cause_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Fifty requests arrive together, and fifty more while the chunks are being read. Every request finds the chunks;
    each chunk is read once, and all in one job."""
    read: list[bytes] = []
    jobs: list[int] = []
    get_into, submit_load = LmdbPageStore.get_into, HiCacheTier.submit_load

    def reading(store: LmdbPageStore, keys: Sequence[bytes], *args: Any, **kwargs: Any) -> list[bool]:
        read.extend(keys)
        return get_into(store, keys, *args, **kwargs)

    def submitting(tier: HiCacheTier, job: TransferJob) -> None:
        jobs.append(len(job.keys))
        submit_load(tier, job)

    monkeypatch.setattr(LmdbPageStore, "get_into", reading)
    monkeypatch.setattr(HiCacheTier, "submit_load", submitting)
    with only_on_disk(tmp_path, policy, PROMPT) as server, contextlib.ExitStack() as opened:
        jobs.clear(), read.clear()
        requests = [opened.enter_context(server.request()) for _ in range(50)]
        while not jobs:
            assert [server.ask(PROMPT, request) for request in requests] == [None] * 50
            server.step()
        requests += [opened.enter_context(server.request()) for _ in range(50)]
        for request in requests:
            assert server.lookup(PROMPT, request) == [True] * len(PROMPT)
        assert (jobs, len(read)) == ([len(PROMPT)], len(PROMPT))
