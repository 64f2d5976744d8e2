"""Make calls fail inside: the n-th function of hicache that a call enters raises an error, as if the function itself
had raised it or a signal had arrived.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import hicache

PACKAGE = Path(hicache.__file__).parent
# Calls that only release resources. These calls do not fail, because no caller could handle their errors.
ENDINGS = {"free", "unlock", "stop_reading", "forget", "detach", "_end_backup", "_end_load", "wait", "end_backups"}
_GENERATOR = 0x20


class Injected(Exception):
    """The error that `fails_at` raises inside a call."""


def fails_at(call: Callable[[], object], number: int, *, anywhere: bool, error: type[BaseException] = Injected) -> bool:
    """Run `call` and raise `error` at the entry of its inner call `number`, counted from 0. Returns whether it got that
    far.

    Without `anywhere`, only calls count that the engine and its transfers make to each other and to the parts below
    them, except `ENDINGS`. With `anywhere`, all calls below a call of the engine count.
    """
    tracer = _Tracer(number, anywhere, error)
    before = sys.gettrace()
    sys.settrace(tracer.on_event)
    try:
        call()
    except BaseException:
        if not tracer.has_raised:
            raise
    finally:
        sys.settrace(before)
    return tracer.has_raised


class _Tracer:
    def __init__(self, number: int, anywhere: bool, error: type[BaseException]) -> None:
        self._left, self._anywhere, self._error = number, anywhere, error
        self._generators: list[FrameType] = []
        self.has_raised = False

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._counts(frame):
            self._left -= 1
            if self._left < 0:
                self.has_raised = True
                raise self._error(f"at the entry of {frame.f_code.co_name}")

    def _counts(self, frame: FrameType) -> bool:
        code, caller = frame.f_code, frame.f_back
        if not _is_in(code) or code.co_name[0] == "<":
            return False
        if code.co_flags & _GENERATOR:  # a generator that resumes is no new call
            if frame in self._generators:
                return False
            self._generators.append(frame)
        own = [at.f_code for at in _stack(caller) if _is_in(at.f_code)]  # contextlib calls a context's exit
        if not any(_is_in(at, "engine.py") for at in own):
            return False
        is_ending = any(at.co_name in ENDINGS for at in (code, *own))
        return self._anywhere or (_is_in(own[0], "engine.py", "flow") and not is_ending)


def _is_in(code: CodeType, *parts: str) -> bool:
    part = _part(code.co_filename)
    return part is not None and (not parts or part in parts)


@functools.cache
def _part(file: str) -> str | None:
    """The module or folder of the package that a file is in."""
    path = Path(file)
    return path.relative_to(PACKAGE).parts[0] if PACKAGE in path.parents else None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
