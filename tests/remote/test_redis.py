"""The Redis store keeps the contract against a real server, and whatever that server does is a miss or not stored."""

from __future__ import annotations

import logging
import math
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import redis_server
from hicache.storage import PageCipher, PageFormat, PageStore, StoreError, open_store
from hicache.storage.conformance import FORMATS, IDENTITY, SMALL_BYTES, MakeStore, StoreConformance, page
from redis_server import Babbler, CuttingProxy, RedisServer, free_port, running

pytestmark = [pytest.mark.remote, pytest.mark.skipif(redis_server.MISSING != "", reason=redis_server.MISSING)]

PATIENCE = "timeout=60"  # so that a busy machine changes nothing
SECRET = "s3cr3t/@:word"
PAGES = {b"%d" % n: page(n) for n in range(8)}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that runs, is empty, and has the settings that it starts with."""
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
        shared_server.ask("config", "set", name, value)
    shared_server.ask("flushall")
    return shared_server


def opener(url: str, always: PageCipher | None = None) -> MakeStore:
    def make(
        identity: Mapping[str, str | int], formats: Sequence[PageFormat], cipher: PageCipher | None = None
    ) -> PageStore:
        return open_store(url, identity=identity, formats=formats, cipher=cipher or always)

    return make


def opened(server: RedisServer, options: str = "") -> PageStore:
    return opener(f"{server.url}?{PATIENCE}{options}")(IDENTITY, FORMATS)


def found_in(store: PageStore, pages: Mapping[bytes, np.ndarray] = PAGES) -> list[bytes]:
    """The keys that the store has, after comparing every byte of their pages."""
    buffers = [np.empty(len(content), np.uint8) for content in pages.values()]
    hits = store.get_into(list(pages), buffers)
    for hit, buffer, content in zip(hits, buffers, pages.values(), strict=True):
        assert not hit or np.array_equal(buffer, content)
    return [key for key, hit in zip(pages, hits, strict=True) if hit]


class TestRedis(StoreConformance):
    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return opener(f"{server.url}?{PATIENCE}")


class TestEncryptedAndExpiring(StoreConformance):
    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        pytest.importorskip("cryptography")
        return opener(f"{server.url}?{PATIENCE}&ttl=1000&level=0", PageCipher(bytes(range(32))))


class TestOverTheNetwork(StoreConformance):
    """By TLS, as a user with a password, in another database than the first."""

    @pytest.fixture(scope="class")
    @classmethod
    def network(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, str]]:
        folder = tmp_path_factory.mktemp("tls")
        key, certificate = folder / "key.pem", folder / "cert.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run([*new, "-keyout", key, "-out", certificate, *subject], check=True, capture_output=True)
        port = free_port()
        tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        user = ["--user", "kv", "on", f">{SECRET}", "~*", "&*", "+@all"]
        with running("--bind", "127.0.0.1", *tls, "--tls-auth-clients", "no", *user) as server:
            escaped = SECRET.replace("/", "%2F").replace("@", "%40").replace(":", "%3A")
            yield server, f"rediss://kv:{escaped}@127.0.0.1:{port}/3?{PATIENCE}&ca={certificate}"

    @pytest.fixture
    def make_store(self, network: tuple[RedisServer, str]) -> MakeStore:
        network[0].ask("flushall")
        return opener(network[1])


def test_servers_that_are_gone_are_misses_until_they_are_back(server: RedisServer) -> None:
    """While the server is killed every call says that nothing is there or stored, counts, and raises nothing; once it
    runs again, the next call uses it."""
    store = opened(server)
    assert store.put(list(PAGES.items())) == [True] * 8 and found_in(store) == list(PAGES)
    server.kill()
    for _ in range(2):
        assert found_in(store) == [] and store.contains(list(PAGES)) == [False] * 8
    assert store.put(list(PAGES.items())) == [False] * 8 and store.delete([b"1"]) == 0
    store.touch([b"1"])
    store.sync()
    stats = store.stats()
    assert store.thread_read_errors() == stats.read_errors >= 4 * 8 and stats.write_errors == 8 + 1
    server.start()
    assert found_in(store) == [] and store.thread_read_errors() == stats.read_errors  # it lost them, and answers
    assert store.put(list(PAGES.items())) == [True] * 8 and found_in(store) == list(PAGES)
    store.close()


def test_a_connection_that_the_server_closed_between_calls_costs_nothing(server: RedisServer) -> None:
    """After a restart, or when the server's `timeout` is over, the next call connects anew and succeeds."""
    store = opened(server)
    store.put(list(PAGES.items()))
    server.ask("client", "kill", "type", "normal")
    assert found_in(store) == list(PAGES)
    server.kill()
    server.start()
    assert store.put(list(PAGES.items())) == [True] * 8 and found_in(store) == list(PAGES)
    store.close()


