"""The readings of the last hour, which a server keeps so that a newly opened dashboard can show them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 10.0
KEPT_S = 3600.0


class KeptReadings:
    """The figures of the last hour, one reading every ten seconds. Used by the server's event loop only.

    `read`: returns the figures by name. `clock`: returns a monotonic time in seconds, as for the server's other
    readings.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._readings = deque[tuple[float, Mapping[str, float]]]()

    def take(self) -> None:
        """Add a reading, and drop readings that are older than an hour."""
        now_s = self._clock()
        self._readings.append((now_s, self._read()))
        while self._readings[0][0] < now_s - KEPT_S:
            self._readings.popleft()

    async def run(self) -> None:
        """Take a reading every ten seconds, until the task is cancelled."""
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)

    def as_json(self) -> dict[str, Any]:
        """Return `names` of figures, and `rows`, one row for each reading, oldest first. A row has the reading's time,
        and then the figures' values in the order of `names`. A value is None if the server did not export the figure at
        that time."""
        names = [*{name: None for _, figures in self._readings for name in figures}]
        rows = [[time_s, *(figures.get(name) for name in names)] for time_s, figures in self._readings]
        return {"names": names, "rows": rows}
