"""The store of a server: identities and salts on one path, and what happens where it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disk_case import written_elsewhere
from hicache.disk.health import LIMITS
from hicache.errors import ConfigError
from hicache.integrations.lmcache.stores import KindStore
from hicache.integrations.server_store import (
    ReadOnlyStore,
    ServerStore,
    ServerStoreConfig,
    server_store_config,
)
from hicache.integrations.versions import require_version
from hicache.storage import PageFormat, StoreError, describe
from memory_store import MemoryPageStore

PAGE_BYTES = 4096
FORMATS = (PageFormat(PAGE_BYTES),)
IDENTITY = {"server": "vllm 0.32", "model": "m", "dtype": "bfloat16", "layout": "LBHNC", "page_tokens": 16}


def opened(
    path: Path, salt: str = "", formats: tuple[PageFormat, ...] = FORMATS, writes: bool = True, **changed: Any
) -> ServerStore:
    settings = {name: changed.pop(name) for name in ("budget", "key_file") if name in changed}
    config = ServerStoreConfig(path=str(path), salt=salt, **settings)
    return ServerStore.open(config, {**IDENTITY, **changed}, formats, writes=writes)


def put(server: ServerStore, name: bytes) -> list[bool]:
    page = np.frombuffer(name.ljust(PAGE_BYTES, b"."), dtype=np.uint8)
    return server.store.put([(server.keys([name])[0], page)])


def get(server: ServerStore, name: bytes) -> bool:
    """Whether the page is there; its bytes are those that were put."""
    page = np.zeros(PAGE_BYTES, dtype=np.uint8)
    [found] = server.store.get_into(server.keys([name]), [page])
    assert not found or page.tobytes() == name.ljust(PAGE_BYTES, b".")
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"dtype": "float16"},
        {"layout": "BLHNC"},
        {"page_tokens": 32},
        {"parallel": "tp=2/1"},
        {"server": "vllm 0.33"},
        {"salt": "tenant"},
        {"formats": (PageFormat(PAGE_BYTES), PageFormat(512))},
        {"key_file": "key"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_servers_on_one_path_see_nothing_of_each_other(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Whatever differs; and each finds its own again after a restart."""
    if "key_file" in changed:
        changed["key_file"] = str(tmp_path / "key")
        (tmp_path / "key").write_bytes(bytes(range(32)))
    path = tmp_path / "pages"
    first = opened(path)
    assert put(first, b"a") == [True]
    first.close()
    second = opened(path, **changed)
    assert not get(second, b"a")
    assert put(second, b"b") == [True]
    second.close()
    for kwargs, own, other in (({}, b"a", b"b"), (changed, b"b", b"a")):
        again = opened(path, **kwargs)
        assert get(again, own) and not get(again, other)
        again.close()


def test_a_store_that_another_process_writes_is_read(tmp_path: Path) -> None:
    """It stores nothing there, and raises nothing."""
    first = opened(tmp_path)
    put(first, b"a")
    first.close()
    with written_elsewhere(first.path):
        second = opened(tmp_path)
        assert not second.can_write and get(second, b"a") and put(second, b"b") == [False] and not get(second, b"b")
        second.close()


def test_a_reader_waits_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not write, and starts before any writer, reads as soon as there is a store."""
    monkeypatch.setattr(ReadOnlyStore, "RETRY_S", 0.0)
    reader = opened(tmp_path, writes=False)
    assert not reader.can_write and not get(reader, b"a")
    first = opened(tmp_path)
    put(first, b"a")
    first.close()
    assert get(reader, b"a") and put(reader, b"b") == [False]
    reader.close()


def test_damaged_files_are_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on without its store, and the log names the file."""
    first = opened(tmp_path)
    put(first, b"a")
    first.close()
    data = first.path / "store.json"
    data.write_bytes(b"\xff" * data.stat().st_size)
    second = opened(tmp_path)
    assert not second.can_write and not get(second, b"a") and put(second, b"b") == [False]
    assert str(data) in caplog.text
    second.close()


def test_operators_read_it_like_any_other(tmp_path: Path) -> None:
    """The subfolder is a whole store, whose identity names the server."""
    first = opened(tmp_path)
    put(first, b"a")
    first.store.check()
    first.close()
    assert first.path.name.startswith("vllm-0.32-")
    found = describe(first.path)
    assert (found.entries, found.identity["server"]) == (1, "vllm 0.32")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "the tier.*path"),
        ({"path": "x", "bugdet": 1}, "the tier.*bugdet"),
        ({"path": "x", "budget": "much"}, "budget"),
        ({"path": "x", "readers": 0}, "readers"),
        ({"path": "x", "remote": "redis://host"}, "the tier.*remote"),  # a disk alone
        ([], "the tier"),
    ],
)
def test_a_wrong_setting_is_named(given: Any, named: str) -> None:
    """With where it stands."""
    with pytest.raises(ConfigError, match=named):
        server_store_config(given, "the tier")


def test_a_path_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A file, and a directory of something else; nothing in it changes."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(ConfigError, match="path="):
            opened(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(StoreError):
        opened(tmp_path / "new", budget=1 << 20, formats=(PageFormat(64 << 20),))
    with pytest.raises(ConfigError, match="server="):
        opened(tmp_path / "new", server="someone")


def test_untested_releases_are_refused() -> None:
    """A minor release counts with all its patches; one of three numbers stands for itself."""
    assert require_version("vLLM", "0.32.1+cpu", ["0.32", "0.33"]) == "0.32"
    assert require_version("SGLang", "0.5.9", ["0.5.9", "0.5.23"]) == "0.5.9"
    for server, version, tested in (("vLLM", "0.3.2", ["0.32"]), ("SGLang", "0.5.10", ["0.5.9"])):
        with pytest.raises(ConfigError):
            require_version(server, version, tested)


def test_lmcaches_store_goes_on_writing_when_it_is_full(tmp_path: Path) -> None:
    """However often there is no room for an object, or for some of several, it is no failure: what fits is stored."""
    server = ServerStore(tmp_path, MemoryPageStore(PAGE_BYTES), "", can_write=True)
    kind, large = KindStore(server), np.zeros(PAGE_BYTES + 1, np.uint8)
    for _ in range(LIMITS.max_failures + 1):
        assert kind.write([b"large"], [large], lag=0) == [False]
        assert kind.write([b"large", b"small"], [large, large[1:]], lag=0).count(True) <= 1
    assert kind.is_healthy and kind.write([b"small"], [large[1:]], lag=0) == [True]
    kind.close()
