"""The index of host pages against dictionaries: reservations that fail, publications, uses, locks and evictions."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hicache.errors import InvariantError
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.host import HostPagePool
from hicache.integrations.sglang.linker_index import HostPage, PageIndex
from hicache.layout import BufferSpec, PoolLayout

NUM_PAGES = 24
LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (8,), "token", (0,)),), 1)
# Prompts that share beginnings: page keys name a page and all before it.
PROMPTS = [[tuple(path[: end + 1]) for end in range(len(path))] for path in (
    "abcdefgh", "abcdxy", "abz", "abcdefuv", "klmnopqrst", "klmnw", "123456", "12378",
)]  # fmt: skip
Key = tuple[str, ...]


def make_index(policy: str = "lru") -> PageIndex:
    page_bytes = LAYOUT.page_bytes(8)
    return PageIndex(HostPagePool(LAYOUT, 8, (NUM_PAGES + 1) * page_bytes, pin=False), policy)


class Model:
    """An index, and beside it what it should hold: `uses` and `hits` say when and how often each published
    page was used."""

    def __init__(self, policy: str, seed: int) -> None:
        self.index, self.dice = make_index(policy), random.Random(f"{policy} {seed}")
        self.is_lru = policy == "lru"
        self.published: dict[Key, HostPage] = {}
        self.before: dict[Key, Key] = {}
        self.uses: dict[Key, int] = {}
        self.hits: dict[Key, int] = {}
        self.in_flight: list[list[HostPage]] = []
        self.coming: dict[Key, HostPage] = {}  # the first of each key in flight
        self.locked: list[list[HostPage]] = []
        self.now = 0
        self.failed = self.evicted = self.twice = 0

    def prompt(self) -> list[Key]:
        keys = self.dice.choice(PROMPTS)
        return keys[self.dice.choice((0, self.dice.randrange(len(keys)))) :][: self.dice.randrange(1, len(keys) + 1)]

    def held(self, keys: list[Key]) -> list[HostPage]:
        return [self.published[key] for key in keys if key in self.published]

    def above(self, pages: list[HostPage]) -> list[Key]:
        """What is known to come before the first, the nearest first."""
        found, key = list[Key](), pages[0].key if pages else None
        while key in self.published and (key := self.before.get(key)) is not None:
            found.append(key)
        return found

    def note(self, keys: list[Key]) -> None:
        """They are the most recent, the last most of all."""
        for key in keys:
            self.now += 1
            self.uses[key] = self.now

    def learn(self, keys: list[Key]) -> None:
        for before, key in itertools.pairwise(keys):
            if before in self.published and key in self.published:
                self.before.setdefault(key, before)

    def victims(self, number: int) -> list[Key] | None:
        """What leaves, one by one: the least recently used of what is not locked, and nothing that is held follows."""
        left, gone = set(self.published), list[Key]()
        while len(gone) < number:
            inner = {self.before[key] for key in left if key in self.before}
            free = [key for key in left - inner if not self.published[key].locks]
            if not free:
                return None
            gone.append(min(free, key=lambda key: self.uses[key]))
            left.remove(gone[-1])
        return gone

    def reserve(self) -> None:
        keys = self.prompt()
        keys = keys if self.dice.random() < 0.2 else [key for key in keys if key not in self.published]
        victims = self.victims(max(0, len(keys) - self.index.pool.available()))
        pages = self.index.reserve(keys)
        assert (pages is None) == (victims is None)
        if pages is None or victims is None:
            self.failed += 1
            return
        assert [page.key for page in pages] == keys and all(page.locks == 1 for page in pages)
        gone = [key for key in self.published if self.index.get(key) is None]
        assert len(gone) == len(victims) and (not self.is_lru or set(gone) == set(victims))
        assert not any(self.published[key].locks for key in gone)
        for key in gone:
            del self.published[key]
        self.before = {key: before for key, before in self.before.items() if key in self.published}
        assert set(self.before.values()) <= set(self.published), "what follows leaves first"
        self.evicted += len(gone)
        self.in_flight.append(pages)
        self.coming = {**{page.key: page for page in reversed(pages)}, **self.coming}

    def land(self) -> None:
        if not self.in_flight:
            return
        pages = self.in_flight.pop(self.dice.randrange(len(self.in_flight)))
        self.coming = {key: page for key, page in self.coming.items() if page not in pages}
        if self.dice.random() < 0.2:
            self.index.abandon(pages)
            return
        new = [page for page in pages if page.key not in self.published]
        self.twice += len(pages) - len(new)
        assert self.index.publish(pages) == new
        self.published.update((page.key, page) for page in new)
        self.note([page.key for page in reversed(new)])
        self.hits.update((page.key, 0) for page in new)
        self.learn([page.key for page in pages])

    def use(self) -> None:
        keys = self.prompt()
        self.index.link(keys)
        self.learn(keys)
        pages = self.held(keys)
        self.index.use(pages)
        used = [*(page.key for page in reversed(pages)), *self.above(pages)]
        self.note(used)
        self.hits.update((key, self.hits[key] + 1) for key in used)

    def lock(self) -> None:
        pages = self.held(self.prompt())
        self.index.lock(pages)
        self.locked.append(pages)

    def wait(self) -> None:
        """Another request needs a page that is in flight: the same entry is found, and locked."""
        pages = [self.coming[key] for key in self.prompt() if key in self.coming and key not in self.published]
        self.index.lock(pages)
        self.locked.append(pages)

    def unlock(self) -> None:
        if self.locked:
            pages = self.locked.pop(self.dice.randrange(len(self.locked)))
            self.index.unlock(pages)
            if pages and self.published.get(pages[0].key) is pages[0]:
                self.note(self.above(pages))

    def clear(self) -> None:
        self.index.clear()
        self.published.clear()
        self.before.clear()

    def check(self) -> None:
        for keys in PROMPTS:
            for key in keys:
                assert self.index.get(key) is self.published.get(key)
                assert self.index.find(key) is self.published.get(key, self.coming.get(key))
        assert all(page.hit_count == self.hits[key] for key, page in self.published.items())
        assert len(self.index) == len(self.published)
        in_flight = {page for pages in self.in_flight for page in pages}
        locks = sum(page not in in_flight for pages in self.locked for page in pages)
        self.index.check(len(in_flight), locks)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_it_holds_what_dictionaries_hold(policy: str, seed: int) -> None:
    """Over random steps: a page is found from its publication until it leaves; what leaves is not locked, and nothing
    that is held follows it; a reservation that fails changes nothing. At the end every page can be freed."""
    model = Model(policy, seed)
    steps = (model.reserve, model.land, model.use, model.lock, model.wait, model.unlock, model.clear)
    for _ in range(3000):
        model.dice.choices(steps, (30, 25, 15, 12, 8, 20, 0.1))[0]()
        model.check()
    assert min(model.failed, model.evicted, model.twice) > 20
    while model.in_flight:
        model.land()
    while model.locked:
        model.unlock()
    pages = model.index.reserve(list(range(NUM_PAGES)))
    assert pages is not None and len(model.index) == 0
    model.index.abandon(pages)
    model.index.check(0, 0)
    assert model.index.pool.available() == NUM_PAGES


def test_check_finds_planted_faults() -> None:
    """The audit names each fault: it can fail."""
    index = make_index()
    pages = index.reserve(["a", "b"])
    assert pages is not None
    with pytest.raises(InvariantError, match="2 pages in flight, 0 of copies"):
        index.check(0, 0)
    first, second = index.publish(pages)
    index.check(0, 0)
    with pytest.raises(InvariantError, match="0 locks, 1 of loads"):
        index.check(0, 1)
    second.page_id, page_id = first.page_id, second.page_id
    with pytest.raises(InvariantError, match="two keys share a host page"):
        index.check(0, 0)
    second.page_id = page_id
    first.locks = 1
    with pytest.raises(InvariantError, match="the eviction order is not exactly"):
        index.check(0, 1)
    first.locks = 0
    index.pool.alloc(1)
    with pytest.raises(InvariantError, match="2 pages owned, 21 free of 24"):
        index.check(0, 0)
