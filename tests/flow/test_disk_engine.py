"""An engine over a disk that fails or stalls serves requests as without a disk, and the host loses no pages."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from disk_case import Clock, Gate, TroubledStore, disk_threads, failing, page_keys, serving_threads
from hicache import AdvancedConfig, CacheEngine, DiskConfig, Prefetch, build_engine
from hicache.engine import LookupResult
from hicache.errors import NotStored
from hicache.storage import PageBuffer, StoreError, list_pages, open_existing
from toy_model import GEOMETRY, config, flush_error, prompt, serve, until_ready
from waiting import BOUND_S, eventually

Stores = list[TroubledStore]
HOST_PAGES = 39  # of 40 pages of the toy engine, one is the sink


def tokens_of(seed: int) -> np.ndarray:
    """A prompt of eleven complete pages."""
    return prompt(seed, 90)


def engine_at(path: Path, **changes: object) -> CacheEngine:
    disk = DiskConfig(path=str(path), budget_bytes=4 << 20)
    changes = {"prefetch_mode": "wait_complete", "advanced": AdvancedConfig(disk_reader_threads=1), **changes}
    return build_engine(config(disk=disk, **changes), GEOMETRY)


def until_held(engine: CacheEngine, gate: Gate) -> None:
    eventually(lambda: engine.poll() or gate.held == 1, engine.stats)


def until_ended(engine: CacheEngine, *handles: Prefetch) -> None:
    """Poll until these prefetches have ended."""
    eventually(lambda: engine.poll() or all(handle.ended for handle in handles), engine.stats)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray) -> int:
    """Prefetch and serve a request, and wait for all copies. Returns the number of tokens from disk."""
    until_ready(engine, engine.prefetch(name, tokens))
    disk_len = serve(engine, name, tokens).hit.disk
    engine.check()
    flush_error(engine)
    engine.check()
    return disk_len


def fill(path: Path, *prompts: np.ndarray) -> None:
    """Put the pages of some prompts into the store."""
    with engine_at(path) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            engine.flush()
        assert engine.stats()["persist.failed_pages"] == 0


def test_a_prefetch_keeps_read_pages_if_the_store_fails(stores: Stores, tmp_path: Path) -> None:
    """The store fails after the first job. The prefetch ends at once, the request uses the pages that were read, and
    the host pages of the other reads are freed."""
    tokens, sizes = prompt(1, 321), {"host_bytes": 60 * 8 * 192, "device_tokens": 512, "max_context_len": 512}
    with engine_at(tmp_path / "s", **sizes) as engine:
        serve(engine, "f", tokens)
    with engine_at(tmp_path / "s", **sizes) as engine:
        store = stores[-1]
        fails = failing(StoreError("gone"), "get_into")
        store.trouble = lambda verb: fails(verb) if store.verbs("get_into") == 16 else None
        handle = engine.prefetch("a", tokens)
        until_ready(engine, handle)
        assert (handle.found_tokens, handle.read_tokens) == (320, 256)
        assert engine.stats()["disk.reads_state"] == 2 and engine.stats()["prefetch.lost_pages"] == 2
        assert engine.stats()["host.free_pages"] == 59 - 32
        assert serve(engine, "a", tokens).hit.disk == 256
        # While reads are stopped, a prefetch neither waits nor finds anything.
        until_ready(engine, engine.prefetch("b", tokens_of(2)))
        assert engine.lookup(tokens_of(2), disk_wait_s=BOUND_S).disk == 0


def test_a_prefetch_past_its_time_reads_nothing(clock: Clock, stores: Stores, tmp_path: Path) -> None:
    """In mode "timeout", pages that were not read by the deadline are not read later."""
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    with engine_at(tmp_path / "s", prefetch_timeout_s=0.0) as engine:
        clock.now_s = 1e12
        handle = engine.prefetch("a", tokens, mode="timeout")
        until_ended(engine, handle)
        assert (handle.found_tokens, handle.read_tokens) == (88, 0) and stores[-1].verbs("get_into") == 0
        assert engine.stats()["prefetch.lost_pages"] == 0
        assert engine.stats()["host.free_pages"] == HOST_PAGES


@pytest.mark.parametrize("verb", ["contains", "get_into"])
def test_a_stalled_read_releases_its_request(verb: str, clock: Clock, stores: Stores, tmp_path: Path) -> None:
    """A request that waits for a stalled read is released. Until the stalled thread returns, it only keeps the host
    pages of its batch. Meanwhile all requests are served, and the disk becomes available again."""
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate(verb)
        handle = engine.prefetch("a", tokens)
        until_held(engine, gate)
        assert not handle.ready
        clock.now_s += 10.1
        engine.poll()
        assert handle.ready and handle.read_tokens == 0
        engine.flush()
        engine.check()
        held_pages = 11 if verb == "get_into" else 0
        assert engine.stats()["host.free_pages"] == HOST_PAGES - held_pages
        assert engine.stats()["disk.reads_stalled_jobs"] == 1
        for n in range(6):
            ask(engine, f"b{n}", tokens_of(n))
        gate.open()
        eventually(lambda: engine.poll() or engine.inspect.context.full.pages.num_in_flight == 0)
        engine.check()
        numbers = itertools.count()

        def is_back() -> bool:
            """Whether a request hits on disk again. The stalled thread may return a little later than the test
            continues."""
            clock.now_s += 3600
            ask(engine, f"c{next(numbers)}", tokens_of(next(numbers) % 5))
            return engine.stats()["disk.reads_state"] == 0 and engine.stats()["prefetch.bytes"] > 0

        eventually(is_back, engine.stats)
        stats = engine.stats()
        assert stats["host.free_pages"] + stats["host.evictable_tokens"] / 8 == HOST_PAGES
    assert disk_threads() == []


def test_a_stalled_write_delays_no_request(clock: Clock, stores: Stores, tmp_path: Path) -> None:
    """While the writer is stalled, its pages stay locked on the host, other pages are evicted, and flush raises for all
    unwritten pages. After the writer has returned, its pages are on disk and may be evicted."""
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate("put")
        serve(engine, "a", tokens_of(0))
        until_held(engine, gate)
        clock.now_s += 10.1
        with pytest.raises(NotStored, match=r"^11 pages .* io_timeout_s"):
            engine.flush()
        assert engine.stats()["disk.writes_stalled_jobs"] == 1
        for n in range(1, 7):
            serve(engine, f"b{n}", tokens_of(n))
            assert flush_error(engine) is not None
            engine.check()
        assert engine.lookup(tokens_of(0)).host == 88, "the writer still reads these pages"
        stats = engine.stats()
        assert stats["persist.bytes"] == 0 and stats["persist.failed_pages"] >= 6 * 11
        gate.open()
        eventually(lambda: engine.poll() or engine.stats()["persist.bytes"] > 0)
        engine.check()
        for n in range(7, 12):
            serve(engine, f"c{n}", tokens_of(n))
            flush_error(engine)  # the backoff has not passed, so writes are not retried yet
        assert engine.lookup(tokens_of(0)).host == 0 and engine.lookup(tokens_of(0), disk_wait_s=BOUND_S).disk == 88
        stats = engine.stats()
        assert stats["host.free_pages"] + stats["host.evictable_tokens"] / 8 == HOST_PAGES
    assert disk_threads() == []


def test_an_engine_closes_with_a_stalled_thread(clock: Clock, stores: Stores, tmp_path: Path) -> None:
    """close() ends although a reader is stalled. The arena stays mapped until the thread has written its bytes
    there."""
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    engine = engine_at(tmp_path / "s")
    engine.start()
    store = stores[-1]
    get_into, written = store.inner.get_into, []

    def read(keys: tuple[bytes, ...], buffers: tuple[PageBuffer, ...], **limits: float) -> list[bool]:
        ok = get_into(keys, buffers, **limits)
        written.extend(hashlib.sha256(page).digest() for page in buffers)
        return ok

    store.inner.get_into = read  # type: ignore[method-assign, assignment]
    gate = store.trouble = Gate("get_into")
    engine.prefetch("a", tokens)
    until_held(engine, gate)
    clock.now_s += 10.1
    engine.close()
    eventually(lambda: disk_threads() == ["hicache-disk-reads-0"], disk_threads)
    del engine
    gc.collect()
    gate.open()
    eventually(lambda: disk_threads() == [])
    eventually(lambda: serving_threads() == [], serving_threads)
    wanted, keys = np.empty((2, store.page_sizes[0]), np.uint8), store.calls[-1][1]
    with contextlib.closing(open_existing(tmp_path / "s")) as again:
        assert again.get_into(keys, list(wanted)) == [True, True]
    assert written == [hashlib.sha256(page).digest() for page in wanted]


@pytest.mark.parametrize("reads", [False, True])
def test_pages_go_between_the_arena_and_the_store(
    reads: bool, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers that the store writes from and reads into are pages of the pinned arena itself."""
    if reads:
        fill(tmp_path / "s", tokens_of(1))
    with engine_at(tmp_path / "s") as engine:
        store, host, buffers = stores[-1], engine.inspect.context.full.host, list[PageBuffer]()
        get_into, put = store.inner.get_into, store.inner.put
        monkeypatch.setattr(store.inner, "get_into", lambda k, b, **t: buffers.extend(b) or get_into(k, b, **t))
        monkeypatch.setattr(store.inner, "put", lambda i, **t: buffers.extend(p for _, p in i) or put(i, **t))
        ask(engine, "a", tokens_of(1))
        pool_pages = [divmod(page.ctypes.data - host.arena.data.data_ptr(), host.page_bytes) for page in buffers]
        assert len(pool_pages) == 11 and all(0 < page < len(host.arena.data) and not rest for page, rest in pool_pages)
        assert store.verbs("get_into") == (6 if reads else 0)


