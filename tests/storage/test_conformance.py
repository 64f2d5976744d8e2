"""The embedded store, and a store in memory, keep the contract of page stores. The conformance suite detects stores
that violate it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import LmdbPageStore, open_store
from hicache.storage.conformance import MakeStore, StoreConformance
from memory_store import MemoryPageStore
from own_store import opener

BUDGET_BYTES = 16 << 20


class TestLmdb(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return partial(LmdbPageStore, tmp_path, budget_bytes=BUDGET_BYTES)


class TestDirectory(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return partial(open_store, f"dir://{tmp_path}?concurrency=2")


class TestMemory(StoreConformance):
    outlives_close = knows_identity = False

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return partial(opener, "own-store://?budget=16MiB")


class Overwriting(MemoryPageStore):
    def put(self, items: Any, **of_call: Any) -> list[bool]:
        self.delete([key for key, _ in items])
        return super().put(items, **of_call)


class Optimistic(MemoryPageStore):
    def get_into(self, keys: Any, buffers: Any, **of_call: Any) -> list[bool]:
        super().get_into(keys, buffers, **of_call)
        return [True] * len(keys)


class Flipping(MemoryPageStore):
    def get_into(self, keys: Any, buffers: Any, **of_call: Any) -> list[bool]:
        found = super().get_into(keys, buffers, **of_call)
        for buffer in buffers:
            buffer[-1] ^= 1
        return found


class Shortening(MemoryPageStore):
    def put(self, items: Any, **of_call: Any) -> list[bool]:
        return super().put([(key if len(key) > 511 else key[:510], page) for key, page in items], **of_call)


class Patient(MemoryPageStore):
    def put(self, items: Any, *, lag: float = 0.0, deadline_s: float = math.inf) -> list[bool]:
        return super().put(items, lag=lag)


class Confident(MemoryPageStore):
    def delete(self, keys: Any) -> int:
        super().delete(keys)
        return len(keys)


class Idle(MemoryPageStore):
    def get_into(self, keys: Any, buffers: Any, **of_call: Any) -> list[bool]:
        return [False] * len(keys)


class Full(MemoryPageStore):
    def put(self, items: Any, **of_call: Any) -> list[bool]:
        if self.stats().live_bytes > BUDGET_BYTES // 2:
            return [True] * len(items)
        return super().put(items, **of_call)


BROKEN: list[tuple[type[MemoryPageStore], str]] = [
    (Overwriting, "test_a_present_key_keeps_its_page"),
    (Optimistic, "test_a_batch_is_answered_key_by_key"),
    (Flipping, "test_a_present_key_keeps_its_page"),
    (Shortening, "test_keys_are_any_1_to_511_bytes"),
    (Patient, "test_after_its_deadline_a_call_does_nothing"),
    (Confident, "test_histories_are_those_of_a_dict"),
    (Idle, "test_it_counts"),
    (Full, "test_what_was_stored_is_there"),
]


@pytest.mark.parametrize(("broken", "test"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_it_notices_what_breaks_the_contract(broken: type[MemoryPageStore], test: str) -> None:
    """A store with one fault fails the test of the violated property. The store also fails the random histories unless
    these cannot show the fault."""
    suite = TestMemory()
    with pytest.raises(AssertionError):
        getattr(suite, test)(lambda **about: broken(BUDGET_BYTES))
    if broken not in (Shortening, Patient, Full):
        with pytest.raises(AssertionError):
            suite.test_histories_are_those_of_a_dict(lambda **about: broken(BUDGET_BYTES))


def test_it_notices_identities_that_mix() -> None:
    """A store in memory that several identities share fails the suite if the suite passes it the identity."""
    store = MemoryPageStore(BUDGET_BYTES)
    store.close = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        StoreConformance().test_another_identity_finds_nothing(lambda **about: store)


def test_it_notices_a_key_that_is_dropped(tmp_path: Path) -> None:
    """A store that accepts a key but stores pages without encryption fails the suite."""
    pytest.importorskip("cryptography")

    def make(*, cipher: object, **about: Any) -> LmdbPageStore:
        return LmdbPageStore(tmp_path, budget_bytes=BUDGET_BYTES, **about)

    with pytest.raises(AssertionError, match="without the key"):
        StoreConformance().test_pages_under_a_key_need_it(make)
