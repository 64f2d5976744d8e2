"""What only a Redis server does to a store: connections that break, memory that is full, pages that expire."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hicache.bench.remote_servers import RedisServer
from hicache.storage import PageFormat
from hicache.storage.conformance import FORMATS, IDENTITY, SMALL_BYTES, page
from remote_case import PAGES, PATIENCE, found_in, opened, opener

pytestmark = [pytest.mark.remote, pytest.mark.skipif(RedisServer.missing() != "", reason=RedisServer.missing())]

RAW = f"{PATIENCE}&level=0"
NO_BOUND = 1 << 40


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that runs, is empty, and has the settings that it starts with."""
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
        shared_server.ask("config", "set", name, value)
    shared_server.ask("flushall")
    return shared_server


def names_in(server: RedisServer) -> list[str]:
    return server.ask("keys", "*").split()


class CuttingProxy:
    """Stands between a client and a server, and lets so many bytes of each connection's requests and answers through.

    Then it cuts the connection, or, where it `stalls`, sends nothing more."""

    def __init__(self, server: Path, folder: Path) -> None:
        self.path = folder / "proxy"
        self.request_bytes = self.answer_bytes = NO_BOUND
        self.stalls = False
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server))
                ways = ((client, server, self.request_bytes), (server, client, self.answer_bytes))
                for source, target, num_bytes in ways:
                    arguments = source, target, num_bytes, self.stalls
                    threading.Thread(target=_copy, args=arguments, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, num_bytes: int, stalls: bool) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(min(num_bytes, 1 << 16) if not stalls else 1 << 16):
            target.sendall(part[:num_bytes])
            num_bytes -= min(num_bytes, len(part))
            if not num_bytes and not stalls:
                break
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[CuttingProxy]:
    with closing(CuttingProxy(server.socket, server.folder)) as proxy:
        yield proxy


class Babbler:
    """Listens at `path`, and answers each connection with the next of `answers`, in turns, before it closes it."""

    def __init__(self, path: Path, answers: Sequence[bytes]) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._answer, args=(itertools.cycle(answers),), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self, answers: Iterator[bytes]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(next(answers))
                client.close()


def test_a_connection_that_the_server_closed_between_calls_costs_nothing(server: RedisServer) -> None:
    """After a restart, or when the server's `timeout` is over, the next call connects anew and succeeds."""
    with closing(opened(server)) as store:
        store.put(list(PAGES.items()))
        server.ask("client", "kill", "type", "normal")
        assert found_in(store) == list(PAGES)
        server.kill()
        server.start()
        assert store.put(list(PAGES.items())) == [True] * 8 and found_in(store) == list(PAGES)


def test_a_connection_that_breaks_anywhere_loses_only_what_it_had_not_answered(
    server: RedisServer, proxy: CuttingProxy
) -> None:
    """Wherever requests or answers are cut, what is said to be read has the right bytes, what is said to be stored is,
    and the next call works."""
    make = opener(f"redis+unix://{proxy.path}?{RAW}")
    total_bytes = sum(len(content) for content in PAGES.values())
    with closing(opened(server)) as direct:
        for cut in [0, 1, 5, 30, 64, 200, *np.random.default_rng(5).integers(1000, total_bytes, 12).tolist()]:
            server.ask("flushall")
            with closing(make(IDENTITY, FORMATS)) as store:
                proxy.request_bytes = cut
                said = store.put(list(PAGES.items()))
                stored = found_in(direct)
                assert all(key in stored for key, ok in zip(PAGES, said, strict=True) if ok)
                proxy.request_bytes = NO_BOUND
                assert store.put(list(PAGES.items())) == [True] * 8
            with closing(make(IDENTITY, FORMATS)) as store:
                proxy.answer_bytes = cut
                hits = found_in(store)
                assert hits == list(PAGES)[: len(hits)] and store.stats().read_errors == 8 - len(hits) > 0
                proxy.answer_bytes = NO_BOUND
                assert found_in(store) == list(PAGES)


def test_a_server_that_stalls_within_an_answer_costs_what_it_had_not_answered(
    server: RedisServer, proxy: CuttingProxy
) -> None:
    """At the deadline of the call the pages that had come are hits, and the next call uses another connection."""
    with closing(opened(server, RAW)) as direct:
        direct.put(list(PAGES.items()))
    for answer_bytes in (0, 3, 2000, 60_000, 100_000):
        with closing(opener(f"redis+unix://{proxy.path}?timeout=1000000")(IDENTITY, FORMATS)) as store:
            proxy.stalls, proxy.answer_bytes = True, answer_bytes
            buffers = [np.empty(len(content), np.uint8) for content in PAGES.values()]
            hits = store.get_into(list(PAGES), buffers, deadline_s=time.monotonic() + 0.2)
            num_hits = sum(hits)
            assert hits == [True] * num_hits + [False] * (8 - num_hits) and num_hits < 8
            assert all(np.array_equal(buffers[n], page(n)) for n in range(num_hits))
            proxy.stalls, proxy.answer_bytes = False, NO_BOUND
            assert found_in(store) == list(PAGES)


