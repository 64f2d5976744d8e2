"""A run of host pages: what the index keeps of pages that came together, and what is to come."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from hicache.eviction.orders import CountedRecord
from hicache.tiers import Store

RUN_TOKENS = 1024
RUN_PAGES = RUN_TOKENS // 64


class Pages(Protocol):
    """Whose pages an index keeps: a `HostPagePool`, or what counts like one."""

    num_pages: int

    def available(self) -> int: ...

    def alloc(self, num_pages: int) -> list[int] | None: ...

    def free(self, pages: Sequence[int]) -> None: ...

    def check(self) -> None: ...


class NewPages(NamedTuple):
    """Pages to be reserved: `keys`, which follow each other in a prompt, behind the page `previous_key` or none.
    `first`: the index of the first in its prompt. `event_pages`: what events tell of pages, of which the first here is
    the `offset`-th; of windows and states, the keys of their full pages. `priority`: of the request that they are for.
    `hit_count`: requests that used them where they come from, `uses`: see `EvictionPolicy.uses_of`."""

    keys: Sequence[bytes]
    previous_key: bytes | None = None
    first: int = 0
    event_pages: Any = None
    offset: int = 0
    priority: int = 0
    hit_count: int = 1
    uses: float = 1.0

    def part(self, start: int, end: int) -> NewPages:
        """The `start`-th to the `end`-th of them."""
        keys, previous_key = self.keys[start:end], self.keys[start - 1] if start else self.previous_key
        first, offset = self.first + start, self.offset + start
        return self._replace(keys=keys, previous_key=previous_key, first=first, offset=offset)


class HostRun(CountedRecord):
    """Pages that follow each other in a prompt, without a gap: `ids[i]` in the pool for the bytes of `keys[i]`. Only
    the index changes it, but for `stored` and `source`, `job` and `wanted`, and `event_pages` and `offset` when it has
    come.

    `locks`          its holders, and the runs behind it that have locks
    `parent_run`     the run that it follows in its prompts
    `after`          those that follow it
    `first`          the index of its first page in its prompts
    `second_pages`   second pages by key, of raw ones: those that did not fit one when packed; no store gets them
    `stored`         bits of the stores that are known to have all others
    `source`         the store that a read brought it from, until a request uses it
    `job`, `wanted`  while a read brings it: what does, and who waits for it
    `event_pages`    what `reserve` was given for it, of which its first page is the `offset`-th
    `expected_uses`  what its uses are when it has come; 1: its coming alone
    `on_device`      how many of its first pages the device is known to have as well
    """

    __slots__ = (
        "after", "event_pages", "expected_uses", "first", "ids", "is_published", "job", "keys", "locks",
        "offset", "on_device", "parent_run", "second_pages", "source", "stored", "wanted",
    )  # fmt: skip

    def __init__(self, keys: list[bytes], ids: list[int], event_pages: Any, offset: int, first: int = 0) -> None:
        super().__init__(keys[0])
        self.keys, self.ids, self.event_pages, self.offset, self.first = keys, ids, event_pages, offset, first
        self.job: Any = None
        self.wanted: Any = None  # a dict, for its order
        self.locks, self.stored, self.hit_count, self.expected_uses = 1, 0, 1, 1.0
        self.source: Store | None = None
        self.second_pages: dict[bytes, int] = {}
        self.on_device = 0
        self.is_published = False
        self.parent_run: HostRun | None = None
        self.after: set[HostRun] = set()

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        """Its size for eviction orders, in pages."""
        return len(self.keys)

    @property
    def is_coming(self) -> bool:
        """Whether it is there or on its way from the device. A read may bring nothing."""
        return self.is_published or self.job is None

    @property
    def num_held(self) -> int:
        """Pages of the pool, second ones included."""
        return len(self.ids) + len(self.second_pages)

    @property
    def is_duplicate(self) -> bool:
        """Whether the device has all of it: then nothing that follows it needs it here."""
        return self.on_device == len(self.keys)

    @property
    def needs(self) -> HostRun | None:
        """What it follows and keeps here while it is locked itself."""
        parent = self.parent_run
        return None if parent is None or parent.on_device == len(parent.keys) else parent

    def take_first(self, num_pages: int) -> HostRun:
        """Its first `num_pages` become a run of their own, like it; no index knows that yet."""
        keys, ids = self.keys[:num_pages], self.ids[:num_pages]
        first = HostRun(keys, ids, self.event_pages, self.offset, self.first)
        first.stored, first.source, first.is_published = self.stored, self.source, self.is_published
        first.hit_count, first.priority, first.expected_uses = self.hit_count, self.priority, self.expected_uses
        first.creation_time, first.last_access_time = self.creation_time, self.last_access_time
        first.follow(self)
        first.second_pages = {key: self.second_pages.pop(key) for key in first.keys if key in self.second_pages}
        first.on_device = min(num_pages, self.on_device)
        self.on_device -= first.on_device
        del self.keys[:num_pages], self.ids[:num_pages]
        self.key, self.offset, self.first = self.keys[0], self.offset + num_pages, self.first + num_pages
        return first

    def common_end(self, keys: Sequence[bytes], start: int, end: int) -> int:
        """Up to where it has pages [start, end) of a prompt with `keys`, of which it has the first."""
        skipped = self.keys.index(keys[start])
        last = min(end, start + len(self.keys) - skipped)
        if self.keys[skipped + last - start - 1] == keys[last - 1]:
            return last
        shift = skipped - start  # the prompts part within the run
        return start + bisect_left(range(start, last), True, key=lambda i: self.keys[i + shift] != keys[i])

    def common_start(self, keys: Sequence[bytes], start: int, end: int) -> int:
        """From where on it has pages [start, end) of a prompt with `keys`, of which it has the last."""
        return max(start, end - 1 - self.keys.index(keys[end - 1]))


def runs_for(pages: NewPages, ids: Iterator[int], run_pages: int) -> Iterator[HostRun]:
    """Runs of at most `run_pages` in which `pages` come, to the next of `ids` in the pool."""
    start = 0
    while start < len(pages.keys):
        end = min(len(pages.keys), start + run_pages - (pages.first + start) % run_pages)
        keys, offset, first = list(pages.keys[start:end]), pages.offset + start, pages.first + start
        run = HostRun(keys, list(islice(ids, end - start)), pages.event_pages, offset, first)
        run.priority, run.hit_count, run.expected_uses = pages.priority, pages.hit_count, pages.uses
        yield run
        start = end


class RunPart(NamedTuple):
    """Pages [start, end) of a prompt, which are those of `run` from its `skipped`-th on."""

    run: HostRun
    skipped: int
    start: int
    end: int

    @property
    def keys(self) -> list[bytes]:
        return self.run.keys[self.skipped : self.skipped + self.end - self.start]


_START, _END = attrgetter("start"), attrgetter("end")


def spans(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open intervals."""
    if not indices:
        return []
    if indices[-1] - indices[0] + 1 == len(indices):
        return [(indices[0], indices[-1] + 1)]
    ends = [at for at in range(1, len(indices) + 1) if at == len(indices) or indices[at] != indices[at - 1] + 1]
    return [(indices[start], indices[end - 1] + 1) for start, end in pairwise([0, *ends])]


