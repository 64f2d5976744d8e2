"""What work costs, counted: no clock decides. No garbage is collected meanwhile, which would run what others left."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def lines_of(work: Callable[[], object], file: str | None = None) -> int:
    """How many lines `work` executes in this thread, of `file` where one is given."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal count
        if file not in (None, frame.f_code.co_filename):
            return None
        count += event == "line"
        return note

    before = sys.gettrace()
    with _nothing_is_collected():
        sys.settrace(note)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


def calls_of(work: Callable[[], object]) -> int:
    """How many functions `work` calls in this thread, C functions included."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with _nothing_is_collected():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count


@contextlib.contextmanager
def _nothing_is_collected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
