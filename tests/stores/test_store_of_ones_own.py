"""A custom page store: a class in one file that implements `PageStore` is the disk tier of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_store
from disk_case import disk_threads, page_keys
from hicache import AdvancedConfig, CacheEngine, DiskConfig, Hit, build_engine
from hicache.errors import ConfigError, NotStored
from hicache.storage import PageBuffer, PageStore, StoreStats
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, flush_error, serve
from waiting import eventually

PROMPT_LEN, CACHED_LEN, NUM_PAGES = 90, 88, 11  # pages of 8 tokens


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, PROMPT_LEN)


def engine_over(store: PageStore, **changes: object) -> CacheEngine:
    advanced = AdvancedConfig(disk_reopen_backoff_s=1e-3, disk_max_reopen_backoff_s=1e-3)
    changes = {"prefetch_mode": "wait_complete", "advanced": advanced, **changes}
    return build_engine(config(**changes), GEOMETRY, store=store)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray, namespace: str = "") -> Hit:
    """Prefetch and serve a request, and compare the reused bytes with the computed ones."""
    handle = engine.prefetch(name, tokens, namespace)
    eventually(lambda: (engine.poll(), handle.ended)[1])
    hit = serve(engine, name, tokens, namespace).hit
    flush_error(engine)
    engine.check()
    return hit


class Refusing(MemoryPageStore):
    """A store that refuses pages while `takes` is False."""

    takes = True

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        return super().put(items, lag=lag, deadline_s=deadline_s) if self.takes else [False] * len(items)


def test_a_store_of_ones_own_is_one_file() -> None:
    """The file of the custom store imports only the contract of stores and the encoding of values from the project."""
    names = {getattr(value, "__module__", None) for value in vars(memory_store).values()}
    assert {name for name in names if name is not None and name.startswith("hicache")} == {
        "hicache.storage.base",
        "hicache.storage.codec",
    }


def test_engines_share_a_store_that_its_owner_closes() -> None:
    """A second engine over the same store finds the pages of the first, while the first runs and after both have ended.
    An engine does not close a store that it was given."""
    store, tokens = MemoryPageStore(1 << 20), prompt(1)
    with engine_over(store) as first, engine_over(store) as second:
        assert ask(first, "a", tokens) == Hit()
        assert ask(second, "b", tokens) == Hit(disk=CACHED_LEN)
    assert disk_threads() == []
    with engine_over(store) as third:
        assert ask(third, "c", tokens) == Hit(disk=CACHED_LEN)
        assert store.contains(page_keys(third, tokens)) == [True] * NUM_PAGES
        store.close()
        assert ask(third, "d", tokens) == Hit(device=CACHED_LEN)
        # At least the touch of "d" has failed; the touch of "c" may reach the store only after its close.
        eventually(lambda: third.stats()["disk.failed_touches"] >= 1, third.stats)
    with engine_over(store) as fourth:  # from now on every call raises
        assert ask(fourth, "d", tokens) == Hit() and ask(fourth, "e", tokens) == Hit(device=CACHED_LEN)


class Twisted(MemoryPageStore):
    """A store that returns its answers in another form, or that cannot count its failed reads."""

    twist: Callable[[list[bool]], Any] = staticmethod(list)
    counts = True

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return self.twist(super().contains(keys, deadline_s=deadline_s))

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        return self.twist(super().get_into(keys, buffers, deadline_s=deadline_s))

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        return self.twist(super().put(items, lag=lag, deadline_s=deadline_s))

    def thread_read_errors(self) -> int:
        return 0 if self.counts else 1 // 0


WRONG: dict[str, Callable[[list[bool]], Any]] = {
    "too many": lambda ok: [*ok, True],
    "too few": lambda ok: ok[:-1],
    "none at all": lambda ok: None,
    "a bug": lambda ok: 1 // 0,
    "no count": list,
}


@pytest.mark.parametrize("kind", [np.array, iter, tuple, *WRONG])
def test_a_store_that_fails_is_left_alone(kind: Any) -> None:
    """Answers may be any sequence. While calls of a store raise, return too many or too few answers, or cannot count
    failed reads, requests are served as without the store. When the store works, it is used again."""
    store, fails = Twisted(1 << 20), kind in WRONG
    with engine_over(store) as engine:
        ask(engine, "a", prompt(0))
        store.twist, store.counts = WRONG.get(kind, kind), kind != "no count"
        for n in range(1, 5):  # these prompts evict the first one from both tiers
            assert ask(engine, f"b{n}", prompt(n)).disk == 0
        assert ask(engine, "c", prompt(0)) == (Hit() if fails else Hit(disk=CACHED_LEN))
        stats = engine.stats()
        assert bool(stats["disk.reads_opens"]) == fails
        loses = stats["disk.writes_opens"] > 0 and stats["persist.failed_pages"] >= 4 * NUM_PAGES
        assert loses == (fails and kind != "no count")
        store.twist, store.counts = list, True
        keys = page_keys(engine, prompt(4))
        eventually(lambda: ask(engine, "again", prompt(4)) and all(store.contains(keys)))
    with engine_over(store) as engine:
        assert ask(engine, "d", prompt(4)) == Hit(disk=CACHED_LEN)


class Unnumbered(MemoryPageStore):
    """A store whose `stats` raises, or has a count that is no number, every other time."""

    turn = 0

    def stats(self) -> StoreStats:
        self.turn += 1
        if self.turn % 4 == 1:
            raise RuntimeError("a client library's error")
        return StoreStats(entries=None) if self.turn % 4 == 3 else super().stats()  # type: ignore[arg-type]


def test_a_store_that_cannot_count_is_used() -> None:
    """If `stats` raises or returns invalid numbers, pages are still stored and found. The last valid numbers are
    shown."""
    store = Unnumbered(1 << 20)
    with engine_over(store) as engine:
        ask(engine, "a", prompt(0))
        keys = page_keys(engine, prompt(0))
    with engine_over(store) as engine:
        assert all(store.contains(keys))
        assert ask(engine, "b", prompt(0)) == Hit(disk=CACHED_LEN)
        stats = engine.stats()
        assert stats["disk.stored_pages"] == NUM_PAGES and not stats["disk.process_failures"]


def test_pages_refused_by_a_store_stay_on_the_host() -> None:
    """If `put` returns False without counting an error, the pages count as not stored, and are served from the host.
    Writing continues, and the pages are stored as soon as `put` returns True."""
    store, tokens = Refusing(1 << 20), prompt(1)
    with engine_over(store) as engine:
        store.takes = False
        ask(engine, "a", tokens)
        keys = page_keys(engine, tokens)
        assert engine.stats()["persist.failed_pages"] >= NUM_PAGES and not any(store.contains(keys))
        for n in (2, 3):  # the device holds one prompt
            serve(engine, f"b{n}", prompt(n))
            with pytest.raises(NotStored, match="the store is full"):
                engine.flush()
        assert serve(engine, "c", tokens).hit == Hit(host=CACHED_LEN)
        assert engine.stats()["disk.writes_opens"] == engine.stats()["disk.writes_failures"] == 0
        store.takes = True
        ask(engine, "d", tokens)
        assert all(store.contains(keys))


def test_a_store_takes_the_place_of_the_disk_settings(tmp_path: Path) -> None:
    """A store together with a path of the disk tier raises, and so does a store without settings of a disk tier."""
    store = MemoryPageStore(1 << 20)
    for changes, setting in (
        ({"disk": DiskConfig(path=str(tmp_path))}, "disk path"),
        ({"host_bytes": 0}, "host_bytes"),
        ({"model_id": ""}, "model_id"),
    ):
        with pytest.raises(ConfigError, match=setting):
            engine_over(store, **changes)
