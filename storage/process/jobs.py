"""Jobs for a store and the outcomes of jobs. The engine, its client and the store process use these classes.

The store owns the bytes of a job's pages from its submission until the engine takes its answer (`FindDone`, `ReadDone`,
`WriteDone`). Every job is answered once. `Stalled` may precede the answer, and the store owns the bytes until the
answer.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

PageBytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class PageRows(Sequence[PageBytes]):
    """The pages `rows` of `memory`, contiguous uint8 `[num_pages, page_bytes]`. Creates the view of a page only when
    the page is accessed."""

    memory: PageBytes
    rows: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> PageBytes: ...
    @overload
    def __getitem__(self, at: slice) -> PageRows: ...
    def __getitem__(self, at: int | slice) -> PageBytes | PageRows:
        if isinstance(at, slice):
            return PageRows(self.memory, self.rows[at])
        page: PageBytes = self.memory[self.rows[at]]
        return page


FIND = -1  # the `batch` number of the first find of a ticket; later finds have lower numbers


class ReadClass(enum.IntEnum):
    """Queue classes of reads, highest priority first. Finds precede reads, because they read no page. LOOKUP: the
    scheduler is blocked until the answer. URGENT: a request waits for the answer."""

    LOOKUP = -1
    URGENT_FIND = 0
    BACKGROUND_FIND = 1
    URGENT_READ = 2
    BACKGROUND_READ = 3


@dataclass(frozen=True)
class FindJob:
    """Ask how many pages of `keys` the store has before the first missing page, and which pages of `others` the store
    has."""

    ticket: int
    keys: tuple[bytes, ...]
    queue_class: ReadClass = ReadClass.URGENT_FIND
    others: tuple[bytes, ...] = ()
    batch: int = FIND
    pages = ()


@dataclass(frozen=True)
class LeaseJob:
    """Take the lease of `key` until `until_s`. If `until_s` is 0, only ask when the lease ends
    (`hicache.storage.base.Leases`)."""

    ticket: int
    key: bytes
    until_s: float = 0.0
    batch: int = FIND
    queue_class = ReadClass.URGENT_FIND
    pages = ()

    @property
    def keys(self) -> tuple[bytes, ...]:
        return (self.key,)


@dataclass(frozen=True)
class LeaseDone:
    """Answer to a `LeaseJob`. `has_begun`: the client has the lease. `until_s`: the end of the lease of this or another
    machine, in seconds since 1970. 0 if no machine has the lease, or if the store does not support leases or fails."""

    ticket: int
    has_begun: bool = False
    until_s: float = 0.0
    batch: int = FIND


@dataclass(frozen=True)
class FindDone:
    """Answer to a `FindJob`. `num_pages`: number of pages of `keys` before the first missing page. `others[i]`: whether
    the store has page i of the job's `others`. `answered`: False if the store was not asked or failed."""

    ticket: int
    num_pages: int
    answered: bool = field(default=True, compare=False)
    others: tuple[bool, ...] = ()
    batch: int = FIND


@dataclass(frozen=True)
class ReadJob:
    """Read the pages of `keys` into `pages`. `batch`: the number of this job among the jobs of its ticket.

    The store stops reading when `cancelled` is set or the client's clock has reached `deadline_s`.
    """

    ticket: int
    batch: int
    keys: tuple[bytes, ...]
    pages: Sequence[PageBytes]
    cancelled: threading.Event = field(compare=False)
    deadline_s: float = math.inf
    queue_class: ReadClass = ReadClass.URGENT_READ


@dataclass(frozen=True)
class ReadDone:
    """Answer to a `ReadJob`. `ok[i]`: page i holds verified bytes. `asked`: number of pages that were requested from
    the store, from the first page on. `seconds`: duration of these requests, on the store's clock."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]
    asked: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class WriteJob:
    """Store `pages` under `keys`. `is_costly`: computing the prompt of these pages takes longer than a second, so the
    pages are copied to a remote store even before a second request uses them."""

    ticket: int
    keys: tuple[bytes, ...]
    pages: Sequence[PageBytes]
    batch: int = 0
    is_costly: bool = False
    queue_class = 0


@dataclass(frozen=True)
class ValueJob:
    """Store `values`, which another store of this process returned, under `keys`. Runs after the writes of clients.
    Only threads of the store process submit this job."""

    keys: tuple[bytes, ...]
    values: tuple[bytes | memoryview, ...]
    ticket: int = 0
    batch: int = 0
    queue_class = 1

    @property
    def pages(self) -> Sequence[PageBytes]:
        """The bytes of the values."""
        return [np.frombuffer(value, np.uint8) for value in self.values]


@dataclass(frozen=True)
class RemoveJob:
    """Remove the pages of `keys`; if `keys` is None, remove all pages of the store. Writes and removes run in the order
    of submission. The answer is a `WriteDone`: `ok[i]` says whether page i was present and is removed. If `keys` is
    None, `ok` has one item for all pages."""

    ticket: int
    keys: tuple[bytes, ...] | None
    batch: int = 0
    queue_class = 0
    pages = ()


@dataclass(frozen=True)
class WriteDone:
    """Answer to a `WriteJob` or `RemoveJob`. `ok[i]`: page i is in the store, as durable as configured. `seconds`: time
    to write the group of the job, on the store's clock, multiplied by the job's share of the group's pages. `num_new`:
    number of pages that were absent before; all pages if the store does not count puts.

    `removed`: keys of pages that the store removed since the last answer to a write; the first answer of a group has
    all these keys. `why`: the fault of the store if it did not store all pages, "" without a fault."""

    ticket: int
    ok: tuple[bool, ...]
    batch: int = 0
    seconds: float = field(default=0.0, compare=False)
    removed: tuple[bytes, ...] = ()
    num_new: int = 0
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Stalled:
    """A thread has worked on this job for longer than `io_timeout_s`. The answer to a stalled job may arrive late or
    never."""

    ticket: int
    batch: int


Question: TypeAlias = FindJob | ReadJob | LeaseJob
QuestionDone: TypeAlias = FindDone | ReadDone | LeaseDone
Job: TypeAlias = Question | WriteJob | RemoveJob
