"""Pages in Mooncake, against a real master and a machine that lends memory: shared, full, dead, hung, corrupt."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from hicache.bench.mooncake_server import MooncakeServer, kill, missing, running
from hicache.storage import PageBuffer, PageCipher, PageFormat, PageStore, StoreError, open_store
from hicache.storage.conformance import MakeStore, StoreConformance
from hicache.storage.records import namespace_digest

REASON = missing()
pytestmark = [pytest.mark.remote, pytest.mark.skipif(bool(REASON), reason=REASON)]

PAGE_BYTES, NUM_PAGES = 1 << 20, 24
IDENTITY: dict[str, str | int] = {"model": "tiny", "page_size": 64}
ANOTHER: dict[str, str | int] = {"model": "another"}
FORMATS = (PageFormat(PAGE_BYTES),)
KEYS = [b"key %d" % n for n in range(NUM_PAGES)]

_READER = """
import hashlib, sys
import numpy as np
from hicache.storage import PageFormat, open_store
url, num_pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = open_store(url, identity={"model": "tiny", "page_size": 64}, formats=[PageFormat(page_bytes)])
pages = np.empty((num_pages, page_bytes), np.uint8)
found = store.get_into([b"key %d" % n for n in range(num_pages)], list(pages))
print(found.count(True), hashlib.sha256(pages).hexdigest())
store.close()
"""


@pytest.fixture
def server() -> Iterator[MooncakeServer]:
    with running(256 << 20) as server:
        yield server


def contents(seed: int = 0) -> PageBuffer:
    """uint8 `[NUM_PAGES * PAGE_BYTES]`."""
    return np.random.default_rng(seed).integers(0, 256, NUM_PAGES * PAGE_BYTES, dtype=np.uint8)


def pages_of(memory: PageBuffer) -> list[PageBuffer]:
    return list(memory.reshape(-1, PAGE_BYTES))


def opened(server: MooncakeServer, options: str = "", **about: object) -> PageStore:
    return open_store(server.url + options, **{"identity": IDENTITY, "formats": FORMATS, **about})  # type: ignore[arg-type]


def put_all(store: PageStore, memory: PageBuffer) -> list[bool]:
    return store.put(list(zip(KEYS, pages_of(memory), strict=True)))


class TestConformance(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[MooncakeServer]:
        with running(64 << 20) as server:
            yield server

    @pytest.fixture(params=["", "buffer=40960"])
    def make_store(self, server: MooncakeServer, request: pytest.FixtureRequest) -> MakeStore:
        def make(identity: Mapping[str, str | int], **about: Any) -> PageStore:
            own = {**identity, "test": request.node.name}
            return open_store(f"{server.url}?{request.param}", identity=own, **about)

        return make


def test_another_process_reads_what_one_put(server: MooncakeServer) -> None:
    """Bytes that went in through registered memory come back in another process with the same URL and identity."""
    memory = contents()
    with closing(opened(server)) as store:
        store.register_memory(memory)
        assert all(put_all(store, memory))
        command = [sys.executable, "-c", _READER, server.url, str(NUM_PAGES), str(PAGE_BYTES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(NUM_PAGES), hashlib.sha256(memory).hexdigest()]


@pytest.mark.parametrize("options", ["?buffer=3MiB", "?buffer=1MiB"])
def test_pages_that_cannot_be_sent_in_place(server: MooncakeServer, options: str) -> None:
    """Encrypted pages go through a little memory of the store; without the key nothing is found."""
    memory, got = contents(), np.zeros(NUM_PAGES * PAGE_BYTES, np.uint8)
    with closing(opened(server, options, cipher=PageCipher(bytes(32)))) as store:
        store.register_memory(got)
        assert all(put_all(store, memory)) and all(store.get_into(KEYS, pages_of(got)))
        assert np.array_equal(got, memory)
    with closing(opened(server, options)) as store:
        assert not any(store.contains(KEYS)) and store.stats().corrupt == 0


def test_a_full_pool_takes_some_pages() -> None:
    """What has no room is not stored, key by key, and is no failure; what was stored is all there."""
    memory = contents()
    with running(16 << 20) as server, closing(opened(server)) as store:
        store.register_memory(memory)
        stored = put_all(store, memory)
        assert any(stored) and not all(stored)
        got = np.zeros(NUM_PAGES * PAGE_BYTES, np.uint8)
        found = store.get_into(KEYS, pages_of(got))
        for n, hit in enumerate(found):
            assert not hit or (stored[n] and np.array_equal(pages_of(got)[n], pages_of(memory)[n]))
        assert any(found)
        stats = store.stats()
        assert (stats.puts, stats.write_errors, stats.read_errors) == (stored.count(True), 0, 0)


def test_values_that_are_no_pages(server: MooncakeServer) -> None:
    """Values that another client wrote, torn, short, long or of another identity, are misses, are counted and go."""
    memory, got = contents(), np.zeros(NUM_PAGES * PAGE_BYTES, np.uint8)
    with closing(opened(server)) as store:
        assert all(put_all(store, memory))
        plain = plain_client(server)
        names = [name_of(key) for key in KEYS]
        good = bytes(plain.get(names[0]))
        with closing(opened(server, identity=ANOTHER)) as other:
            assert all(put_all(other, memory))
            foreign = bytes(plain.get(name_of(KEYS[6], ANOTHER)))
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        bad = [bytes(flipped), good[:-1], good + b"x", good[:20], b"x", bytes(len(good)), foreign, bytes(4 * len(good))]
        for name, value in zip(names, bad, strict=False):
            assert plain.remove(name, True) == 0 and plain.put(name, value) == 0
        for name in names[len(bad) :]:
            assert plain.get_size(name) == len(good)
        found = store.get_into(KEYS, pages_of(got))
        assert found == [n >= len(bad) for n in range(NUM_PAGES)]
        assert np.array_equal(got[len(bad) * PAGE_BYTES :], memory[len(bad) * PAGE_BYTES :])
        stats = store.stats()
        assert (stats.corrupt, stats.read_errors, stats.hits) == (len(bad), 0, NUM_PAGES - len(bad))
        assert all(put_all(store, memory)), "the writer did not replace what does not verify"
        assert all(store.get_into(KEYS, pages_of(got))) and np.array_equal(got, memory)
        plain.close()


def test_a_dead_owner_is_a_miss(server: MooncakeServer) -> None:
    """When the machine that holds the pages dies, they are misses and read errors until it is replaced."""
    memory = contents()
    with closing(opened(server)) as store:
        store.register_memory(memory)
        assert all(put_all(store, memory))
        assert server.owner is not None
        kill(server.owner)
        assert not any(store.get_into(KEYS, pages_of(np.zeros_like(memory))))
        assert store.stats().read_errors == store.thread_read_errors() == NUM_PAGES
        server.start_owner()
        memory[:] = contents(1)
        eventually(lambda: not any(store.contains(KEYS)))
        eventually(lambda: all(put_all(store, memory)))
        got = np.zeros_like(memory)
        assert all(store.get_into(KEYS, pages_of(got))) and np.array_equal(got, memory)


def test_a_second_replica_is_read_once_the_master_misses_the_first(server: MooncakeServer) -> None:
    dead, source = server.owner, contents()
    server.start_owner()
    with closing(opened(server, "?replicas=2")) as store:
        assert all(put_all(store, source)) and dead is not None
        kill(dead)
        copies = np.zeros_like(source)
        eventually(lambda: all(store.get_into(KEYS, pages_of(copies))))
        assert np.array_equal(copies, source)


def test_a_dead_master_comes_back(server: MooncakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Without a master nothing is found, stored or raised, and all of it is counted; with a new one the store works."""
    memory = contents()
    with closing(opened(server, "?timeout=2")) as store:
        store.register_memory(memory)
        assert all(put_all(store, memory))
        kill(server.master)
        assert not any(store.contains(KEYS)) and store.thread_read_errors() == NUM_PAGES
        assert not any(store.get_into(KEYS, pages_of(np.zeros_like(memory))))
        assert not any(put_all(store, memory)) and store.delete(KEYS) == 0 and not store.reopen()
        stats = store.stats()
        assert (stats.read_errors, stats.write_errors, stats.misses) == (2 * NUM_PAGES, 2 * NUM_PAGES, NUM_PAGES)
        assert re.search("keys failed, code -90.: the master", caplog.text)
        with pytest.raises(StoreError, match="no Mooncake master answers"):
            opened(server)
        server.start_master()
        eventually(store.reopen)
        eventually(lambda: all(put_all(store, memory)))
        got = np.zeros_like(memory)
        assert all(store.get_into(KEYS, pages_of(got))) and np.array_equal(got, memory)


