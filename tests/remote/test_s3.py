"""Cases of S3 alone: a server that ends or hangs, missing buckets and credentials, a client that panics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from hicache.bench.remote_servers import CREDENTIALS, S3Server
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
    """A server that runs, with an empty bucket; the environment has credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    shared_server.wipe()
    return shared_server


def test_a_bucket_that_is_not_there_fails_each_call(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Pages are not stored, reads and questions miss; all is counted and says why. A page that is missing in a bucket
    that is there is no error."""
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
    """Where the environment has none, and neither has the machine a role."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with closing(opened(server)) as store:
        assert store.contains([b"0"]) == [False] and store.stats().read_errors == 1
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in caplog.text


def test_a_prefix_that_names_nothing_is_refused() -> None:
    """Before anything is connected, by the URL that it is a part of."""
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


def test_leases_expire_by_themselves(server: S3Server) -> None:
    """By conditional puts: of many machines one gets a lease, and one gets it once it has expired. A server that has
    ended gives none."""
    with closing(opened(server)) as one, closing(opened(server)) as other, ThreadPoolExecutor(8) as threads:
        assert isinstance(one, S3PageStore) and isinstance(other, S3PageStore)
        for until_s in (time.time() - 20, time.time() - 10, time.time() + 1e5):  # the first two have expired
            begun = [threads.submit(store.begin, b"key", until_s + n) for n, store in enumerate([one, other] * 3)]
            winners = [n for n, each in enumerate(begun) if each.result()]
            assert len(winners) == 1 or until_s < time.time()
        assert one.who(b"key") == other.who(b"key") == pytest.approx(until_s + winners[0], abs=1e-2)
        assert not one.begin(b"key", until_s + 99) and one.who(b"other") is None and one.begin(b"other", until_s)
        assert one.stats().read_errors == one.stats().write_errors == 0


def test_an_operator_lists_verifies_and_prunes_a_bucket(server: S3Server) -> None:
    """Pages by name, a bad one by its checksum; the oldest are removed down to a budget, and leases are no pages."""
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
