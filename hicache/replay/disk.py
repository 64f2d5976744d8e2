"""The simulated disk of a replay: the stored blocks in the order of eviction, and the number of written blocks."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from hicache.pages.key import Tokens

_LEAST_LOG = 1 << 10


class DiskOrder:
    """Blocks by prefix id, least recently used first, as a page store evicts them. `capacity`: maximum number of
    blocks; None: unlimited.

    The blocks of one call are consecutive in a prompt. Its first block becomes the most recently used one, so the end
    of a prompt is evicted before its start. Every use has a stamp, and the log lists the uses in the order of stamps.
    Eviction skips a use in the log if its block was used again later or was evicted.

    `num_written`: blocks that `put` added. `num_useful`: written blocks that `read` returned later, each counted once.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._clock = 1
        self._num_stored = 0
        self._logged = 0
        self._stamps = np.zeros(1024, np.int64)  # stamp of each block's last use, by id; 0: not on disk
        self._is_unread = np.zeros(1024, np.bool_)
        self._log: deque[tuple[int, Tokens]] = deque()  # each entry has a first stamp, and ids with consecutive stamps
        self.num_written = self.num_useful = 0

    def __len__(self) -> int:
        return self._num_stored

    def num_present(self, ids: Tokens) -> int:
        """Return the number of `ids` before the first one that is not on disk. This does not count as a use."""
        absent = np.flatnonzero(~self._has(ids))
        return int(absent[0]) if len(absent) else len(ids)

    def touch(self, ids: Tokens) -> None:
        """Count a use of `ids` by a request; ids that are not on disk are ignored."""
        self._use(ids[self._has(ids)])

    def read(self, ids: Tokens) -> None:
        """Read `ids`, which must be on disk; this counts as a use."""
        self._use(ids)
        self.num_useful += int(self._is_unread[ids].sum())
        self._is_unread[ids] = False

    def put(self, ids: Tokens) -> None:
        """Write the blocks of `ids` that are not on disk, and count a use of the others. If the disk is full, other
        blocks are evicted first, and then the end of `ids`."""
        new, is_held = ids, self._has(ids)
        if is_held.any():
            new = ids[~is_held]
            self._use(ids[is_held])
        self._use(new)
        self._is_unread[new] = True
        self._num_stored += len(new)
        self.num_written += len(new)
        if self._capacity is not None and self._num_stored > self._capacity:
            self._evict(self._num_stored - self._capacity)

    def reset_counts(self) -> None:
        """Set the numbers of written and useful blocks to zero."""
        self._is_unread[:] = False
        self.num_written = self.num_useful = 0

    def _has(self, ids: Tokens) -> npt.NDArray[np.bool_]:
        try:
            stamps = self._stamps[ids]
        except IndexError:  # the id is new; catching this is cheaper than computing the maximum in each call
            more = max(int(ids.max()) + 1, 2 * len(self._stamps)) - len(self._stamps)
            self._stamps = np.concatenate((self._stamps, np.zeros(more, np.int64)))
            self._is_unread = np.concatenate((self._is_unread, np.zeros(more, np.bool_)))
            stamps = self._stamps[ids]
        return stamps > 0

    def _use(self, ids: Tokens) -> None:
        by_stamp = ids[::-1]
        self._stamps[by_stamp] = np.arange(self._clock, self._clock + len(ids))
        if self._capacity is not None and len(ids):
            self._log.append((self._clock, by_stamp))
            self._logged += len(ids)
        self._clock += len(ids)
        if self._logged > max(_LEAST_LOG, 4 * self._num_stored):
            held = np.flatnonzero(self._stamps)
            held = held[np.argsort(self._stamps[held])]
            self._stamps[held] = np.arange(self._clock, self._clock + len(held))
            self._log = deque([(self._clock, held)])
            self._clock += len(held)
            self._logged = len(held)

    def _evict(self, num_blocks: int) -> None:
        while num_blocks:
            stamp, ids = self._log.popleft()
            current = np.flatnonzero(self._stamps[ids] == np.arange(stamp, stamp + len(ids)))
            evicted = current[:num_blocks]
            self._stamps[ids[evicted]] = 0
            self._num_stored -= len(evicted)
            num_blocks -= len(evicted)
            self._logged -= len(ids)
            if len(evicted) < len(current):
                rest = int(evicted[-1]) + 1
                self._log.appendleft((stamp + rest, ids[rest:]))
                self._logged += len(ids) - rest
