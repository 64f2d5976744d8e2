"""What crosses between the scheduler thread and a store's threads: frozen jobs one way, frozen outcomes the other.

The tier owns the bytes of a job's pages from its submission until its answer (`FindDone`, `ReadDone`, `WriteDone`)
is taken. Every job is answered once. `Stalled` may come before the answer; the bytes still belong to the tier then.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PageBytes: TypeAlias = npt.NDArray[np.uint8]
FIND = -1  # the `batch` of a ticket's first find, those of others lie below


class ReadClass(enum.IntEnum):
    """The queue classes of reads, by priority. Urgent: a request waits for it."""

    URGENT_FIND = 0
    URGENT_READ = 1
    BACKGROUND_FIND = 2
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

    Reading ends when `cancelled` is set or the tier's clock has reached `deadline_s`. `landed(i)` is called on the
    reading thread when page i holds verified bytes, while these are in the processor's cache.
    """

    ticket: int
    batch: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]
    cancelled: threading.Event = field(compare=False)
    deadline_s: float = math.inf
    queue_class: ReadClass = ReadClass.URGENT_READ
    landed: Callable[[int], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReadDone:
    """`ok[i]`: page i holds verified bytes. `asked`: how many pages, from the first on, the store was asked for;
    `seconds`: how long that took, on the tier's clock."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]
    asked: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class WriteJob:
    ticket: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]
    batch: int = 0
    queue_class = 0


@dataclass(frozen=True)
class WriteDone:
    """`ok[i]`: page i is in the store, as durable as its durability setting says. `seconds`: the job's share, by pages,
    of the time that its batch took to write, on the tier's clock.

    `removed`: keys that the store was known to lose until then, before `ok` held; those of a group of jobs come with
    the first."""

    ticket: int
    ok: tuple[bool, ...]
    batch: int = 0
    seconds: float = field(default=0.0, compare=False)
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Stalled:
    """A thread has worked on this job for longer than `io_timeout_s`. Its answer may come late or never."""

    ticket: int
    batch: int


Job: TypeAlias = FindJob | ReadJob | WriteJob
