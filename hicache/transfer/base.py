"""The contract of a transfer backend: copies between device slots and host pages, submitted now, finished later.

`load` (host to device) goes layer by layer and reports each layer to the counter under its load id; `store` (device to
host) reports only its end. Both return at once, and the rest of a copy may be queued as somebody waits for it or asks
for its state. Operations complete in submission order within a direction. The caller lets nobody else use slots and
pages, and writes to no tensor that names them, until the operation is done. A failed operation sets `error`; the bytes
of its destination are undefined then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TransferOp(Protocol):
    """One submitted copy. `error` is meaningful once `done()`.

    `is_undelayed`: neither earlier work on the device nor the host held the copy up: `seconds` shows the speed of the
    link.

    `misfits`: of a store of packed pages, once `done()`, the positions of those that do not fit, ascending; the bytes
    of these host pages mean nothing.
    """

    num_bytes: int
    error: Exception | None
    is_undelayed: bool

    @property
    def misfits(self) -> Sequence[int]: ...

    def done(self) -> bool:
        """Whether source and destination may be used by others; never blocks."""

    def wait(self) -> None:
        """Block until `done()`."""

    def wait_outcome(self) -> None:
        """Block until `error` is final; at once when a submitted copy cannot fail any more."""

    def seconds(self) -> float:
        """How long the copy took, once done."""


class TransferBackend(Protocol):
    """Owned by the scheduler thread; owns its streams or threads.

    `rest`, where pages are packed: the second places of those that are raw (`hicache.transfer.placed`), int64 CPU
    [p].
    """

    def load(
        self, pages: torch.Tensor, slots: torch.Tensor, load_id: int, rest: torch.Tensor | None = None
    ) -> TransferOp:
        """Copy host `pages` (int64 CPU [p]) to device `slots` (int64 [p * page_tokens]), reporting layers of `load_id`.

        Waits, on the device, for the work that is queued on the current stream and may use the slots. `rest`: 0 for
        packed pages; None: all are.
        """

    def store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None = None) -> TransferOp:
        """Copy device `slots` to host `pages`, after the work queued on the current stream, which wrote the slots.

        `rest`: all pages are stored raw; None: none is.
        """

    def stats(self) -> dict[str, float]:
        """The measured rates of the link and the number of copies by method. Always the same names."""

    def start(self) -> None:
        """Before the first copy: whatever these would wait for once, like compilers."""

    def close(self) -> None:
        """Finish submitted operations, then release streams or threads."""

    def abandon(self, deadline_s: float) -> None:
        """End copies early; return when none runs, or at `deadline_s` of `time.monotonic`. Any thread, copy threads
        included."""