@pytest.mark.parametrize(("timeout_s", "wait_s"), [(0.2, math.inf), (1e6, 0.2)], ids=["timeout", "deadline"])
def test_a_frozen_server_is_a_miss(server: RedisServer, timeout_s: float, wait_s: float) -> None:
    """Calls end by their timeout or their deadline; a buffer is left alone from then on; a thawed server is used."""
    store, hasty = opened(server), opener(f"{server.url}?timeout={timeout_s}")(IDENTITY, FORMATS)
    store.put(list(PAGES.items()))
    server.freeze()
    try:
        buffers = [np.zeros(len(content), np.uint8) for content in PAGES.values()]
        assert hasty.get_into(list(PAGES), buffers, deadline_s=time.monotonic() + wait_s) == [False] * 8
        assert hasty.contains(list(PAGES), deadline_s=time.monotonic() + wait_s) == [False] * 8
        assert hasty.put([(b"new", page(0))], deadline_s=time.monotonic() + wait_s) == [False]
    finally:
        server.thaw()
    assert hasty.stats().read_errors == 16 and hasty.stats().write_errors == 1
    assert found_in(store) == list(PAGES) and not any(buffer.any() for buffer in buffers)
    hasty.close()
    store.close()


def test_a_connection_that_breaks_anywhere_loses_only_what_it_had_not_answered(server: RedisServer) -> None:
    """Wherever requests or answers are cut, what is said to be read has the right bytes, what is said to be stored is,
    and the next call works."""
    direct = opened(server)
    proxy = CuttingProxy(server.socket, server.folder)
    rng = np.random.default_rng(5)
    total_bytes = sum(len(content) for content in PAGES.values())
    for cut in [0, 1, 5, 30, 64, 200, *rng.integers(1000, total_bytes, 12)]:
        server.ask("flushall")
        store = opener(f"redis+unix://{proxy.path}?{PATIENCE}&level=0")(IDENTITY, FORMATS)
        proxy.request_bytes = int(cut)
        said = store.put(list(PAGES.items()))
        stored = found_in(direct)
        assert all(key in stored for key, ok in zip(PAGES, said, strict=True) if ok)
        proxy.request_bytes, proxy.answer_bytes = 1 << 40, 1 << 40
        assert store.put(list(PAGES.items())) == [True] * 8
        store.close()
        store = opener(f"redis+unix://{proxy.path}?{PATIENCE}&level=0")(IDENTITY, FORMATS)
        proxy.answer_bytes = int(cut)
        hits = found_in(store)
        assert hits == list(PAGES)[: len(hits)] and store.stats().read_errors == 8 - len(hits) > 0
        proxy.answer_bytes = 1 << 40
        assert found_in(store) == list(PAGES)
        store.close()
    proxy.close()
    direct.close()


def test_a_server_that_stalls_within_an_answer_costs_what_it_had_not_answered(server: RedisServer) -> None:
    """At the deadline of the call the pages that had come are hits, and the next call uses another connection."""
    direct = opened(server, "&level=0")
    direct.put(list(PAGES.items()))
    proxy = CuttingProxy(server.socket, server.folder)
    for answer_bytes in (0, 3, 2000, 60_000, 100_000):
        store = opener(f"redis+unix://{proxy.path}?timeout=1000000")(IDENTITY, FORMATS)
        proxy.stalls, proxy.answer_bytes = True, answer_bytes
        buffers = [np.empty(len(content), np.uint8) for content in PAGES.values()]
        hits = store.get_into(list(PAGES), buffers, deadline_s=time.monotonic() + 0.2)
        num_hits = sum(hits)
        assert hits == [True] * num_hits + [False] * (8 - num_hits) and num_hits < 8
        assert all(np.array_equal(buffers[n], page(n)) for n in range(num_hits))
        proxy.stalls, proxy.answer_bytes = False, 1 << 40
        assert found_in(store) == list(PAGES)
        store.close()
    proxy.close()
    direct.close()


