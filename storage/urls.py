"""Page stores by URL: `open_store` looks the scheme up and hands the URL on.

    lmdb:///path?budget=8GiB&durability=commit&level=1
    redis://user:password@host:6379/0?ttl=86400, rediss:// with TLS, redis+unix:///path/of/socket?db=0
    s3://bucket/prefix?endpoint=http://host:9000

The schemes of other packages come from entry points of the group `hicache.stores`: the name is the scheme, the value a
`StoreOpener`. No message and no `repr` shows a user name or a password of a URL.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from hicache.sizes import parse_bytes
from hicache.storage.base import PageStore, StoreError
from hicache.storage.chain import ChainStore
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.mooncake_client import MooncakeAddress
from hicache.storage.mooncake_store import MooncakePageStore
from hicache.storage.redis_store import RedisPageStore
from hicache.storage.resp import RedisAddress
from hicache.storage.s3_store import S3PageStore

ENTRY_POINTS = "hicache.stores"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_BETWEEN_URLS = re.compile(r",(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE | re.ASCII)
_DEFAULT_BUDGET_BYTES = 8 << 30  # that of the setting disk.budget_bytes


class StoreOpener(Protocol):
    """Opens the store that a URL of its scheme names. Raises `StoreError` with the remedy where it cannot."""

    def __call__(
        self,
        url: str,
        /,
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        cipher: PageCipher | None,
    ) -> PageStore: ...


class UrlOption(NamedTuple):
    """An option of a URL: the argument it becomes, how its text is read (a `ValueError` refuses it), and what it is."""

    argument: str
    parse: Callable[[str], Any]
    meaning: str


@dataclass(frozen=True)
class StoreUrl:
    """`scheme://user:password@host:port/path?options` in parts, without percent-escapes; "" and None for what is not
    there."""

    scheme: str
    user: str = field(repr=False)
    password: str = field(repr=False)
    host: str
    port: int | None
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Raises `StoreError`."""
        scheme = _scheme_of(url)
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")
            given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        except ValueError:  # which would show what it could not read
            raise _unreadable(scheme) from None
        if parts.fragment or "@" in parts.query or len(dict(given)) < len(given):
            raise _unreadable(scheme)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(scheme, user, password, _host_of(parts), port, unquote(parts.path), dict(given))

    def arguments(self, **known: UrlOption) -> dict[str, Any]:
        """The options given, as arguments of a constructor. Raises `StoreError` for unknown ones and for bad values."""
        unknown = sorted(self.options.keys() - known.keys())
        if unknown:
            names = ", ".join(sorted(known))
            raise StoreError(f"a URL of {self.scheme} has no option {unknown[0]!r}; its options are {names}")
        arguments = {}
        for name, text in self.options.items():
            argument, parse, meaning = known[name]
            try:
                arguments[argument] = parse(text)
            except ValueError:
                raise StoreError(f"{name}={text!r} in a URL of {self.scheme}: give {meaning}") from None
        return arguments


def open_store(
    url: str,
    *,
    identity: Mapping[str, str | int],
    formats: Sequence[PageFormat],
    cipher: PageCipher | None = None,
) -> PageStore:
    """The store that `url` names, for pages of `formats`. `identity` names everything that decides what a page means,
    and with `cipher` pages are encrypted, as `LmdbPageStore` says. URLs with commas between them name a chain: reads
    ask the stores in this order, writes go to all.

    Raises `StoreError` for a URL that cannot be used, and what the store raises.
    """
    stores: list[PageStore] = []
    try:
        for part in _BETWEEN_URLS.split(url):
            scheme = _scheme_of(part)
            opener = _OPENERS.get(scheme) or _registered(scheme)
            stores.append(opener(part, identity=identity, formats=formats, cipher=cipher))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return ChainStore(stores) if len(stores) > 1 else stores[0]


