"""What the scheduler needs of others: a runner, and, where they are wanted, an auditor and listeners to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.engine import Lease
from hicache.serving.runner import Chunk

OnToken = Callable[[int], None]
"""Called on the scheduler's thread with each token of a request, in order, as it is chosen."""


class Runner(Protocol):
    """What the scheduler needs of a model runner: `ModelRunner` is one."""

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute and store KV of all `chunks`, of different requests.

        Returns float32 logits [chunks, vocab], those of the last token of each. Raises TransferError if a load of a
        request's prefix failed; what was computed of the others is computed again, to the same result.
        """
        ...


class Auditor(Protocol):
    """Inspects a request's pages while the lease still protects them. Its time is excluded from `ttft_s`."""

    def audit(self, lease: Lease, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens`: the committed sequence. Pages [hit.device, cached_len) of it came from the host or the disk."""
        ...
