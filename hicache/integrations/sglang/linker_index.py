"""Which pages are on the host, by page key, and which of them leaves first.

    reserve    others leave for pages to write to          in flight: one lock, that of their writer
    publish    their bytes are confirmed                   found by `get`, and in the eviction order while not locked
    abandon    or did not come                             gone

A page key says nothing of prompts, so chains are learned: keys that were named one after the other follow each other. A
page is used with all pages known to come before it, so that of a chain the last page leaves first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from hicache.errors import InvariantError
from hicache.eviction.orders import CountedRecord, EvictionOrder, clock
from hicache.eviction.policy import make_order
from hicache.host.pool import HostPagePool

K = TypeVar("K", bound=Hashable)


class HostPage(CountedRecord):
    """A page of the pool, `page_id`, for the bytes of `key`. `locks`: its writer, and those who need it to stay.

    `before`: the page known to come before it, `after`: those known to come after. `stored`: whether the disk is known
    to have it.
    """

    __slots__ = ("after", "before", "locks", "page_id", "stored")

    def __init__(self, key: Hashable, page_id: int) -> None:
        super().__init__(key)
        self.page_id, self.locks, self.stored = page_id, 1, False
        self.before: HostPage | None = None
        self.after: set[HostPage] = set()


def page_ids(pages: Iterable[HostPage]) -> torch.Tensor:
    """Their ids in the host pool, int64 `[pages]`."""
    return torch.tensor([page.page_id for page in pages], dtype=torch.int64)


class PageIndex:
    """The pages of one host pool, which are free, in flight, published, or gone and still locked. Scheduler thread."""

    def __init__(self, pool: HostPagePool, policy: str) -> None:
        self.pool = pool
        self._published: dict[Hashable, HostPage] = {}
        self._in_flight: dict[Hashable, HostPage] = {}  # of each key the first
        self._num_in_flight = 0
        self._gone: set[HostPage] = set()
        self._order: EvictionOrder[HostPage] = make_order(policy, lambda page: not page.after)
        self.num_evicted = 0

    def __len__(self) -> int:
        """Published pages."""
        return len(self._published)

    def get(self, key: Hashable) -> HostPage | None:
        """The page that holds the bytes of `key`."""
        return self._published.get(key)

    def find(self, key: Hashable) -> HostPage | None:
        """As `get`, or else the page that is to hold them."""
        return self._published.get(key) or self._in_flight.get(key)

    def missing(self, keys: Sequence[K]) -> list[K]:
        return [key for key in keys if key not in self._published]

    def reserve(self, keys: Sequence[Hashable]) -> list[HostPage] | None:
        """A page to write to for each key, for which others leave; None, and none leaves, where too many are locked.

        For a key that has a page already this is another one, of which `publish` keeps the first that comes.
        """
        victims: list[HostPage] = []
        missing = len(keys) - self.pool.available()
        if missing > len(self._order):
            return None
        while len(victims) < missing and (victim := self._order.victim()) is not None:
            self._order.evict(victim)
            victims.append(victim)
            if (before := victim.before) is not None:
                before.after.remove(victim)
                if not before.after:
                    self._order.update(before)
        if len(victims) < missing:
            for victim in reversed(victims):
                self._order.unlock(victim)
                if victim.before is not None:
                    victim.before.after.add(victim)
            return None
        for victim in victims:
            del self._published[victim.key]
        self.pool.free(page_ids(victims))
        self.num_evicted += len(victims)
        ids = self.pool.alloc(len(keys))
        assert ids is not None
        pages = [HostPage(key, page_id) for key, page_id in zip(keys, ids.tolist(), strict=True)]
        self._num_in_flight += len(pages)
        for page in pages:
            self._in_flight.setdefault(page.key, page)
        return pages

    def publish(self, pages: Sequence[HostPage]) -> list[HostPage]:
        """Reserved pages, in the order of a prompt, hold their bytes from now on. Keys that are held already keep their
        page. Returns the pages that are new."""
        self._land(pages)
        new: list[HostPage] = []
        for page in pages:
            if self._published.setdefault(page.key, page) is page:
                new.append(page)
        known = {*new}
        self._drop([page for page in pages if page not in known])
        for page in reversed(new):  # the first is the most recent
            page.locks, page.last_access_time = page.locks - 1, next(clock)
            if page.locks:
                self._order.hit(page)
            else:
                self._order.insert(page)
        self.link([page.key for page in pages])
        return new

    def abandon(self, pages: Sequence[HostPage]) -> None:
        """Give reserved pages back."""
        self._land(pages)
        self._drop(pages)

    def link(self, keys: Sequence[Hashable]) -> None:
        """Pages of a prompt, one after the other. Where both are held, learn which comes before which."""
        before: HostPage | None = None
        for key in keys:
            page = self._published.get(key)
            if page is not None and before is not None and page.before is None:
                page.before = before
                before.after.add(page)
            before = page

    def use(self, pages: Sequence[HostPage]) -> None:
        """A request uses these pages, in the order of its prompt, and so those before them."""
        for page in (*reversed(pages), *self._above(pages)):
            page.last_access_time = next(clock)
            page.hit_count += 1
            self._order.hit(page)

    def lock(self, pages: Iterable[HostPage]) -> None:
        for page in pages:
            page.locks += 1
            if page.locks == 1:
                self._order.lock(page)

    def unlock(self, pages: Sequence[HostPage]) -> None:
        """In the order of a prompt. They keep the rank of their last use, and those before them rank above."""
        for page in reversed(pages):
            if page in self._gone:
                self._drop([page])
                continue
            page.locks -= 1
            if not page.locks:
                self._order.unlock(page)
        self.lift(pages)

    def lift(self, pages: Sequence[HostPage]) -> None:
        """These pages became the most recent: make those before them more recent still."""
        for above in self._above(pages):
            above.last_access_time = next(clock)
            self._order.hit(above)

    def clear(self) -> None:
        """Forget the published pages. Those that are locked are free with their last unlock."""
        for page in self._published.values():
            if page.locks:
                self._gone.add(page)
            else:
                self._order.evict(page)
        self.pool.free(page_ids(page for page in self._published.values() if not page.locks))
        self._published.clear()

    def check(self, num_in_flight: int, num_locks: int) -> None:
        """Raise `InvariantError` unless every page of the pool is free or has one owner, and every page in flight and
        every lock is somebody's."""
        found = []
        pages = self._published.values()
        if len({page.page_id for page in pages}) < len(pages):
            found.append("two keys share a host page")
        owned = len(pages) + self._num_in_flight + len(self._gone)
        if owned + self.pool.available() != self.pool.num_pages:
            found.append(f"{owned} pages owned, {self.pool.available()} free of {self.pool.num_pages}")
        if self._num_in_flight != num_in_flight:
            found.append(f"{self._num_in_flight} pages in flight, {num_in_flight} of copies and reads")
        locks = sum(page.locks for page in (*pages, *self._gone))
        if locks != num_locks:
            found.append(f"{locks} locks, {num_locks} of loads and writes in flight")
        if {*self._order} != {page for page in pages if not page.locks}:
            found.append("the eviction order is not exactly the published pages that are not locked")
        if found:
            raise InvariantError("page index", found)
        self.pool.check()

    def _above(self, pages: Sequence[HostPage]) -> list[HostPage]:
        """The pages known to come before the first of these, the nearest first."""
        found: list[HostPage] = []
        above = pages[0].before if pages else None
        while above is not None:
            found.append(above)
            above = above.before
        return found

    def _land(self, pages: Iterable[HostPage]) -> None:
        """They are in flight no more."""
        for page in pages:
            self._num_in_flight -= 1
            if self._in_flight.get(page.key) is page:
                del self._in_flight[page.key]

    def _drop(self, pages: Sequence[HostPage]) -> None:
        """One lock less on pages that are not published; the last one frees them."""
        for page in pages:
            page.locks -= 1
        self._gone.update(page for page in pages if page.locks)
        self._gone.difference_update(page for page in pages if not page.locks)
        self.pool.free(page_ids(page for page in pages if not page.locks))
