"""Metrics of an engine, cheap enough to stay enabled in every step.

A `Counter` or `Histogram` belongs to one thread, which writes it without a lock or a name look-up. If several threads
count the same event, each asks the registry for its own counter. `Metrics.snapshot` adds up the counters of all
threads, and reads the metrics that other objects keep. docs/metrics.md explains the names of metrics here and in
Prometheus.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, TypedDict

Pressure = Literal["low", "medium", "high", "critical"]
MetricType = Literal["counter", "gauge", "histogram"]

BYTES_BOUNDS = tuple(float(4**k) for k in range(6, 19))
"""Bounds of histograms of bytes, from 4 KiB to 64 GiB, by factors of 4."""
SECONDS_BOUNDS = tuple(1e-5 * 2**k for k in range(23))
"""Bounds of histograms of seconds, from 10 us to 42 s, by factors of 2."""
AGE_BOUNDS = tuple(float(2**k) for k in range(18))
"""Bounds of histograms of ages, from 1 s to 36 hours, by factors of 2."""
_BOUNDS = {"bytes": BYTES_BOUNDS, "seconds": SECONDS_BOUNDS, "age_seconds": AGE_BOUNDS}

# The name of every metric must end with one of these units.
UNITS = (
    *("bytes_per_second", "tokens_per_second", "writes_per_day", "bytes", "age_seconds", "seconds", "ratio"),
    *("tokens", "pages", "states", "nodes", "runs", "windows", "blocks", "batches"),
    *("requests", "attempts", "leases", "loads", "copies", "reads", "jobs", "evictions"),
    *("failures", "errors", "opens", "retries", "touches", "state", "flag"),
)

_NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_UNIT = re.compile(rf"[._]({'|'.join(UNITS)})$")


class PoolStats(TypedDict):
    """Occupancy of a pool. A used page counts as `page_size` used tokens. `utilization`: used tokens divided by total
    tokens, in [0, 1]."""

    total_tokens: int
    used_tokens: int
    utilization: float
    num_pages: int
    free_pages: int


def pool_stats(total_tokens: int, available_tokens: int, page_size: int) -> PoolStats:
    """Return the occupancy of a pool of `total_tokens` tokens. `total_tokens` must be above 0."""
    used = total_tokens - available_tokens
    return {
        "total_tokens": total_tokens,
        "used_tokens": used,
        "utilization": used / total_tokens,
        "num_pages": total_tokens // page_size,
        "free_pages": available_tokens // page_size,
    }


def memory_pressure(utilization: float) -> Pressure:
    """Return the level of a utilization: "critical" above 0.95, "high" above 0.85, "medium" above 0.7, else "low"."""
    if utilization > 0.95:
        return "critical"
    if utilization > 0.85:
        return "high"
    return "medium" if utilization > 0.7 else "low"


@dataclass(frozen=True)
class MetricInfo:
    """The description of a metric. `unit`: one of `UNITS`, with which the metric's name ends. The value of a state is
    one of the numbers listed in `help`, that of a flag 0 or 1, that of a ratio in [0, 1]. `family`, `labels`: name and
    labels of the metric in Prometheus, if several metrics share a family."""

    type: MetricType
    unit: str
    help: str
    family: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class HistogramValue:
    """A histogram at one time. `counts[i]`: number of observations in (bounds[i - 1], bounds[i]]; the last count:
    number of observations above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


MetricValue: TypeAlias = float | HistogramValue


@dataclass(slots=True)
class Counter:
    """A number of events, tokens, pages, bytes or seconds that only grows.

    One thread, its owner, writes it: `counter.value += n`. Any thread may read `value`.
    """

    value: float = 0


class Histogram:
    """Counts the observations of one thread, its owner, in the intervals between fixed bounds.

    Any thread may read `value`. If a thread reads during an `observe`, the sum may lack this last observation.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add many observations. `counts`: number of observations by interval, as in `HistogramValue.counts`. `total`:
        sum of the observations."""
        self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        self._sum += total

    @property
    def value(self) -> HistogramValue:
        return HistogramValue(self._bounds, tuple(self._counts), self._sum)