def test_a_hung_master_is_given_up_on(server: MooncakeServer) -> None:
    """`contains`, `delete` and `reopen` return when their time is over though the library does not; `close` too."""
    memory = contents()
    with closing(opened(server, "?timeout=1")) as store:
        assert all(put_all(store, memory))
        server.master.send_signal(signal.SIGSTOP)
        assert not any(store.contains(KEYS, deadline_s=time.monotonic() + 0.1))
        assert not any(put_all(store, memory)) and store.delete(KEYS) == 0 and not store.reopen()
        store.touch(KEYS)
        assert store.stats().read_errors == NUM_PAGES
        with pytest.raises(StoreError, match=r"cannot connect .*\(not within 1 s\)"):
            opened(server, "?timeout=1")
    server.master.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_hung_owner_touches_no_buffer_later(server: MooncakeServer, method: str) -> None:
    """When the machine that holds the pages hangs in the middle, calls return in the end, and no byte of a buffer
    changes after that, although the machine goes on; then the store works again."""
    memory = contents()
    with closing(opened(server)) as store:
        store.register_memory(memory)
        assert server.owner is not None
        owner = server.owner
        if method == "get":
            assert all(put_all(store, memory))
        else:
            assert store.put([(b"first", pages_of(memory)[0])]) == [True]  # the library knows the machine
        server.owner.send_signal(signal.SIGSTOP)
        result = put_all(store, memory) if method == "put" else store.get_into(KEYS, pages_of(memory))
        assert not all(result)
        stats = store.stats()
        assert stats.write_errors if method == "put" else stats.read_errors
        memory[:] = 77
        owner.send_signal(signal.SIGCONT)
        expected = contents(1)
        eventually(lambda: store.reopen() and not any(store.contains(KEYS)))
        eventually(lambda: all(put_all(store, expected)))
        got = np.zeros_like(memory)
        assert all(store.get_into(KEYS, pages_of(got))) and np.array_equal(got, expected)
        assert (memory == 77).all()


