"""The contract of a page store: what the disk tier (or a remote one) promises, whatever keeps the bytes.

A page store knows keys and bytes, never tensors. Owns the protocol, its errors and its statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import HiCacheError

PageBuffer: TypeAlias = npt.NDArray[np.uint8]
Durability: TypeAlias = Literal["relaxed", "commit"]


class StoreError(HiCacheError):
    """A store cannot be opened or was called wrongly; the message names the remedy."""


class StoreLocked(StoreError):
    """Another store object, here or in another process, already writes to this path."""


class StoreMismatch(StoreError):
    """The path holds pages of another identity or format; the message names both sides."""


class StoreCorrupt(StoreError):
    """The files are not what a store wrote, or `check()` found violations (all of them are in `violations`)."""

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__(message)


class StoreTreesDamaged(StoreCorrupt):
    """The tables of a store must not be walked; `rescue` builds them anew from what can still be read.

    `reason`: the first fault of them, without the remedy.
    """

    def __init__(self, data: Path, fault: str) -> None:
        self.reason = f"the tables are damaged ({fault})"
        super().__init__(
            f"the tables of {data} are damaged ({fault}); verify the store with repair, or remove the directory"
        )


@dataclass(frozen=True)
class StoreStats:
    """A snapshot. Counters start at zero when the store is opened; sizes are those after the last commit. What a store
    does not count stays zero.

    `live_bytes`: values that can be read, headers included. `raw_bytes`: the pages that these hold. `file_bytes`: what
    the files take, which `budget_bytes` bounds. `put_bytes_raw` and `put_bytes_stored`: pages put, before and after
    packing. `corrupt`: reads that found bytes which could not be verified. `read_errors`, `write_errors`: calls the
    medium refused. `read_only`: it refused a write, and nothing is written until `revive`.
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
    read_only: bool = False

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class PageStore(Protocol):
    """Pages of one or several declared sizes under keys of 1 to 511 bytes. A buffer of another length is a
    `StoreError`.

    Threads: `contains`, `get_into`, `touch` and `stats` from any thread, many at a time; the others from one writer
    thread.
    Order: within one call the earlier key counts as the more recently used. Callers pass the pages of a prompt from
    its first to its last, and the tail of a prefix is worth nothing without its head, so the tail is to go first.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys `get_into` would look up now. Changes nothing; a later `get_into` may still miss."""
        ...

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        """Fill `buffers[i]`, writable contiguous uint8 `[page_bytes]`, with the page of `keys[i]`.

        True: the buffer holds verified bytes. False: a miss, and the buffer's content is undefined. Bytes that cannot
        be verified are a miss; they are counted and deleted by the writer's next call. A page of another size than the
        buffer is a miss too, and stays. Never raises for what is stored.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages that were used, wherever they were served from; returns at once. What is not there is left alone."""
        ...

    def put(self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0) -> list[bool]:
        """Store pages, contiguous uint8 `[page_bytes]`, evicting others as the budget demands.

        True: visible, and durable as the store was configured. A key that is present, whatever its size, is not written
        again and counts as used. False: not stored (the medium is full or failed); what was stored before stays.
        `lag` in [0, 1]: 0, the caller's writer keeps up; 1, its queue is full. A store may pack less to catch up.
        """
        ...

    def revive(self) -> bool:
        """Try to write again after the medium refused; true when the store is writable now, as it may have been before.

        Loses nothing and may be called at any time, as often as the caller likes: it does not wait between attempts.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages; returns how many there were."""
        ...

    def stats(self) -> StoreStats:
        """What is known in memory: never waits for the medium, nor raises for what became of it."""
        ...

    def thread_read_errors(self) -> int:
        """Reads that the medium refused to the calling thread so far; each was a miss. Never waits for the medium."""
        ...

    def check(self) -> None:
        """Verify every value, index and counter, in a quiet moment. Raises `StoreCorrupt` once, with all violations."""
        ...

    def compact(self) -> int:
        """Give free space back to the file system; returns the bytes by which the file shrank."""
        ...

    def sync(self) -> None:
        """Return when everything put so far survives a power cut."""
        ...

    def close(self) -> None:
        """Wait for readers, sync and release the path. The second call does nothing; any other call but `stats`
        raises."""
        ...