@dataclass(slots=True)
class _Series:
    info: MetricInfo
    counters: list[Counter] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Return whether another object keeps the value, and `snapshot` reads the value from this object."""
        return not (self.counters or self.histograms)

    @property
    def value(self) -> MetricValue:
        if not self.histograms:
            return sum(counter.value for counter in self.counters)
        values = [histogram.value for histogram in self.histograms]
        counts = tuple(map(sum, zip(*(value.counts for value in values), strict=True)))
        return HistogramValue(values[0].bounds, counts, sum(value.sum for value in values))


class Metrics:
    """The registry of one engine: every metric with its type, unit and help text.

    Metrics are registered while the engine is built; any thread may call `snapshot` at any time. Names have the form
    `part.what_unit`: `prefetch.bytes`, `restore.declined_loads`, `disk.read_only_flag`. Prometheus shows a metric under
    its `family` and labels, `admit_hit_tokens{tier="host"}`, or under its name if it has no family. Raises ValueError
    for a malformed name, a name without a unit, an empty help text, or a name already registered differently.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._reads: list[Callable[[], Mapping[str, float]]] = []

    def counter(self, name: str, help: str, family: str = "", **labels: str) -> Counter:
        """Return a new counter for `name`. Each thread that counts needs its own."""
        series, counter = self._owned(_info(name, "counter", help, family, labels), name), Counter()
        # This is a new list, because a snapshot in another thread may iterate over the old one.
        series.counters = [*series.counters, counter]
        return counter

    def histogram(self, name: str, help: str, family: str = "", **labels: str) -> Histogram:
        """Return a new histogram of bytes or seconds for `name`. Each thread that observes needs its own."""
        bounds = _BOUNDS.get(_unit_of(name))
        if bounds is None:
            raise ValueError(f"metric {name}: histograms are of bytes or seconds")
        series, histogram = self._owned(_info(name, "histogram", help, family, labels), name), Histogram(bounds)
        series.histograms = [*series.histograms, histogram]
        return histogram

    def transfer(self, name: str, of_bytes: str, of_seconds: str, **labels: str) -> tuple[Histogram, Histogram]:
        """Return two histograms of copies between two tiers: bytes of each copy, and seconds of each copy. `of_bytes`,
        `of_seconds`: help texts of these histograms."""
        return (
            self.histogram(f"{name}.bytes", of_bytes, "transfer_bytes", **labels),
            self.histogram(f"{name}.seconds", of_seconds, "transfer_seconds", **labels),
        )

    def gauge(self, name: str, help: str, read: Callable[[], float], family: str = "", **labels: str) -> None:
        """Register a gauge. Each call of `snapshot` gets the gauge's value by calling `read` on the same thread."""
        self.read_from({name: ("gauge", help)}, lambda: {name: read()}, {name: (family, labels)})

    def read_from(
        self,
        metrics: Mapping[str, tuple[MetricType, str]],
        read: Callable[[], Mapping[str, float]],
        families: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType({}),
    ) -> None:
        """Register counters and gauges that another object keeps. `metrics`: type and help text by name. `read`:
        returns the values of all these metrics by name. `families`: family and labels by name, for metrics that have a
        family."""
        for name, (type_, help) in metrics.items():
            if name in self._series:
                raise ValueError(f"metric {name} is registered already")
            self._series[name] = _Series(_info(name, type_, help, *families.get(name, ("", {}))))
        self._reads = [*self._reads, read]

    def snapshot(self) -> dict[str, MetricValue]:
        """Return all values by name, sorted. Counters and histograms are summed over their threads."""
        values: dict[str, MetricValue] = {
            name: series.value for name, series in self._series.copy().items() if not series.is_read
        }
        for read in self._reads:
            values.update(read())
        return dict(sorted(values.items()))

    def describe(self) -> dict[str, MetricInfo]:
        """Return the description of each metric by name, sorted."""
        return {name: series.info for name, series in sorted(self._series.copy().items())}

    def _owned(self, info: MetricInfo, name: str) -> _Series:
        """Return the series of a metric that threads count with their own counters or histograms."""
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(info)
        elif series.info != info or series.is_read:
            raise ValueError(f"metric {name} is registered as {series.info}")
        return series


def joined_help(members: Iterable[MetricInfo]) -> str:
    """Return the help text of a family. If its members have different help texts, return all of them, each with its
    labels."""
    helps = {", ".join(info.labels.values()): info.help for info in members}
    if len({*helps.values()}) == 1:
        return next(iter(helps.values()))
    return "; ".join(f"{of}: {text}" for of, text in helps.items())


def flattened(values: Mapping[str, MetricValue]) -> dict[str, float]:
    """Return each metric as one number. The number of a histogram is the sum of its observations."""
    return {name: value.sum if isinstance(value, HistogramValue) else value for name, value in values.items()}


def _unit_of(name: str) -> str:
    found = _UNIT.search(name)
    if found is None:
        raise ValueError(f"metric {name}: it must end in its unit, one of {', '.join(UNITS)}")
    return found[1]


def _info(name: str, type_: MetricType, help: str, family: str, labels: Mapping[str, str]) -> MetricInfo:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"metric {name!r}: names are dotted and in lower case, like disk.file_bytes")
    if not help:
        raise ValueError(f"metric {name}: the help text must say what it is")
    return MetricInfo(type_, _unit_of(name), help, family or name.replace(".", "_"), labels)
