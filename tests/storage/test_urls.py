"""A URL opens the store that it names. An invalid URL is refused in one line that shows no password."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.storage import LmdbPageStore, PageFormat, PageStore, StoreError, StoreUrl, open_store
from storage_pages import IDENTITY, PAGE_BYTES, found_numbers, put_numbers
from storage_pages import open_store as open_lmdb

FORMATS = [PageFormat(PAGE_BYTES)]
SECRET = "s3cr3t"


def opened(url: str) -> PageStore:
    return open_store(url, identity=IDENTITY, formats=FORMATS)


def test_lmdb_is_the_store_in_that_directory(tmp_path: Path) -> None:
    """A URL of lmdb has a path with percent-escapes, and the options of the constructor. The class reads back pages
    that were stored through a URL."""
    path = tmp_path / "a store"
    url = f"lmdb://{tmp_path}/a%20store?budget=32MiB&durability=commit&level=0"
    with_url = open_store(url, identity=IDENTITY, formats=FORMATS)
    assert isinstance(with_url, LmdbPageStore) and with_url.stats().budget_bytes == 32 << 20
    assert with_url.put([(b"k", np.zeros(PAGE_BYTES, np.uint8))]) == [True]
    assert with_url.stats().put_bytes_stored > PAGE_BYTES  # level 0: zeros are not compressed
    put_numbers(with_url, range(4))
    with_url.close()
    by_class = open_lmdb(path, budget_bytes=32 << 20)
    assert found_numbers(by_class, range(4)) == {0, 1, 2, 3}
    by_class.close()


REFUSED = [
    ("/var/lib/hicache", "begins with its scheme"),
    ("nosuch://host/x", "'nosuch'.*lmdb"),
    ("lmdb://relative/path", "absolute path"),
    ("lmdb:///x?level=-1", "level='-1'"),
    ("lmdb:///x?bugdet=1GB", "'bugdet'.*budget"),
    ("lmdb:///x?level=1&level=2", "each option once"),
    ("lmdb:///x?budget=-1", "budget='-1'"),
    ("lmdb:///x?budget=99999TB", "from 1 to 8192TiB"),
    (f"lmdb:///x?level={10**30}", "level.* 9007199254740992"),
    ("lmdb:///x?durability=", "durability='' in a URL of lmdb: give text"),
    ("s3://bucket?concurrency=9007199254740993", "concurrency='9007199254740993' in a URL of s3"),
    ("s3://bucket?timeout=1e7", "above 0, at most 1000000"),
    ("mooncake://host?segment=-1", "segment='-1' in a URL of mooncake"),
    ("mooncake:///", "mooncake://host:50051"),
    ("mooncake://host?replicas=0", "replicas='0' in a URL of mooncake: give an integer from 1"),
    ("lmdb:///a directory", "with %XX for spaces"),
    ("lmdb:///x%00", "cannot read a URL of lmdb"),
    (f"lmdb://{'x' * 70}/x", "cannot read a URL of lmdb"),
    ("s3:///prefix", "s3://bucket/prefix"),
    (f"s3://key:{SECRET}@bucket/prefix", "credentials"),
    ("s3://bucket?endpoint=minio:9000", "endpoint"),
    (f"s3://bucket?endpoint=http://key:{SECRET}%40minio", "endpoint"),
    ("s3://bucket?endpiont=x", "endpoint"),
    # If special characters of a password are not escaped, the password reaches another part of the URL.
    (f"lmdb://u:{SECRET}@host:port/x", "cannot read a URL of lmdb"),
    (f"lmdb://u:1?{SECRET}=2@host", "cannot read a URL of lmdb"),
    (f"lmdb://u:1?{SECRET}@host", "cannot read a URL of lmdb"),
    (f"lmdb://u:{SECRET}#1@host", "cannot read a URL of lmdb"),
    (f"lmdb://u:{SECRET}@host/x", "absolute path"),
    (f"lmdb://u:1/{SECRET}@host", "absolute path"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED, ids=[url for url, _ in REFUSED])
def test_what_cannot_be_used_is_refused_in_a_line(url: str, message: str) -> None:
    """One `StoreError` names the mistake and the remedy, without user name and password."""
    with pytest.raises(StoreError, match=message) as caught:
        opened(url)
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_url_in_parts() -> None:
    """A URL is split into user, password, host, port, path and options, without escapes. The `repr` of a parsed URL
    shows neither user nor password."""
    parts = StoreUrl.parse(f"x+y://us%40er:{SECRET}%2F@Bucket_1:70/a%20b/c?n=1%26&m=+&k=0")
    assert (parts.scheme, parts.user, parts.password) == ("x+y", "us@er", f"{SECRET}/")
    assert (parts.host, parts.port, parts.path) == ("bucket_1", 70, "/a b/c")
    assert parts.options(n="", m="x", k_bytes=0, j=7) == {"n": "1&", "m": "+", "k_bytes": 0, "j": 7}
    assert SECRET not in repr(parts) and "us@er" not in repr(parts)
    assert StoreUrl.parse("x://[::1]:70/a").host == "::1"


PLUGIN = """
from own_store import opener

broken = 1 / 0 if "{broken}" else None
"""


def install(folder: Path, *, broken: str) -> None:
    """Write the files that `pip install` would write for a package with one module and one entry point."""
    info = folder / "store_of_ones_own-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: store-of-ones-own\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hicache.stores]\nown-store = store_of_ones_own:opener\n")
    (folder / "store_of_ones_own.py").write_text(PLUGIN.replace("{broken}", broken))


def test_an_installed_package_adds_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point of an installed package opens URLs of its scheme. Errors list its scheme, and an entry point that
    fails raises an error."""
    install(tmp_path / "good", broken="")
    monkeypatch.syspath_prepend(str(tmp_path / "good"))
    monkeypatch.delitem(sys.modules, "store_of_ones_own", raising=False)
    importlib.invalidate_caches()
    store = open_store("own-store://?budget=1000000", identity=IDENTITY, formats=FORMATS)
    assert store.stats().budget_bytes == 1_000_000
    assert put_numbers(store, [3]) == [True] and found_numbers(store, [3, 4]) == {3}
    with pytest.raises(StoreError, match="does not encrypt"):
        open_store("own-store://", identity=IDENTITY, formats=FORMATS, cipher=object())  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"use one of dir, lmdb, (.+, )?own-store,"):
        opened("nosuch://")
    with pytest.raises(StoreError, match="no option 'x'"):
        opened("own-store://?x=1")

    install(tmp_path / "bad", broken="yes")
    monkeypatch.syspath_prepend(str(tmp_path / "bad"))
    monkeypatch.delitem(sys.modules, "store_of_ones_own", raising=False)
    with pytest.raises(StoreError, match="registered for 'own-store', fails: division by zero"):
        opened("own-store://")
