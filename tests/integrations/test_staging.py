"""A tier for threads that wait for pages. Pages are copied through staging memory, however slow the medium is and
however many threads wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_case import Clock, Gate, TroubledStore, started_tier
from hicache.integrations.staging import WaitingTier
from hicache.storage import PageBuffer
from hicache.storage.process.health import LIMITS
from hicache.stores.disk_and_remote import Stores
from hicache.tiers import DISK
from waiting import BOUND_S, eventually

PAGE_BYTES, NUM_PAGES = 4096, 12
KEYS = [b"page %d" % n for n in range(NUM_PAGES)]


def fill(i: int, page: PageBuffer) -> None:
    page[:] = i


class Landed(list[tuple[int, int]]):
    """A list of the pages that were read: number and first byte of each page."""

    def __call__(self, i: int, page: PageBuffer) -> None:
        assert len(set(page.tolist())) == 1
        self.append((i, int(page[0])))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[tuple[WaitingTier, TroubledStore]]:
    """A tier with few staging pages. The store of the tier holds a page of bytes n for key n."""
    inner, troubled = started_tier(tmp_path, clock=clock, readers=2)
    tier = WaitingTier(Stores({DISK: inner}), PAGE_BYTES)
    tier._for_reads.num_pages = 4
    del tier._for_reads._free[4:], tier._for_writes._free[4:]
    tier._for_writes.num_pages = 4
    assert tier.write(KEYS, PAGE_BYTES, fill) == [True] * NUM_PAGES
    yield tier, troubled
    assert tier.close()


Store = tuple[WaitingTier, TroubledStore]


def read(tier: WaitingTier, keys: list[bytes]) -> Landed:
    landed = Landed()
    assert tier.read(keys, PAGE_BYTES, landed) == len(landed)
    return landed


def test_pages_up_to_the_first_that_is_missing(store: Store) -> None:
    """Pages are read up to the first missing one, in order, on the calling thread, even if there are more of them than
    staging pages."""
    tier, _ = store
    everything = [(n, n) for n in range(NUM_PAGES)]
    assert read(tier, KEYS) == everything
    assert read(tier, [*KEYS[:7], b"missing", *KEYS[7:]]) == everything[:7]
    assert tier.find([*KEYS, b"missing"]) == [True] * NUM_PAGES + [False]


@pytest.mark.parametrize("failing", [0, 5, NUM_PAGES - 1])
def test_an_exception_of_the_caller_ends_only_its_call(store: Store, failing: int) -> None:
    """An exception of the caller's function, while it takes or gives a page, ends only this call. Later calls have all
    staging pages."""
    tier, _ = store

    def fails(i: int, page: PageBuffer) -> None:
        if i == failing:
            raise ValueError(f"no room for page {i}")

    for call in (tier.read, tier.write):
        with pytest.raises(ValueError, match=f"no room for page {failing}"):
            call([key + b"?" for key in KEYS] if call == tier.write else KEYS, PAGE_BYTES, fails)
    assert read(tier, KEYS) == [(n, n) for n in range(NUM_PAGES)]
    assert tier.write(KEYS, PAGE_BYTES, fill) == [True] * NUM_PAGES


def test_a_caller_waits_for_a_page_as_long_as_it_says(store: Store, clock: Clock) -> None:
    """A caller waits for a page at most as long as its limit. Later pages do not land, and their staging pages are free
    after the answer."""
    tier, troubled = store
    gate, landed = Gate("get_into"), Landed()
    troubled.trouble = gate

    def ticking() -> float:
        clock.now_s += LIMITS.io_timeout_s / 100
        return clock.now_s

    tier.tier.clock = ticking
    assert tier.read(KEYS, PAGE_BYTES, landed, LIMITS.io_timeout_s / 50) == 0
    tier.tier.clock = clock
    gate.open()
    assert eventually(lambda: len(read(tier, KEYS))) == NUM_PAGES and landed == []


def test_many_threads_at_once_get_their_own_answers(store: Store) -> None:
    """While many threads wait, one of them receives the answers for all."""
    tier, _ = store
    wrong: list[object] = []
    start = threading.Barrier(6)

    def ask(n: int) -> None:
        start.wait(BOUND_S)
        for i in range(20):
            keys = KEYS[n : n + 1 + i % 4]
            if n % 3 == 0 and read(tier, keys) != [(j, n + j) for j in range(len(keys))]:
                wrong.append(("read", n, i))
            if n % 3 == 1 and tier.find([*keys, b"?"]) != [*[True] * len(keys), False]:
                wrong.append(("find", n, i))
            if n % 3 == 2 and tier.write([b"%d.%d" % (n, i)], PAGE_BYTES, fill) != [True]:
                wrong.append(("write", n, i))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert not wrong and not any(thread.is_alive() for thread in threads)
