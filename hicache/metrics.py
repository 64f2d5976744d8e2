"""Metrics: what the engine counted, cheap enough to stay on in every step.

A `Counter` is one integer that one thread adds to, so counting is an integer add: no lock, no name look-up, nothing at
all in a step that moves nothing. Threads that count the same thing ask the registry for a counter each; `snapshot`
adds them up. A gauge is a function that is called when somebody looks, and costs nothing until then.

Owns the registry. May import errors; imports nothing of the project today.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

Pressure = Literal["low", "medium", "high", "critical"]

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


class PoolStats(TypedDict):
    """How full a pool is. Tokens count whole pages; `utilization` is used over total, in [0, 1]."""

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

    Called by one thread, its owner: `counter.value += n`. Any thread may read `value`; what it reads was true a moment
    ago and never decreases.
    """

    value: int = 0


@dataclass(slots=True)
class _Series:
    help: str
    counters: list[Counter] = field(default_factory=list)
    read: Callable[[], float] | None = None


class Metrics:
    """The registry of one engine. Owns the names and what each means.

    `counter` and `gauge` are called while the engine is built; `snapshot` from any thread, at any time. Names are
    dotted and end in their unit: `disk.read_bytes`, `flow.restore_tokens`, `transfer.wait_ns`.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def counter(self, name: str, help: str) -> Counter:
        """A new counter that adds to `name`: ask once for each thread that counts, and keep what is returned.

        Raises ValueError where the name is malformed, is a gauge, or was described in other words.
        """
        series = self._series.get(name)
        if series is None:
            series = self._register(name, help)
        if series.read is not None:
            raise ValueError(f"metric {name} is a gauge")
        if series.help != help:
            raise ValueError(f"metric {name} means {series.help!r} already, not {help!r}")
        counter = Counter()
        # A new list, never a longer one: a snapshot in another thread goes on over the list it has.
        series.counters = [*series.counters, counter]
        return counter

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Register a value that `read` returns when somebody looks; it runs in the thread of the snapshot.

        Raises ValueError where the name is malformed or taken.
        """
        if name in self._series:
            raise ValueError(f"metric {name} exists already")
        self._register(name, help).read = read

    def snapshot(self) -> dict[str, float]:
        """All values by name, in order of the names. Counters are sums over their threads."""
        values: dict[str, float] = {}
        for name, series in sorted(self._series.copy().items()):
            values[name] = sum(c.value for c in series.counters) if series.read is None else series.read()
        return values

    def describe(self) -> dict[str, str]:
        """What each name means, in order of the names."""
        return {name: series.help for name, series in sorted(self._series.copy().items())}

    def _register(self, name: str, help: str) -> _Series:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"metric {name!r}: write it dotted and in lower case, like disk.read_bytes")
        if not help:
            raise ValueError(f"metric {name}: say in a few words what it counts")
        series = self._series[name] = _Series(help)
        return series
