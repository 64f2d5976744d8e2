"""Calls that fail on their way: an error at the entry of the n-th function of hicache that a call gets to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import hicache

PACKAGE = Path(hicache.__file__).parent
# What ends something gives back and takes nothing. It does not fail; if it did, there would be nobody to tell.
ENDINGS = {"free", "unlock", "end_read", "stop_reading", "forget", "detach", "_end", "wait", "wait_and_complete"}
_GENERATOR = 0x20


class Injected(Exception):
    """What fails, for no reason."""


def fails_at(call: Callable[[], object], number: int, *, anywhere: bool) -> bool:
    """Whether `call` gets to its call `number`, from 0 on, at whose entry `Injected` is raised.

    Those count that the engine and its movements make, to one another and to the parts below them, but for `ENDINGS`;
    `anywhere`: every call of a function of the package.
    """
    tracer = _Tracer(number, anywhere)
    sys.settrace(tracer.on_event)
    try:
        call()
    except Exception:
        if not tracer.has_raised:
            raise
    finally:
        sys.settrace(None)
    return tracer.has_raised


class _Tracer:
    def __init__(self, number: int, anywhere: bool) -> None:
        self._left, self._anywhere = number, anywhere
        self._generators: list[FrameType] = []
        self.has_raised = False

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._counts(frame):
            self._left -= 1
            if self._left < 0:
                self.has_raised = True
                raise Injected(f"at the entry of {frame.f_code.co_qualname if sys.version_info >= (3, 11) else ''}")

    def _counts(self, frame: FrameType) -> bool:
        code, caller = frame.f_code, frame.f_back
        if not _is_in(code) or code.co_name[0] == "<":
            return False
        if code.co_flags & _GENERATOR:  # one that goes on is no new call
            if frame in self._generators:
                return False
            self._generators.append(frame)
        if self._anywhere:
            return True
        while caller is not None and not _is_in(caller.f_code):  # contextlib calls what is to be undone
            caller = caller.f_back
        return caller is not None and _is_in(caller.f_code, "engine.py", "flow") and not _is_ending(frame)


def _is_in(code: CodeType, *parts: str) -> bool:
    path = Path(code.co_filename)
    return PACKAGE in path.parents and (not parts or path.relative_to(PACKAGE).parts[0] in parts)


def _is_ending(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ENDINGS and _is_in(frame.f_code):
            return True
        frame = frame.f_back
    return False
