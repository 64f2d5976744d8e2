"""How much may be written to a drive, and which pages are worth it: a token bucket, and a memory of uses.

    full            everything may be written, until a quarter is spent
    above half      what memory evicts next
    below           of that what two requests have used
    empty           nothing

Owns no page and no thread. In any interval of t seconds at most `bytes_per_s * (t + BUCKET_S)` bytes are spent, of
what does not fit the bucket one piece more. The bucket starts empty, so processes that crash and start again together
spend no more than one that runs as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

BUCKET_S = 30.0  # of the budget, which may be spent at once
_EARLY, _COLD = 0.75, 0.5  # of the bucket
_REMEMBERED = 1 << 20  # pages; 8 MiB
_NAME = "S8"  # a key has more bytes

_NUM_FLAGS = np.uint64(3)
_USED, _USED_TWICE, _UNREAD, _FLAGS = (np.uint64(flags) for flags in (1, 3, 4, 7))

Clock = Callable[[], float]
Names = npt.NDArray[np.uint64]


def names_of(keys: Sequence[bytes]) -> Names:
    """The first bytes of each key as a number, uint64 `[keys]`: equal ones of different pages only misjudge their
    use."""
    return np.array(keys, _NAME).view(">u8").astype(np.uint64)


class WriteBudget:
    """Bytes that may be written now. `bytes_per_s`: what the bucket gets; 0: not known yet, and nothing is refused.

    What is sent is reserved, and spent once it is known to have been written. `is_early`: everything may be written.
    """

    def __init__(self, bytes_per_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        self._rate, self._clock, self._at_s = bytes_per_s, clock, clock()
        self._owed, self._reserved = bytes_per_s * BUCKET_S, 0.0  # what the bucket lacked at `_at_s`; on their way
        self.is_early = True

    @property
    def bytes_per_s(self) -> float:
        """0: not known yet."""
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float) -> None:
        self._owe(0)
        self._rate = rate

    @property
    def level(self) -> float:
        """Share of the bucket that is left, in [0, 1], when all that was sent is written. Any thread."""
        return max(0.0, 1 - self._taken / (self._rate * BUCKET_S)) if self._rate else 1.0

    def look(self) -> None:
        """Decide anew whether everything may be written."""
        level = self.level
        self.is_early = level >= _EARLY if self.is_early else level >= 1

    @property
    def takes_all_cold(self) -> bool:
        """Whether what one request alone has used may be written before memory evicts it."""
        return self.level >= _COLD

    def has_room(self, num_bytes: int) -> bool:
        """Whether the bucket has so much; a full one takes anything."""
        taken = self._taken
        return not self._rate or not taken or taken + num_bytes <= self._rate * BUCKET_S

    def num_fitting(self, num_pages: int, page_bytes: int) -> int:
        """How many of `num_pages` pages the bucket has room for; at least one, if it is full."""
        taken = self._taken
        if not self._rate:
            return num_pages
        left = int((self._rate * BUCKET_S - taken) // page_bytes)
        return max(0 if taken else 1, min(num_pages, left))

    def reserve(self, num_bytes: int) -> None:
        """So much is on its way."""
        self._reserved += num_bytes

    def spend(self, num_bytes: int, num_reserved: int) -> None:
        """Of `num_reserved` bytes this many were written."""
        self._reserved -= num_reserved
        self._owe(num_bytes)

    @property
    def _taken(self) -> float:
        """Bytes that the bucket lacks now, and those on their way."""
        return self._reserved + max(0.0, self._owed - self._rate * (self._clock() - self._at_s))

    def _owe(self, num_bytes: int) -> None:
        now_s = self._clock()
        self._owed = num_bytes + max(0.0, self._owed - self._rate * (now_s - self._at_s))
        self._at_s = now_s


class PageUses:
    """Which pages one request has used and which several, beyond their eviction, and which were written and not read.

    `num_written`: pages, and `num_read`: those of them that were read later, as far as that is known.

    A table of `size` places, of which each page has one by its name, see `names_of`: a page that
    comes to the place of another takes it.
    """

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._table = np.zeros(size, np.uint64)  # of each page its name, three flags behind it
        self.num_written = self.num_read = 0

    def use(self, names: Names) -> None:
        """A request used these."""
        places, known, flags = self._look_up(names)
        self._table[places] = known | flags | np.where(flags & _USED, _USED_TWICE, _USED)

    def used_twice(self, names: Names) -> npt.NDArray[np.bool_]:
        """Which of these several requests have used, `[names]`."""
        _, _, flags = self._look_up(names)
        is_twice: npt.NDArray[np.bool_] = (flags & _USED_TWICE) == _USED_TWICE
        return is_twice

    def write(self, names: Names, num_new: int) -> None:
        """These are on the drive from now on, `num_new` of them only now."""
        places, known, flags = self._look_up(names)
        self._table[places] = known | flags | _UNREAD
        self.num_written += num_new

    def read(self, names: Names) -> None:
        """These were read from the drive."""
        places, known, flags = self._look_up(names)
        is_first = (flags & _UNREAD) != 0
        self._table[places[is_first]] = (known | (flags & ~_UNREAD))[is_first]
        self.num_read += int(is_first.sum())

    def count_anew(self) -> None:
        """Of what was written so far no read counts any more."""
        self._table &= ~_UNREAD
        self.num_written = self.num_read = 0

    def _look_up(self, names: Names) -> tuple[Names, Names, Names]:
        """Of each page its place, what the table has of its name, and its flags, which are 0 where another one has its
        place."""
        places, known = names % np.uint64(len(self._table)), names << _NUM_FLAGS
        found = self._table[places]
        return places, known, np.where(found & ~_FLAGS == known, found & _FLAGS, np.uint64(0))
