"""A node keeps the tokens with which it was created, whatever the caller does with its memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache.pages.key import TokenRun, bytes_of, pack_tokens

LONG = 6000  # tokens; a run of 4096 or more may be a view of the caller's memory


def _flagged(buffer: np.ndarray) -> np.ndarray:
    view = buffer[:LONG]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    "view",
    [
        _flagged,
        lambda buffer: np.broadcast_to(buffer[:LONG], (LONG,)),
        lambda buffer: np.frombuffer(memoryview(buffer).toreadonly(), np.int64)[:LONG],
        lambda buffer: buffer[:LONG],
    ],
)
def test_a_reused_buffer_changes_no_node(view: Callable[[np.ndarray], np.ndarray]) -> None:
    """A caller may pass views of one buffer, read-only or not, for all its prompts. A node still keeps its own
    tokens."""
    buffer = np.arange(8192)
    run = TokenRun(pack_tokens(view(buffer)))
    buffer += 1
    assert run.tokens.tolist() == list(range(LONG))
    assert run.common_len(buffer, bytes_of(buffer), 0) == 0