def test_no_answer_is_more_than_a_miss() -> None:
    """Whatever a server says, of Redis or of another protocol, whole or cut, no call raises and no page is read."""
    lines = [
        "+OK",
        "$-1",
        "$-7",
        "$60",
        "$99999999999",
        ":0",
        ":-1",
        "--1",
        "-",
        "*2",
        "$",
        "$x",
        "_",
        "",
        "HTTP/1.1 400",
    ]
    words = [f"{line}\r\n".encode() for line in lines] + [b"\n", bytes(60), b"$" + b"9" * 5000]
    draw = random.Random(1)
    answers = [b"".join(draw.choices(words, k=draw.randrange(9))) for _ in range(301)]
    with tempfile.TemporaryDirectory(prefix="hicache-redis-") as folder:
        server = Babbler(Path(folder) / "socket", answers)
        for _ in range(len(answers)):
            store = opener(f"redis+unix://{server.path}?{PATIENCE}")(IDENTITY, FORMATS)
            assert found_in(store) == []
            store.put(list(PAGES.items()))
            store.contains(list(PAGES))
            store.close()
        server.close()


def test_a_full_server_keeps_what_it_has(server: RedisServer) -> None:
    """Where the server is out of memory, pages are not stored, which is counted; the others are read as before."""
    store = opened(server, "&level=0")
    assert store.put(list(PAGES.items())) == [True] * 8
    server.ask("config", "set", "maxmemory", "1mb")
    more = {b"more %d" % n: page(2 * n + 1) for n in range(40)}
    said = store.put(list(more.items()))
    assert not all(said) and store.stats().write_errors == said.count(False)
    assert found_in(store) == list(PAGES) and found_in(store, more) == [
        key for key, ok in zip(more, said, strict=True) if ok
    ]
    store.close()


def test_a_server_that_evicts_leaves_holes(server: RedisServer) -> None:
    """Of what a server with a bound keeps, every page is read, whichever others are gone."""
    server.ask("config", "set", "maxmemory-policy", "allkeys-random")
    server.ask("config", "set", "maxmemory", "3mb")
    store = opened(server, "&level=0")
    pages = {b"%d" % n: page(2 * n + 1) for n in range(80)}
    for item in pages.items():
        store.put([item])
    server.ask("config", "set", "maxmemory", "0")  # each command may evict
    held = found_in(store, pages)
    assert 0 < len(held) < len(pages) and len(held) == len(server.keys()) and store.stats().read_errors == 0
    store.close()


def test_reading_a_large_batch_evicts_nothing(server: RedisServer) -> None:
    """A server whose memory has room for its pages, and for few replies beside them, keeps all pages of a batch."""
    pages = {b"%d" % n: np.full(1 << 20, n, np.uint8) for n in range(40)}
    store = opener(f"{server.url}?{PATIENCE}&level=0")(IDENTITY, [PageFormat(1 << 20)])
    store.put(list(pages.items()))
    [used] = re.findall(r"used_memory:(\d+)", server.ask("info", "memory"))
    server.ask("config", "set", "maxmemory-policy", "allkeys-lru")
    server.ask("config", "set", "maxmemory", str(int(used) + (24 << 20)))
    assert found_in(store, pages) == list(pages) and len(server.keys()) == len(pages)
    store.close()


def test_a_wiped_server_is_empty(server: RedisServer) -> None:
    """What is gone is a miss without an error, and is stored again."""
    store = opened(server)
    store.put(list(PAGES.items()))
    server.ask("flushall")
    assert store.contains(list(PAGES)) == [False] * 8 and found_in(store) == []
    assert store.put(list(PAGES.items())) == [True] * 8 and found_in(store) == list(PAGES)
    assert store.stats().read_errors == store.stats().corrupt == 0
    store.close()


