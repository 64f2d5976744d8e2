"""What only S3 does to a store: a server that ends or hangs, missing buckets and credentials, a client that panics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from hicache.bench.remote_servers import CREDENTIALS, S3Server
from hicache.storage import StoreError
from hicache.storage.conformance import FORMATS, IDENTITY, page
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
    """What its Rust cannot use, here from the environment, is a miss and not stored, which is counted and logged."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "not-a-url"}.items():
        monkeypatch.setenv(name, value)
    with closing(opener(f"s3://bucket?{PATIENCE}")(IDENTITY, FORMATS)) as store:
        assert store.contains([b"0"]) == [False] and found_in(store) == []
        assert store.put([(b"0", page(0))]) == [False]
        assert (store.stats().read_errors, store.stats().write_errors) == (9, 1) and "AWS_*" in caplog.text
