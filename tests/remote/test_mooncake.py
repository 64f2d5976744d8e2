"""Cases that only Mooncake has: a full pool, machines and a master that die or hang, and replicas."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from hicache.bench.remote_servers import MooncakeServer, end, freeze
from hicache.storage import PageBuffer, PageCipher, PageFormat, PageStore, StoreError, open_store
from hicache.storage.mooncake_store import MooncakePageStore
from waiting import eventually

REASON = MooncakeServer.missing()
pytestmark = [pytest.mark.remote, pytest.mark.skipif(bool(REASON), reason=REASON)]

PAGE_BYTES, NUM_PAGES = 1 << 20, 24
KEYS = [b"key %d" % n for n in range(NUM_PAGES)]
PATIENCE = "?timeout=60"


@pytest.fixture
def server() -> Iterator[MooncakeServer]:
    with MooncakeServer(256 << 20, lease_ms=60_000) as server:  # a busy machine takes seconds to read a batch
        yield server


def contents(seed: int = 0) -> PageBuffer:
    """Random contents of all pages, uint8 `[NUM_PAGES * PAGE_BYTES]`."""
    return np.random.default_rng(seed).integers(0, 256, NUM_PAGES * PAGE_BYTES, dtype=np.uint8)


def pages_of(memory: PageBuffer) -> list[PageBuffer]:
    return list(memory.reshape(-1, PAGE_BYTES))


def opened(server: MooncakeServer, options: str = PATIENCE, cipher: PageCipher | None = None) -> PageStore:
    identity = {"model": "tiny", "page_size": 64}
    return open_store(server.url + options, identity=identity, formats=(PageFormat(PAGE_BYTES),), cipher=cipher)


def put_all(store: PageStore, memory: PageBuffer) -> list[bool]:
    return store.put(list(zip(KEYS, pages_of(memory), strict=True)))


def require_held(store: PageStore, memory: PageBuffer) -> None:
    got = np.zeros_like(memory)
    assert all(store.get_into(KEYS, pages_of(got))) and np.array_equal(got, memory)


def hasty(server: MooncakeServer, memory: PageBuffer) -> PageStore:
    """A store with a timeout of one second that has all pages. Opening and filling the store are retried, because a
    busy machine may take longer."""

    def opens() -> PageStore | None:
        with contextlib.suppress(StoreError):
            return opened(server, "?timeout=1")
        return None

    store = eventually(opens)
    assert store is not None
    eventually(lambda: all(put_all(store, memory)))
    return store


def test_pages_that_cannot_be_sent_in_place(server: MooncakeServer) -> None:
    """Encrypted pages are copied through a small buffer of the store. Without the key no page is found."""
    memory, got = contents(), np.zeros(NUM_PAGES * PAGE_BYTES, np.uint8)
    with closing(opened(server, f"{PATIENCE}&buffer=3MiB", PageCipher(bytes(32)))) as store:
        store.register_memory(got)
        assert all(put_all(store, memory)) and all(store.get_into(KEYS, pages_of(got)))
        assert np.array_equal(got, memory)
    with closing(opened(server)) as store:
        assert not any(store.contains(KEYS)) and store.stats().corrupt == 0


def test_a_full_pool_takes_some_pages() -> None:
    """Pages without space are not stored; each key is answered separately, and this is no failure. All stored pages are
    complete."""
    one_hour_ms = 3_600_000  # a page that was looked up is not evicted
    with MooncakeServer(16 << 20, lease_ms=one_hour_ms) as server, closing(opened(server)) as store:
        pages, stored, num_puts = pages_of(contents()), dict[bytes, PageBuffer](), 0
        answers = [True]
        while any(answers):
            items = [(b"%d %d" % (num_puts, n), page) for n, page in enumerate(pages)]
            answers = store.put(items)
            found = store.contains([key for key, _ in items])
            assert not any(held and not ok for held, ok in zip(found, answers, strict=True))
            stored |= {key: page for (key, page), held in zip(items, found, strict=True) if held}
            num_puts += answers.count(True)
        got = [np.zeros_like(page) for page in stored.values()]
        assert stored and all(store.get_into(list(stored), got)) and all(map(np.array_equal, got, stored.values()))
        stats = store.stats()
        assert (stats.puts, stats.write_errors, stats.read_errors) == (num_puts, 0, 0)


def test_a_dead_owner_is_a_miss(server: MooncakeServer) -> None:
    """After the machine that holds the pages has died, they are misses until it is replaced, and read errors until the
    master notices its death."""
    memory = contents()
    with closing(opened(server)) as store:
        store.register_memory(memory)
        assert all(put_all(store, memory))
        server.kill()
        assert not any(store.get_into(KEYS, pages_of(np.zeros_like(memory))))
        stats = store.stats()
        assert (stats.hits, stats.misses) == (0, NUM_PAGES) and stats.read_errors == store.thread_read_errors()
        server.start()
        memory[:] = contents(1)
        eventually(lambda: not any(store.contains(KEYS)))
        eventually(lambda: all(put_all(store, memory)))
        require_held(store, memory)


def test_a_second_replica_is_read_once_the_master_misses_the_first(server: MooncakeServer) -> None:
    """Pages on two machines are read from the second when the first is dead, as soon as the master notices."""
    first, memory = server.process, contents()
    server.start()
    with closing(opened(server, f"{PATIENCE}&replicas=2")) as store:
        assert all(put_all(store, memory))
        end(first)
        copies = np.zeros_like(memory)
        eventually(lambda: all(store.get_into(KEYS, pages_of(copies))))
        assert np.array_equal(copies, memory)


def test_a_dead_master_comes_back(server: MooncakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Without a master nothing is found or stored, no call raises, and everything is counted. With a new master the
    store works."""
    memory = contents()
    with closing(hasty(server, memory)) as store:
        store.register_memory(memory)
        end(server.master)
        before = store.stats()
        assert not any(store.contains(KEYS))
        assert not any(store.get_into(KEYS, pages_of(np.zeros_like(memory))))
        assert not any(put_all(store, memory)) and store.delete(KEYS) == 0 and not store.reopen()
        stats = store.stats()
        assert stats.read_errors - before.read_errors == stats.write_errors - before.write_errors == 2 * NUM_PAGES
        assert stats.misses - before.misses == NUM_PAGES and "the master" in caplog.text
        with pytest.raises(StoreError):
            opened(server)
        server.start_master()
        eventually(store.reopen)
        eventually(lambda: all(put_all(store, memory)))
        eventually(lambda: all(store.contains(KEYS)))
        require_held(store, memory)