def test_no_answer_is_more_than_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a server says, of Redis or of another protocol, whole or cut, no call raises and no page is read; a log
    has no more than the beginning of it."""
    lines = ["+OK", "$-1", "$-7", "$60", "$99999999999", ":0", ":-1", "--1", "-", "*2", "$", "$x", "_", "HTTP/1.1"]
    words = [f"{line}\r\n".encode() for line in ["", *lines]]
    words += [b"\n", bytes(60), b"$" + b"9" * 5000, b"-DENIED " + b"x" * 999 + b"\r\n"]
    draw = random.Random(1)
    answers = [b"".join(draw.choices(words, k=draw.randrange(9))) for _ in range(301)]
    with (
        tempfile.TemporaryDirectory(prefix="hicache-redis-") as folder,
        closing(Babbler(Path(folder) / "socket", answers)) as server,
    ):
        for _ in range(len(answers)):
            with closing(opener(f"redis+unix://{server.path}?{PATIENCE}")(IDENTITY, FORMATS)) as store:
                assert found_in(store) == []
                store.put(list(PAGES.items()))
                store.contains(list(PAGES))
    assert "DENIED" in caplog.text and max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_full_server_keeps_what_it_has(server: RedisServer) -> None:
    """Where the server is out of memory, pages are not stored, which is counted; the others are read as before."""
    with closing(opened(server, RAW)) as store:
        assert store.put(list(PAGES.items())) == [True] * 8
        server.ask("config", "set", "maxmemory", "1mb")
        more = {b"more %d" % n: page(2 * n + 1) for n in range(40)}
        said = store.put(list(more.items()))
        assert not all(said) and store.stats().write_errors == said.count(False)
        assert found_in(store) == list(PAGES)
        assert found_in(store, more) == [key for key, ok in zip(more, said, strict=True) if ok]


def test_reading_a_large_batch_evicts_nothing(server: RedisServer) -> None:
    """A server whose memory has room for its pages, and for few replies beside them, keeps all pages of a batch."""
    pages = {b"%d" % n: np.full(1 << 20, n, np.uint8) for n in range(40)}
    with closing(opener(f"{server.url}?{RAW}")(IDENTITY, [PageFormat(1 << 20)])) as store:
        store.put(list(pages.items()))
        [used] = re.findall(r"used_memory:(\d+)", server.ask("info", "memory"))
        server.ask("config", "set", "maxmemory-policy", "allkeys-lru")
        server.ask("config", "set", "maxmemory", str(int(used) + (24 << 20)))
        assert found_in(store, pages) == list(pages) and len(names_in(server)) == len(pages)


def test_a_value_of_another_type_is_a_miss_and_goes(server: RedisServer) -> None:
    """A list under the name of a page is counted as corrupt, not as a failure, and its key can be stored again."""
    with closing(opened(server)) as store:
        store.put([(b"a", page(0))])
        [name] = names_in(server)
        server.ask("del", name)
        server.ask("rpush", name, "x")
        assert found_in(store, {b"a": page(0)}) == []
        assert (store.stats().corrupt, store.stats().read_errors) == (1, 0)
        assert store.put([(b"a", page(0))]) == [True] and found_in(store, {b"a": page(0)}) == [b"a"]


def test_a_replica_is_read_and_not_written(server: RedisServer) -> None:
    """READONLY is not stored, and counted; what is there is read."""
    with closing(opened(server)) as store:
        store.put(list(PAGES.items()))
        server.ask("replicaof", "127.0.0.1", "1")
        try:
            assert store.put([(b"new", page(0)), (b"0", page(0))]) == [False, False]
            assert store.stats().write_errors == 2 and found_in(store) == list(PAGES)
        finally:
            server.ask("replicaof", "no", "one")
        assert store.put([(b"new", page(0))]) == [True]


def test_long_values_are_not_stored(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A page whose value may be above `max_value` is not sent, which is said once and is no failure of the server; the
    others of its batch are stored."""
    with closing(opened(server, f"{RAW}&max_value={SMALL_BYTES + 200}")) as store:
        assert store.put(list(PAGES.items())) == [len(content) == SMALL_BYTES for content in PAGES.values()]
        assert store.stats().write_errors == 0 and len(found_in(store)) == 4
    assert caplog.text.count("max_value") == 1


def test_use_keeps_pages_from_expiring(server: RedisServer) -> None:
    """With `ttl`, what is put, read, put again or touched is kept for so long from then on."""
    with closing(opened(server, f"{PATIENCE}&ttl=100000")) as store:
        store.put([(b"a", page(0))])
        [name] = names_in(server)
        uses: list[Callable[[], object]] = [
            lambda: store.get_into([b"a"], [np.empty(SMALL_BYTES, np.uint8)]),
            lambda: store.touch([b"x", b"a"]),
            lambda: store.put([(b"a", page(0))]),
        ]
        for use in uses:
            assert 90_000 < int(server.ask("ttl", name)) <= 100_000
            server.ask("expire", name, "50000")
            use()
            store.sync()
        assert 90_000 < int(server.ask("ttl", name)) <= 100_000


def test_a_refused_password_is_a_miss_and_a_secret(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A server that refuses the user is logged with its reason, without the password."""
    with closing(opener(f"redis+unix://someone:geheim@{server.socket}?{PATIENCE}")(IDENTITY, FORMATS)) as store:
        with caplog.at_level(logging.WARNING):
            assert store.contains([b"a"]) == [False] and store.put([(b"a", page(0))]) == [False]
        assert "AUTH" in caplog.text and "geheim" not in caplog.text and "geheim" not in repr(vars(store))
        assert (store.stats().read_errors, store.stats().write_errors) == (1, 1)
