"""Fixtures of the tests of the disk tier and of prefetches: their clock and their stores."""

from __future__ import annotations

import functools

import pytest

import hicache.build.store_tiers
import hicache.storage.process.stores
from disk_case import Clock, TroubledStore
from hicache.storage import open_store
from hicache.storage.process.settings import ServiceSettings
from prefetch_case import PacedStore

TOY_PAGE_BYTES = 8 * 192  # bytes of a page of 8 tokens of the toy model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all engines that the test builds afterwards."""
    clock = Clock()
    # A read has two pages, so that a reader of a long prompt makes several reads.
    settings = functools.partial(ServiceSettings, part_bytes=2 * TOY_PAGE_BYTES)
    monkeypatch.setattr(hicache.build.store_tiers, "ServiceSettings", settings)
    for name in ("open_tier", "open_given"):
        opens = getattr(hicache.build.store_tiers, name)
        monkeypatch.setattr(hicache.build.store_tiers, name, functools.partial(opens, clock=clock))
    return clock


@pytest.fixture
def store(clock: Clock) -> PacedStore:
    return PacedStore(clock)


@pytest.fixture
def stores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[TroubledStore]:
    """The disk stores of all engines that the test builds afterwards, the newest last. A test can make them fail."""
    stores: list[TroubledStore] = []

    def troubled(url: str, **settings: object) -> TroubledStore:
        stores.append(TroubledStore(open_store(url, **settings)))  # type: ignore[arg-type]
        return stores[-1]

    monkeypatch.setattr(hicache.storage.process.stores, "open_store", troubled)
    return stores
