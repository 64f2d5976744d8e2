"""What only S3 does to a store: a server that ends or hangs, missing buckets and credentials, a client that panics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from hicache.bench.remote_servers import CREDENTIALS, S3Server
from hicache.storage import StoreError
from hicache.storage.conformance import FORMATS, IDENTITY, page
from remote_case import PAGES, PATIENCE, found_in, opened, opener

pytestmark = [pytest.mark.remote, pytest.mark.skipif(S3Server.missing() != "", reason=S3Server.missing())]

ABSENT, PRESENT = [False] * len(PAGES), [True] * len(PAGES)


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


@pytest.mark.smoke
def test_a_server_that_is_gone_is_a_miss_until_it_is_back(server: S3Server) -> None:
    """While the server is killed every call says that nothing is there or stored, counts, and raises nothing; once it
    runs again, the next call uses it."""
    with closing(opened(server)) as store:
        assert store.put(list(PAGES.items())) == PRESENT and found_in(store) == list(PAGES)
        server.kill()
        for _ in range(2):
            assert found_in(store) == [] and store.contains(list(PAGES)) == ABSENT
        assert store.put(list(PAGES.items())) == ABSENT and store.delete([b"1"]) == 0
        store.touch([b"1"])
        store.sync()
        stats = store.stats()
        assert store.thread_read_errors() == stats.read_errors >= 4 * 8 and stats.write_errors >= 8
        server.start()
        assert found_in(store) == [] and store.thread_read_errors() == stats.read_errors  # it lost them, and answers
        assert store.put(list(PAGES.items())) == PRESENT and found_in(store) == list(PAGES)


@pytest.mark.smoke
def test_a_frozen_server_is_a_miss(server: S3Server) -> None:
    """Calls end by their timeout, which counts; a buffer is left alone from then on; a server that goes on is used."""
    hasty = opened(server, "timeout=0.3")
    with closing(opened(server)) as store:
        assert store.put(list(PAGES.items())) == PRESENT
        server.freeze()
        try:
            buffers = [np.zeros(len(content), np.uint8) for content in PAGES.values()]
            assert hasty.get_into(list(PAGES), buffers) == ABSENT and hasty.contains(list(PAGES)) == ABSENT
            assert hasty.put([(b"new", page(0))]) == [False]
            assert (hasty.stats().read_errors, hasty.stats().write_errors) == (16, 1)
            hasty.close()
        finally:
            server.thaw()
        assert found_in(store) == list(PAGES) and not any(buffer.any() for buffer in buffers)
