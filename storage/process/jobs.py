"""Jobs for a store and their outcomes, as an engine, its client and the store process see them.

The store owns the bytes of a job's pages from its submission until its answer (`FindDone`, `ReadDone`, `WriteDone`)
is taken. Every job is answered once. `Stalled` may come before the answer; the bytes still belong to the store then.
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


class PageRows(Sequence[PageBytes]):
    """The pages `rows` of `memory`, uint8 [num_pages, page_bytes] in one piece, without a view for each."""

    __slots__ = ("memory", "rows")

    def __init__(self, memory: PageBytes, rows: list[int]) -> None:
        self.memory = memory
        self.rows = rows

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


FIND = -1  # the `batch` of a ticket's first find, those of others lie below


class ReadClass(enum.IntEnum):
    """The queue classes of reads, by priority: finds first, which read no page. Lookup: the scheduler waits for it.
    Urgent: a request waits for it."""

    LOOKUP = -1
    URGENT_FIND = 0
    BACKGROUND_FIND = 1
    URGENT_READ = 2
    BACKGROUND_READ = 3


@dataclass(frozen=True)
class FindJob:
    """How many of `keys`, from the first on, does the store hold without a gap, and which of `others`?"""

    ticket: int
    keys: tuple[bytes, ...]
    queue_class: ReadClass = ReadClass.URGENT_FIND
    others: tuple[bytes, ...] = ()
    batch: int = FIND
    pages = ()


@dataclass(frozen=True)
class FindDone:
    """`others[i]`: whether the store holds that key. `answered`: false when it was not asked or could not tell."""

    ticket: int
    num_pages: int
    answered: bool = field(default=True, compare=False)
    others: tuple[bool, ...] = ()
    batch: int = FIND


@dataclass(frozen=True)
class ReadJob:
    """Read `keys` into `pages`. `batch` numbers the jobs of a ticket.

    Reading ends when `cancelled` is set or the client's clock has reached `deadline_s`.
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
    """`ok[i]`: page i holds verified bytes. `asked`: how many pages, from the first on, the store was asked for;
    `seconds`: how long that took, on the store's clock."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]
    asked: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class WriteJob:
    ticket: int
    keys: tuple[bytes, ...]
    pages: Sequence[PageBytes]
    batch: int = 0
    queue_class = 0


@dataclass(frozen=True)
class RemoveJob:
    """Remove `keys`, in the order of the writes around it; None: all pages of the store. Its answer is a `WriteDone`:
    `ok[i]`, page i was there, and is gone. With one `ok` for all pages."""

    ticket: int
    keys: tuple[bytes, ...] | None
    batch: int = 0
    queue_class = 0
    pages = ()


@dataclass(frozen=True)
class WriteDone:
    """`ok[i]`: page i is in the store, as durable as its durability setting says. `seconds`: the job's share, by pages,
    of the time that its batch took to write, on the store's clock. `num_new`: pages that the store lacked before; one
    that does not count its puts is taken to have lacked all.

    `removed`: keys that the store was known to lose until then, before `ok` held; those of a group of jobs come with
    the first. `why`: the fault of the store if it did not take all pages; empty if it has none."""

    ticket: int
    ok: tuple[bool, ...]
    batch: int = 0
    seconds: float = field(default=0.0, compare=False)
    removed: tuple[bytes, ...] = ()
    num_new: int = 0
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Stalled:
    """A thread has worked on this job for longer than `io_timeout_s`. Its answer may come late or never."""

    ticket: int
    batch: int


Job: TypeAlias = FindJob | ReadJob | WriteJob | RemoveJob
