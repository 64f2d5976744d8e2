"""The stores of one process. A client's request opens a store, clients that request the same store share it, and the
store is closed when its last client disconnects."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from hicache.storage.base import PageStore, StoreError, StoreLocked
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.process.frames import VERSION
from hicache.storage.process.health import Limits
from hicache.storage.process.replicator import Replicator
from hicache.storage.process.service import StoreService
from hicache.storage.process.settings import RemoteSettings, ServiceSettings
from hicache.storage.records import identity_with_key
from hicache.storage.remote import RemotePageStore
from hicache.storage.store_folder import store_name
from hicache.storage.urls import open_store, opener_of

NO_REMOTE = RemoteSettings()
_Key: TypeAlias = tuple[str, str]  # URL and name of a store


@dataclass(frozen=True)
class StoreRequest:
    """A client's request for a store. `url`: see `hicache.storage.urls`; "" if the process serves its own URL. `key`:
    the encryption key, b"" without encryption. `reports_removed`: answers to writes have the keys of the pages that the
    store removed. `remote`: the remote store to which pages are copied, unless the process was started with a remote
    store. `opens_remote`: the client requests the remote store instead of the store at `url`. Pages that the client
    reads from the remote store are also stored in the store at `url`, if a client has the store at `url` open."""

    url: str
    identity: Mapping[str, str | int]
    formats: Sequence[PageFormat]
    key: bytes = dataclasses.field(default=b"", repr=False)
    reports_removed: bool = False
    settings: ServiceSettings = dataclasses.field(default_factory=ServiceSettings)
    remote: RemoteSettings = dataclasses.field(default_factory=RemoteSettings)
    opens_remote: bool = False

    def pack(self) -> bytes:
        about = {**dataclasses.asdict(self), "identity": dict(self.identity), "key": self.key.hex(), "version": VERSION}
        return json.dumps(about).encode()

    @classmethod
    def unpack(cls, about: dict[str, Any]) -> StoreRequest:
        """Parse a request. Raises StoreError if the request is invalid."""
        try:
            formats = [PageFormat(each["page_bytes"], PageFilter(**each["filter"])) for each in about["formats"]]
            settings = about["settings"]
            settings["limits"] = Limits(**settings["limits"])
            key, settings = bytes.fromhex(about["key"]), ServiceSettings(**settings)
            remote, opens_remote = RemoteSettings(**about["remote"]), bool(about["opens_remote"])
            url, reports_removed = about["url"], about["reports_removed"]
            return cls(url, about["identity"], formats, key, reports_removed, settings, remote, opens_remote)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"a client sent an invalid request for a store: {error!r}") from error


class OpenStores:
    """The open stores. Any thread may call the methods. `url`: if given, the process serves this URL to all clients;
    otherwise each request has a URL. `remote`: if it has a URL, the remote store for all clients; otherwise each
    request has a remote store. `given`: if given, every request gets this store object. If `owns_given`, the object is
    closed when its last client disconnects.

    On a disk each identity has its own subfolder, and all identities share the budget (`store_folder`). If the process
    serves its own URL, each encryption key has its own subfolder too. If clients name the URL, the key does not change
    the subfolder, and opening a store without its key raises.
    """

    def __init__(
        self,
        url: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        remote: RemoteSettings = NO_REMOTE,
        given: PageStore | None = None,
        owns_given: bool = False,
    ) -> None:
        self._url = url
        self._remote = remote
        self._clock = clock
        self._given = given
        self._owns_given = owns_given
        self._lock = threading.Lock()
        self._open: dict[_Key, _Open] = {}

    def acquire(self, about: dict[str, object]) -> StoreService:
        """Return the service of the store that a client requests. Open the store if it is not open. Raises
        StoreError."""
        request = StoreRequest.unpack(about)
        cipher = PageCipher(request.key) if request.key else None
        identity = identity_with_key(request.identity, cipher if self._url else None)
        name = store_name(identity, [format.page_bytes for format in request.formats])
        remote = self._remote if self._remote.url else request.remote
        local = (self._url or request.url, name)
        if not request.opens_remote:
            return self._acquire(local, lambda: self._opened(local, request, cipher, remote))
        if not remote.url:
            raise StoreError("this process has no remote store; start it with --remote URL, or set remote.url")
        return self._acquire((remote.url, name), lambda: self._opened_remote(local, request, cipher, remote))

    def _acquire(self, at: _Key, opener: Callable[[], StoreService]) -> StoreService:
        """Add a client to the store `at`, and open the store if it is not open."""
        with self._lock:
            found = self._open.setdefault(at, _Open())
            if found.service is not None and not found.num_clients:
                raise StoreLocked("this process is closing the store; try again later")
            found.num_clients += 1
        try:
            with found.opening:  # one lock for each store, because opening a store may take long
                if found.service is None:
                    found.service = opener()
                return found.service
        except BaseException:
            with self._lock:
                found.num_clients -= 1
                if not found.num_clients:
                    del self._open[at]
            raise

    def _opened(
        self, at: _Key, request: StoreRequest, cipher: PageCipher | None, remote: RemoteSettings
    ) -> StoreService:
        if self._given is not None:
            return StoreService(self._given, request.settings, owns_store=self._owns_given, clock=self._clock)
        if remote.url:
            opener_of(remote.url)  # raises now if the scheme is unknown, instead of later in a thread
        if remote.url == at[0]:
            raise StoreError(f"{remote.url} is given as the store and as its remote store; give two stores")
        removed: list[bytes] = []
        on_removed = removed.extend if request.reports_removed else None
        about: dict[str, Any] = {"identity": request.identity, "formats": request.formats, "cipher": cipher}
        store = open_store(at[0], **about, on_removed=on_removed, name=at[1])
        try:
            service = StoreService(store, request.settings, clock=self._clock, removed=removed)
        except BaseException:
            store.close()
            raise
        service.has_remote = bool(remote.url)
        if remote.url and remote.backup != "none":
            asked = dataclasses.replace(request, settings=ServiceSettings.of_remote(remote.url))
            open_remote = partial(
                self._acquire, (remote.url, at[1]), lambda: self._opened_remote(at, asked, cipher, remote)
            )
            service.copies = Replicator(service, remote, open_remote, self.release)
        return service

    def _opened_remote(
        self, local: _Key, request: StoreRequest, cipher: PageCipher | None, remote: RemoteSettings
    ) -> StoreService:
        store = open_store(remote.url, identity=request.identity, formats=request.formats, cipher=cipher)
        if isinstance(store, RemotePageStore):
            store.on_value = partial(self._fill, local)
        try:
            return StoreService(store, request.settings, clock=self._clock)
        except BaseException:
            store.close()
            raise

    def _fill(self, local: _Key, key: bytes, value: memoryview) -> None:
        """Pass a value that the remote store returned to the local store, if a client has the local store open."""
        found = self._open.get(local)
        if found is not None and found.service is not None and found.num_clients:
            found.service.fill(key, value)

    def release(self, service: StoreService) -> None:
        """Remove a client from its store, and close the store after the last client. Raises the error of closing the
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
