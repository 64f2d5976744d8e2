"""One client of Mooncake's library, which reconnects after failures.

Three measured behaviours of the library (0.3.13) shape this module. First, `setup` holds the interpreter lock, for
minutes if the master does not answer. So a child process tries `setup` first. Second, the library reports a transfer of
more than 60 s as failed, but the transfer continues. So `call` closes the client, which ends the transfer, before it
returns the buffers to the caller. Third, a call to a closed client crashes the process. So closing waits until no call
is running.
"""

from __future__ import annotations

import bisect
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from hicache.storage.base import PageBuffer, StoreError, StoreUnavailable
from hicache.storage.read_write_lock import ReadWriteLock

log = logging.getLogger("hicache.storage")

# For each key the library returns a length, 0 or 1, or one of these codes (mooncake-store/include/types.h). All other
# negative codes report failures of the master, of a machine that lends memory, or of the network.
FULL = -200
INVALID_PARAMS = -600  # for a get: the value is longer than the buffers
BEING_WRITTEN, MISSING, PRESENT, LEASED, LEASE_ENDED, GONE = -703, -704, -705, -706, -707, -712
TRANSFER_FAILED = -800  # for a get, this code also means that the value is shorter than the buffers
UNREACHABLE, TIMED_OUT = -900, -901
_NO_FAILURES = frozenset((FULL, BEING_WRITTEN, MISSING, PRESENT, LEASED, GONE))
_MEANINGS = {
    INVALID_PARAMS: "the value has another length",
    LEASE_ENDED: "the lease ended before the read; raise --default_kv_lease_ttl of the master",
    TRANSFER_FAILED: "the transfer failed; a process that owns the memory has ended or hangs",
    UNREACHABLE: "the master cannot be reached; start mooncake_master there",
    TIMED_OUT: "the master did not answer in time; look whether it hangs, or raise timeout",
}

Codes: TypeAlias = "list[int]"
LibraryCall: TypeAlias = Callable[[Any], Codes]

