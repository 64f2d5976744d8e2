"""The base classes of transfers between tiers, and of their copies."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.flow.prompt import Prompt
from hicache.pages.node import TreeNode
from hicache.pages.table import Rows
from hicache.tiers import Component
from hicache.transfer.base import TransferOp

_IS_UNDELAYED = attrgetter("is_undelayed")


class PromptRows(NamedTuple):
    """Pages of a prompt that are on the host. `rows`: the rows of the pages; `pages`: the indices of the pages in the
    prompt, ascending."""

    rows: Rows
    pages: Rows

    def between(self, start: int, end: int) -> PromptRows:
        """Return the pages with indices in [start, end)."""
        first, last = np.searchsorted(self.pages, (start, end))
        return PromptRows(self.rows[first:last], self.pages[first:last])


@dataclass(eq=False)
class Copy:
    """One transfer operation per component. The copy is done when all operations are done, and has failed if one
    operation, or a load in `depends_on`, has failed."""

    operations: list[TransferOp] = field(default_factory=list, init=False)
    num_bytes: int = field(default=0, init=False)
    depends_on: tuple[Load, ...] = field(default=(), init=False)
    cause: Exception | None = field(default=None, init=False)

    def add(self, op: TransferOp) -> None:
        self.operations.append(op)
        self.num_bytes += op.num_bytes

    @property
    def error(self) -> Exception | None:
        """The error of this copy, or of a load on which it depends; None without an error. Final after
        `wait_outcome`."""
        error = self.cause
        for op in self.operations:
            error = error or op.error
        for load in self.depends_on:
            error = error or load.error
        return error

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
        return all(map(_IS_UNDELAYED, self.operations))

    def seconds(self) -> float:
        """Return the seconds of the longest operation."""
        longest_s = 0.0
        for op in self.operations:
            longest_s = max(longest_s, op.seconds())
        return longest_s


@dataclass(eq=False)
class Load(Copy):
    """A load in flight for the prefix of `prompt` that ends with `node`. `pages`: the host pages that the load copies
    and locks. `brings`: the rows of the tree whose slots or states the load writes, by component. The column `load` of
    these rows has the `number` of the load.

    `readers`: the number of leases and later loads that read the loaded pages. The slots of a failed load (`orphans`)
    are not reused before the last reader has ended. `depends_on`: loads in flight of earlier pages of the prompt; if
    one of them fails, this load fails too. `load_ids`: the ids of this load in the layer counters, by component.
    `orphan_states`: states that a lease or the tree freed before the load had written them.
    """

    node: TreeNode
    prompt: Prompt
    pages: Mapping[Component, PromptRows]
    number: int = field(default_factory=itertools.count(1).__next__, init=False)
    brings: dict[Component, Rows] = field(default_factory=dict, init=False)
    load_ids: dict[Component, int] = field(default_factory=dict, init=False)
    readers: int = field(default=0, init=False)
    completed: bool = field(default=False, init=False)
    abandoned: bool = field(default=False, init=False)
    orphans: list[torch.Tensor] = field(default_factory=list, init=False)
    orphan_states: dict[Component, list[torch.Tensor]] = field(default_factory=dict, init=False)


class PageTransfer(ABC):
    """A transfer of pages and states between tiers by asynchronous operations. Scheduler thread.

    `is_partly_applied`: an error interrupted `poll` while it applied results, so some operations may count as in flight
    forever.
    """

    is_partly_applied = False

    @abstractmethod
    def poll(self) -> bool:
        """Apply the results of operations that have ended. Returns whether any operation had ended. Never blocks."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Return whether any operation has not ended."""

    def wait(self) -> None:  # noqa: B027 - most transfers have nothing to wait for
        """Block until all submitted copies have ended. The next `poll` applies their results."""

    def device_locks(self, component: Component) -> Iterable[Rows]:
        """Yield the device rows that this transfer locks."""
        return ()

    def loads_read(self) -> Iterable[Load]:
        """Return the loads whose pages this transfer reads, including failed loads."""
        return ()

    def host_locks(self, component: Component) -> Iterable[Rows]:
        """Yield the host rows of a component that this transfer locks: pages that the transfer writes, and pages that
        must not be evicted now."""
        return ()


def settle(transfers: Sequence[PageTransfer], timeout_s: float) -> None:
    """Poll until no transfer has operations in flight. Raises InvariantError if no operation ends for `timeout_s`."""
    ended_s = time.monotonic()
    while time.monotonic() - ended_s < timeout_s:
        for transfer in transfers:
            transfer.wait()
        has_ended = [transfer.poll() for transfer in transfers]
        if any(has_ended):
            ended_s = time.monotonic()
        elif any(transfer.is_busy() for transfer in transfers):
            time.sleep(0.0005)
        else:
            return
    raise InvariantError("engine", ["no operation ends any more, but some operations count as in flight"])