def test_hits_in_memory_count_as_uses_on_disk(stores: Stores, tmp_path: Path) -> None:
    """The disk evicts a prompt without further uses before a prompt that device or host has served again. The disk
    evicts the last pages of a prompt before the first ones."""
    one, two = tokens_of(1), tokens_of(2)
    with engine_at(tmp_path / "s") as engine:
        for n, tokens in enumerate((one, two, one)):
            hit = serve(engine, f"r{n}", tokens).hit
            engine.flush()
        assert hit.device + hit.host > 0 and hit.disk == 0
        store = stores[-1].inner
        keys = [page_keys(engine, tokens) for tokens in (one, two)]
        eventually(lambda: store.sync() or [one.key for one in list_pages(store)] == keys[1][::-1] + keys[0][::-1])
        assert len(keys[0]) > 4


@pytest.mark.parametrize("by", ["a request", "a flush", "the close"])
def test_pages_refused_during_an_outage_are_sent_again(
    by: str, clock: Clock, stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that the store refused are written when it accepts writes again and a request uses them, or the engine is
    flushed or closed. During the outage the store is asked once, and each flush raises with the number of pages and the
    cause. The close does not raise, and logs them."""
    tokens = tokens_of(1)
    with engine_at(tmp_path / "s") as engine:
        store = stores[-1]
        store.trouble = failing(OSError(errno.ENOSPC, "no space left"), "put", "reopen")
        serve(engine, "a", tokens)
        keys = page_keys(engine, tokens)
        for _ in range(3):
            with pytest.raises(NotStored, match=r"the disk tier: .* no space left") as refused:
                engine.flush()
            assert refused.value.num_pages == len(keys)
        assert not any(store.inner.contains(keys)) and engine.stats()["disk.writes_failures"] == 1
        store.trouble = lambda verb: None
        clock.now_s += 10
        if by == "a request":
            serve(engine, "b", tokens)
            eventually(lambda: engine.poll() or engine.stats()["disk.stored_pages"] == len(keys), engine.stats)
        elif by == "a flush":
            engine.flush()
        engine.check()
    with contextlib.closing(open_existing(tmp_path / "s")) as again:
        assert all(again.contains(keys)) and store.verbs("reopen") == 1
    assert "are not stored" not in caplog.text


def test_a_flush_retries_pages_that_failed_once(stores: Stores, tmp_path: Path) -> None:
    """One write fails and later ones succeed: the flush that gets the error still stores all pages."""
    errors = [OSError(errno.EIO, "")]

    def fails_once(verb: str) -> None:
        if verb == "put" and errors:
            raise errors.pop()

    with engine_at(tmp_path / "s") as engine:
        stores[-1].trouble = fails_once
        serve(engine, "a", tokens_of(1))
        engine.flush()
        assert not errors and all(stores[-1].inner.contains(page_keys(engine, tokens_of(1))))


def test_an_engine_closes_over_a_disk_that_refuses(
    clock: Clock, stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the disk refuses pages, close does not raise, and logs the number of pages and the cause."""
    with engine_at(tmp_path / "s") as engine:
        stores[-1].trouble = failing(OSError(errno.EIO, "a bad sector"), "put", "reopen")
        serve(engine, "a", tokens_of(1))
    assert "11 pages are not stored" in caplog.text and "a bad sector" in caplog.text


def test_a_page_waits_for_its_turn_once(stores: Stores, tmp_path: Path) -> None:
    """While the writer is busy, each page of a prompt is queued once, however often requests use the prompt."""
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate("put")

        def use(name: str, seed: int) -> None:
            serve(engine, name, tokens_of(seed))
            engine.inspect.copies.wait()
            engine.poll()

        for seed in range(1, 4):
            use(f"a{seed}", seed)
        writes = engine.inspect.writes[0]
        before = writes.num_waiting
        for n in range(5):
            for seed in range(1, 4):
                use(f"b{n}.{seed}", seed)
        after = writes.num_waiting
        gate.open()
        assert before > 0, "the host's half was to be locked by then"
        assert after <= before + 1
        engine.flush()
        engine.check()


@pytest.mark.parametrize("breaks", [False, True])
def test_pages_queued_for_the_disk_are_not_locked(breaks: bool, stores: Stores, tmp_path: Path) -> None:
    """Writes lock at most half of the host, also if another prompt shares queued pages. After a failing disk has
    refused pages, later jobs do not write them again."""
    with engine_at(tmp_path / "s", device_tokens=1024) as engine:
        turns, index, whole = threading.Semaphore(0), engine.inspect.context.full.pages, prompt(3, 160)
        begun = list[str]()

        def takes_turns(verb: str) -> bool:
            if verb == "put":
                begun.append(verb)
            return verb != "put" or turns.acquire(timeout=BOUND_S)

        stores[-1].trouble = takes_turns

        def locked_pages() -> int:
            return len(index) - index.num_evictable

        def use(name: str, tokens: np.ndarray) -> None:
            serve(engine, name, tokens)
            engine.inspect.copies.wait()
            engine.poll()

        use("a1", prompt(1, 72))
        eventually(lambda: len(begun) == 1)
        use("a2", prompt(2, 72))
        use("b", whole)
        use("c", np.append(whole[:104], prompt(4, 9)))  # shares pages with the queued prompt
        assert locked_pages() == 9
        turns.release()
        eventually(lambda: engine.poll() or engine.stats()["disk.stored_pages"] == 9, engine.stats)
        eventually(lambda: engine.poll() or len(begun) == 2)  # the second write goes through
        assert locked_pages() == 19  # of 39
        if breaks:
            stores[-1].trouble = lambda verb: verb != "put" or 1 / 0
        turns.release(100)
        assert (flush_error(engine) is not None) == breaks
        assert engine.stats()["disk.stored_pages"] == (9 + 19 if breaks else 9 + 9 + 20 + 1)
        engine.check()


def test_the_scheduler_never_waits_for_the_disk(tmp_path: Path, clock: Clock, stores: Stores) -> None:
    """While every read and write of the store stalls, lookup reports that the disk is not known, and stats and close
    return. When the store answers again, a later close finishes, and the next engine finds the acknowledged pages."""
    settings = DiskConfig(path=str(tmp_path / "s"), budget_bytes=4 << 20)
    advanced = AdvancedConfig(disk_reader_threads=1)
    engine = build_engine(config(disk=settings, advanced=advanced), GEOMETRY)
    engine.start()
    serve(engine, "a", tokens_of(0))
    engine.flush()
    gate = stores[0].trouble = Gate("contains", "get_into", "put")
    entries = stores[0].inner.stats().entries
    held = engine.lookup(tokens_of(1), disk_wait_s=0.0)
    assert (held.disk, held.disk_known) == (0, False)
    serve(engine, "b", tokens_of(2))
    eventually(lambda: (engine.poll(), gate.held == 2)[1])
    assert engine.stats()["disk.stored_pages"] == entries > 0
    clock.now_s += 11
    engine.close()
    assert "hicache-disk-writes-0" in disk_threads()
    with engine_at(tmp_path / "s") as without:
        assert without.stats()["disk.process_state"] == 2
    gate.open()
    eventually(lambda: disk_threads() == [])
    engine.close()
    with engine_at(tmp_path / "s") as again:
        assert again.lookup(tokens_of(0), disk_wait_s=BOUND_S) == LookupResult(0, 0, 88, missed={"tail": 2})
