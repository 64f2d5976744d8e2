"""The requests whose reads have not begun."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from hicache.flow.asked import Asked
from hicache.flow.host_room import HostRoom

_RETRY_S = 0.05  # between two looks whether there is room for a postponed request
_ARRIVAL = attrgetter("arrival")


class Line:
    """Four lists, each in the order of arrival: of requests that wait or do not, and that were postponed or not. Owned
    by the scheduler thread. `asked`: all requests by id."""

    def __init__(self, asked: Mapping[str, Asked], room: HostRoom, clock: Callable[[], float]) -> None:
        self._asked, self._room, self._clock, self._retry_at_s = asked, room, clock, -math.inf
        self._lists = {key: list[Asked]() for key in itertools.product((False, True), repeat=2)}

    @property
    def has_new(self) -> bool:
        """Whether any request was not postponed."""
        return bool(self._lists[False, False] or self._lists[True, False])

    def __contains__(self, asked: Asked) -> bool:
        requests, index = self._list_of(asked), self._index_of(asked)
        return index < len(requests) and requests[index] is asked

    def add(self, asked: Asked) -> None:
        bisect.insort(self._list_of(asked), asked, key=_ARRIVAL)

    def discard(self, asked: Asked) -> bool:
        """Remove a request; whether it was in the line."""
        if found := asked in self:
            del self._list_of(asked)[self._index_of(asked)]
        return found

    def retry(self) -> None:
        """There may be room for a postponed request now."""
        self._retry_at_s = -math.inf

    def take(self, kinds: Iterable[bool]) -> Asked | None:
        """Remove the request that begins next: of the first of `kinds`, whether it waits, that has any, the one that
        arrived first. A postponed request begins if there is room for it, one each `_RETRY_S`."""
        for waits in kinds:
            first = [*self._lists[waits, False][:1], *self._postponed(waits=waits)]
            if first:
                asked: Asked = min(first, key=_ARRIVAL)
                self.discard(asked)
                if asked.is_postponed:
                    self._retry_at_s = self._clock() + _RETRY_S
                return asked
        return None

    def _postponed(self, *, waits: bool) -> list[Asked]:
        """The first postponed request; if requests have claimed all room, the one that alone has."""
        found = self._lists[waits, True][:1]
        if not found or self._clock() < self._retry_at_s:
            return []
        if self._room.claimed >= self._room.max_pages:
            sole = self._asked.get(self._room.share.sole or "")
            found = (
                [sole] if sole is not None and self._list_of(sole) is self._lists[waits, True] and sole in self else []
            )
        return [asked for asked in found if self._room.left(asked) > 0]

    def _index_of(self, asked: Asked) -> int:
        return bisect.bisect_left(self._list_of(asked), asked.arrival, key=_ARRIVAL)

    def _list_of(self, asked: Asked) -> list[Asked]:
        return self._lists[asked.handle.waits, asked.is_postponed]