_ABANDONS_TRANSFERS_AFTER_S = 59.0  # slightly less than the measured 60.0 s
_RECONNECT_PAUSE_S = 1.0
_PROBE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
own_host, metadata, protocol, device, master = sys.argv[1:]
os._exit(bool(store.setup(own_host, metadata, 0, 0, protocol, device, master)))
"""


class MooncakeClient:
    """A client of one Mooncake master; any threads. Raises `StoreError` if it cannot connect to the master within
    `timeout_s`, and on use after `close`.

    `segment_bytes`: memory that this process lends to the pool. Without a connection, calls return `UNREACHABLE`; at
    most one call per second tries to connect before it returns.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        segment_bytes: int,
        protocol: str,
        device: str,
        metadata: str,
        timeout_s: float,
    ) -> None:
        self._master = (host, port)
        self._timeout_s = timeout_s
        self._segment_bytes = segment_bytes
        self._metadata = metadata
        self._transport = (protocol, device)
        self._memories: list[tuple[int, int, PageBuffer]] = []  # registered addresses [start, end), ascending
        self._registering = threading.Lock()
        self._lock = ReadWriteLock()  # calls lock it for reading; connecting and closing lock it for writing
        self._closed = False
        self._reconnect_at_s = 0.0
        self._library: Any = self._connect()

    def register(self, memory: PageBuffer) -> bool:
        """Register `memory`, so that the library transfers from and to `memory` directly. Returns False if the library
        refuses."""
        start = memory.ctypes.data
        if self.is_registered(memory):
            return True
        code = self.call(lambda library: [library.register_buffer(start, len(memory))], 1)[0]
        # UNREACHABLE is no refusal: the next successful connection registers all memories
        if code not in (0, UNREACHABLE):
            return False
        with self._registering:
            bisect.insort(self._memories, (start, start + len(memory), memory), key=lambda known: known[0])
        return True

    def is_registered(self, page: PageBuffer) -> bool:
        start = page.ctypes.data
        before = bisect.bisect_right(self._memories, start, key=lambda known: known[0]) - 1
        return before >= 0 and start + len(page) <= self._memories[before][1]

    def call(self, call: LibraryCall, num_codes: int) -> Codes:
        """Call the library and return its codes, one for each key. When this method returns, the library no longer uses
        the buffers."""
        begin_s = time.monotonic()
        self._reconnect()
        with self._lock:
            library = self._library
            if self._closed:
                raise StoreError("the store is closed; open it again")
            codes = [UNREACHABLE] * num_codes if library is None else call(library)
        if time.monotonic() - begin_s >= _ABANDONS_TRANSFERS_AFTER_S and any(code < 0 for code in codes):
            self._drop(library)
        return codes

    @staticmethod
    def meaning(code: int) -> str:
        return f"code {code}: {_MEANINGS.get(code, 'see types.h of mooncake-store')}"

    @staticmethod
    def has_failed(code: int) -> bool:
        """Return whether the code reports a failure. An absent key or a full pool is no failure."""
        return code < 0 and code not in _NO_FAILURES

    def close(self) -> None:
        """Wait at most `timeout_s` for running calls, then disconnect. If a call runs longer, the connection stays open
        until this call returns."""
        self._closed = True
        with self._lock.writing(within_s=self._timeout_s) as is_idle:
            library, self._library = self._library, None
            if not is_idle:
                log.warning(
                    "Mooncake at %s:%d: a call has not returned; the connection ends when it does", *self._master
                )
            elif library is not None:
                closing = threading.Thread(target=library.close, daemon=True)
                closing.start()
                closing.join(self._timeout_s)

    def _drop(self, library: Any) -> None:
        """Wait until no call is running, then close a library client that has reported running transfers as failed."""
        with self._lock.writing():
            if library is not None and self._library is library:
                log.warning("Mooncake at %s:%d: transfers did not end within 60 s; connecting again", *self._master)
                library.close()
                self._library = None

    def _reconnect(self) -> None:
        """Connect if there is no connection and the last attempt was at least `_RECONNECT_PAUSE_S` ago."""
        if self._library is not None or self._closed:
            return
        with self._lock.writing():
            if self._library is None and not self._closed and time.monotonic() >= self._reconnect_at_s:
                try:
                    self._library = self._connect()
                except StoreError as error:
                    log.warning("%s", error)
                self._reconnect_at_s = time.monotonic() + _RECONNECT_PAUSE_S

    def _connect(self) -> Any:
        """Create a library client, connect it, and register all memories with it."""
        library, master = load_mooncake().MooncakeDistributedStore(), "{}:{}".format(*self._master)
        try:
            with socket.create_connection(self._master, self._timeout_s) as connection:
                own_host = connection.getsockname()[0]
        except OSError as error:
            raise StoreUnavailable(
                f"no Mooncake master answers at {master} ({error}); start mooncake_master there"
            ) from None
        why = self._probe(own_host, master)
        own = (own_host, self._metadata, self._segment_bytes, 0, *self._transport, master)
        if why or library.setup(*own):
            raise StoreError(
                f"cannot connect to Mooncake at {master} ({why or 'its log is on stderr'}); check protocol, device, "
                "metadata and segment in its URL, and whether the master hangs, or raise timeout"
            )
        for start, end, _ in self._memories:
            library.register_buffer(start, end - start)
        return library

    def _probe(self, own_host: str, master: str) -> str:
        """Let a child process try to connect. Returns "" if the child process connects, otherwise the reason of the
        failure."""
        probe = [sys.executable, "-c", _PROBE, own_host, self._metadata, *self._transport, master]
        try:
            done = subprocess.run(probe, timeout=self._timeout_s, capture_output=True, check=False)
        except subprocess.TimeoutExpired as expired:
            failed, logged = True, expired.stderr or b""
        else:
            failed, logged = done.returncode != 0, done.stderr
        error = re.search(r"^E\d{4} .*?\] (.*)", logged.decode(errors="replace"), re.MULTILINE)
        return (error[1] if error else f"not within {self._timeout_s:g} s") if failed else ""


def load_mooncake() -> Any:
    """Import the module `mooncake.store`, which is large and starts threads. Called only when a store needs the
    module."""
    try:
        import mooncake.store
    except ImportError as error:
        raise StoreError(
            f"a store at mooncake:// needs Mooncake and libibverbs ({error}), of hicache[mooncake]: "
            "pip install 'hicache[mooncake]', and apt-get install libibverbs1"
        ) from None
    return mooncake.store
