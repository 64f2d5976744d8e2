"""Movements between tiers: their copies, and the poll that applies the results."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.flow.prompt import Prompt
from hicache.pages.node import TreeNode
from hicache.pages.table import Rows
from hicache.tiers import Component
from hicache.transfer.base import TransferOp

_numbers = itertools.count(1)


class PromptRows(NamedTuple):
    """Pages of a prompt on the host: their rows, and which pages they are, ascending."""

    rows: Rows
    pages: Rows

    def between(self, start: int, end: int) -> PromptRows:
        """Those of pages [start, end)."""
        first, last = np.searchsorted(self.pages, (start, end))
        return PromptRows(self.rows[first:last], self.pages[first:last])


class Copy:
    """Operations that belong together, one a component: done when all are, failed when one is."""

    def __init__(self) -> None:
        self.operations: list[TransferOp] = []
        self.num_bytes = 0

    def add(self, op: TransferOp) -> None:
        self.operations.append(op)
        self.num_bytes += op.num_bytes

    @property
    def error(self) -> Exception | None:
        for op in self.operations:
            if op.error is not None:
                return op.error
        return None

    def done(self) -> bool:
        is_done = True
        for op in self.operations:
            is_done = is_done and op.done()
        return is_done

    def wait(self) -> None:
        for op in self.operations:
            op.wait()

    def wait_outcome(self) -> None:
        for op in self.operations:
            op.wait_outcome()

    @property
    def is_undelayed(self) -> bool:
        return all(op.is_undelayed for op in self.operations)

    def seconds(self) -> float:
        """Of the longest."""
        longest_s = 0.0
        for op in self.operations:
            longest_s = max(longest_s, op.seconds())
        return longest_s


class Load(Copy):
    """A load in flight of `pages` of the host, which it has locked, for the prefix of `prompt` that ends with `node`.
    `brings`: the rows of the tree that it writes, by component, in whose columns it is known by `number`.

    `readers`: leases and later loads that read what it brings. A failed load's slots stay out of use until the last of
    them ends: `orphans`. `depends_on`: loads in flight that this one continues; it fails with them. `load_ids`: its
    number in the layer counter, `orphan_states`: values, by component, that left a lease or the tree before the load
    had written to them.
    """

    def __init__(
        self, node: TreeNode, prompt: Prompt, pages: Mapping[Component, PromptRows], depends_on: Sequence[Load]
    ) -> None:
        super().__init__()
        self.node, self.prompt, self.pages, self.depends_on = node, prompt, pages, tuple(depends_on)
        self.number = next(_numbers)
        self.brings: dict[Component, Rows] = {}
        self.load_ids: dict[Component, int] = {}
        self.readers = 0
        self.completed = self.abandoned = False
        self._cause: Exception | None = None
        self.orphans: list[torch.Tensor] = []
        self.orphan_states: dict[Component, list[torch.Tensor]] = {}

    @property
    def error(self) -> Exception | None:
        """Why it failed; of a load that failed with another, why that did. Final after `wait_outcome`."""
        below = (load.error for load in self.depends_on)
        return self._cause or super().error or next((error for error in below if error is not None), None)

    def complete(self) -> None:
        """It has ended, and so has all that it depends on."""
        self._cause, self.depends_on, self.completed = self.error, (), True


class Movement(ABC):
    """A part that moves pages and states between tiers, and ends later than it began. Scheduler thread.

    `is_torn`: what had ended was applied in part, so something counts as under way that never ends.
    """

    is_torn = False

    @abstractmethod
    def poll(self) -> bool:
        """Apply what has ended; whether there was anything. Never blocks."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether anything has not ended."""

    def wait(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Block until the copies that were submitted have ended. They still have to be applied."""

    def device_locks(self, component: Component) -> Iterable[Rows]:
        """The locks that this movement holds on pages of the device."""
        return ()

    def loads_read(self) -> Iterable[Load]:
        """Loads that it reads, which may have failed."""
        return ()

    def host_locks(self, component: Component) -> Iterable[Rows]:
        """The locks that this movement holds on host pages of a component: on pages that it writes, and on pages that
        must not be evicted meanwhile."""
        return ()


def settle(movements: Sequence[Movement], patience_s: float) -> None:
    """Poll until nothing is under way. InvariantError if nothing ends for `patience_s`."""
    landed_s = time.monotonic()
    while time.monotonic() - landed_s < patience_s:
        for movement in movements:
            movement.wait()
        has_landed = [movement.poll() for movement in movements]
        if any(has_landed):
            landed_s = time.monotonic()
        elif any(movement.is_busy() for movement in movements):
            time.sleep(0.0005)
        else:
            return
    raise InvariantError("engine", ["nothing lands any more, and something counts as under way"])
