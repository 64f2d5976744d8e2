"""Several disks, and the remote tier beside them: which of them gets a page, and which brings one that several have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from disk_case import Clock, Gate, TroubledStore, failing, page_keys
from hicache import CacheEngine, DiskConfig, Prefetch, build_engine
from hicache.config.stores import MAX_DISKS
from hicache.errors import ConfigError
from hicache.flow.placement import Placement
from hicache.host.run import HostRun
from hicache.serving.server.prometheus import EngineCollector
from hicache.storage import open_existing
from hicache.tiers import REMOTE, Store
from memory_store import MemoryPageStore
from prefetch_case import PAGE, PacedStore, settings, tokens_of
from toy_model import GEOMETRY, config, serve, settled, until_ready
from waiting import BOUND_S, eventually

A, B = Store(1), Store(2)
LONG = {"device_tokens": 1024, "max_context_len": 1024, "host_bytes": 400 * PAGE * 192}
NUM_PAGES = 64  # read by eight jobs


@contextmanager
def engine_over(*stores: object, **changes: object) -> Iterator[CacheEngine]:
    """Over several disks, which hold no read when the engine ends."""
    with build_engine(settings(**LONG, **changes), GEOMETRY, store=stores) as engine:  # type: ignore[arg-type]
        try:
            yield engine
        finally:
            for store in stores:
                if isinstance(store, PacedStore):
                    store.allow()


@contextmanager
def asked_both(clock: Clock) -> Iterator[tuple[CacheEngine, list[PacedStore], Prefetch, np.ndarray]]:
    """Two disks alike that have all pages of a prompt, and a prefetch of it that both hold up; at the end it is
    served."""
    tokens, stores = tokens_of(1, NUM_PAGES * PAGE + 1), [PacedStore(clock) for _ in range(2)]
    for store in stores:
        with engine_over(store) as engine:
            serve(engine, "fill", tokens)
            engine.flush()
        store.landed.clear()
        store.hold()
    with engine_over(*stores) as engine:
        handle = engine.prefetch("a", tokens, mode="wait_complete")
        eventually(lambda: engine.poll() or all(store.held for store in stores))
        yield engine, stores, handle, tokens
        eventually(lambda: engine.poll() or handle.ended, engine.stats)
        assert handle.landed_tokens == handle.found_tokens == NUM_PAGES * PAGE
        assert serve(engine, "a", tokens).hit.disk == NUM_PAGES * PAGE
        for store in stores:
            store.allow()
        settled(engine)


def read_all(engine: CacheEngine, name: str, tokens: np.ndarray) -> int:
    """Prefetch and serve a request, comparing every byte; returns its tokens from disks."""
    until_ready(engine, engine.prefetch(name, tokens, mode="wait_complete"))
    hit = serve(engine, name, tokens).hit
    settled(engine)
    return hit.disk


# Which brings a page


def test_disks_of_equal_rate_bring_about_half_each(clock: Clock) -> None:
    """Both have all pages, and read in turns: each page comes once, and none brings more than a job more."""
    with asked_both(clock) as (engine, stores, handle, _):
        while not handle.ended:
            for store in stores:
                before = store.num_ended
                if store.held:
                    store.allow(1)
                    eventually(lambda store=store, before=before: store.num_ended > before)
            eventually(lambda: engine.poll() or handle.ended or any(store.held for store in stores))
        counts = [sum(store.landed.values()) for store in stores]
        assert sum(counts) == NUM_PAGES and abs(counts[0] - counts[1]) <= 8
        assert not {*stores[0].landed} & {*stores[1].landed}


@pytest.mark.parametrize("still", [0, 1])
def test_what_stands_still_is_brought_by_the_other(still: int, clock: Clock) -> None:
    """What a disk was asked for and does not bring is asked of the other once that would have brought it by far."""
    with asked_both(clock) as (_, stores, _, _):
        other = stores[1 - still]
        other.read_s = 0.01  # and no other time passes
        other.allow()
    assert sum(other.landed.values()) == NUM_PAGES


def test_a_stalled_disk_is_left_to_the_other(clock: Clock) -> None:
    """One that does not answer for the I/O timeout keeps its job; its pages come from the other, whose rate nobody
    knows."""
    with asked_both(clock) as (engine, stores, _, _):
        stores[1].allow()
        eventually(lambda: engine.poll() or sum(stores[1].landed.values()) >= 8)
        clock.now_s += 2e8


@pytest.mark.parametrize("fails", [True, False])
def test_what_one_cannot_read_the_other_brings(fails: bool, clock: Clock) -> None:
    """A disk that fails, or lacks what it announced, costs nothing where another has it; nothing is asked again."""
    with asked_both(clock) as (engine, stores, _, tokens):
        if fails:
            stores[0].trouble = failing(OSError(5, "I/O error"), "get_into")
        else:
            stores[0].inner.delete(page_keys(engine, tokens))
        num_asked = [store.verbs("contains") for store in stores]
        for store in stores:
            store.allow()
    assert set(stores[1].landed.values()) == {1} and len(stores[1].landed) >= NUM_PAGES - 2
    assert num_asked == [store.verbs("contains") for store in stores]


def test_the_remote_tier_brings_some_of_what_the_disk_has(clock: Clock) -> None:
    """Of a long prompt, though the disk has all of it; of a short one the remote tier is not asked."""
    long, short = tokens_of(1, 8 * 80 + 1), tokens_of(2)
    disk, remote = PacedStore(clock), MemoryPageStore(1 << 30)
    for store, kind in ((disk, "store"), (remote, "remote")):
        with build_engine(settings(**LONG), GEOMETRY, **{kind: store}) as engine:  # type: ignore[arg-type]
            for n, tokens in enumerate((long, short)):
                serve(engine, f"f{n}", tokens)
                engine.flush()
    remote = TroubledStore(remote)
    with build_engine(settings(**LONG), GEOMETRY, store=disk, remote=remote) as engine:
        assert read_all(engine, "short", short) == 192 and not remote.verbs("contains")
        disk.hold()
        handle = engine.prefetch("long", long, mode="wait_complete")
        eventually(lambda: engine.poll() or disk.held == 1)
        eventually(lambda: engine.poll() or handle.landed_tokens or remote.verbs("get_into"), engine.stats)
        disk.allow()
        until_ready(engine, handle)
        hit = serve(engine, "long", long).hit
        assert hit.disk and hit.remote and hit.disk + hit.remote == 640
        settled(engine)


# Which gets a page


class _Writer:
    """A disk whose writer refuses when told to."""

    def __init__(self) -> None:
        self.is_refusing = False
        self.writes = SimpleNamespace(refuses=lambda: self.is_refusing)


def _placed(placement: Placement, num_runs: int, first: int = 0) -> list[Store]:
    """Where so many runs of four pages go."""
    runs = [HostRun([bytes([n % 256, n // 256])], [0], None, 0) for n in range(first, first + num_runs)]
    for run in runs:
        run.keys *= 4
    return [next(store for store in (A, B, REMOTE) if placement.takes(store, run)) for run in runs]


def test_pages_go_to_disks_by_their_rates() -> None:
    """In turns while these are unknown; then by what they take in a second. What a disk is known to have goes there,
    and one that takes nothing has no turn, and gets no more than its part when it takes pages again."""
    first, second = _Writer(), _Writer()
    placement = Placement({A: first, B: second, REMOTE: _Writer()})  # type: ignore[dict-item]
    assert _placed(placement, 6) == [A, B] * 3
    placement.observe(A, 300 << 20, 1.0)
    placement.observe(B, 290 << 20, 1.0)
    assert _placed(placement, 6) == [A, B] * 3
    placement.observe(B, 13 << 20, 2.0)
    assert 73 <= _placed(placement, 100).count(A) <= 77, "300 MiB a second and 100"
    placement.note(B, [bytes([n, 0]) for n in range(40)])
    assert _placed(placement, 40) == [B] * 40
    second.is_refusing = True
    assert _placed(placement, 40) == [A] * 40
    second.is_refusing = False
    assert 71 <= _placed(placement, 100, 400).count(A) <= 79
    run = HostRun([b"x"], [0], None, 0)
    assert [placement.takes(store, run) for store in (A, B)].count(True) == 1 and placement.takes(REMOTE, run)
    assert all(Placement({A: first}).takes(A, run) for _ in range(2))  # type: ignore[dict-item]


def _folders(folder: Path) -> list[str]:
    return [str(folder / name) for name in "ab"]


def _engine_at(paths: Sequence[str], **changes: object) -> CacheEngine:
    disk = DiskConfig(path=tuple(paths), budget_bytes=4 << 20)
    return build_engine(config(disk=disk, prefetch_mode="wait_complete", **changes), GEOMETRY)


def test_each_page_lies_on_one_disk_and_all_are_found_after_a_restart(tmp_path: Path) -> None:
    """As many on each; nothing is written twice, though it is computed again. Metrics tell the disks apart."""
    prompts, paths = [tokens_of(n, 90) for n in range(8)], _folders(tmp_path)
    with _engine_at(paths) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            engine.flush()
    with _engine_at(paths[::-1]) as engine:
        held = [engine.lookup(tokens, disk_wait_s=BOUND_S) for tokens in prompts]
        assert [(found.disk, found.disk_known) for found in held] == [(88, True)] * 8
        for n, tokens in enumerate(prompts[:4]):
            assert read_all(engine, f"a{n}", tokens) == 88
        for n, tokens in enumerate(prompts[4:]):
            engine.prefetch(f"b{n}", tokens, mode="best_effort")
            engine.cancel(f"b{n}")
            eventually(lambda: engine.poll() or not engine.inspect.prefetcher.is_busy())  # type: ignore[union-attr]
            serve(engine, f"c{n}", tokens)
            engine.flush()
        stats, of = engine.stats(), engine.describe()
        assert stats["disk.stored_pages"] == stats["disk2.stored_pages"] == 4 * 11
        assert stats["prefetch.bytes"] + stats["disk2_prefetch.bytes"] == 4 * 88 * 192
        for name, family, labels in (
            ("disk2.stored_pages", "disk_stored_pages", {"disk": "2"}),
            ("disk2.used_ratio", "tier_used_ratio", {"tier": "disk2"}),
            ("disk2_persist.written_bytes", "persist_written_bytes", {"disk": "2"}),
            ("disk2_prefetch.bytes", "movement_bytes", {"movement": "read", "direction": "disk2_to_host"}),
        ):
            assert (of[name].family, dict(of[name].labels)) == (family, labels)
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine.metrics, of))
        pages = [registry.get_sample_value("hicache_disk_stored_pages", {"disk": disk}) for disk in ("", "2")]
        assert pages == [stats["disk.stored_pages"], stats["disk2.stored_pages"]]
    for path in paths:
        store = open_existing(path)
        store.check()
        store.close()


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), OSError(5, "I/O error"), None])
def test_a_disk_that_takes_nothing_leaves_the_others(trouble: Exception | None, clock: Clock) -> None:
    """Full, failing or frozen: what comes goes to the other one, and is found there."""
    first, second = TroubledStore(MemoryPageStore(1 << 20)), MemoryPageStore(1 << 20)
    gate = Gate("put")
    first.trouble = gate if trouble is None else failing(trouble, "put", "reopen")
    prompts = [tokens_of(n, 90) for n in range(16)]
    with engine_over(first, second) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            assert engine.inspect.backup is not None
            engine.inspect.backup.wait()
            eventually(lambda: engine.poll() or not engine.inspect.backup.is_busy())  # type: ignore[union-attr]
            clock.now_s += 0.1 if trouble is not None else 2e8
        eventually(lambda: engine.poll() or second.stats().entries >= 8 * 11, engine.stats)
        gate.open()
        first.trouble = lambda verb: None
        clock.now_s += 3600
        engine.flush()
        engine.reset(["device", "host"])
        found = [read_all(engine, f"a{n}", tokens) for n, tokens in enumerate(prompts)]
        assert sum(found) >= 8 * 88 and {*found} <= {0, 88}


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    """As many disks as there may be, given once."""
    stores = [MemoryPageStore(1 << 20)] * (MAX_DISKS + 1)
    with pytest.raises(ConfigError, match="9 stores"):
        build_engine(settings(), GEOMETRY, store=stores)
    with pytest.raises(ConfigError, match="twice"):
        DiskConfig(path=("/x", "/y", "/x"))
    assert DiskConfig(path=["/x"]).path == "/x" and DiskConfig(path=["/x", "/y"]).paths == ("/x", "/y")  # type: ignore[arg-type]
