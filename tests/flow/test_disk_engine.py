"""The engine over a disk that fails or stalls: requests are served as without one, and the host loses nothing."""

from __future__ import annotations

import errno
import functools
import gc
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hicache.stores
from disk_case import PATIENCE_S, Clock, Gate, TroubledStore, disk_threads, failing, page_keys, wait_until
from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, Prefetch, build_engine
from hicache.config import PrefetchMode
from hicache.disk import DiskTier
from hicache.engine import LookupResult
from hicache.serving.request import Request
from hicache.serving.scheduler import Scheduler
from hicache.storage import LmdbPageStore, PageBuffer, StoreError, StoreLocked, pages
from hicache.tree import FULL
from serving_case import plain_greedy, prompt, tiny_engine, tiny_llama, tiny_runner, token_bytes
from toy_model import GEOMETRY, config, serve

HOST_PAGES = 39  # of the toy's 40, one is the sink
Troubled = tuple[Clock, list[TroubledStore]]


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Troubled:
    """Engines built from here on have a clock that stands, and stores that fail when told to; newest last."""
    clock, stores = Clock(), []

    def store(*args: object, **settings: object) -> TroubledStore:
        stores.append(TroubledStore(LmdbPageStore(*args, **settings)))  # type: ignore[arg-type]
        return stores[-1]

    monkeypatch.setattr(hicache.stores, "LmdbPageStore", store)
    monkeypatch.setattr(hicache.stores, "DiskTier", functools.partial(DiskTier, clock=clock))
    return clock, stores


