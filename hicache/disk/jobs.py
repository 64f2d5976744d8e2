"""What crosses between the scheduler thread and the disk threads: frozen jobs one way, frozen answers the other.

A page's bytes belong to the disk from the submission of a job until its answer (`FindDone`, `ReadDone`, `WriteDone`) is
drained; every job gets exactly one. `Hung` may come before it, and changes nothing about whose the bytes are. A find
with a `reply` is answered there. May import numpy and the standard library.
"""

from __future__ import annotations

import math
import queue
import threading
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PageBytes: TypeAlias = npt.NDArray[np.uint8]
FIND = -1  # stands for the number of a batch where a find is meant


@dataclass(frozen=True)
class FindJob:
    """How many of `keys`, from the first on, does the store hold without a gap? `urgent`: a request waits for it.

    `reply`: where the answer, or `Hung`, goes instead of to those that are drained.
    """

    ticket: int
    keys: tuple[bytes, ...]
    urgent: bool = True
    reply: queue.SimpleQueue[FindDone | Hung] | None = field(default=None, compare=False)
    batch = FIND


@dataclass(frozen=True)
class FindDone:
    """`answered`: the store said so; else it was not asked, or could not tell."""

    ticket: int
    num_pages: int
    answered: bool = field(default=True, compare=False)
    batch = FIND


@dataclass(frozen=True)
class ReadJob:
    """Read `keys` into `pages`. `batch` numbers the jobs of a ticket.

    Nothing (more) is read once `cancelled` is set or the tier's clock has reached `deadline_s`. `urgent`: a request
    waits for it.
    """

    ticket: int
    batch: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]
    cancelled: threading.Event = field(compare=False)
    deadline_s: float = math.inf
    urgent: bool = True


@dataclass(frozen=True)
class ReadDone:
    """`ok[i]`: page i holds verified bytes. `asked`: pages, from the first on, that the store was asked for."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]
    asked: int = 0


@dataclass(frozen=True)
class WriteJob:
    ticket: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]
    batch: int = 0


@dataclass(frozen=True)
class WriteDone:
    """`ok[i]`: page i is in the store, as durable as its mode says."""

    ticket: int
    ok: tuple[bool, ...]
    batch: int = 0


@dataclass(frozen=True)
class Hung:
    """A thread has had this job for too long: nobody should wait for its answer, which may come late or never."""

    ticket: int
    batch: int


Job: TypeAlias = FindJob | ReadJob | WriteJob


def num_bytes(job: Job) -> int:
    """Of the pages that the job carries."""
    return 0 if isinstance(job, FindJob) else sum(page.nbytes for page in job.pages)
