"""The clock and the store of the tests of prefetches."""

from __future__ import annotations

import functools

import pytest

import hicache.stores
from disk_case import Clock
from hicache.disk import DiskTier
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
