"""The store of a server: identities and salts on one path, and what happens where it cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.disk.health import LIMITS
from hicache.errors import ConfigError
from hicache.integrations.config import ServerStoreConfig, server_store_config
from hicache.integrations.lmcache.stores import KindStore
from hicache.integrations.server_store import ServerStore
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


def test_a_second_process_reads_what_the_first_stores(tmp_path: Path) -> None:
    """It stores nothing, and raises nothing."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path; from hicache.integrations.server_store import ServerStore\n"
        "from hicache.integrations.config import ServerStoreConfig; from hicache.storage import PageFormat\n"
        f"s = ServerStore.open(ServerStoreConfig(path={str(tmp_path)!r}), {IDENTITY!r}, (PageFormat({PAGE_BYTES}),))\n"
        "import numpy as np; page = np.zeros(4096, np.uint8)\n"
        "print(s.can_write, s.store.get_into(s.keys([b'a', b'b']), [page, page.copy()]), page.tobytes()[:2])\n"
        "print(s.store.put([(s.keys([b'b'])[0], page)]), s.store.contains(s.keys([b'b']))); s.close()"
    )
    first = opened(tmp_path)
    put(first, b"a")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["False [True, False] b'a.'", "[False] [False]"]
    assert "a path of its own" in result.stderr
    first.close()


def test_damaged_files_are_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on without its store, and the log names what to do."""
    first = opened(tmp_path)
    put(first, b"a")
    first.close()
    data = first.path / "store.json"
    data.write_bytes(b"\xff" * data.stat().st_size)
    second = opened(tmp_path)
    assert not second.can_write and not get(second, b"a") and put(second, b"b") == [False]
    assert f"{data} is damaged: its record cannot be read; remove the directory" in caplog.text
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
    ("given", "match"),
    [
        ({}, r"the tier: missing setting path"),
        ({"path": "x", "bugdet": 1}, r"the tier: unknown setting bugdet; known are path, budget"),
        ({"path": "x", "budget": "much"}, r"budget='much'"),
        ({"path": "x", "readers": 0}, r"readers=0 is below 1"),
        ({"path": "x", "remote": "redis://host"}, r"the tier: unknown setting remote"),
        ([], r"the tier is not a mapping"),
    ],
)
def test_a_wrong_setting_is_named(given: Any, match: str) -> None:
    """With where it stands and what is known."""
    with pytest.raises(ConfigError, match=match):
        server_store_config(given, "the tier")


def test_a_path_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A file, and a directory of something else; nothing in it changes."""
    (tmp_path / "file").write_text("mine")
    for path, why in ((tmp_path / "file", "cannot be used"), (tmp_path, "holds files of something else")):
        with pytest.raises(ConfigError, match=f"{why}.*set path to a new or empty directory"):
            opened(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(StoreError, match="too small"):
        opened(tmp_path / "new", budget=1 << 20, formats=(PageFormat(64 << 20),))
    with pytest.raises(ConfigError, match="a name and a release"):
        opened(tmp_path / "new", server="someone")


def test_untested_releases_are_refused() -> None:
    """A minor release counts with all its patches; one of three numbers stands for itself."""
    assert require_version("vLLM", "0.32.1+cpu", ["0.32", "0.33"]) == "0.32"
    assert require_version("SGLang", "0.5.9", ["0.5.9", "0.5.23"]) == "0.5.9"
    for server, version, tested in (("vLLM", "0.3.2", ["0.32"]), ("SGLang", "0.5.10", ["0.5.9"])):
        with pytest.raises(ConfigError, match=rf"{server} {version} was never tested.*{tested[0]}"):
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
