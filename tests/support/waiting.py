"""The only way to wait in tests: wait for a condition, with a time limit that only a defect reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BOUND_S = 120.0  # seconds; long enough for a busy machine, and less than pytest's own timeout


def eventually(condition: Callable[[], T], state: Callable[[], object] | None = None) -> T:
    """Call `condition` again and again; returns its first true value.

    If the time limit passes, the message shows the last value of `condition` and the result of `state`.
    """
    end_s = time.monotonic() + BOUND_S
    pause_s = 0.0005
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {BOUND_S:.0f} s: last {value!r}, state: {state() if state else ''}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return value
