"""Metrics of an engine, cheap enough to stay on in every step.

A `Counter` is an integer that one thread adds to, without a lock or a name look-up. Threads that count the same event
ask the registry for a counter each; `snapshot` adds them up. A gauge is a function that `snapshot` calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

Pressure = Literal["low", "medium", "high", "critical"]

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


class PoolStats(TypedDict):
    """How full a pool is. Tokens are those of whole pages; `utilization` is used over total, in [0, 1]."""

    total_tokens: int
    used_tokens: int
    utilization: float
    num_pages: int
    free_pages: int


def pool_stats(total_tokens: int, available_tokens: int, page_size: int) -> PoolStats:
    """The statistics of a pool of `total_tokens`, which must be above 0."""
    used = total_tokens - available_tokens
    return {
        "total_tokens": total_tokens,
        "used_tokens": used,
        "utilization": used / total_tokens,
        "num_pages": total_tokens // page_size,
        "free_pages": available_tokens // page_size,
    }


def memory_pressure(utilization: float) -> Pressure:
    """A level: "critical" above 0.95, "high" above 0.85, "medium" above 0.7, else "low"."""
    if utilization > 0.95:
        return "critical"
    if utilization > 0.85:
        return "high"
    return "medium" if utilization > 0.7 else "low"


@dataclass(slots=True)
class Counter:
    """A number of events, tokens, pages, bytes or nanoseconds that only grows.

    One thread, its owner, writes it: `counter.value += n`. Any thread may read `value`.
    """

    value: int = 0


@dataclass(slots=True)
class _Series:
    help: str
    counters: list[Counter] = field(default_factory=list)
    read: Callable[[], float] | None = None


class Metrics:
    """The registry of one engine: every name with its help text.

    `counter` and `gauge` are called while the engine is built; `snapshot` from any thread, at any time. Names are
    dotted and end in their unit: `disk.read_bytes`, `flow.restore_tokens`, `transfer.wait_ns`.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def counter(self, name: str, help: str) -> Counter:
        """A new counter for `name`, one for each thread that counts.

        Raises ValueError where the name is malformed, is a gauge, or was registered with another help text.
        """
        series = self._series.get(name)
        if series is None:
            series = self._register(name, help)
        if series.read is not None:
            raise ValueError(f"metric {name} is a gauge")
        if series.help != help:
            raise ValueError(f"metric {name} is registered as {series.help!r}, not {help!r}")
        counter = Counter()
        # A new list, since a snapshot in another thread may iterate over the present one.
        series.counters = [*series.counters, counter]
        return counter

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Register a gauge whose value `read` returns; it is called in the thread of each snapshot.

        Raises ValueError where the name is malformed or registered already.
        """
        if name in self._series:
            raise ValueError(f"metric {name} is registered already")
        self._register(name, help).read = read

    def snapshot(self) -> dict[str, float]:
        """All values by name, sorted. Those of counters are sums over their threads."""
        values: dict[str, float] = {}
        for name, series in sorted(self._series.copy().items()):
            values[name] = sum(c.value for c in series.counters) if series.read is None else series.read()
        return values

    def describe(self) -> dict[str, str]:
        """The help text of each metric by name, sorted."""
        return {name: series.help for name, series in sorted(self._series.copy().items())}

    def _register(self, name: str, help: str) -> _Series:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"metric {name!r}: names are dotted and in lower case, like disk.read_bytes")
        if not help:
            raise ValueError(f"metric {name}: the help text must say what it counts")
        series = self._series[name] = _Series(help)
        return series