def whole(text: str) -> int:
    """A number of at least 0."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def seconds(text: str) -> float:
    """A time above 0."""
    duration_s = float(text)
    if not 0 < duration_s < math.inf:
        raise ValueError(text)
    return duration_s


TIMEOUT = UrlOption("timeout_s", seconds, "a number of seconds above 0")
LEVEL = UrlOption("level", whole, "a zstd level, 1 to 22, or 0 to store pages uncompressed")
BUDGET = UrlOption("budget_bytes", parse_bytes, "a size like 100GB or 8GiB")
DURABILITY = UrlOption("durability", str, "relaxed or commit")


def _open_lmdb(url: str, /, **about: Any) -> PageStore:
    parts = StoreUrl.parse(url)
    if parts.host or parts.path in ("", "/"):
        raise StoreError("a URL of lmdb names a directory by its absolute path: lmdb:///var/lib/hicache?budget=8GiB")
    given = parts.arguments(budget=BUDGET, durability=DURABILITY, level=LEVEL)
    return LmdbPageStore(parts.path, **{"budget_bytes": _DEFAULT_BUDGET_BYTES, **given}, **about)


def _open_redis(url: str, /, **about: Any) -> PageStore:
    parts = StoreUrl.parse(url)
    is_unix, db = parts.scheme == "redis+unix", parts.path.strip("/")
    if is_unix == bool(parts.host) or (not is_unix and db and not db.isdecimal()):
        raise StoreError("a URL of Redis is redis://host:6379/0, with the number of a database, or redis+unix:///path")
    given = parts.arguments(
        db=UrlOption("db", whole, "the number of a database"),
        ca=UrlOption("ca_file", str, "a file of certificates"),
        timeout=TIMEOUT,
        ttl=UrlOption("ttl_s", whole, "a number of seconds, 0 for no limit"),
        max_value=UrlOption("max_value_bytes", parse_bytes, "a size like 512MiB"),
        level=LEVEL,
    )
    address = RedisAddress(
        host=parts.host,
        port=parts.port or 6379,
        path=parts.path if is_unix else "",
        user=parts.user,
        password=parts.password,
        db=given.pop("db", 0 if is_unix or not db else int(db)),
        tls=parts.scheme == "rediss",
        ca_file=given.pop("ca_file", ""),
    )
    return RedisPageStore(address, **given, **about)


def _open_s3(url: str, /, **about: Any) -> PageStore:
    parts = StoreUrl.parse(url)
    if not parts.host or parts.port or parts.user or parts.password:
        raise StoreError("a URL of S3 is s3://bucket/prefix?endpoint=..., with credentials in the environment")
    given = parts.arguments(
        endpoint=UrlOption("endpoint", str, "the URL of a server"),
        region=UrlOption("region", str, "the name of a region"),
        timeout=TIMEOUT,
        concurrency=UrlOption("concurrency", whole, "a number of requests"),
        level=LEVEL,
    )
    return S3PageStore(parts.host, parts.path.strip("/"), **given, **about)


def _open_mooncake(url: str, /, **about: Any) -> PageStore:
    parts = StoreUrl.parse(url)
    if not parts.host or parts.path not in ("", "/") or parts.user or parts.password:
        raise StoreError("a URL of Mooncake names its master: mooncake://host:50051?replicas=2")
    given = parts.arguments(
        segment=UrlOption("segment_bytes", parse_bytes, "a size like 8GiB, 0 to lend no memory"),
        protocol=UrlOption("protocol", str, "tcp or rdma"),
        device=UrlOption("device", str, "names of RDMA devices"),
        metadata=UrlOption("metadata", str, "P2PHANDSHAKE or the address of a metadata server"),
        buffer=UrlOption("buffer_bytes", parse_bytes, "a size like 64MiB"),
        replicas=UrlOption("replicas", whole, "a number of machines"),
        timeout=TIMEOUT,
        level=LEVEL,
    )
    own = {name: given.pop(name) for name in ("segment_bytes", "protocol", "device", "metadata") if name in given}
    return MooncakePageStore(MooncakeAddress(parts.host, parts.port or 50051, **own), **given, **about)


_OPENERS: Mapping[str, StoreOpener] = {
    "lmdb": _open_lmdb,
    "s3": _open_s3,
    "mooncake": _open_mooncake,
    **dict.fromkeys(("redis", "rediss", "redis+unix"), _open_redis),
}


def _registered(scheme: str) -> StoreOpener:
    """The opener that an installed package registered for `scheme`."""
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if scheme not in entries:
        known = ", ".join(sorted({*_OPENERS, *entries}))
        raise StoreError(f"no store has the scheme {scheme!r}; the known ones are {known}")
    try:
        return cast(StoreOpener, entries[scheme].load())
    except Exception as error:
        raise StoreError(f"the store {entries[scheme].value}, registered for {scheme!r}, fails: {error}") from error


def _scheme_of(url: str) -> str:
    match = _SCHEME.match(url)
    if match is None:
        raise StoreError("a store's URL begins with its scheme, like lmdb:///path or redis://host")
    return match[1].lower()


def _host_of(parts: SplitResult) -> str:
    """The host as it was written: `hostname` is lower case, but names of buckets are not."""
    after = parts.netloc.rpartition("@")[2]
    host = after[1:].partition("]")[0] if after.startswith("[") else after.partition(":")[0]
    return unquote(host)


def _unreadable(scheme: str) -> StoreError:
    return StoreError(
        f"cannot read a URL of {scheme}: write it as {scheme}://user:password@host:port/path?name=value&name=value, "
        "each option once, with %XX for characters such as / ? # @ in a name or password"
    )