def within(parts: Sequence[RunPart], indices: Sequence[int]) -> list[RunPart]:
    """What `parts`, ascending, have of these pages of their prompt, ascending."""
    found: list[RunPart] = []
    for start, end in spans(indices):
        first, last = bisect_right(parts, start, key=_END), bisect_left(parts, end, key=_START)
        chosen = [*parts[first:last]]
        if chosen and chosen[-1].end > end:
            chosen[-1] = chosen[-1]._replace(end=end)
        if chosen and (num_before := start - chosen[0].start) > 0:
            chosen[0] = chosen[0]._replace(skipped=chosen[0].skipped + num_before, start=start)
        found += chosen
    return found


def end_of(parts: Sequence[RunPart], start: int) -> int:
    """Where the pages of a prompt end that `parts`, ascending, have from `start` on without a gap."""
    end = start
    for index in range(bisect_right(parts, start, key=_END), len(parts)):
        if parts[index].start > end:
            break
        end = parts[index].end
    return end


def used_alike(parts: Iterable[RunPart]) -> list[tuple[int, int]]:
    """Pieces of `parts`, which leave no gap, that requests used equally often: (end, number of requests)."""
    found: list[tuple[int, int]] = []
    for part in parts:
        if found and found[-1][1] == part.run.hit_count:
            found.pop()
        found.append((part.end, part.run.hit_count))
    return found


def ids_of(parts: Iterable[RunPart]) -> torch.Tensor:
    """Their pages in the host pool, int64 `[pages]`."""
    ids: list[int] = []
    for run, skipped, start, end in parts:
        ids += run.ids[skipped : skipped + end - start]
    return torch.tensor(ids, dtype=torch.int64)


def second_pages_of(parts: Sequence[RunPart]) -> torch.Tensor | None:
    """Their second pages, int64 `[pages]`, 0 for those without; None where none has one."""
    if not any(part.run.second_pages for part in parts):
        return None
    second_ids = [part.run.second_pages.get(key, 0) for part in parts for key in part.keys]
    return torch.tensor(second_ids, dtype=torch.int64) if any(second_ids) else None


def pages_of(runs: Iterable[HostRun]) -> torch.Tensor:
    """Their pages in the host pool, int64 `[pages]`, without second ones."""
    return torch.tensor([page for run in runs for page in run.ids], dtype=torch.int64)


def path_of(run: HostRun, seen: set[HostRun] | None = None) -> list[HostRun]:
    """What `run` follows on the host, from the first on, and itself; with `seen` only what that lacks, and gets."""
    path, at = list[HostRun](), run
    while seen is None or at not in seen:
        path.append(at)
        if at.parent_run is None:
            break
        at = at.parent_run
    if seen is not None:
        seen.update(path)
    return path[::-1]


def held_by(runs: Iterable[HostRun]) -> list[int]:
    """Their pages in the host pool: of each run, those of `pages_of`, then second ones."""
    return [page for run in runs for page in (*run.ids, *run.second_pages.values())]
