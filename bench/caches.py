"""Calls of `RadixCache` with value objects: match and insert of one long key, and evictions from many leaves.

A key is made once and used again, as a request's is, or made anew from a list of ids for every call. Both sides' calls
are timed in turns, in processor time; the ceiling of a case is the peer's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import hicache
from hicache.bench.common import Case, Report, percentile

TOKENS = 100_000
LEAVES = 10_000
Call = Callable[[], Callable[[], object]]
TARGETS = {"match.key": 0.1, "insert.key": 1.0, "evict": 1.0}


def add_calls(report: Report, peer: Any | None, samples: int) -> None:
    """The cases of hicache's `RadixCache`, over the peer's where there is one."""
    sides = [hicache] if peer is None else [hicache, peer]
    for page_size in (64, 1):
        for form in ("key", "list"):
            for what, prepare in (("match", _match), ("insert", _insert)):
                calls = [prepare(names, page_size, form) for names in sides]
                times = _times(calls, samples)
                name = f"cache.{what}.page{page_size}.{form}"
                note = f"{TOKENS // page_size * page_size} tokens, " + (
                    "of a key made before" if form == "key" else "of a key made from a list in each call"
                )
                _add(report, name, f"{what}.{form}", times, note)
    evictions = _times([_evict(names) for names in sides], samples)
    _add(report, f"cache.evict.leaves{LEAVES}", "evict", evictions, "one leaf in each call")


def _add(report: Report, name: str, target: str, times: Sequence[list[float]], note: str) -> None:
    ours, *others = times
    ceiling = percentile(others[0], 50) if others else None
    wanted = TARGETS.get(target) if others else None
    report.add(Case.of(name, ours, "us", better="lower", ceiling=ceiling, target=wanted, note=note))


def _times(calls: Sequence[Call], samples: int) -> list[list[float]]:
    """Processor microseconds of what each side's call returns, in turns: what `call` itself does is not timed."""
    times: list[list[float]] = [[] for _ in calls]
    for at in range(samples):
        for side in range(len(calls)) if at % 2 else reversed(range(len(calls))):
            timed = calls[side]()
            start = time.process_time_ns()
            timed()
            times[side].append((time.process_time_ns() - start) / 1e3)
    return times


def _ids(page_size: int) -> tuple[list[int], torch.Tensor]:
    ids = np.random.default_rng(page_size).integers(0, 150_000, TOKENS // page_size * page_size)
    return ids.tolist(), torch.arange(1, len(ids) + 1)


def _simulated(names: Any, page_size: int) -> Any:
    """A cache whose allocator keeps nothing."""
    freed = SimpleNamespace(device=torch.device("cpu"), free=lambda slots: None)
    return names.RadixCache.create_simulated(mock_allocator=freed, page_size=page_size)


def _match(names: Any, page_size: int, form: str) -> Call:
    held, slots = _ids(page_size)
    asked, _ = _ids(page_size)  # equal ids, other objects
    cache, key = _simulated(names, page_size), names.RadixKey(asked)
    cache.insert(names.InsertParams(key=names.RadixKey(held), value=slots))

    def call() -> Callable[[], object]:
        if form == "key":
            return lambda: cache.match_prefix(names.MatchPrefixParams(key=key))
        return lambda: cache.match_prefix(names.MatchPrefixParams(key=names.RadixKey(asked)))

    if call()().device_indices.numel() != len(asked):  # type: ignore[attr-defined]
        raise AssertionError("the cached prefix does not match")
    return call


def _insert(names: Any, page_size: int, form: str) -> Call:
    """What the call before inserted is evicted first."""
    ids, slots = _ids(page_size)
    cache, key = _simulated(names, page_size), names.RadixKey(ids)

    def call() -> Callable[[], object]:
        cache.evict(names.EvictParams(num_tokens=len(ids)))
        if form == "key":
            return lambda: cache.insert(names.InsertParams(key=key, value=slots))
        return lambda: cache.insert(names.InsertParams(key=names.RadixKey(ids), value=slots))

    call()()  # the key is made now
    return call


def _evict(names: Any) -> Call:
    """A leaf is inserted before each call."""
    cache, slots, next_leaf = _simulated(names, 1), torch.ones(2, dtype=torch.int64), 1000

    def call() -> Callable[[], object]:
        nonlocal next_leaf
        next_leaf += 1
        cache.insert(names.InsertParams(key=names.RadixKey([7, next_leaf]), value=slots))
        return lambda: cache.evict(names.EvictParams(num_tokens=1))

    for _ in range(LEAVES):
        call()
    return call
