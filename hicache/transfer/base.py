"""The contract of a transfer backend: asynchronous copies between device slots and host pages.

`load` (host to device) copies layer by layer and reports each layer to the layer counter under the load id; `store`
(device to host) reports only the end of the copy. Both methods return at once. The rest of a copy may be queued on the
device later, when a caller waits for the copy or asks for its state. The copies of one direction complete in the order
of their submission. Until the operation is done, the caller does not use the slots and pages otherwise, and does not
write to the tensors of slots and pages. A copy that fails sets `error`; the bytes of its destination are then
undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TransferOp(Protocol):
    """One submitted copy. `error` is valid once `done()` returns True.

    `is_undelayed`: neither earlier work on the device nor the host delayed the copy, so `seconds` shows the speed of
    the link.

    `misfits`: for a store of packed pages that is done, the indices of the pages that do not fit packed, ascending. The
    bytes of the host pages of misfits are undefined.
    """

    num_bytes: int
    error: Exception | None
    is_undelayed: bool

    @property
    def misfits(self) -> Sequence[int]: ...

    def done(self) -> bool:
        """Return whether source and destination may be used again; never blocks."""

    def wait(self) -> None:
        """Block until `done()`."""

    def wait_outcome(self) -> None:
        """Block until `error` is final; returns at once if the copy can no longer fail."""

    def seconds(self) -> float:
        """Return the duration of the copy, once it is done."""


class TransferBackend(Protocol):
    """Copies pages; owns its streams or threads. Called by the scheduler thread.

    `rest`, if the pool's pages are packed, is int64 CPU [p]: the second host page of each unpacked page
    (`hicache.transfer.segments`).
    """

    def load(
        self, pages: torch.Tensor, slots: torch.Tensor, load_id: int, rest: torch.Tensor | None = None
    ) -> TransferOp:
        """Copy host `pages` (int64 CPU [p]) to device `slots` (int64 [p * page_tokens]), and report each layer of the
        load `load_id`.

        The copy waits, on the device, for work queued on the current stream, which may use the slots. `rest` is 0 for a
        packed page; None if all pages are packed.
        """

    def store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None = None) -> TransferOp:
        """Copy device `slots` to host `pages`, after the work queued on the current stream, which wrote the slots.

        If `rest` is given, all pages are stored unpacked. If `rest` is None, a pool with packed pages packs all pages.
        """

    def stats(self) -> dict[str, float]:
        """Return the measured rates of the link and the number of copies by method, always under the same names."""

    def start(self) -> None:
        """Do slow work that is necessary once before the first copy, for example compile kernels."""

    def close(self) -> None:
        """Finish submitted operations, then release streams or threads."""

    def abandon(self, deadline_s: float) -> None:
        """Abort copies. Returns when no copy runs, or at `deadline_s`, a time of `time.monotonic`. Any thread may call
        this method, including a copy thread."""
