"""The one way to wait in tests: for a condition, with one bound, which only a defect reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BOUND_S = 120.0  # a machine may be busy with anything; below pytest's own timeout


def eventually(condition: Callable[[], T], state: Callable[[], object] | None = None) -> T:
    """The first true value of `condition`, asked again and again.

    `state` is what the message shows where none comes, next to the last value of `condition`.
    """
    end_s = time.monotonic() + BOUND_S
    pause_s = 0.0005
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {BOUND_S:.0f} s: last {value!r}, state: {state() if state else ''}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return value
