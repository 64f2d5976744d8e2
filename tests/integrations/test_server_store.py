"""The store of a server: identities and salts on one path or socket, and stores that cannot be opened."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hicache.integrations.server_store
from hicache.config.stores import SharedStoreConfig
from hicache.errors import ConfigError
from hicache.integrations.server_store import ServerStore, ServerStoreConfig, server_store_config
from hicache.integrations.staging import WaitingTier
from hicache.storage import PageBuffer, PageFormat, StoreError, describe
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import RemoteSettings, ServiceSettings
from hicache.storage.process.stores import OpenStores, StoreRequest
from store_server import served
from waiting import eventually

PAGE_BYTES = 4096
FORMATS = (PageFormat(PAGE_BYTES),)
IDENTITY = {
    "server": "vllm",
    "release": "0.32",
    "model": "m",
    "dtype": "bfloat16",
    "layout": "LBHNC",
    "page_tokens": 16,
}


class Server:
    """A store as a server uses it. The bytes of a page follow from its name."""

    def __init__(
        self, path: Path | str, salt: str = "", formats: tuple[PageFormat, ...] = FORMATS, **changed: Any
    ) -> None:
        settings = {name: changed.pop(name) for name in ("budget", "key_file", "remote") if name in changed}
        config = ServerStoreConfig(path=str(path), salt=salt, **settings)
        self.store = ServerStore.open(config, {**IDENTITY, **changed}, formats)
        self.tier = WaitingTier(self.store.stores, PAGE_BYTES)

    def put(self, name: bytes) -> bool:
        def fill(_: int, page: PageBuffer) -> None:
            page[:] = list(name.ljust(PAGE_BYTES, b"."))

        return self.tier.write(self.store.keys([name]), PAGE_BYTES, fill) == [True]

    def get(self, name: bytes) -> bool:
        found: list[bytes] = []
        self.tier.read(self.store.keys([name]), PAGE_BYTES, lambda _, page: found.append(page.tobytes()))
        assert found in ([], [name.ljust(PAGE_BYTES, b".")])
        return bool(found)

    def close(self) -> None:
        assert self.tier.close()


@contextlib.contextmanager
def opened(*arguments: Any, **changed: Any) -> Iterator[Server]:
    server = Server(*arguments, **changed)
    yield server
    server.close()


def test_a_store_without_a_disk_is_not_copied_to_itself(tmp_path: Path) -> None:
    """Servers without a disk share the pages of a remote store, and a process refuses a store that is its own remote
    store."""
    url = f"dir://{tmp_path}"
    with (
        opened("", "weights", remote=SharedStoreConfig(url=url)) as first,
        opened("", "weights", remote=SharedStoreConfig(url=url)) as second,
    ):
        assert first.put(b"a") and second.get(b"a") and second.put(b"b") and first.get(b"b")
    request = StoreRequest(url, IDENTITY, FORMATS, remote=RemoteSettings(url))
    with pytest.raises(StoreError, match=f"{url} is given as the store and as its remote store"):
        OpenStores().acquire(json.loads(request.pack()))


def test_a_store_of_another_process_is_left_alone_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While another process has the store open, the server continues without it, raises nothing, and logs the remedy
    once. The server retries until the store is free."""
    soon = ServiceSettings(limits=Limits(reopen_backoff_s=1e-3, max_reopen_backoff_s=1e-3))
    monkeypatch.setattr(hicache.integrations.server_store, "ServiceSettings", lambda **_: soon)
    first = Server(tmp_path)
    assert first.put(b"a")
    with opened(tmp_path) as second:
        for _ in range(3):
            assert not second.put(b"b") and not second.get(b"a")
        assert caplog.text.count("hicache store serve") == 1
        first.close()
        assert eventually(lambda: second.get(b"a")) and second.put(b"b") and second.get(b"b")


def test_servers_of_one_socket_share_stores(tmp_path: Path) -> None:
    """Servers of one socket have a store for each identity, in the served directory. Servers of one identity read and
    write the same store."""
    with served(tmp_path / "pages", tmp_path / "socket") as socket:
        with opened(socket) as first, opened(socket) as second, opened(socket, model="n") as other:
            assert first.put(b"a") and second.get(b"a") and not other.get(b"a")
            assert second.put(b"b") and first.get(b"b") and other.put(b"b")
        with opened(socket) as again:
            assert again.get(b"a") and again.get(b"b")
    assert sorted(describe(folder).entries for folder in (tmp_path / "pages").iterdir()) == [1, 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "the tier.*path"),
        ({"path": "x", "bugdet": 1}, "the tier.*bugdet"),
        ({"path": "x", "budget": "much"}, "budget"),
        ({"path": "x", "readers": 0}, "readers"),
        ({"path": "x", "remote": "s3://bucket"}, 'the tier: remote=.*give {"url": "s3://bucket"}'),
        ({"path": "x", "remote": {}}, "the tier: remote: missing setting url"),
        ({"path": "x", "remote": {"url": ""}}, "remote url is empty.*dir:///mnt/shared/kv"),
        ({"path": "x", "remote": {"url": "s3://b", "backup": "some"}}, "remote backup='some'.*used, all, none"),
        ({"path": "x", "remote": {"url": "s3://b", "keep": 1}}, "the tier: remote: unknown setting keep"),
        (
            {"path": "x", "remote": {"url": "nfs://me:secret@host"}},
            "the tier: remote url='nfs://\\*.*scheme.*give.*s3:",
        ),
        ({"path": "x", "remote": {"url": "lmdb:///var"}}, "remote url='lmdb:///var'.*set path"),
        ({"path": "x", "devices": "all"}, "devices='all': choose one of same, any"),
        ([], "the tier"),
    ],
)
def test_a_wrong_setting_is_named(given: Any, named: str) -> None:
    """An error about a wrong setting names the setting and where it was given."""
    with pytest.raises(ConfigError, match=named):
        server_store_config(given, "the tier")


def test_a_path_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A path to a file, or to a directory that is no store, is refused. Nothing in it changes."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(ConfigError, match="path="):
            Server(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(StoreError):
        Server(tmp_path / "new", budget=1 << 20, formats=(PageFormat(64 << 20),))
    with pytest.raises(ConfigError, match="server="):
        Server(tmp_path / "new", server="someone 1.0")