def tokens_of(seed: int, length: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def engine_at(path: Path, **changes: object) -> CacheEngine:
    disk = DiskConfig(path=str(path), budget_bytes=4 << 20)
    changes = {"prefetch_mode": "wait_complete", "advanced": AdvancedConfig(disk_reader_threads=1), **changes}
    return build_engine(config(disk=disk, **changes), GEOMETRY)


def until_ready(engine: CacheEngine, handle: Prefetch) -> None:
    def ready() -> bool:
        engine.poll()
        engine.check()
        return handle.ended

    wait_until(ready)


def until_held(engine: CacheEngine, gate: Gate) -> None:
    wait_until(lambda: engine.poll() or gate.held == 1)


def fill(path: Path, *prompts: np.ndarray) -> None:
    """Put the pages of some prompts into the store."""
    with engine_at(path) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            engine.flush()
        assert engine.stats()["persist.failed_pages"] == 0


TROUBLES: dict[str, Callable[[str], None]] = {
    "the medium fails": failing(OSError(errno.EIO, "I/O error"), "get_into", "put", "contains"),
    "the disk is full": failing(OSError(errno.ENOSPC, "no space"), "put", "reopen"),
    "the store raises": failing(StoreError("no"), "get_into", "contains"),
    "a bug": failing(ZeroDivisionError(), "get_into", "put"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_serving_goes_on_without_the_disk(trouble: str, policy: str, troubled: Troubled, tmp_path: Path) -> None:
    """Requests over tiers too small for them read right bytes before, while and after the store fails; every account
    holds at every step, and when the delay is over the disk is used again."""
    clock, stores = troubled
    prompts = [tokens_of(n) for n in range(6)]
    with engine_at(tmp_path / "s", write_policy=policy) as engine:
        hits = []
        for phase, breaks in enumerate((False, True, False)):
            stores[-1].trouble = TROUBLES[trouble] if breaks else lambda verb: None
            clock.now_s += 3600
            hits.append(0)
            new = [tokens_of(10 * (phase + 1) + n) for n in range(4)]
            for n, tokens in enumerate([*prompts, *new, *prompts]):
                until_ready(engine, engine.prefetch(f"{phase}.{n}", tokens))
                hits[-1] += serve(engine, f"{phase}.{n}", tokens).hit.disk
                engine.check()
                engine.flush()
                engine.check()
            stats = engine.stats()
            assert (stats["disk.writes_opens"] + stats["disk.reads_opens"] > 0) == (phase > 0)
        assert hits[0] > 0 and hits[2] > 0
        assert stats["disk.writes_state"] == stats["disk.reads_state"] == 0
        assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == 128
        assert stats["host.free_pages"] + stats["host.evictable_tokens"] / 8 == HOST_PAGES
    assert disk_threads() == []


def test_answers_are_those_of_a_server_without_a_disk(troubled: Troubled, tmp_path: Path) -> None:
    """Conversations generate the same tokens as the bare model while the store fails every second turn."""
    clock, stores = troubled
    model = tiny_llama()
    disk = {"path": str(tmp_path / "s")}
    talks = [prompt(length, seed=i) for i, length in enumerate([90, 70, 150, 110])]
    with tiny_engine(model, device_tokens=192, host_bytes=256 * token_bytes(model), disk=disk) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        for turn in range(4):
            bad = failing(OSError(errno.EIO, "I/O error"), "get_into", "put")
            stores[-1].trouble = bad if turn % 2 else lambda verb: None
            clock.now_s += 3600
            for i, talk in enumerate(talks):
                [result] = scheduler.run([Request(f"{i}.{turn}", talk, 6)])
                assert result.tokens == plain_greedy(model, talk, 6)
                talks[i] = np.concatenate([talk, result.tokens, prompt(5, seed=turn)])
        engine.flush()
        engine.check()
        assert engine.stats()["disk.writes_opens"] > 0


def test_a_prefetch_keeps_what_it_inserted_when_the_store_fails(troubled: Troubled, tmp_path: Path) -> None:
    """The store fails behind the first batch: the prefetch ends at once, what was inserted is used, and the pages of
    the rest are freed."""
    _, stores = troubled
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    with engine_at(tmp_path / "s") as engine:
        store = stores[-1]
        fails = failing(StoreError("gone"), "get_into")
        store.trouble = lambda verb: fails(verb) if store.verbs("get_into") == 4 else None
        handle = engine.prefetch("a", tokens)
        until_ready(engine, handle)
        assert (handle.found_tokens, handle.landed_tokens) == (88, 64)
        assert engine.stats()["disk.reads_state"] == 2 and engine.stats()["prefetch.lost_pages"] == 2
        assert engine.stats()["host.free_pages"] == HOST_PAGES - 8
        assert serve(engine, "a", tokens).hit.disk == 64
        # While reads are stopped nothing is waited for and nothing is found.
        until_ready(engine, engine.prefetch("b", tokens_of(2)))
        assert engine.lookup(tokens_of(2), disk_wait_s=PATIENCE_S).disk == 0


def test_a_prefetch_past_its_time_reads_nothing(troubled: Troubled, tmp_path: Path) -> None:
    """Under "timeout", what was not read by the deadline is not read any more."""
    clock, stores = troubled
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    with engine_at(tmp_path / "s", prefetch_timeout_s=0.0) as engine:
        clock.now_s = 1e12
        handle = engine.prefetch("a", tokens, mode="timeout")
        until_ready(engine, handle)
        assert (handle.found_tokens, handle.landed_tokens) == (88, 0) and stores[-1].verbs("get_into") == 0
        assert engine.stats()["prefetch.lost_pages"] == 0
        assert engine.stats()["host.free_pages"] == HOST_PAGES


@pytest.mark.parametrize("verb", ["contains", "get_into"])
def test_a_stalled_read_releases_its_request(verb: str, troubled: Troubled, tmp_path: Path) -> None:
    """A request that waits for a stalled read is released; of the host's pages the thread keeps those of its batch
    alone, until it returns; all requests are served meanwhile, and the disk comes back."""
    clock, stores = troubled
    tokens = tokens_of(1)
    fill(tmp_path / "s", tokens)
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate(verb)
        handle = engine.prefetch("a", tokens)
        until_held(engine, gate)
        assert not handle.ready
        clock.now_s += 10.1
        engine.poll()
        assert handle.ready and handle.landed_tokens == 0
        engine.flush()
        engine.check()
        held_pages = 8 if verb == "get_into" else 0
        assert engine.stats()["host.free_pages"] == HOST_PAGES - held_pages
        assert engine.stats()["disk.reads_stalled_jobs"] == 1
        for n in range(6):
            until_ready(engine, engine.prefetch(f"b{n}", tokens_of(n)))
            serve(engine, f"b{n}", tokens_of(n))
            engine.flush()
            engine.check()
        gate.open()
        wait_until(lambda: engine.poll() or engine.inspect.prefetcher.pages_in_flight(FULL) == 0)  # type: ignore[union-attr]
        engine.check()
        clock.now_s += 3600
        for n in range(5):
            until_ready(engine, engine.prefetch(f"c{n}", tokens_of(n)))
            serve(engine, f"c{n}", tokens_of(n))
            engine.flush()
        stats = engine.stats()
        assert stats["disk.reads_state"] == 0 and stats["prefetch.bytes"] > 0
        assert stats["host.free_pages"] + stats["host.evictable_tokens"] / 8 == HOST_PAGES
    assert disk_threads() == []


def test_a_stalled_write_delays_nobody(troubled: Troubled, tmp_path: Path) -> None:
    """While the writer is stalled, its pages stay locked on the host, others are evicted, and flush ends; when it
    returns, its pages are on disk and may be evicted."""
    clock, stores = troubled
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate("put")
        serve(engine, "a", tokens_of(0))
        until_held(engine, gate)
        clock.now_s += 10.1
        engine.flush()
        assert engine.stats()["disk.writes_stalled_jobs"] == 1
        for n in range(1, 7):
            serve(engine, f"b{n}", tokens_of(n))
            engine.flush()
            engine.check()
        assert engine.lookup(tokens_of(0)).host == 88, "the writer still reads these pages"
        stats = engine.stats()
        assert stats["persist.bytes"] == 0 and stats["persist.failed_pages"] == 6 * 11
        gate.open()
        wait_until(lambda: engine.poll() or engine.stats()["persist.bytes"] > 0)
        engine.check()
        for n in range(7, 12):
            serve(engine, f"c{n}", tokens_of(n))
            engine.flush()
        assert engine.lookup(tokens_of(0)).host == 0 and engine.lookup(tokens_of(0), disk_wait_s=PATIENCE_S).disk == 88
        stats = engine.stats()
        assert stats["host.free_pages"] + stats["host.evictable_tokens"] / 8 == HOST_PAGES
    assert disk_threads() == []


def test_an_engine_closes_beside_a_stalled_thread(troubled: Troubled, tmp_path: Path) -> None:
    """close() ends although a reader is stalled; the arena stays mapped until the thread has put its bytes there."""
    clock, stores = troubled
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
    assert disk_threads() == ["hicache-disk-reads-0"]
    del engine
    gc.collect()
    gate.open()
    wait_until(lambda: disk_threads() == [])
    wanted = np.empty((2, store.inner.page_sizes[0]), np.uint8)  # type: ignore[attr-defined]
    assert get_into(store.calls[-1][1], list(wanted)) == [True, True]
    assert written == [hashlib.sha256(page).digest() for page in wanted]
    store.close()


def test_pages_go_between_the_arena_and_the_store(troubled: Troubled, tmp_path: Path) -> None:
    """The buffers that the store writes from and reads into are pages of the pinned arena itself."""
    _, stores = troubled
    tokens = tokens_of(1)
    for reads in (False, True):
        with engine_at(tmp_path / "s") as engine:
            arena, page_bytes = engine.inspect.context.full.host.arena.data, engine.inspect.context.full.host.page_bytes  # type: ignore[union-attr]
            inner, places = stores[-1].inner, []
            get_into, put = inner.get_into, inner.put

            def note(page: PageBuffer, places: list[tuple[int, int]] = places, start: int = arena.data_ptr()) -> None:
                places.append(divmod(page.ctypes.data - start, page.nbytes))

            inner.get_into = lambda k, b, n=note, f=get_into, **t: [n(p) for p in b] and f(k, b, **t)  # type: ignore
            inner.put = lambda i, n=note, f=put, **t: [n(p) for _, p in i] and f(i, **t)  # type: ignore
            until_ready(engine, engine.prefetch("a", tokens))
            serve(engine, "a", tokens)
            engine.flush()
            assert len(places) == 11 and all(0 < page < len(arena) and not rest for page, rest in places)
            assert arena.shape[1] == page_bytes and stores[-1].verbs("get_into") == (6 if reads else 0)


def test_an_urgent_prefetch_overtakes_a_speculative_one(troubled: Troubled, tmp_path: Path) -> None:
    """With one reader, what a request waits for is found and read before what came earlier and nobody waits for."""
    _, stores = troubled
    prompts = [tokens_of(n, 34) for n in range(3)]
    fill(tmp_path / "s", *prompts)
    for verb in ("contains", "get_into"):
        with engine_at(tmp_path / "s") as engine:
            store, keys = stores[-1], [page_keys(engine, p[:32])[0] for p in prompts]
            gate = Gate("contains")
            modes: list[PrefetchMode] = ["wait_complete", "best_effort", "wait_complete"]

            def start(n: int, engine: CacheEngine = engine, modes: list[PrefetchMode] = modes) -> Prefetch:
                return engine.prefetch(f"r{n}", prompts[n], mode=modes[n])

            handles: list[Prefetch] = []
            if verb == "get_into":  # both have been found when the reader is held up
                handles = [start(1), start(2)]
                wait_until(lambda store=store: store.verbs("contains") == 2)  # type: ignore[misc]
            store.trouble = gate
            handles.append(start(0))
            wait_until(lambda gate=gate: gate.held == 1)  # type: ignore[misc]
            handles += [start(1), start(2)] if verb == "contains" else []
            engine.poll()
            gate.open()
            for handle in handles:
                until_ready(engine, handle)
            firsts = [call[1][0] for call in store.calls if call[0] == verb and call[1][0] in keys[1:]]
            assert firsts == [keys[2], keys[1]]
            with engine.acquire(CacheRequest("r2", prompts[2])) as lease:
                assert lease.hit.disk == 32


def test_what_memory_serves_counts_as_used_on_disk(tmp_path: Path) -> None:
    """A prompt that is served from device or host again is the last that the disk evicts, and its last pages are
    evicted before its first; a prompt that nobody asks for is evicted first."""
    one, two = tokens_of(1), tokens_of(2)
    with engine_at(tmp_path / "s") as engine:
        for n, tokens in enumerate((one, two, one)):
            hit = serve(engine, f"r{n}", tokens).hit
            engine.flush()
        assert hit.device + hit.host > 0 and hit.disk == 0
        store = engine.inspect.context.disk.store
        store.sync()
        keys = [page_keys(engine, tokens) for tokens in (one, two)]
        order = [key for key, _ in pages(store)]
        assert order == keys[1][::-1] + keys[0][::-1] and len(keys[0]) > 4


def test_what_an_outage_kept_from_the_disk_is_sent_again(troubled: Troubled, tmp_path: Path) -> None:
    """Pages that the store refused go there once it takes writes again and a request uses them; nothing is sent while
    it does not."""
    clock, stores = troubled
    tokens = tokens_of(1)
    with engine_at(tmp_path / "s") as engine:
        store = stores[-1]
        store.trouble = failing(OSError(errno.ENOSPC, "no space left"), "put", "reopen")
        serve(engine, "a", tokens)
        engine.flush()
        keys = page_keys(engine, tokens)
        assert not any(store.inner.contains(keys))
        refused = engine.stats()["persist.failed_pages"]
        serve(engine, "b", tokens)
        engine.flush()
        assert engine.stats()["persist.failed_pages"] == refused == len(keys)
        store.trouble = lambda verb: None
        clock.now_s += 10
        serve(engine, "c", tokens)
        engine.flush()
        assert all(store.inner.contains(keys)) and store.verbs("reopen") == 1
        engine.check()


def test_a_page_waits_for_its_turn_once(troubled: Troubled, tmp_path: Path) -> None:
    """However often a prompt is used while the writer is busy with others, its nodes are queued once each."""
    _, stores = troubled
    with engine_at(tmp_path / "s") as engine:
        gate = stores[-1].trouble = Gate("put")

        def use(name: str, seed: int) -> None:
            serve(engine, name, tokens_of(seed))
            assert engine.inspect.backup is not None
            engine.inspect.backup.wait()
            engine.inspect.restore.wait()
            engine.poll()

        for seed in range(1, 4):
            use(f"a{seed}", seed)
        persist = engine.inspect.persists[0]
        assert persist is not None
        before = persist.num_waiting
        for n in range(5):
            for seed in range(1, 4):
                use(f"b{n}.{seed}", seed)
        after = persist.num_waiting
        gate.open()
        assert before > 0, "the host's half was to be locked by then"
        assert after <= before + 1
        engine.flush()
        engine.check()


def test_the_scheduler_never_waits_for_the_disk(tmp_path: Path, troubled: Troubled) -> None:
    """While every read and write of the store stalls, lookup says that the disk is not known, and stats and close
    return; when the store answers again, a later close finishes and the next engine finds what was acknowledged."""
    clock, stores = troubled
    settings = DiskConfig(path=str(tmp_path / "s"), budget_bytes=4 << 20)
    advanced = AdvancedConfig(disk_reader_threads=1, disk_io_timeout_s=0.05)
    engine = build_engine(config(disk=settings, advanced=advanced), GEOMETRY)
    engine.start()
    serve(engine, "a", tokens_of(0))
    engine.flush()
    gate = stores[0].trouble = Gate("contains", "get_into", "put")
    entries = stores[0].inner.stats().entries
    held = engine.lookup(tokens_of(1), disk_wait_s=0.01)
    assert (held.disk, held.disk_known) == (0, False)
    serve(engine, "b", tokens_of(2))
    wait_until(lambda: (engine.poll(), gate.held == 2)[1])
    assert engine.stats()["disk.stored_pages"] == entries > 0
    clock.now_s += 1
    engine.close()
    assert "hicache-disk-writes-0" in disk_threads()
    with pytest.raises(StoreLocked):
        engine_at(tmp_path / "s")
    gate.open()
    wait_until(lambda: disk_threads() == [])
    engine.close()
    with engine_at(tmp_path / "s") as again:
        assert again.lookup(tokens_of(0), disk_wait_s=PATIENCE_S) == LookupResult(0, 0, 88)
