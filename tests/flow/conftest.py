"""The clock and the stores of the tests of the disk tier and of prefetches."""

from __future__ import annotations

import functools

import pytest

import hicache.build.store_tiers
import hicache.storage.process.stores
from disk_case import Clock, TroubledStore
from hicache.storage import open_store
from hicache.storage.process.settings import ServiceSettings
from prefetch_case import PacedStore

TOY_PAGE_BYTES = 8 * 192  # of 8 tokens of the toy model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all engines that are built from here on."""
    clock = Clock()
    # Reads of two pages, so that there is something between two looks of a reader.
    settings = functools.partial(ServiceSettings, part_bytes=2 * TOY_PAGE_BYTES)
    monkeypatch.setattr(hicache.build.store_tiers, "ServiceSettings", settings)
    for name in ("open_tier", "given_tier"):
        opens = getattr(hicache.build.store_tiers, name)
        monkeypatch.setattr(hicache.build.store_tiers, name, functools.partial(opens, clock=clock))
    return clock


@pytest.fixture
def store(clock: Clock) -> PacedStore:
    return PacedStore(clock)


@pytest.fixture
def stores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[TroubledStore]:
    """The stores on disk of engines that are built from here on, newest last: they fail when told to."""
    stores: list[TroubledStore] = []

    def troubled(url: str, **settings: object) -> TroubledStore:
        stores.append(TroubledStore(open_store(url, **settings)))  # type: ignore[arg-type]
        return stores[-1]

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", troubled)
    return stores
