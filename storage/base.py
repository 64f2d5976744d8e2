"""The contract of a page store: what the disk tier, or a remote one, promises, whatever keeps the bytes.

A page store knows keys and bytes, never tensors. Owns the protocol, its errors and its statistics.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from hicache.errors import HiCacheError

PageBuffer: TypeAlias = npt.NDArray[np.uint8]
Durability: TypeAlias = Literal["relaxed", "commit"]


class StoreError(HiCacheError):
    """A store cannot be opened, or was called wrongly; the message names the remedy."""


class StoreUnavailable(StoreError):
    """The store cannot be had now: its disk is full or fails, nothing serves it, or what its subclasses say. It may be
    had later, without a change of settings."""


def is_lasting(error: StoreError | None) -> TypeGuard[StoreError]:
    """Whether opening failed for a reason that no time mends, as a wrong setting."""
    return error is not None and not isinstance(error, StoreUnavailable)


class StoreLocked(StoreUnavailable):
    """Another store object, here or in another process, has this path open. `pid`: the process, 0 if it cannot be
    named."""

    def __init__(self, message: str, pid: int = 0) -> None:
        self.pid = pid
        super().__init__(message)


class StoreMismatch(StoreError):
    """The path holds pages of another identity or format; the message names both sides."""


class StoreCorrupt(StoreUnavailable):
    """The files are not what a store wrote, or `check()` found violations (`violations` lists them all). A store can be
    had again once they are removed."""

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__(message)


_DAY_S, _LEAST_S = 86400, 3600


@dataclass(frozen=True)
class StoreStats:
    """A snapshot. Counters start at zero when the store is opened; sizes are those after the last commit. What a store
    does not count stays zero.

    `entries`: stored pages. `live_bytes`: their values, headers included. `raw_bytes`: the same pages uncompressed.
    `file_bytes`: disk space of the files, which `budget_bytes` bounds. `put_bytes_raw`, `put_bytes_stored`: pages that
    were put, before and after compression. `corrupt`: reads whose bytes could not be verified. `read_errors`,
    `write_errors`: I/O calls that failed, after which callers pause; no room is a failure only if bytes were sent to
    learn of it. `drive_bytes`: size of the file system that has the files. `open_seconds`: whole ones, since the store
    was opened. `read_only`: a write failed, and no page is stored until `reopen` succeeds.
    """

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0
    file_bytes: int = 0
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
        """Times that what was put fills the drive in a day, since the store was opened, which counts as an hour at
        least; 0 where the drive's size is not known."""
        drive_seconds = self.drive_bytes * max(_LEAST_S, self.open_seconds)
        return self.put_bytes_stored * _DAY_S / drive_seconds if drive_seconds else 0.0


# Later attempts at the same path would fail as well.
_WRONG_PATH = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}


def opening_error(what: str, error: Exception) -> StoreError:
    """What to raise where `what` was to be opened and `error` came: StoreUnavailable, unless its path is wrong."""
    is_wrong_path = isinstance(error, OSError) and error.errno in _WRONG_PATH
    why = (error.strerror if isinstance(error, OSError) else None) or error
    if is_wrong_path:
        return StoreError(f"cannot open {what}: {why}; choose another path")
    return StoreUnavailable(f"cannot open {what}: {why}; free space or repair the disk")


class PageStore(Protocol):
    """What every store can do, on a disk or on other machines: pages of one or several declared sizes, under keys of 1
    to 511 bytes.

    A buffer whose length is none of `page_sizes` raises `StoreError`. What a call meets in the store does not raise:
    what cannot be read is a miss, what cannot be written is not stored, key by key, and `stats` counts it.
    Threads: `put`, `delete` and `reopen` from one writer thread, `close` when no other call is under way, the other
    methods from any threads at the same time.
    Order: within one call the earlier key counts as the more recently used. Callers pass the pages of a prompt from
    first to last: a suffix is worth nothing without its prefix, so the suffix is evicted first.
    Deadlines are times of `time.monotonic`. After its deadline a call begins nothing and gives up what it can; what it
    did not do is False. It never returns while anything may still write to a buffer or read one, so it may return late:
    callers that must not wait use threads, as `hicache.storage.process` does.
    """

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        ...

    def register_memory(self, memory: PageBuffer) -> None:
        """Buffers of later calls will lie in `memory`, contiguous uint8 that stays where it is until `close`. A hint:
        a store that copies from and to registered memory alone uses memory of its own for other buffers."""
        ...

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        """Which keys `get_into` would read now. Changes nothing; a later `get_into` may still miss."""
        ...

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        """Fill `buffers[i]`, writable contiguous uint8 `[page_bytes]`, with the page of `keys[i]`.

        True: the buffer holds verified bytes. False: a miss; the content of the buffer is undefined. Bytes that cannot
        be verified are a miss, are counted, and are deleted later, at the latest by the next call of the writer. A page
        of another size than the buffer is a miss, is not counted as corrupt, and is kept.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count pages as used, wherever they were served from. Returns at once; absent keys are ignored."""
        ...

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        """Store pages, contiguous uint8 `[page_bytes]`; others are evicted as the budget demands.

        True: visible, and durable as the store was configured. A key that is present, whatever the size of its page, is
        not written again and counts as used. False: not stored (the store is full or failed); what was stored before is
        kept. `lag` in [0, 1]: 0, the caller's writer keeps up; 1, its queue is full. A store may compress less then.
        """
        ...

    def reopen(self) -> bool:
        """Try to write again after a write failed; True when the store is writable now, also when it was before.

        Loses nothing and does not wait between attempts: the caller decides how often to try.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, also while the store takes none; returns how many were present. A page that cannot be removed
        stays, and `contains` says so."""
        ...

    def stats(self) -> StoreStats:
        """What is known in memory. Does no I/O and never raises."""
        ...

    def thread_read_errors(self) -> int:
        """Failed reads of the calling thread so far, lost connections and missed deadlines among them; each was a miss.
        Does no I/O."""
        ...

    def sync(self) -> None:
        """Return when everything put so far is as durable as the store can make it."""
        ...

    def close(self) -> None:
        """Wait for readers, sync, and release what the store holds. A second call does nothing; any other call but
        `stats` raises `StoreError`. In a fork it does nothing, and other calls raise `NotRunning`."""
        ...
