"""Opens page stores by URL: `open_store` looks up the scheme and passes the URL to its opener.

    lmdb:///path?budget=8GiB&durability=commit&level=1
    mooncake://host:50051?replicas=2
    s3://bucket/prefix?endpoint=http://host:9000
    dir:///mnt/shared/kv

Other packages add schemes by entry points of the group `hicache.stores`. The name of an entry point is the scheme. The
value of an entry point is a function of `(url, *, identity, formats, cipher)`. The function returns a `PageStore`, or
raises `StoreError` with a message that names the remedy.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hicache.storage.base import PageStore, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.dir_store import DirPageStore
from hicache.storage.filters import PageFormat
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.mooncake_store import MooncakePageStore
from hicache.storage.mounts import network_type
from hicache.storage.records import decisive
from hicache.storage.s3_store import S3PageStore
from hicache.storage.store_url import StoreUrl, scheme_of

ENTRY_POINTS = "hicache.stores"
_Opener: TypeAlias = Callable[..., PageStore]
_DEFAULT_BUDGET_BYTES = 8 << 30  # same as the default of the setting disk.budget_bytes


def open_store(
    url: str,
    *,
    identity: Mapping[str, str | int],
    formats: Sequence[PageFormat],
    cipher: PageCipher | None = None,
    on_removed: Callable[[Sequence[bytes]], None] | None = None,
    name: str = "",
) -> PageStore:
    """Open the store at `url` for pages of `formats`. `identity`, `cipher`, `on_removed`: see `LmdbPageStore`. Stores
    of other schemes than lmdb do not call `on_removed`. `name`: if given, a URL of lmdb names a folder of stores and
    their common budget, and `name` is the subfolder of this store.

    Raises `StoreError` for an invalid URL, and the errors of the store.
    """
    url, about = url.strip(), {"identity": identity, "formats": formats, "cipher": cipher}
    opener = opener_of(url)
    if opener is _open_lmdb:
        return opener(url, **about, on_removed=on_removed, name=name)
    return opener(url, **{**about, "identity": decisive(identity)})


def opener_of(url: str) -> _Opener:
    """Return the function that opens stores of the URL's scheme. Raises `StoreError` for an unknown scheme."""
    scheme = scheme_of(url.strip())
    return _OPENERS.get(scheme) or _registered(scheme)


def disk_of(url: str) -> tuple[Path, int] | None:
    """Return the directory and the budget in bytes in a URL of lmdb; None if the URL has another scheme. Raises
    `StoreError`."""
    if scheme_of(url.strip()) != "lmdb":
        return None
    path, options = _parsed_lmdb(url.strip())
    return path, options["budget_bytes"]


def _open_lmdb(url: str, /, *, name: str, **about: Any) -> PageStore:
    path, options = _parsed_lmdb(url)
    return LmdbPageStore(path / name, **options, **about, shares_budget=bool(name))


def _parsed_lmdb(url: str) -> tuple[Path, dict[str, Any]]:
    """Return the directory and the options in a URL of lmdb."""
    at = StoreUrl.parse(url)
    if at.host or at.path in ("", "/"):
        raise StoreError("a URL of lmdb names a directory by its absolute path: lmdb:///var/lib/hicache?budget=8GiB")
    if network := network_type(at.path):
        raise StoreError(
            f"the disk path {at.path} is on a network file system ({network}), where the index of a store is damaged; "
            f"choose a local disk, and share pages by a remote store in that directory: dir://{at.path}"
        )
    return Path(at.path), at.options(budget_bytes=_DEFAULT_BUDGET_BYTES, durability="relaxed", level=1)


_OPENERS: Mapping[str, _Opener] = {
    "lmdb": _open_lmdb,
    "dir": DirPageStore,
    "s3": S3PageStore,
    "mooncake": MooncakePageStore,
}


def _registered(scheme: str) -> _Opener:
    """Load the opener that an installed package registered for `scheme`."""
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if scheme not in entries:
        known = ", ".join(sorted({*_OPENERS, *entries}))
        raise StoreError(f"the URL of the store has the unknown scheme {scheme!r}; use one of {known}")
    try:
        opener: _Opener = entries[scheme].load()
    except Exception as error:
        raise StoreError(f"the store {entries[scheme].value}, registered for {scheme!r}, fails: {error}") from error
    return opener