@pytest.mark.parametrize("options", ["protocol=foo&timeout=5", "protocol=rdma&device=nope0&timeout=5", "timeout=0.01"])
def test_a_pool_that_cannot_be_joined_is_no_missing_master(server: MooncakeServer, options: str) -> None:
    """One line says what to check, and none of the program that tries it."""
    with pytest.raises(
        StoreError, match=r"cannot connect to Mooncake at .*; check protocol, device, metadata"
    ) as caught:
        opened(server, f"?{options}")
    assert "import" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_buffer_that_no_memory_holds_is_refused(server: MooncakeServer) -> None:
    """In a line that names the option."""
    with pytest.raises(StoreError, match="lower buffer"):
        opened(server, "?buffer=8000TiB")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Mooncake the URL names the extra to install."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"pip install 'hicache\[mooncake\]'"):
        open_store("mooncake://127.0.0.1:1", identity=IDENTITY, formats=FORMATS)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds; how long that takes is no verdict."""
    while not condition():
        time.sleep(0.2)


def plain_client(server: MooncakeServer) -> Any:
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    address = server.url.partition("//")[2]
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address) == 0
    return client


def name_of(key: bytes, identity: Mapping[str, str | int] = IDENTITY) -> str:
    """docs/remote.md: the name of a value."""
    return f"hicache-{namespace_digest(identity)[:8].hex()}-{base64.urlsafe_b64encode(key).rstrip(b'=').decode()}"
