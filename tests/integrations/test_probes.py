"""Probes of a server's interface. The server has a few lines, and each of its releases differs in one place."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.integrations.probes import Call, Features, missing_features, wrong_overrides
from hicache.integrations.server_store import ServerStore, ServerStoreConfig, server_fields
from hicache.integrations.sglang.features import USED
from hicache.integrations.versions import (
    release_name,
    require_features,
    warn_untested,
)
from hicache.integrations.versions import tested_release as released
from hicache.storage import PageFormat

SERVER = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

@dataclass
class Job:
    name: str
    rows: int = 0

class Tier(ABC):
    def __init__(self):
        self.rows = 0

    @abstractmethod
    def load(self, job, *, urgent=False): ...

    def touch(self, keys): ...
"""
PLUG_IN = """
import small_server

class Disk(small_server.Tier):
    def load(self, job, *, urgent=False): ...

    def touch(self, keys): ...
"""
NAMES = Features(
    names={"small_server": ("Job",), "small_server:Job": ("name", "rows"), "small_server:Tier": ("rows", "load")},
    calls={"small_server:Job": Call(1, ("rows",))},
)


@pytest.fixture
def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Write a server and its plug-in; returns the features that the server lacks."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small_plug_in.py").write_text(PLUG_IN)

    def probe(server: str) -> list[str]:
        (tmp_path / "small_server.py").write_text(server)
        importlib.invalidate_caches()
        if found := missing_features([NAMES]):
            return found
        importlib.import_module("small_plug_in")
        return wrong_overrides([NAMES], "small_plug_in")

    yield probe
    for name in ("small_server", "small_plug_in"):
        sys.modules.pop(name, None)


def test_a_server_with_every_feature_passes(missing: Callable[[str], list[str]]) -> None:
    assert missing(SERVER) == []


def test_more_than_hicache_uses_is_no_fault(missing: Callable[[str], list[str]]) -> None:
    more = SERVER.replace("def touch(self, keys)", "def touch(self, keys, *more, **others)")
    assert missing(f"{more}\n    def new_hook(self, job): ...\n") == []


@pytest.mark.parametrize(
    ("now", "then", "named"),
    [
        ("class Job", "class Work", "small_server has no Job"),
        ("    name: str", "    key: str", "small_server:Job has no name"),
        ("self.rows = 0", "self.slots = 0", "small_server:Tier has no rows"),
        (
            "    rows: int = 0",
            "    rows: int = 0\n    size: int = 1\n    def __init__(self, name): ...",
            "cannot be called",
        ),
        ("urgent=False", "urgent=False, parts", "Disk.load does not match small_server:Tier: parts"),
        ("def touch(self, keys)", "def touch(self, chunks)", "Disk.touch does not match"),
        ("def touch(self, keys)", "def touch(self, keys, request)", "Tier: request"),
        ("    def touch", "    @abstractmethod\n    def drop(self): ...\n    def touch", "lacks drop"),
        ("from abc", "import a_package_that_is_gone\nfrom abc", "small_server is missing"),
    ],
)
def test_a_changed_interface_is_named(missing: Callable[[str], list[str]], now: str, then: str, named: str) -> None:
    assert any(named in text for text in missing(SERVER.replace(now, then)))


def test_a_release_that_lacks_a_feature_is_refused() -> None:
    """A release that lacks a feature is refused. The error names the feature and the releases to install."""
    with pytest.raises(ConfigError, match=r"Server 9\.9 .*json has no loadz.* Install Server 9\.8 or 9\.7"):
        require_features("Server", "9.9", ["9.8", "9.7"], [Features(names={"json": ("loadz",)})])
    require_features("Server", "9.9", ["9.8"], [Features(names={"json": ("loads",)})])


def test_without_the_server_each_feature_is_missing() -> None:
    if importlib.util.find_spec("sglang") is None:
        assert len(missing_features([USED])) > len(USED.calls)


def test_a_tested_release_counts_with_its_patches() -> None:
    """A tested release includes its patch releases. A tested release of three numbers includes pre-releases and
    post-releases of the same numbers."""
    assert released("0.32.1+cpu", ["0.32", "0.33"]) == "0.32"
    for patch in ("0.5.23", "0.5.23.post1", "0.5.23rc2"):
        assert released(patch, ["0.5.23"]) == "0.5.23"
    assert released("0.3.2", ["0.32"]) is released("0.5.2", ["0.5.23"]) is None


def test_untested_releases_have_stores_of_their_own(tmp_path: Path) -> None:
    """Each untested release has its own store; so do two builds of one release, and the same release after it was
    tested. Tested releases share a store."""
    names = [release_name(version, ["0.32"]) for version in ("0.32.0", "0.31.0", "0.34.0", "0.34.0.dev3+g1a")]
    assert names[0] == "0.32"
    paths = set()
    for name in [*names, release_name("0.34.0", ["0.34"])]:
        identity = server_fields("vllm", name)
        store = ServerStore.open(ServerStoreConfig(path=str(tmp_path)), identity, [PageFormat(4096)])
        paths.add(store.path)
        assert store.stores.close()
    assert len(paths) == 4


def test_an_untested_release_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "hicache"):
        for _ in range(3):
            warn_untested("Server", "9.9", ("9.8",))
            warn_untested("Server", "9.8.1", ("9.8",))
    [record] = caplog.records
    assert "Server 9.9 was never tested" in record.getMessage()
