"""The readings of figures that a server keeps for its dashboard."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from disk_case import Clock
from hicache.monitoring import kept
from hicache.monitoring.kept import KEPT_S, KeptReadings


def test_an_hour_is_kept_with_every_figure_that_was_there() -> None:
    """Readings of the last hour are kept, older ones are dropped. A figure that the server did not export at that time
    is None."""
    clock, figures = Clock(), {"a": 0.0}
    readings = KeptReadings(lambda: dict(figures), clock)
    assert readings.as_json() == {"names": [], "rows": []}
    begin_s = clock()
    for number in range(4):
        figures["a"] = number
        if number == 2:
            figures["b"] = 7.0
        readings.take()
        clock.now_s += KEPT_S / 2
    assert readings.as_json() == {
        "names": ["a", "b"],
        "rows": [[begin_s + KEPT_S / 2 * number, number, 7.0 if number > 1 else None] for number in (1, 2, 3)],
    }


def test_a_server_reads_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes its first reading at once, and takes further ones until it ends."""
    monkeypatch.setattr(kept, "EVERY_S", 0.0)
    numbers = itertools.count()

    async def serve() -> KeptReadings:
        readings = KeptReadings(lambda: {"a": next(numbers)})
        task = asyncio.create_task(readings.run())
        while len(readings.as_json()["rows"]) < 3:
            await asyncio.sleep(0)
        task.cancel()
        return readings

    rows = asyncio.run(serve()).as_json()["rows"]
    assert [row[1] for row in rows] == [*range(len(rows))]
