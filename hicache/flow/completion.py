"""What has ended lands: of every movement, and copies in the order of their submission."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from hicache.flow.load import JointOp
from hicache.host import HostRun
from hicache.tiers import Component
from hicache.tree.node import TreeNode


class HasOp(Protocol):
    @property
    def op(self) -> JointOp: ...


T = TypeVar("T", bound=HasOp)


class Movement(ABC):
    """What moves pages and states between tiers, and ends later than it began. Scheduler thread.

    `is_torn`: what had ended was applied in part, so something counts as under way that never ends.
    """

    is_torn = False

    @abstractmethod
    def poll(self) -> bool:
        """Apply what has ended; whether there was anything. Never blocks."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether anything has not ended."""

    @abstractmethod
    def locks(self) -> Iterable[TreeNode]:
        """Each lock that it holds on the tree: the node whose prefix has to stay."""

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        """Each lock that it holds on published pages of the host."""
        return ()

    def pages_in_flight(self, component: Component) -> int:
        """Host pages of a component that it has reserved."""
        return 0


class CopyMovement(Movement, Generic[T]):
    """A movement by copies, which end and are completed in the order of their submission."""

    def __init__(self) -> None:
        self._in_flight: deque[T] = deque()

    def poll(self) -> bool:
        completed = False
        while self._in_flight and self._in_flight[0].op.done():
            self._end_first()
            completed = True
        return completed

    def num_in_flight(self) -> int:
        """Copies that were submitted and not completed. Any thread."""
        return len(self._in_flight)

    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def wait(self) -> None:
        """Block until everything submitted has ended (it still has to be completed)."""
        for operation in self._in_flight:
            operation.op.wait()

    def wait_and_complete(self) -> None:
        self.wait()
        while self._in_flight:
            self._end_first()

    def _end_first(self) -> None:
        self.is_torn = True
        self._end(self._in_flight.popleft())
        self.is_torn = False

    @abstractmethod
    def _end(self, operation: T) -> None:
        """Apply a copy that has ended."""


def land(movements: Iterable[Movement]) -> bool:
    """Poll each of them; whether there was anything."""
    landed = False
    for movement in movements:
        landed |= movement.poll()
    return landed


def settle(movements: Sequence[Movement], patience_s: float) -> bool:
    """Poll until nothing is under way. False: nothing has ended for `patience_s`."""
    landed_s = time.monotonic()
    while time.monotonic() - landed_s < patience_s:
        for movement in movements:
            if isinstance(movement, CopyMovement):
                movement.wait()
        if land(movements):
            landed_s = time.monotonic()
        elif any(movement.is_busy() for movement in movements):
            time.sleep(0.0005)
        else:
            return True
    return False
