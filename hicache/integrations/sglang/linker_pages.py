"""Which pages of a component are on the host, by SGLang's page keys, and which of them leaves first.

SGLang names pages by a hash chain and says nothing of prompts, so the chains are learned: the keys of one transfer
follow each other, and those of one look-up do. A page is used with all pages known to come before it, so that of a
chain the last page leaves first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hicache.errors import InvariantError
from hicache.eviction.orders import CountedRecord, clock
from hicache.eviction.policy import make_order
from hicache.host import HostPagePool


class HeldPage(CountedRecord):
    """A page on the host. `before`: the page known to come before it, `after`: those known to come after. It stays
    while it is locked. `stored`: whether the disk is known to have it."""

    __slots__ = ("after", "before", "dropped", "host_page", "locks", "stored")
    key: str

    def __init__(self, key: str, host_page: int) -> None:
        super().__init__(key)
        self.host_page, self.locks = host_page, 0
        self.before: HeldPage | None = None
        self.after: set[HeldPage] = set()
        self.dropped = self.stored = False


def host_pages(pages: Iterable[HeldPage]) -> torch.Tensor:
    """Their ids in the host pool, int64 `[pages]`."""
    return torch.tensor([page.host_page for page in pages], dtype=torch.int64)


def _ends_its_chain(page: HeldPage) -> bool:
    return not page.after


class PageIndex:
    """The pages of one host pool. Scheduler thread.

    A page of the pool is free, reserved (by `reserve`, until `publish` or `free`), in the index, or dropped and still
    locked.
    """

    def __init__(self, pool: HostPagePool, policy: str) -> None:
        self.pool = pool
        self._pages: dict[str, HeldPage] = {}
        self._order = make_order(policy, _ends_its_chain)
        self._num_reserved = self._num_dropped = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: str) -> HeldPage | None:
        return self._pages.get(key)

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._pages]

    def reserve(self, num_pages: int) -> torch.Tensor | None:
        """Host pages to write to, int64 `[num_pages]`, for which others leave; None where too many are locked."""
        if self.pool.available() + len(self._order) < num_pages:
            return None
        victims: list[HeldPage] = []
        while self.pool.available() + len(victims) < num_pages:
            victim = self._order.victim()
            if victim is None:
                break
            self._order.evict(victim)
            self._detach(victim)
            victims.append(victim)
        self.pool.free(host_pages(victims))
        self.num_evicted += len(victims)
        reserved = self.pool.alloc(num_pages)
        self._num_reserved += 0 if reserved is None else num_pages
        return reserved

    def free(self, pages: torch.Tensor) -> None:
        """Give reserved pages back."""
        self.pool.free(pages)
        self._num_reserved -= len(pages)

    def publish(self, keys: Sequence[str], pages: torch.Tensor) -> list[HeldPage]:
        """Reserved pages hold the bytes of `keys`, in the order of a prompt, from now on. Keys that are held already
        keep their page. Returns the pages that are new."""
        new: list[HeldPage] = []
        for key, host_page in zip(keys, pages.tolist(), strict=True):
            if key in self._pages:
                self.free(torch.tensor([host_page]))
                continue
            page = self._pages[key] = HeldPage(key, host_page)
            self._num_reserved -= 1
            new.append(page)
        for page in reversed(new):  # the first is the most recent
            self._order.insert(page)
        self.link(keys)
        return new

    def link(self, keys: Sequence[str]) -> None:
        """Pages of a prompt, one after the other. Where both are held, learn which comes before which."""
        before: HeldPage | None = None
        for key in keys:
            page = self._pages.get(key)
            if page is not None and before is not None and page.before is None:
                page.before = before
                before.after.add(page)
            before = page

    def use(self, pages: Sequence[HeldPage]) -> None:
        """A request uses these pages, in the order of its prompt, and so those before them."""
        for page in (*reversed(pages), *self._above(pages)):
            page.last_access_time = next(clock)
            page.hit_count += 1
            self._order.hit(page)

    def lock(self, pages: Iterable[HeldPage]) -> None:
        for page in pages:
            page.locks += 1
            if page.locks == 1:
                self._order.lock(page)

    def unlock(self, pages: Sequence[HeldPage]) -> None:
        """In the order of a prompt. They are the most recent then, and so are those before them."""
        for page in reversed(pages):
            page.locks -= 1
            if page.locks == 0:
                if page.dropped:
                    self._num_dropped -= 1
                    self.pool.free(host_pages([page]))
                else:
                    self._order.unlock(page)
        self.lift(pages)

    def lift(self, pages: Sequence[HeldPage]) -> None:
        """These pages became the most recent: make those before them more recent still."""
        for above in self._above(pages):
            self._order.hit(above)

    def clear(self) -> None:
        """Forget all pages. Those that are locked are free with their last unlock."""
        pages = list(self._pages.values())
        for page in pages:
            page.dropped = page.locks > 0
            if not page.dropped:
                self._order.evict(page)
            self._detach(page)
        self._num_dropped += sum(page.dropped for page in pages)
        self.pool.free(host_pages(page for page in pages if not page.dropped))

    def check(self, num_reserved: int, num_locks: int) -> None:
        """Raise `InvariantError` unless every page of the pool is free or has one owner, and every reservation and lock
        is somebody's."""
        found = []
        ids = [page.host_page for page in self._pages.values()]
        if len({*ids}) < len(ids):
            found.append("two keys share a host page")
        owned = len(ids) + self._num_reserved + self._num_dropped
        if owned + self.pool.available() != self.pool.num_pages:
            found.append(f"{owned} pages owned, {self.pool.available()} free of {self.pool.num_pages}")
        if self._num_reserved != num_reserved:
            found.append(f"{self._num_reserved} pages reserved, {num_reserved} by copies and reads in flight")
        locks = sum(page.locks for page in self._pages.values())
        if not self._num_dropped and locks != num_locks:
            found.append(f"{locks} locks, {num_locks} of loads and writes in flight")
        unlocked = sum(not page.locks for page in self._pages.values())
        if unlocked != len(self._order):
            found.append(f"{unlocked} pages are not locked, {len(self._order)} may leave")
        if found:
            raise InvariantError("linker pages", found)
        self.pool.check()

    @staticmethod
    def _above(pages: Sequence[HeldPage]) -> list[HeldPage]:
        """The pages known to come before the first of these, the nearest first."""
        found: list[HeldPage] = []
        above = pages[0].before if pages else None
        while above is not None:
            found.append(above)
            above = above.before
        return found

    def _detach(self, page: HeldPage) -> None:
        """The page leaves the index and its chain."""
        del self._pages[page.key]
        before = page.before
        if before is not None:
            before.after.remove(page)
            if not before.after:
                self._order.update(before)
        for page_after in page.after:
            page_after.before = None
        page.after.clear()
        page.before = None
