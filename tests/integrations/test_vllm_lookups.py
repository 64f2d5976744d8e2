"""What the tier under vLLM remembers of lookups, without vLLM."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hicache.disk import DiskTier, FindDone
from hicache.integrations.vllm.lookups import Lookups
from memory_store import MemoryPageStore

CHUNKS = [bytes([n]) * 36 for n in range(40)]


@pytest.fixture
def disk() -> Iterator[DiskTier]:
    tier = DiskTier(MemoryPageStore(1 << 20), readers=2, queue_jobs=4)
    tier.start()
    yield tier
    assert tier.close()


def poll(disk: DiskTier, lookups: Lookups) -> None:
    for done in disk.reads.poll():
        assert isinstance(done, FindDone)
        lookups.answered(done)


def test_every_lookup_is_answered_and_nothing_is_left_of_requests_that_finished(disk: DiskTier) -> None:
    """Of random requests, in random steps; an answer is what the store holds, or "no" where its queue was full."""
    rng = random.Random(0)
    held = set(CHUNKS[::2])
    disk.store.put([(chunk, np.zeros(8, dtype=np.uint8)) for chunk in held])
    lookups = Lookups(disk.reads, list)
    running: dict[str, list[bytes]] = {}
    hits = 0
    for n in range(600):
        if n < 400 and rng.random() < 0.5:
            running[str(n)] = rng.sample(CHUNKS, rng.randrange(1, 9))
        for request, chunks in list(running.items()):
            answers = [lookups.lookup(chunk, request) for chunk in chunks]
            assert not any(answer and chunk not in held for answer, chunk in zip(answers, chunks, strict=True))
            if None not in answers or rng.random() < 0.1:
                hits += answers.count(True)
                lookups.forget(request)
                del running[request]
        lookups.flush()
        poll(disk, lookups)
        time.sleep(rng.choice((0, 0, 1e-3)))
    deadline_s = time.monotonic() + 60
    while running:
        assert time.monotonic() < deadline_s
        for request, chunks in list(running.items()):
            if None not in [lookups.lookup(chunk, request) for chunk in chunks]:
                lookups.forget(request)
                del running[request]
        lookups.flush()
        poll(disk, lookups)
    assert hits and len(lookups) == 0


def test_a_verdict_is_corrected_by_what_a_load_or_a_store_shows(disk: DiskTier) -> None:
    """And forgotten with the last request that asked."""
    lookups = Lookups(disk.reads, list)
    for request in ("a", "b"):
        assert lookups.lookup(CHUNKS[0], request) is None
    lookups.mark(CHUNKS, held=True)
    assert lookups.lookup(CHUNKS[0], "a") is True
    lookups.mark(CHUNKS, held=False)
    lookups.forget("a")
    assert (lookups.lookup(CHUNKS[0], "b"), len(lookups)) == (False, 1)
    lookups.forget("b")
    assert len(lookups) == 0
