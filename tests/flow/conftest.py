"""The clock and the stores of the tests of the disk tier and of prefetches."""

from __future__ import annotations

import functools

import pytest

import hicache.stores
from disk_case import Clock, TroubledStore
from hicache.disk import DiskTier
from hicache.storage import LmdbPageStore
from prefetch_case import PacedStore


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all engines that are built from here on."""
    clock = Clock()
    monkeypatch.setattr(hicache.stores, "DiskTier", functools.partial(DiskTier, clock=clock))
    return clock


@pytest.fixture
def store(clock: Clock) -> PacedStore:
    return PacedStore(clock)


@pytest.fixture
def stores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[TroubledStore]:
    """The stores on disk of engines that are built from here on, newest last: they fail when told to."""
    stores: list[TroubledStore] = []

    def troubled(*args: object, **settings: object) -> TroubledStore:
        stores.append(TroubledStore(LmdbPageStore(*args, **settings)))  # type: ignore[arg-type]
        return stores[-1]

    monkeypatch.setattr(hicache.stores, "LmdbPageStore", troubled)
    return stores
