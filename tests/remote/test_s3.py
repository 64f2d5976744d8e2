"""The S3 store keeps the contract against a real server, and whatever that server does is a miss or not stored."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

import s3_server
from hicache.storage import PageCipher, PageFormat, PageStore, StoreError, open_store
from hicache.storage.conformance import FORMATS, IDENTITY, MakeStore, StoreConformance, page
from hicache.storage.records import namespace_digest
from s3_server import CREDENTIALS, S3Server, running

needs_server = pytest.mark.skipif(s3_server.MISSING != "", reason=s3_server.MISSING)
pytestmark = pytest.mark.remote

PAGES = {b"%d" % n: page(n) for n in range(6)}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that runs, with an empty bucket; the environment has credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    shared_server.wipe()
    return shared_server


def opener(url: str, always: PageCipher | None = None) -> MakeStore:
    def make(
        identity: Mapping[str, str | int], formats: Sequence[PageFormat], cipher: PageCipher | None = None
    ) -> PageStore:
        return open_store(url, identity=identity, formats=formats, cipher=cipher or always)

    return make


def opened(server: S3Server, options: str = "") -> PageStore:
    return opener(f"{server.url}&timeout=60{options}")(IDENTITY, FORMATS)


def found_in(store: PageStore, pages: Mapping[bytes, np.ndarray] = PAGES) -> list[bytes]:
    """The keys that the store has, after comparing every byte of their pages."""
    buffers = [np.empty(len(content), np.uint8) for content in pages.values()]
    hits = store.get_into(list(pages), buffers)
    for hit, buffer, content in zip(hits, buffers, pages.values(), strict=True):
        assert not hit or np.array_equal(buffer, content)
    return [key for key, hit in zip(pages, hits, strict=True) if hit]


@needs_server
class TestS3(StoreConformance):
    @pytest.fixture
    def make_store(self, server: S3Server) -> MakeStore:
        return opener(f"{server.url}&timeout=60")


@needs_server
class TestEncrypted(StoreConformance):
    @pytest.fixture
    def make_store(self, server: S3Server) -> MakeStore:
        pytest.importorskip("cryptography")
        return opener(f"{server.url}&timeout=60&level=0&concurrency=1", PageCipher(bytes(range(32))))


@needs_server
def test_a_server_that_is_gone_is_a_miss_until_it_is_back(server: S3Server) -> None:
    """While the server is killed every call says that nothing is there or stored, counts, and raises nothing; once it
    runs again, the next call uses it."""
    store = opened(server)
    assert store.put(list(PAGES.items())) == [True] * 6 and found_in(store) == list(PAGES)
    server.kill()
    assert found_in(store) == [] and store.contains(list(PAGES)) == [False] * 6
    assert store.put(list(PAGES.items())) == [False] * 6 and store.delete([b"1"]) == 0
    stats = store.stats()
    assert store.thread_read_errors() == stats.read_errors >= 2 * 6 and stats.write_errors >= 6
    server.start()
    assert found_in(store) == [] and store.thread_read_errors() == stats.read_errors  # it lost them, and answers
    assert store.put(list(PAGES.items())) == [True] * 6 and found_in(store) == list(PAGES)
    store.close()


@needs_server
def test_a_frozen_server_is_a_miss(server: S3Server) -> None:
    """Calls end by the timeout of a request; a buffer is left alone from then on; a thawed server is used."""
    store, hasty = opened(server), opener(f"{server.url}&timeout=0.3")(IDENTITY, FORMATS)
    store.put(list(PAGES.items()))
    server.freeze()
    try:
        buffers = [np.zeros(len(content), np.uint8) for content in PAGES.values()]
        assert hasty.get_into(list(PAGES), buffers) == [False] * 6
        assert hasty.contains(list(PAGES), deadline_s=time.monotonic() + 0.1) == [False] * 6
        assert hasty.put([(b"new", page(0))]) == [False]
        hasty.close()
    finally:
        server.thaw()
    assert found_in(store) == list(PAGES)
    assert not any(buffer.any() for buffer in buffers)
    store.close()


@needs_server
def test_a_bucket_that_is_not_there_fails_each_call(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Pages are not stored, reads and questions miss; all is counted and says why. A page that is missing in a bucket
    that is there is no error."""
    store = opener(f"s3://nobody-made-this?endpoint={server.endpoint}")(IDENTITY, FORMATS)
    calls: list[Callable[[], object]] = [
        lambda: store.contains(list(PAGES)) == [False] * 6 and store.stats().read_errors == 6,
        lambda: found_in(store) == [] and store.stats().read_errors == 12,
        lambda: store.put(list(PAGES.items())) == [False] * 6 and store.stats().write_errors == 6,
    ]
    for call in calls:
        caplog.clear()
        assert call()
        assert "its bucket does not exist; create it" in caplog.text
    store.close()
    store = opened(server)
    assert store.contains(list(PAGES)) == [False] * 6 and found_in(store) == [] and store.stats().read_errors == 0
    store.close()


