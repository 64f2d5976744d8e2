"""Nodes that wait while another node computes a long prompt. The nodes are servers on one machine with a shared
folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from disk_case import Clock
from hicache.integrations.vllm.prefill_leases import STEP_TOKENS
from hicache.storage.dir_store import LEASES
from vllm_tier_case import Scheduler, key, scheduler
from waiting import eventually

NUM_CHUNKS = 80
CHUNK_TOKENS = 512
CHUNKS = [key(number) for number in range(NUM_CHUNKS)]  # 40 960 tokens, which are computed in 10 s
PER_S = NUM_CHUNKS * CHUNK_TOKENS / 10


@contextlib.contextmanager
def node(path: Path, clock: Clock) -> Iterator[Scheduler]:
    (path.parent / "shared").mkdir(exist_ok=True)
    remote = {"url": f"dir://{path.parent / 'shared'}", "backup": "used"}
    about: dict[str, Any] = {"salt": "these weights", "prefill_tokens_per_s": PER_S, "num_chunks": NUM_CHUNKS + 8}
    with scheduler(path, remote=remote, **about) as server:
        server.tiers[0]._leases._wall_s = clock
        yield server


@pytest.fixture(autouse=True)
def wall(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let the stores use the clock of the test too."""
    monkeypatch.setattr("hicache.storage.dir_store.time.time", clock)


def ask(server: Scheduler, context: ReqContext, chunks: Sequence[OffloadKey] = CHUNKS) -> list[bool]:
    """Look up the chunks until vLLM would schedule the request; returns which chunks were found."""
    found: list[bool] = []
    server.until(lambda: found.extend(server.ask(chunks, context) or ()) or found)
    return found


def begins(server: Scheduler, context: ReqContext, shared: Path) -> None:
    """The request computes the chunks, and the node's lease is in the shared folder: another node that looks earlier
    computes too."""
    assert ask(server, context) == [False] * NUM_CHUNKS
    eventually(lambda: any(path.is_file() for path in shared.rglob(f"{LEASES}/*/*")))


def waits(server: Scheduler, context: ReqContext, chunks: Sequence[OffloadKey] = CHUNKS) -> None:
    """Whether the request waits for another node."""
    tier = server.tiers[0]
    before = tier._leases.waited.value
    server.until(lambda: server.ask(chunks, context) is None and tier._leases.waited.value > before)


def test_one_node_computes_and_the_others_load(tmp_path: Path, clock: Clock) -> None:
    """The first node that misses computes at once. A prompt with the same beginning waits on the other node until the
    chunks are stored, and then loads them."""
    with contextlib.ExitStack() as held:
        first, second = (held.enter_context(node(tmp_path / name, clock)) for name in "ab")
        computing, waiting = (held.enter_context(server.request()) for server in (first, second))
        begins(first, computing, tmp_path / "shared")
        waits(second, waiting)
        first.computed(CHUNKS, computing)
        first.until(lambda: not first.manager.has_pending_work())
        tier = first.tiers[0]
        eventually(lambda: tier._poll() or tier.metrics.snapshot()["disk.backup_sent_pages"] == NUM_CHUNKS)

        def loads() -> bool:
            if second.tiers[0]._leases.is_waiting(waiting.req_id):  # otherwise a look-up or a load is in flight
                clock.now_s += 0.3
            second.step()
            return second.ask(CHUNKS, waiting) == [True] * NUM_CHUNKS

        eventually(loads)


def test_a_node_that_dies_costs_its_lease(tmp_path: Path, clock: Clock) -> None:
    """If a node dies, the next node computes the prompt after the lease has expired, with its own lease."""
    with node(tmp_path / "a", clock) as first, first.request() as computing:
        begins(first, computing, tmp_path / "shared")
    with contextlib.ExitStack() as held:
        second, third = (held.enter_context(node(tmp_path / name, clock)) for name in "bc")
        waiting, late = (held.enter_context(server.request()) for server in (second, third))
        waits(second, waiting)
        clock.now_s += 1.6 * 10
        assert ask(second, waiting) == [False] * NUM_CHUNKS
        waits(third, late)


def test_prompts_below_16k_tokens_and_other_prompts_do_not_wait(tmp_path: Path, clock: Clock) -> None:
    few = CHUNKS[: STEP_TOKENS // CHUNK_TOKENS]
    others = [key(1000 + number) for number in range(NUM_CHUNKS)]
    with contextlib.ExitStack() as held:
        first, second = (held.enter_context(node(tmp_path / name, clock)) for name in "ab")

        def request(server: Scheduler) -> ReqContext:
            return held.enter_context(server.request())

        begins(first, request(first), tmp_path / "shared")
        assert ask(second, request(second), few) == [False] * len(few)
        assert ask(second, request(second), others) == [False] * NUM_CHUNKS
        waits(second, request(second))
        assert second.tiers[0]._leases.waited.value == 1
