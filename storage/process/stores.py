"""The stores of one process: opened at a client's request, shared by clients with the same request, and closed when the
last client disconnects."""

from __future__ import annotations

import dataclasses
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
from hicache.storage.process.service import StoreService
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.records import identity_with_key
from hicache.storage.store_folder import store_name
from hicache.storage.urls import open_store


@dataclass(frozen=True)
class StoreRequest:
    """A client's request for a store. `url`: see `hicache.storage.urls`; "" if the process serves its own URL. `key`:
    the encryption key, b"" without encryption. `tells_removed`: answers to writes name the pages that the store
    removed."""

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
        """Parse a request. Raises StoreError if it is invalid."""
        try:
            formats = [PageFormat(each["page_bytes"], PageFilter(**each["filter"])) for each in about["formats"]]
            settings = about["settings"]
            settings["limits"] = Limits(**settings["limits"])
            key, settings = bytes.fromhex(about["key"]), ServiceSettings(**settings)
            return cls(about["url"], about["identity"], formats, key, about["tells_removed"], settings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"a client sent an invalid request for a store: {error!r}") from error


class OpenStores:
    """The open stores; any thread. `url`: if given, the process serves this URL to all clients; otherwise each client
    names its URL. `given`: if given, this store object is used for every request; it is closed with its client only if
    `owns_given`.

    On a disk each identity has its own subfolder, and all share the budget (`store_folder`). If the process serves its
    own URL, each encryption key has its own subfolder too. Otherwise the key does not change the subfolder, and opening
    a store without its key raises.
    """

    def __init__(
        self,
        url: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        given: PageStore | None = None,
        owns_given: bool = False,
    ) -> None:
        self._url = url
        self._clock = clock
        self._given = given
        self._owns_given = owns_given
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def acquire(self, about: dict[str, object]) -> StoreService:
        """Return the service of the store that a client requests. The store is opened if it is not open. Raises
        StoreError."""
        request = StoreRequest.unpack(about)
        cipher = PageCipher(request.key) if request.key else None
        identity = identity_with_key(request.identity, cipher if self._url else None)
        name = store_name(identity, [format.page_bytes for format in request.formats])
        url = self._url or request.url
        with self._lock:
            found = self._open.setdefault((url, name), _Open())
            if found.service is not None and not found.num_clients:
                raise StoreLocked("this process is closing the store; try again later")
            found.num_clients += 1
        try:
            with found.opening:  # opening may take long and must not block other stores
                if found.service is None:
                    found.service = self._opened(url, name, request, cipher)
                return found.service
        except BaseException:
            with self._lock:
                found.num_clients -= 1
                if not found.num_clients:
                    del self._open[url, name]
            raise

    def _opened(self, url: str, name: str, request: StoreRequest, cipher: PageCipher | None) -> StoreService:
        if self._given is not None:
            return StoreService(self._given, request.settings, owns_store=self._owns_given, clock=self._clock)
        removed: list[bytes] = []
        store = open_store(
            url,
            identity=request.identity,
            formats=request.formats,
            cipher=cipher,
            on_removed=removed.extend if request.tells_removed else None,
            name=name,
        )
        try:
            return StoreService(store, request.settings, clock=self._clock, removed=removed)
        except BaseException:
            store.close()
            raise

    def release(self, service: StoreService) -> None:
        """Count the end of a client, and close the store after its last client. Raises the error of closing the
        store."""
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
