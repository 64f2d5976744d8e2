"""The contract of a page store, on a disk or remote.

A page store knows keys and bytes, never tensors. This module owns the protocol, its errors and its statistics.
"""

from __future__ import annotations

import errno
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache.errors import HiCacheError

PageBuffer: TypeAlias = npt.NDArray[np.uint8]
Durability: TypeAlias = Literal["relaxed", "commit"]


class StoreError(HiCacheError):
    """A store cannot be opened, or a caller passed wrong arguments; the message names the remedy."""


class StoreUnavailable(StoreError):
    """The store cannot be opened now: its disk is full or fails, no process serves the store, or the store is locked or
    corrupt (see the subclasses). A later attempt may succeed with the same settings."""


def is_lasting(error: StoreError | None) -> TypeGuard[StoreError]:
    """Return whether opening failed for a reason that a retry cannot fix, for example a wrong setting."""
    return error is not None and not isinstance(error, StoreUnavailable)


class StoreLocked(StoreUnavailable):
    """Another store object, in this or another process, has the path open. `pid`: the id of that process, 0 if
    unknown."""

    def __init__(self, message: str, pid: int = 0) -> None:
        self.pid = pid
        super().__init__(message)


class StoreMismatch(StoreError):
    """The store at the path has another identity or page format than the caller requested; the message names both."""


class StoreCorrupt(StoreUnavailable):
    """The files were not written by a store, or `check()` found violations (`violations` lists them all). After the
    files are removed, the store can be opened again."""

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__(message)


_DAY_S, _MIN_S = 86400, 3600


@dataclass(frozen=True)
class StoreStats:
    """A snapshot of counters and sizes. Counters start at zero when the store is opened; sizes are values after the
    last commit. A field that a store does not count stays zero.

    `entries`: stored pages. `live_bytes`: bytes of all stored values, headers included. `raw_bytes`: bytes of the
    stored pages before compression. `file_bytes`: disk space of the files, which `budget_bytes` bounds. `others_bytes`:
    disk space of the other stores that share the budget, when the store last checked the budget.
    `put_bytes_raw`, `put_bytes_stored`: pages written, before and after compression. `corrupt`: reads whose bytes could
    not be verified. `read_errors`, `write_errors`: failed I/O calls, after which callers pause; a write to a full store
    counts as failed only if the store sent bytes before it learned that no space is left. `drive_bytes`: size of the
    file system that has the store's files. `open_seconds`: full seconds since the store was opened. `read_only`: a
    write failed, and no page is stored until `reopen` succeeds.
    """

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0
    file_bytes: int = 0
    others_bytes: int = 0
    budget_bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes_raw: int = 0
    put_bytes_stored: int = 0
    evicted: int = 0
    corrupt: int = 0
    read_errors: int = 0
    write_errors: int = 0
    drive_bytes: int = 0
    open_seconds: int = 0
    read_only: bool = False

    @property
    def drive_writes_per_day(self) -> float:
        """Bytes stored per day, as a multiple of the drive's size; 0 if that size is unknown. The rate is an average
        since the store was opened. A store that has been open for less than an hour counts as open for an hour."""
        drive_seconds = self.drive_bytes * max(_MIN_S, self.open_seconds)
        return self.put_bytes_stored * _DAY_S / drive_seconds if drive_seconds else 0.0


# `errno` values of a failed open after which another attempt to open the same path would fail too.
_WRONG_PATH = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}


def opening_error(what: str, error: Exception) -> StoreError:
    """Return the error to raise after opening `what` failed with `error`: StoreUnavailable, or StoreError if the path
    is wrong."""
    is_wrong_path = isinstance(error, OSError) and error.errno in _WRONG_PATH
    why = (error.strerror if isinstance(error, OSError) else None) or error
    if is_wrong_path:
        return StoreError(f"cannot open {what}: {why}; choose another path")
    return StoreUnavailable(f"cannot open {what}: {why}; free space or repair the disk")


@runtime_checkable
class Leases(Protocol):
    """Leases of page keys, for machines that share a store: the machine with the lease computes a prompt, and the other
    machines wait for its pages. A lease expires at its end time. Any thread may call these methods. Times are seconds
    since 1970; the clocks of the machines must agree.

    While the store fails, `begin` returns False and `who` returns None.
    """

    def begin(self, key: bytes, until_s: float) -> bool:
        """Take the lease of `key` until `until_s`. Returns False if another lease of `key` has not expired, or if the
        store fails. If several callers request the lease of a key concurrently, one of them gets True."""
        ...

    def who(self, key: bytes) -> float | None:
        """Return the time at which the lease of `key` expires. Return None if `key` has no lease, or only an expired
        one."""
        ...


