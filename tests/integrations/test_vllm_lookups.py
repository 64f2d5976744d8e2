"""What the tier under vLLM remembers of lookups, without vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from hicache.integrations.vllm.lookups import Lookups
from hicache.storage.process.jobs import FindDone
from hicache.storage.process.settings import ServiceSettings
from hicache.stores.tier import StoreTier, given_tier
from memory_store import MemoryPageStore
from waiting import eventually

CHUNKS = [bytes([n]) * 36 for n in range(40)]


HELD = set(CHUNKS[::2])


@pytest.fixture
def disk() -> Iterator[StoreTier]:
    store = MemoryPageStore(1 << 20)
    store.put([(chunk, np.zeros(8, dtype=np.uint8)) for chunk in HELD])
    tier = given_tier(store, ServiceSettings(readers=2, queue_jobs=4))
    yield tier
    assert tier.close()


@pytest.fixture
def lookups(disk: StoreTier) -> Lookups:
    def poll() -> None:
        for done in disk.reads.poll():
            assert isinstance(done, FindDone)
            lookups.answered(done)

    lookups = Lookups(disk.reads, list, poll)
    return lookups


def step(lookups: Lookups) -> None:
    lookups.flush()
    lookups._poll()


def test_every_lookup_is_answered_and_nothing_is_left_of_requests_that_finished(
    disk: StoreTier, lookups: Lookups
) -> None:
    """Of random requests, in random steps; an answer is what the store holds, or "no" where its queue was full."""
    rng = random.Random(0)
    running: dict[str, list[bytes]] = {}
    for n in range(400):
        if rng.random() < 0.5:
            running[str(n)] = rng.sample(CHUNKS, rng.randrange(1, 9))
        for request, chunks in list(running.items()):
            answers = [lookups.lookup(chunk, request) for chunk in chunks]
            assert not any(answer and chunk not in HELD for answer, chunk in zip(answers, chunks, strict=True))
            if None not in answers or rng.random() < 0.1:
                lookups.forget(request)
                del running[request]
        step(lookups)

    for request in running:
        lookups.forget(request)
    assert len(lookups) == 0
    eventually(lambda: step(lookups) or not disk.reads.under_way)

    def answers() -> list[bool | None]:
        found = [lookups.lookup(chunk, "last") for chunk in CHUNKS]
        step(lookups)
        return [] if None in found else found

    assert eventually(answers) == [chunk in HELD for chunk in CHUNKS]


def test_a_new_prompt_is_known_as_one_in_the_step_in_which_it_comes(lookups: Lookups) -> None:
    """However long it is, no more of it is looked up than until the store has answered for its first chunk. Behind one
    that is held each chunk is asked for; and where the first lookup is of the last chunk, as for windows, all are."""
    prompt = [b"new" + n.to_bytes(33, "little") for n in range(1 << 20)]
    rest = iter(prompt)
    assert lookups.lookup(next(rest), "new") is None
    eventually(lambda: lookups.lookup(next(rest), "new") is False)
    step(lookups)
    assert lookups.lookup(prompt[0], "new") is False
    for request, chunks in (("known", [*CHUNKS[:1], *prompt[1:40]]), ("window", [prompt[0], *CHUNKS])):
        held = [chunk in HELD for chunk in chunks]
        eventually(lambda r=request, c=chunks, h=held: [lookups.lookup(n, r) for n in c] == h or step(lookups))
