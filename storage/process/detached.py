"""Reads that the store process answers before the reading thread returns, if a read is cancelled or stalls.

The thread reads pages into memory of the store process. The thread copies the pages to the client's memory if the
client still waits for the pages. So a remote server that hangs blocks no memory of a client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache.storage.process.jobs import PageBytes, ReadDone, ReadJob, Stalled


@dataclass(frozen=True)
class DetachedRead(ReadJob):
    """A read of a client. `answer`: function that sends the answer to the client. Any thread may call the methods.

    Invariant: the client gets one answer, and no thread accesses the client's pages after this answer.
    """

    answer: Callable[[ReadDone], None] = field(default=lambda done: None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _is_answered: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @classmethod
    def of(cls, job: ReadJob, answer: Callable[[ReadDone], None]) -> DetachedRead:
        what = job.ticket, job.batch, job.keys, job.pages, job.cancelled
        return cls(*what, deadline_s=job.deadline_s, queue_class=job.queue_class, answer=answer)

    @property
    def is_answered(self) -> bool:
        return self._is_answered.is_set()

    def reply(self, outcome: ReadDone | Stalled) -> None:
        """Send the first outcome to the client, and drop later outcomes. A read that stalls is answered as failed."""
        with self._lock:
            if self.is_answered:
                return
            self._is_answered.set()
        if isinstance(outcome, Stalled):
            outcome = ReadDone(self.ticket, self.batch, (False,) * len(self.keys))
        self.answer(outcome)

    def drop_if_cancelled(self) -> None:
        """Answer the read as failed if the client has cancelled it."""
        if self.cancelled.is_set():
            self.reply(Stalled(self.ticket, self.batch))

    def land(self, part: slice, pages: Sequence[PageBytes], ok: Sequence[bool]) -> list[bool]:
        """Copy each page that is `ok` to the client's pages `part`, unless the read is already answered. Returns for
        each page whether it was copied."""
        with self._lock:
            landed = [has_page and not self.is_answered for has_page in ok]
            for target, page, has_landed in zip(self.pages[part], pages, landed, strict=True):
                if has_landed:
                    np.copyto(target, page)
        return landed
