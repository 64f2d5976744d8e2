"""Counts the cost of work, without a clock. Garbage collection is off, because it would run unrelated finalizers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hicache.bench.counting import Calls, without_collection


def lines_of(work: Callable[[], object], file: str | None = None) -> int:
    """Count the lines that `work` executes in this thread; if `file` is given, only the lines of that file."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal count
        if file not in (None, frame.f_code.co_filename):
            return None
        count += event == "line"
        return note

    before = sys.gettrace()
    with without_collection():
        sys.settrace(note)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


def calls_of(work: Callable[[], object]) -> int:
    """Count the functions that `work` calls in this thread, including C functions."""
    calls = Calls()
    calls.record(work)
    return calls.total
