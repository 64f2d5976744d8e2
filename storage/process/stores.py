"""The stores of one process: opened by what a client asks for, shared by all who ask for the same, closed by the
last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.storage.base import PageStore, StoreError, StoreLocked
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.process.frames import VERSION
from hicache.storage.process.health import Limits
from hicache.storage.process.service import ServiceSettings, StoreService
from hicache.storage.store_url import scheme_of
from hicache.storage.urls import open_store


@dataclass(frozen=True)
class StoreRequest:
    """What a client asks for. `url`: see `hicache.storage.urls`; "" at a process that serves one of its own. `key`: of
    encryption, b"" without. `tells_removed`: answers of writes name the pages that the store lost."""

    url: str
    identity: Mapping[str, str | int]
    formats: Sequence[PageFormat]
    key: bytes = dataclasses.field(default=b"", repr=False)
    tells_removed: bool = False
    settings: ServiceSettings = dataclasses.field(default_factory=ServiceSettings)

    def pack(self) -> bytes:
        about = {**dataclasses.asdict(self), "identity": dict(self.identity), "key": self.key.hex(), "version": VERSION}
        return json.dumps(about).encode()

    @classmethod
    def unpack(cls, about: dict[str, Any]) -> StoreRequest:
        """StoreError for what is no request."""
        try:
            formats = [PageFormat(each["page_bytes"], PageFilter(**each["filter"])) for each in about["formats"]]
            settings = about["settings"]
            settings["limits"] = Limits(**settings["limits"])
            key, settings = bytes.fromhex(about["key"]), ServiceSettings(**settings)
            return cls(about["url"], about["identity"], formats, key, about["tells_removed"], settings)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"a client asks for a store in a way that is not understood: {error!r}") from error


class OpenStores:
    """Any thread. `url`: of the store that this process serves, whatever its clients name; "": that which each names.
    `given`: an object of its owner's process in the place of all; only with `owns_given` it is closed with its client.

    On a served disk each identity has a store in a folder of its own, so clients of any model may connect; the budget
    is that of each.
    """

    def __init__(
        self,
        url: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        given: PageStore | None = None,
        owns_given: bool = False,
    ) -> None:
        self._url, self._clock, self._given, self._owns_given = url, clock, given, owns_given
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def acquire(self, about: dict[str, object]) -> StoreService:
        """The store that a client's OPEN asks for; opened where it is not. Raises StoreError."""
        request = StoreRequest.unpack(about)
        cipher = PageCipher(request.key) if request.key else None
        sizes = sorted(format.page_bytes for format in request.formats)
        named = json.dumps([dict(request.identity), cipher.key_id if cipher else "", sizes], sort_keys=True)
        at = _folder_of(self._url, named) if self._url else request.url, named
        with self._lock:
            found = self._open.setdefault(at, _Open())
            if found.service is not None and not found.num_clients:
                raise StoreLocked("this process is closing the store; try again later")
            found.num_clients += 1
        try:
            with found.opening:  # which may take long, and holds up no other store
                if found.service is None:
                    found.service = self._opened(at[0], request, cipher)
                return found.service
        except BaseException:
            with self._lock:
                found.num_clients -= 1
                if not found.num_clients:
                    del self._open[at]
            raise

    def _opened(self, url: str, request: StoreRequest, cipher: PageCipher | None) -> StoreService:
        if self._given is not None:
            return StoreService(self._given, request.settings, owns_store=self._owns_given, clock=self._clock)
        removed: list[bytes] = []
        store = open_store(
            url,
            identity=request.identity,
            formats=request.formats,
            cipher=cipher,
            on_removed=removed.extend if request.tells_removed else None,
        )
        return StoreService(store, request.settings, clock=self._clock, removed=removed)

    def release(self, service: StoreService) -> None:
        """A client has left: closes the store after the last one, and raises what closing raises."""
        at, found = next((at, one) for at, one in list(self._open.items()) if one.service is service)
        with self._lock:
            found.num_clients -= 1
            if found.num_clients:
                return
        try:
            service.close()
        finally:
            with self._lock:
                del self._open[at]


@dataclass
class _Open:
    service: StoreService | None = None
    num_clients: int = 0
    opening: threading.Lock = dataclasses.field(default_factory=threading.Lock)


def _folder_of(url: str, named: str) -> str:
    """The URL of the store of an identity below a served folder; other stores tell identities apart themselves."""
    path, mark, options = url.partition("?")
    if scheme_of(url) != "lmdb":
        return url
    return f"{path.rstrip('/')}/{hashlib.sha256(named.encode()).hexdigest()[:16]}{mark}{options}"
