"""The contract of a transfer backend: copies between device slots and host pages, submitted now, finished later.

`load` (host to device) goes layer by layer and reports each layer through the counter under its load id; `store`
(device to host) reports only its end. Both return at once. Submission order is completion order within a direction. The
caller keeps slots and pages untouched by others until the operation is done. A failed operation says so in `error`;
nothing is known then about the bytes of its destination.

May import numpy, torch, layout, kernels, config and errors.
"""

from __future__ import annotations

from typing import Protocol

import torch


class TransferOp(Protocol):
    """One submitted copy. `error` is meaningful once `done()`."""

    num_bytes: int
    error: Exception | None

    def done(self) -> bool:
        """Whether source and destination are free of it; never blocks."""
        ...

    def wait(self) -> None:
        """Block until `done()`."""
        ...

    def wait_outcome(self) -> None:
        """Block until `error` is final: where a submitted copy cannot fail any more, not at all."""
        ...

    def seconds(self) -> float:
        """How long the copy took, once done."""
        ...


class TransferBackend(Protocol):
    """Owned by the scheduler thread; owns its streams or threads."""

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> TransferOp:
        """Copy host `pages` (int64 CPU [p]) to device `slots` (int64 [p * page_tokens]), reporting layers of `load_id`.

        Waits, on the device, for work already queued on the current stream: whatever last used the slots.
        """
        ...

    def store(self, slots: torch.Tensor, pages: torch.Tensor) -> TransferOp:
        """Copy device `slots` to host `pages`, after the work already queued on the current stream that wrote them."""
        ...

    def figures(self) -> dict[str, float]:
        """What was measured of the link and decided with it, by dotted name, for the statistics."""
        ...

    def start(self) -> None: ...

    def close(self) -> None:
        """Finish what was submitted, then release streams or threads."""
        ...

    def abandon(self, deadline_s: float) -> None:
        """Nobody wants the copies any more: end them early, and return when none runs, or at `deadline_s` of
        `time.monotonic`. Any thread, copy threads included."""
        ...
