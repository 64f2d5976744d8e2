"""The tokens of a node are those it was made with, whatever becomes of the caller's memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache.pages.key import TokenRun, bytes_of, pack_tokens

LONG = 6000  # tokens; from 4096 on a run may be a view


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
    """A caller that hands out views of one buffer for all of its prompts, read-only or not: a node keeps its own."""
    buffer = np.arange(8192)
    run = TokenRun(pack_tokens(view(buffer)))
    buffer += 1
    assert run.tokens.tolist() == list(range(LONG))
    assert run.common_len(buffer, bytes_of(buffer), 0) == 0
