"""Records which functions a piece of work calls in this thread. It uses a profile hook and no clock.

Benchmarks and tests of costs import this module. It imports no other module of the package.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Function(NamedTuple):
    """A Python function by its module's name and its code."""

    module: str
    code: CodeType


@dataclass
class Calls:
    """Recorded calls, in order. `python`: the called Python functions. `c`: the qualified names of the called C
    functions.

    A generator counts as a call each time it is resumed.
    """

    python: list[Function] = field(default_factory=list)
    c: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.python) + len(self.c)

    def record(self, work: Callable[[], T]) -> T:
        """Run `work`, append each call that it makes in this thread, and return its result. The garbage collector is
        off during `work`, because finalizers of unrelated objects would count."""
        with without_collection():
            sys.setprofile(self._note)
            try:
                return work()
            finally:
                sys.setprofile(None)
                self.c.pop()  # removes the call of setprofile above

    def in_package(self) -> list[Function]:
        """Return the calls of functions in source files of hicache, except its benchmarks. Generated code, like the
        `__init__` of a dataclass, has no source file."""
        return [
            function
            for function in self.python
            if function.module.startswith("hicache.")
            and not function.module.startswith("hicache.bench.")
            and not function.code.co_filename.startswith("<")
        ]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.python.append(Function(str(frame.f_globals.get("__name__", "")), frame.f_code))
        elif event == "c_call":
            self.c.append(argument.__qualname__)  # type: ignore[attr-defined]


def modules_of(functions: Iterable[Function]) -> set[str]:
    """Return the modules that define these functions. Each module is one source file."""
    return {function.module for function in functions}


def classes_of(functions: Iterable[Function]) -> set[str]:
    """Return the classes that define these functions, by module and qualified name. A function inside a method belongs
    to the class of the method."""
    methods = ((function.module, function.code.co_qualname.partition(".<locals>")[0]) for function in functions)
    return {f"{module}.{name.rpartition('.')[0]}" for module, name in methods if "." in name}


@contextmanager
def without_collection() -> Iterator[None]:
    """Switch the garbage collector off within the block, and on again afterwards if it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
