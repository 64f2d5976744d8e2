"""Cases that only S3 has: a server that ends or hangs, missing buckets and credentials, and a client that panics."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import ClassVar

import pytest

from hicache.bench.remote_servers import CREDENTIALS, S3Server, free_port
from hicache.storage import StoreError
from hicache.storage.conformance import FORMATS, IDENTITY, page
from hicache.storage.s3_store import S3PageStore
from hicache.storage.shared_pages import shared_pages
from remote_case import PAGES, PATIENCE, found_in, opened, opener

pytestmark = [pytest.mark.remote, pytest.mark.skipif(S3Server.missing() != "", reason=S3Server.missing())]

ABSENT = [False] * len(PAGES)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A running server with an empty bucket. The environment has credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    shared_server.wipe()
    return shared_server


def test_a_bucket_that_is_not_there_fails_each_call(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Without the bucket pages are not stored, and reads and look-ups miss. Everything is counted, and the log has the
    reason. A missing page in an existing bucket is no error."""
    url = f"s3://nobody-made-this?endpoint={server.endpoint}&{PATIENCE}"
    with closing(opener(url)(IDENTITY, FORMATS)) as store:
        calls: list[Callable[[], object]] = [
            lambda: store.contains(list(PAGES)) == ABSENT and store.stats().read_errors == 8,
            lambda: found_in(store) == [] and store.stats().read_errors == 16,
            lambda: store.put(list(PAGES.items())) == ABSENT and store.stats().write_errors == 8,
        ]
        for call in calls:
            caplog.clear()
            assert call()
            assert "bucket does not exist" in caplog.text
    with closing(opened(server)) as store:
        assert store.contains(list(PAGES)) == ABSENT and found_in(store) == [] and store.stats().read_errors == 0


def test_without_credentials_it_says_what_to_set(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If neither the environment has credentials nor the machine a role, the error says what to set."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with closing(opened(server)) as store:
        assert store.contains([b"0"]) == [False] and store.stats().read_errors == 1
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in caplog.text


def test_a_prefix_that_names_nothing_is_refused() -> None:
    """An invalid prefix is refused before any connection is made. The error has the URL."""
    with pytest.raises(StoreError, match="s3://bucket/a//b"):
        opener("s3://bucket/a//b")(IDENTITY, FORMATS)


def test_a_panic_of_the_client_is_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the client cannot use a setting of the environment, each page is a miss and is not stored, which is counted
    and logged."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "not-a-url"}.items():
        monkeypatch.setenv(name, value)
    with closing(opener(f"s3://bucket?{PATIENCE}")(IDENTITY, FORMATS)) as store:
        assert store.contains([b"0"]) == [False] and found_in(store) == []
        assert store.put([(b"0", page(0))]) == [False]
        assert (store.stats().read_errors, store.stats().write_errors) == (9, 1) and "AWS_*" in caplog.text
    with pytest.raises(StoreError, match=r"AWS_\*"):
        list(shared_pages("s3://bucket").pages())


def test_an_error_has_its_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the reason of a failed call after the long name of the object."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket/{'prefix' * 20}?endpoint=http://127.0.0.1:{free_port()}&{PATIENCE}"
    with closing(opener(url)(IDENTITY, FORMATS)) as store:
        assert store.put([(bytes(32), page(0))]) == [False]
    assert "error sending request" in caplog.text


def test_leases_expire_by_themselves(server: S3Server) -> None:
    """Leases use conditional puts. One of many machines gets a lease, and another machine gets the lease after it has
    expired. A server that has ended gives none."""
    with closing(opened(server)) as one, closing(opened(server)) as other, ThreadPoolExecutor(8) as threads:
        assert isinstance(one, S3PageStore) and isinstance(other, S3PageStore)
        for until_s in (time.time() - 20, time.time() - 10, time.time() + 1e5):  # the first two leases have expired
            begun = [threads.submit(store.begin, b"key", until_s + n) for n, store in enumerate([one, other] * 3)]
            winners = [n for n, each in enumerate(begun) if each.result()]
            assert len(winners) == 1 or until_s < time.time()
        assert one.who(b"key") == other.who(b"key") == pytest.approx(until_s + winners[0], abs=1e-2)
        assert not one.begin(b"key", until_s + 99) and one.who(b"other") is None and one.begin(b"other", until_s)
        for wrong in (b"inf", b"nan", b"", b"9" * 99):
            server.write(f"some/prefix/{one._lease(b'other')}", wrong)
            assert one.who(b"other") is None and one.begin(b"other", until_s)
        assert one.stats().read_errors == one.stats().write_errors == 0


class LosingAnswers(http.server.BaseHTTPRequestHandler):
    """A server of one object, with conditional puts. It answers the first put with an error, after storing the
    object."""

    protocol_version = "HTTP/1.1"
    stored: ClassVar[list[bytes]] = []

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.stored.append(body)
        self._answer(500 if len(self.stored) == 1 else 412, b"")

    def do_GET(self) -> None:
        self._answer(200, self.stored[0])

    def log_message(self, *_: object) -> None: ...

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


def test_a_lease_whose_answer_was_lost_is_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server stores a lease but fails to answer, the client's second attempt finds the lease of its first one.
    The caller has the lease, and does not wait for itself."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    LosingAnswers.stored.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LosingAnswers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&{PATIENCE}"
        with closing(opener(url)(IDENTITY, FORMATS)) as store:
            assert isinstance(store, S3PageStore) and store.begin(b"key", time.time() + 1e5)
            assert len(LosingAnswers.stored) == 2 and not store.begin(b"key", time.time() + 2e5)
        server.shutdown()


def test_an_operator_lists_verifies_and_prunes_a_bucket(server: S3Server) -> None:
    """The pages of a bucket are listed by name, and a damaged page is found by its checksum. The oldest pages are
    removed down to a budget. Leases do not count as pages."""
    with closing(opened(server)) as store:
        assert isinstance(store, S3PageStore) and all(store.put(list(PAGES.items())))
        assert store.begin(b"key", time.time() + 1e5)
        shared = shared_pages(server.url)
        pages = {each.key: each for each in shared.pages()}
        assert pages.keys() == PAGES.keys() and not any(map(shared.fault, pages.values()))
        bad = pages[b"3"]
        server.write(bad.name if bad.name.startswith("some") else f"some/prefix/{bad.name}", b"hello")
        assert [each.key for each in shared.pages() if shared.fault(each)] == [b"3"]
        total_bytes = sum(each.num_bytes for each in shared.pages())
        report = shared.prune(total_bytes - 1)
        assert report.removed == 1 and report.left == len(PAGES) - 1 == len(list(shared.pages()))
        assert shared.prune(0).left == 0 and found_in(store) == [] and store.who(b"key")
        with pytest.raises(StoreError, match="bucket does not exist"):
            list(shared_pages(f"s3://nobody-made-this?endpoint={server.endpoint}").pages())
