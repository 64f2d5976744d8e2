"""The disk of a replay: which pages it holds, in the order in which a page store evicts them.

No bytes and no tree: keys in the order of their last use, as `hicache.storage` keeps them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class DiskOrder:
    """Page keys, least recently used first. `capacity`: pages; None: unlimited. Several nodes may share one.

    Keys of one call follow each other in a prompt: the first becomes the most recently used, so suffixes go first.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def num_present(self, keys: Iterable[bytes]) -> int:
        """How many of `keys` are held before the first that is not. No use."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request used these; those that are not held are ignored."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def put(self, keys: Sequence[bytes]) -> None:
        """Hold these, evicting others, and at last their own suffix. What is held already counts as used."""
        self.touch(keys)
        for key in [key for key in reversed(keys) if key not in self._keys]:
            self._keys[key] = None
            if self._capacity is not None and len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
                self.num_evicted += 1
