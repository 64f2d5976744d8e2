"""What the disk of a replay holds, and what was written to it."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from hicache.pages.key import Tokens

_LEAST_LOG = 1 << 10


class DiskOrder:
    """Blocks by prefix id, least recently used first, as a page store evicts them. `capacity`: blocks; None: unlimited.

    Blocks of one call follow each other in a prompt: the first becomes the most recently used, so suffixes go first.
    Every use has a stamp. The log has the uses by stamp; one whose block was used again, or is gone, is skipped.

    `num_written`: blocks that `put` added; `num_useful`: those of them that `read` asked for afterwards, counted once.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._clock = 1
        self._held = 0
        self._logged = 0
        self._stamps = np.zeros(1024, np.int64)  # by id; 0: not held
        self._is_unread = np.zeros(1024, np.bool_)
        self._log: deque[tuple[int, Tokens]] = deque()  # the first stamp, and ids with one stamp after the other
        self.num_written = self.num_useful = 0

    def __len__(self) -> int:
        return self._held

    def num_present(self, ids: Tokens) -> int:
        """How many of `ids` are held before the first that is not. No use."""
        absent = np.flatnonzero(~self._has(ids))
        return int(absent[0]) if len(absent) else len(ids)

    def touch(self, ids: Tokens) -> None:
        """A request used these; those that are not held are ignored."""
        self._use(ids[self._has(ids)])

    def read(self, ids: Tokens) -> None:
        """These, which are held, are read and used."""
        self._use(ids)
        self.num_useful += int(self._is_unread[ids].sum())
        self._is_unread[ids] = False

    def put(self, ids: Tokens) -> None:
        """Hold these, evicting others, and at last their own suffix. What is held already counts as used."""
        new, is_held = ids, self._has(ids)
        if is_held.any():
            new = ids[~is_held]
            self._use(ids[is_held])
        self._use(new)
        self._is_unread[new] = True
        self._held += len(new)
        self.num_written += len(new)
        if self._capacity is not None and self._held > self._capacity:
            self._evict(self._held - self._capacity)

    def count_anew(self) -> None:
        """What was written so far counts no more."""
        self._is_unread[:] = False
        self.num_written = self.num_useful = 0

    def _has(self, ids: Tokens) -> npt.NDArray[np.bool_]:
        try:
            stamps = self._stamps[ids]
        except IndexError:  # an id that is new; it is cheaper to ask for it than to look for the highest first
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
        if self._logged > max(_LEAST_LOG, 4 * self._held):
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
            gone = current[:num_blocks]
            self._stamps[ids[gone]] = 0
            self._held -= len(gone)
            num_blocks -= len(gone)
            self._logged -= len(ids)
            if len(gone) < len(current):
                rest = int(gone[-1]) + 1
                self._log.appendleft((stamp + rest, ids[rest:]))
                self._logged += len(ids) - rest