def test_a_hung_master_is_given_up_on(server: MooncakeServer) -> None:
    """If the master hangs, a call returns when the library does, and its misses are counted. Opening another store is
    refused."""
    memory = contents()
    with closing(hasty(server, memory)) as store:
        freeze(server.master)
        try:
            before = store.stats()
            assert not any(store.contains(KEYS))
            assert store.stats().read_errors - before.read_errors == NUM_PAGES
            with pytest.raises(StoreError):
                opened(server, "?timeout=1")
        finally:
            server.master.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_hung_owner_touches_no_buffer_later(server: MooncakeServer, method: str) -> None:
    """The machine that holds the pages hangs during a call. The call returns in the end, and afterwards no byte of a
    buffer changes, although the machine continues. Then the store works again."""
    memory = contents()
    with closing(opened(server)) as store:
        store.register_memory(memory)
        # In both cases the library has connected to the machine.
        assert all(put_all(store, memory) if method == "get" else store.put([(b"first", pages_of(memory)[0])]))
        server.freeze()
        try:
            result = put_all(store, memory) if method == "put" else store.get_into(KEYS, pages_of(memory))
            assert not all(result)
            assert store.stats().write_errors if method == "put" else store.stats().read_errors
            memory[:] = 77
        finally:
            server.thaw()
        expected = contents(1)
        eventually(lambda: store.reopen() and not any(store.contains(KEYS)))
        eventually(lambda: all(put_all(store, expected)))
        require_held(store, expected)
        assert (memory == 77).all()


def test_what_cannot_be_joined_or_registered_is_refused(server: MooncakeServer) -> None:
    """If the pool cannot be joined or memory cannot be registered, the error is one line that names the settings, and
    does not claim that the master is missing."""
    for options, settings in (("protocol=foo&timeout=5", ("protocol", "timeout")), ("buffer=8000TiB", ("buffer",))):
        with pytest.raises(StoreError) as caught:
            opened(server, f"?{options}")
        line = str(caught.value)
        assert all(setting in line for setting in settings) and "\n" not in line and "import" not in line
        assert "no Mooncake master" not in line


def test_a_copied_value_is_not_reported_as_read(server: MooncakeServer) -> None:
    """`on_value` gets the values that were read from the pool, and not the values that were copied to it."""
    reported, memory = list[bytes](), contents()
    with closing(opened(server)) as store:
        assert isinstance(store, MooncakePageStore)
        assert all(put_all(store, memory))
        values = [(key, store.get_value(key) or b"") for key in KEYS[:2]]
        assert store.delete(KEYS[:2]) == 2
        store.on_value = lambda key, value: reported.append(key)
        assert store.put_values(values) == [True, True] and reported == []
        require_held(store, memory)
        assert sorted(reported) == sorted(KEYS)
