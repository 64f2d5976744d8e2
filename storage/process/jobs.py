"""Jobs for a store and their outcomes, shared by the engine, its client and the store process.

The store owns the bytes of a job's pages from its submission until the engine takes its answer (`FindDone`, `ReadDone`,
`WriteDone`). Every job is answered once. `Stalled` may precede the answer; then the store still owns the bytes.
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
    """The pages `rows` of `memory`, contiguous uint8 `[num_pages, page_bytes]`, without creating a view for each."""

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
    """Queue classes of reads, highest priority first. Finds read no page and precede reads. LOOKUP: the scheduler waits
    for the answer. URGENT: a request waits for it."""

    LOOKUP = -1
    URGENT_FIND = 0
    BACKGROUND_FIND = 1
    URGENT_READ = 2
    BACKGROUND_READ = 3


@dataclass(frozen=True)
class FindJob:
    """Ask how many of `keys`, from the first on, the store has without a gap, and which of `others` it has."""

    ticket: int
    keys: tuple[bytes, ...]
    queue_class: ReadClass = ReadClass.URGENT_FIND
    others: tuple[bytes, ...] = ()
    batch: int = FIND
    pages = ()


@dataclass(frozen=True)
class LeaseJob:
    """Take the lease of `key` until `until_s`, or ask for its end if `until_s` is 0 (`hicache.storage.base.Leases`)."""

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
    """Answer to a `LeaseJob`. `has_begun`: the client has the lease. `until_s`: the end of the lease in seconds since
    1970, also of another machine's; 0 if there is none, the store has no leases or fails."""

    ticket: int
    has_begun: bool = False
    until_s: float = 0.0
    batch: int = FIND


@dataclass(frozen=True)
class FindDone:
    """Answer to a `FindJob`. `num_pages`: number of `keys` without a gap. `others[i]`: whether the store has that key.
    `answered`: False if the store was not asked or failed."""

    ticket: int
    num_pages: int
    answered: bool = field(default=True, compare=False)
    others: tuple[bool, ...] = ()
    batch: int = FIND


@dataclass(frozen=True)
class ReadJob:
    """Read `keys` into `pages`. `batch` numbers the jobs of a ticket.

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
    """Answer to a `ReadJob`. `ok[i]`: page i holds verified bytes. `asked`: how many pages, from the first on, were
    requested from the store; `seconds`: duration of that, on the store's clock."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]
    asked: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class WriteJob:
    """Store `pages` under `keys`. `is_costly`: their prompt takes longer than a second to compute, so that they are
    worth a copy in a remote store before a request uses them."""

    ticket: int
    keys: tuple[bytes, ...]
    pages: Sequence[PageBytes]
    batch: int = 0
    is_costly: bool = False
    queue_class = 0


@dataclass(frozen=True)
class ValueJob:
    """Store `values` of another store of this process under `keys`, after the writes of clients. Only threads of the
    process submit it."""

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
    """Remove `keys`, or all pages of the store if None, in order with the writes before and after. The answer is a
    `WriteDone`: `ok[i]` if page i was present and is removed; one `ok` for all pages if `keys` is None."""

    ticket: int
    keys: tuple[bytes, ...] | None
    batch: int = 0
    queue_class = 0
    pages = ()


@dataclass(frozen=True)
class WriteDone:
    """Answer to a `WriteJob` or `RemoveJob`. `ok[i]`: page i is in the store, as durable as configured. `seconds`: the
    job's share, by pages, of the time to write its group, on the store's clock. `num_new`: pages that were absent
    before; all pages if the store does not count puts.

    `removed`: keys of pages that the store removed before it stored these; the first answer of a group has all of them.
    `why`: the fault of the store if it did not store all pages, "" without a fault."""

    ticket: int
    ok: tuple[bool, ...]
    batch: int = 0
    seconds: float = field(default=0.0, compare=False)
    removed: tuple[bytes, ...] = ()
    num_new: int = 0
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Stalled:
    """A thread has worked on this job for longer than `io_timeout_s`. Its answer may arrive late or never."""

    ticket: int
    batch: int


Question: TypeAlias = FindJob | ReadJob | LeaseJob
QuestionDone: TypeAlias = FindDone | ReadDone | LeaseDone
Job: TypeAlias = Question | WriteJob | RemoveJob
