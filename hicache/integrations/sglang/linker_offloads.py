"""Offloads: pages of a node of SGLang's tree go to the host, all or none, and from there to the disk."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hicache.integrations.sglang.linker_disk import LinkerDisk
from hicache.integrations.sglang.linker_pages import PageIndex
from hicache.integrations.sglang.linker_parts import Part
from hicache.transfer import TransferOp

Fence = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class _Copy:
    """Reserved pages of one component that a copy fills. `chain`: the keys of its whole transfer."""

    part: Part
    chain: list[str]
    pages: torch.Tensor
    op: TransferOp


class Offloads:
    """The offloads of one linker, completed in the order of their begin. Scheduler thread.

    `behind_forward`: work queued within it waits for all forwards before.
    """

    def __init__(self, disk: LinkerDisk, behind_forward: Fence) -> None:
        self._disk, self._behind_forward = disk, behind_forward
        self._running: deque[list[_Copy] | None] = deque()  # None: could not be taken
        self.completed: deque[bool] = deque()

    def begin(self, parts: Sequence[Part]) -> list[_Copy] | None:
        """None where the host has no room, or a copy is refused. Pages that it has already are not copied again."""
        reserved: list[tuple[Part, list[str], torch.Tensor]] = []
        copies: list[_Copy] = []
        try:
            for part in parts:
                part.tier.index.use(part.held)
                new = part.missing()
                pages = part.tier.index.reserve(len(new.keys))
                if pages is None:
                    return self._undo(reserved, copies)
                reserved.append((new, part.keys, pages))
            with self._behind_forward():
                for new, chain, pages in reserved:
                    if new.keys:
                        copies.append(_Copy(new, chain, pages, new.tier.transfer.store(new.slots, pages)))
        except BaseException:
            self._undo(reserved, copies)
            raise
        return copies

    def add(self, copies: list[_Copy] | None) -> None:
        """What `begin` returned; None completes as failed."""
        self._running.append(copies)

    @property
    def is_idle(self) -> bool:
        return not self._running

    def num_reserved(self, index: PageIndex) -> int:
        """Pages of an index that copies fill."""
        copies = [copy for copies in self._running for copy in copies or ()]
        return sum(len(copy.pages) for copy in copies if copy.part.tier.index is index)

    def poll(self) -> None:
        """Take what ended."""
        while self._running and ((first := self._running[0]) is None or all(copy.op.done() for copy in first)):
            self._running.popleft()
            self.completed.append(first is not None and self._end(first))

    def end_all(self) -> None:
        """Wait for all, and forget their outcomes."""
        for copy in [copy for copies in self._running for copy in copies or ()]:
            copy.op.wait()
        self.poll()
        self.completed.clear()

    def _end(self, copies: Sequence[_Copy]) -> bool:
        """The pages hold their keys' bytes from now on, unless a copy failed."""
        ok = all(copy.op.error is None for copy in copies)
        for copy in copies:
            index = copy.part.tier.index
            if ok:
                new = index.publish(copy.part.keys, copy.pages)
                index.link(copy.chain)
                index.lift(new)
                self._disk.write(copy.part.tier.name, new)
            else:
                index.free(copy.pages)
        return ok

    @staticmethod
    def _undo(reserved: Sequence[tuple[Part, list[str], torch.Tensor]], copies: Sequence[_Copy]) -> None:
        for copy in copies:
            copy.op.wait()
        for part, _, pages in reserved:
            part.tier.index.free(pages)
