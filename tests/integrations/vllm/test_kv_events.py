"""KV events: vLLM's own classes read the events of an engine, and of the secondary tier under vLLM."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, get_offload_block_hash

from hicache.integrations.vllm.tier_events import TierEvents
from kv_events_case import subscribe
from vllm_tier_case import NUM_CHUNKS, Scheduler, key, scheduler

CHUNKS = [key(number) for number in range(320)]  # chunks of 8 KiB, together more than the budget


def test_vllm_decodes_what_an_engine_tells(tmp_path: Path) -> None:
    """A subscriber with vLLM's `KVEventBatch` knows the blocks that the tiers hold."""
    subscribe(tmp_path, "vllm.distributed.kv_events")


class Router:
    """A router that knows of the disk only what vLLM's scheduler publishes. `held`: hashes of stored blocks. A block
    may not be reported as stored twice."""

    def __init__(self, server: Scheduler) -> None:
        self._manager = server.manager
        config = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
        self._tracker = OffloadingEventsTracker(config)
        self.held: set[object] = set()
        self.removed = 0

    def hear(self) -> None:
        for event in self._tracker.take_events(self._manager.take_events()):
            assert isinstance(event, BlockStored | BlockRemoved)
            if event.medium != MEDIUM_STORAGE:
                continue
            assert (event.locality, event.ownership) == ("LOCAL", "hicache")
            hashes = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not hashes & self.held
                self.held |= hashes
            else:
                assert hashes <= self.held
                self.held -= hashes
                self.removed += len(hashes)


@pytest.mark.smoke
def test_a_router_knows_what_the_disk_holds(tmp_path: Path) -> None:
    """Chunks are stored at random, some of them again, and the budget evicts others. In the end the router knows
    exactly the chunks that a load finds, by the hashes that vLLM publishes for chunks of its CPU tier."""
    rng = random.Random(0)
    with scheduler(tmp_path, budget=1 << 20, level=0, enable_kv_cache_events=True) as server:
        router = Router(server)
        for _ in range(40):
            server.store(rng.sample(CHUNKS, rng.randrange(1, NUM_CHUNKS // 2)))
            router.hear()
            if rng.random() < 0.3:
                server.reset()
        server.reset()
        found = [chunk for chunk in CHUNKS if server.load([chunk]) == [True]]
        router.hear()
    assert router.removed
    assert router.held == {maybe_convert_block_hash(BlockHash(get_offload_block_hash(chunk))) for chunk in found}


def test_what_a_store_held_whose_process_ended_is_told_anew() -> None:
    """If the process of a store ends, each reported block is reported as removed once. A block that is written again is
    reported as stored again."""
    events, keys = TierEvents("STORAGE", "LOCAL"), [bytes([number]) for number in range(4)]
    reported = []
    for times_lost in (0, 1, 1):
        events.note_losses(times_lost)
        events.stored(keys, CHUNKS[:4])
        reported += [(event.removed, list(event.keys)) for event in events.take()]
    assert reported == [(False, CHUNKS[:4]), (True, CHUNKS[:4]), (False, CHUNKS[:4])]