@needs_server
def test_without_credentials_it_says_what_to_set(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the environment has none, and neither has the machine a role."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    store = opened(server)
    assert store.contains([b"0"]) == [False] and store.stats().read_errors == 1
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in caplog.text
    store.close()


@needs_server
def test_a_panic_of_the_client_is_an_error(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What its Rust cannot use, here from the environment, is a miss and not stored, which is counted and logged."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not-a-url")
    store = opener("s3://bucket")(IDENTITY, FORMATS)
    assert store.contains([b"0"]) == [False] and found_in(store) == []
    assert store.put([(b"0", page(0))]) == [False]
    assert (store.stats().read_errors, store.stats().write_errors) == (7, 1) and "AWS_*" in caplog.text
    store.close()


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a byte of the header": lambda value, _: value[:9] + b"?" + value[10:],
    "a byte of the page": lambda value, _: value[:500] + bytes([value[500] ^ 1]) + value[501:],
    "cut off": lambda value, _: value[:-1],
    "longer than any value": lambda value, _: value + bytes(100_000),
    "text": lambda *_: b"hello",
    "empty": lambda *_: b"",
    "the value of another key": lambda _, other: other,
}


@needs_server
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_value_that_does_not_verify_is_a_miss_and_goes(server: S3Server, damage: str) -> None:
    """It is counted, hides no other page of the batch, and its key can be stored again."""
    store = opened(server, "&level=0")
    pages = {b"%d" % n: page(2 * n) for n in range(3)}
    store.put(list(pages.items()))
    folder = f"some/prefix/hicache/{namespace_digest(IDENTITY)[:8].hex()}"
    names = [f"{folder}/{base64.urlsafe_b64encode(key).decode().rstrip('=')}" for key in pages]
    server.write(names[1], DAMAGE[damage](server.read(names[1]), server.read(names[2])))
    assert found_in(store, pages) == [b"0", b"2"]
    assert store.stats().corrupt == 1 and store.stats().read_errors == 0
    assert store.contains(list(pages)) == [True, False, True]
    assert store.put(list(pages.items())) == [True] * 3 and found_in(store, pages) == list(pages)
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://key:geheim@bucket/prefix", "credentials in the environment"),
        ("s3://a%20bucket", "s3://bucket/prefix"),
        ("s3://bucket/a//b", "cannot open s3://bucket/a//b: .*empty path segment"),
        ("s3://bucket?concurrency=0", "concurrency='0' in a URL of s3: give a whole number from 1"),
        ("s3://bucket?endpoint=", "give http://host:9000 or https://host"),
        ("s3://bucket?endpoint=minio:9000", "give http://host:9000 or https://host"),
        ("s3://bucket?endpoint=ftp://minio", "give http://host:9000 or https://host"),
        ("s3://bucket?endpoint=http://minio:99999", "give http://host:9000 or https://host"),
        ("s3://bucket?endpoint=http://key:geheim%40minio", "endpoint=... in a URL of s3: give http://host:9000"),
        ("s3://bucket?endpiont=x", "no option 'endpiont'; its options are concurrency, endpoint, level, region"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    """Before anything is connected, by a line that says what would do."""
    with pytest.raises(StoreError, match=message) as caught:
        opener(url)(IDENTITY, FORMATS)
    assert "geheim" not in str(caught.value)


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the extra."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"pip install 'hicache\[s3\]'"):
        opener("s3://bucket")(IDENTITY, FORMATS)
