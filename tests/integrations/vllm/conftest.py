"""What tests of the tier under vLLM share."""

from __future__ import annotations

import functools

import pytest

from disk_case import Clock
from hicache.integrations import server_store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which a disk is measured, given up and tried again."""
    clock = Clock()
    monkeypatch.setattr(server_store, "open_tier", functools.partial(server_store.open_tier, clock=clock))
    return clock