DAMAGE: dict[str, Callable[[RedisServer, str, str], object]] = {
    "a byte of the header": lambda server, name, _: server.ask("setrange", name, "9", "?"),
    "a byte of the page": lambda server, name, _: server.ask("setrange", name, "500", "?"),
    "cut off": lambda server, name, _: server.ask("set", name, server.ask("getrange", name, "0", "3")),
    "longer than any value": lambda server, name, _: server.ask("setrange", name, "100000", "?"),
    "text": lambda server, name, _: server.ask("set", name, "hello"),
    "empty": lambda server, name, _: server.ask("set", name, ""),
    "a list": lambda server, name, _: (server.ask("del", name), server.ask("rpush", name, "x")),
    "the value of another key": lambda server, name, other: server.ask("copy", other, name, "replace"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_value_that_does_not_verify_is_a_miss_and_goes(server: RedisServer, damage: str) -> None:
    """It is counted, hides no other page of the batch, and its key can be stored again."""
    store = opened(server, "&level=0")
    pages = {b"%d" % n: page(2 * n) for n in range(3)}
    names = []
    for item in pages.items():
        store.put([item])
        names += sorted(set(server.keys()) - set(names))
    DAMAGE[damage](server, names[1], names[2])
    assert found_in(store, pages) == [b"0", b"2"]
    assert store.stats().corrupt == 1 and store.stats().read_errors == 0
    assert store.contains(list(pages)) == [True, False, True]
    assert store.put(list(pages.items())) == [True] * 3 and found_in(store, pages) == list(pages)
    store.close()


def test_a_replica_is_read_and_not_written(server: RedisServer) -> None:
    """READONLY is not stored, and counted; what is there is read."""
    store = opened(server)
    store.put(list(PAGES.items()))
    server.ask("replicaof", "127.0.0.1", "1")
    try:
        assert store.put([(b"new", page(0)), (b"0", page(0))]) == [False, False]
        assert store.stats().write_errors == 2 and found_in(store) == list(PAGES)
    finally:
        server.ask("replicaof", "no", "one")
    assert store.put([(b"new", page(0))]) == [True]
    store.close()


def test_long_values_are_not_stored(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A page whose value may be above `max_value` is not sent, which is said once and is no failure of the server; the
    others of its batch are stored."""
    store = opened(server, f"&level=0&max_value={SMALL_BYTES + 200}")
    assert store.put(list(PAGES.items())) == [len(content) == SMALL_BYTES for content in PAGES.values()]
    assert store.stats().write_errors == 0 and len(found_in(store)) == 4
    assert caplog.text.count("raise max_value") == 1
    store.close()


def test_use_keeps_pages_from_expiring(server: RedisServer) -> None:
    """With `ttl`, what is put, read, put again or touched is kept for so long from then on."""
    store = opened(server, "&ttl=1000")
    store.put([(b"a", page(0))])
    [name] = server.keys()
    assert 900 < int(server.ask("ttl", name)) <= 1000
    uses: list[Callable[[], object]] = [
        lambda: store.get_into([b"a"], [np.empty(SMALL_BYTES, np.uint8)]),
        lambda: store.touch([b"x", b"a"]),
        lambda: store.put([(b"a", page(0))]),
    ]
    for use in uses:
        server.ask("expire", name, "500")
        use()
        store.sync()
        assert 900 < int(server.ask("ttl", name)) <= 1000
    store.close()


def test_a_refused_password_is_a_miss_and_a_secret(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A server that refuses the user is logged with its reason, without the password."""
    url = f"redis+unix://someone:geheim@{server.socket}"
    store = opener(url)(IDENTITY, FORMATS)
    with caplog.at_level(logging.WARNING):
        assert store.contains([b"a"]) == [False] and store.put([(b"a", page(0))]) == [False]
    assert "AUTH is refused" in caplog.text and "geheim" not in caplog.text and "geheim" not in repr(vars(store))
    assert (store.stats().read_errors, store.stats().write_errors) == (1, 1)
    store.close()


def test_a_log_shows_the_beginning_of_what_a_server_says(caplog: pytest.LogCaptureFixture) -> None:
    """Redis explains some errors in a paragraph, of which a line has 200 characters."""
    with tempfile.TemporaryDirectory(prefix="hicache-redis-") as folder:
        server = Babbler(Path(folder) / "socket", [b"-DENIED " + b"x" * 999 + b"\r\n"])
        store = opener(f"redis+unix://{server.path}?{PATIENCE}")(IDENTITY, FORMATS)
        assert store.contains([b"a"]) == [False] and store.stats().read_errors == 1
        store.close()
        server.close()
    assert f"DENIED {'x' * 193}..." in caplog.text and "x" * 194 not in caplog.text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis:///0", "redis://host:6379/0"),
        ("redis://host/first", "redis://host:6379/0"),
        ("redis+unix://host/socket", "redis://host:6379/0"),
        ("redis://host?timeout=0", "timeout='0' in a URL of redis: give a number of seconds above 0"),
        ("redis://host?tll=5", "no option 'tll'; its options are ca, db, level, max_value, timeout, ttl"),
        ("redis://host?max_value=much", "max_value='much' in a URL of redis: give a size like 100GB"),
        ("redis://host?level=23", "level=23"),
        ("redis://host/0?db=1", "names its database twice"),
        ("redis://host?ca=/etc/hosts", "ca in a URL of redis, which has no TLS: write rediss://"),
        ("rediss://host?ca=/nonexistent", "ca='/nonexistent' .*give a file of certificates"),
        ("rediss://host?ca=/etc/hosts", "ca='/etc/hosts' .*give a file of certificates"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    """Before anything is connected, by a line that says what would do."""
    with pytest.raises(StoreError, match=message):
        opener(url)(IDENTITY, FORMATS)