class DiskPages(ABC):
    """Methods of a store on a disk of this machine, in addition to `PageStore`. Any thread calls `keep_until`, and the
    writer thread calls the other methods."""

    @property
    @abstractmethod
    def note(self) -> bytes:
        """The note: bytes that a client stores in the index of the store. A new store has the note b"". The note is
        lost if the process ends without closing the store."""

    @note.setter
    @abstractmethod
    def note(self, note: bytes) -> None: ...

    @abstractmethod
    def keep_until(self, keys: Sequence[bytes], until_s: float) -> None:
        """Count pages as used. Until `until_s`, a time of `time.monotonic`, the store evicts these pages only after all
        other pages. Does not block."""

    @abstractmethod
    def keep_budget(self) -> None:
        """Evict pages until the store is within its share of the budget, which all stores of one folder have in
        common."""

    @abstractmethod
    def evict_all(self) -> bool:
        """Evict all pages. Returns True if the store is empty afterwards."""

    @abstractmethod
    def announce_close(self) -> None:
        """Announce that `close` will follow soon. A process that tries to open the store then waits instead of
        failing."""


class PageStore(Protocol):
    """A store of pages, on a disk or on other machines. Pages have one or several declared sizes; a key has 1 to 511
    bytes.

    A buffer whose length is not in `page_sizes` raises `StoreError`. A failure inside the store does not raise: a page
    that cannot be read is a miss, and a page that cannot be written is not stored. The other keys of the call are
    unaffected, and `stats` counts both kinds of failures. Threads: one writer thread calls `put`, `put_values`,
    `delete` and `reopen`; `close` is called while no other call runs; any threads call the other methods concurrently.
    Order: of two keys in one call, the store treats the earlier key as the more recently used one. Callers pass the
    pages of a prompt from first to last, so its suffix, which is useless without the prefix, is evicted first.
    Deadlines are times of `time.monotonic`. After its deadline, a call starts no more work, aborts the work that can be
    aborted, and returns False for each unfinished key. A call never returns while a transfer may still read or write a
    buffer, so a call may return after its deadline. A caller that must not wait calls the store in a thread, as
    `hicache.storage.process` does.
    """

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The page sizes that the store accepts, in bytes, ascending."""
        ...

    def register_memory(self, memory: PageBuffer) -> None:
        """Announce that buffers of later calls will lie in `memory`, contiguous uint8, valid at this address until
        `close`. The announcement is a hint: buffers of later calls may also lie in other memory. A store that can
        transfer only registered memory then copies each page."""
        ...

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        """Return, for each key, whether `get_into` would read its page now. Changes nothing; a later `get_into` may
        miss."""
        ...

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        """Fill `buffers[i]`, writable contiguous uint8 `[page_bytes]`, with the page of `keys[i]`.

        True: the buffer holds verified bytes. False: a miss; the content of the buffer is undefined. A page whose bytes
        cannot be verified is a miss, counts as `corrupt`, and is deleted at the latest by the next call of the writer
        thread. A page of another size than the buffer is a miss, is not counted as corrupt, and is kept.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count pages as used, for example when another tier served them. Does not block; absent keys are ignored."""
        ...

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        """Store pages, contiguous uint8 `[page_bytes]`; evict other pages if the budget requires it.

        True: the page is visible to readers, and as durable as the setting `durability` requires. A key that is
        present, with a page of any size, is not written again and counts as used. False: the page is not stored,
        because the store is full or failed; the other pages of the store remain. `lag` in [0, 1]: 0 if the caller's
        writer keeps up, 1 if its queue is full. With more lag a store may compress less.
        """
        ...

    def get_value(self, key: bytes) -> bytes | None:
        """The value stored under `key`: header and payload, compressed or encrypted as stored, with a verified
        checksum. None if the page is absent or cannot be read or verified. Counts neither as a hit nor as a use."""
        ...

    def put_values(self, items: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bool]:
        """Store values that `get_value` of another store with this identity and encryption key returned.

        Returns the same list as `put`, and treats keys that are present as `put` does. A value whose header, lengths or
        checksum do not fit its key is not stored, and is counted as corrupt.
        """
        ...

    def reopen(self) -> bool:
        """Try to write again after a failed write. Returns True if the store is writable now, even if it was writable
        before the call.

        Deletes no page and does not wait between attempts: the caller decides how often to try.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, also while the store is read-only; returns how many were present. `contains` stays True for a
        page that could not be removed."""
        ...

    def stats(self) -> StoreStats:
        """Return the statistics that the store has in memory. Does no I/O and never raises."""
        ...

    def thread_read_errors(self) -> int:
        """Return how many reads of the calling thread have failed so far, including lost connections and missed
        deadlines. Each failed read counted as a miss. Does no I/O."""
        ...

    def sync(self) -> None:
        """Block until all pages put so far are as durable as the store can make them."""
        ...

    def close(self) -> None:
        """Wait for readers, sync, and release files and memory. A second call does nothing. After `close`, all calls
        except `stats` raise `StoreError`. In a forked process, `close` does nothing, and other calls raise
        `NotRunning`."""
        ...
