"""Completion by operation: what has finished, in submission order, and what ranks agree on of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from hicache.flow.load import JointOp


class HasOp(Protocol):
    @property
    def op(self) -> JointOp: ...


T = TypeVar("T", bound=HasOp)


class CopyMovement(ABC, Generic[T]):
    """A movement by copies, which are numbered from 1 in the order of their submission and complete in it.

    Owned by the scheduler thread.
    """

    def __init__(self) -> None:
        self._in_flight: deque[T] = deque()
        self._completed = 0

    def finished(self) -> Sequence[int]:
        """The number up to which every copy has ended. Never blocks."""
        number = self._completed
        for operation in self._in_flight:
            if not operation.op.done():
                break
            number += 1
        return (number,)

    def complete(self, through: Sequence[int]) -> None:
        while self._completed < through[0]:
            self._completed += 1
            self._end(self._in_flight.popleft())

    def num_in_flight(self) -> int:
        """Copies that were submitted and not completed. Any thread."""
        return len(self._in_flight)

    def wait(self) -> None:
        """Block until everything submitted has ended (it still has to be completed)."""
        for operation in self._in_flight:
            operation.op.wait()

    def wait_and_complete(self) -> None:
        self.wait()
        self.complete((self._completed + len(self._in_flight),))

    @abstractmethod
    def _end(self, operation: T) -> None:
        """Apply a copy that has ended."""


class Agreement(Protocol):
    """How ranks agree on what has finished: the element-wise minimum of `finished` over all ranks. Called at the same
    place of every step on every rank."""

    def __call__(self, finished: Sequence[int]) -> Sequence[int]: ...


def single_rank(finished: Sequence[int]) -> Sequence[int]:
    """A single rank agrees with itself, at no cost."""
    return finished


class Movement(Protocol):
    """A movement whose operations are numbered from 1 in submission order, in each of its queues."""

    def finished(self) -> Sequence[int]:
        """For each queue, the number up to which every operation has ended; never blocks."""
        ...

    def complete(self, through: Sequence[int]) -> None:
        """Apply the operations up to these numbers, at most those of `finished`, each once and in order."""
        ...


class Completion:
    """Completes what has finished on all ranks. Owned by the scheduler thread."""

    def __init__(self, movements: Sequence[Movement], agree: Agreement) -> None:
        self._movements, self._agree = tuple(movements), agree
        self._completed = [number for movement in self._movements for number in movement.finished()]

    def poll(self) -> bool:
        """Complete what is new; False where nothing is. Never blocks, but for what `agree` does."""
        vectors = [movement.finished() for movement in self._movements]
        through = self._agree([number for vector in vectors for number in vector])
        if through == self._completed:
            return False
        self._completed, start = list(through), 0
        for movement, vector in zip(self._movements, vectors, strict=True):
            movement.complete(through[start : start + len(vector)])
            start += len(vector)
        return True
