"""Exports hicache's counters and gauges at SGLang's `/metrics`.

SGLang's `StorageMetrics` accepts only pages and GB/s of reads and writes. All other metrics are registered with the
`prometheus_client` of the process, from which SGLang collects its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hicache.metrics import HistogramValue, MetricInfo, Metrics, joined_help

_EVERY_S = 1.0
_FAMILIES: dict[str, Any] = {}  # shared by all ranks of the process, because prometheus_client accepts each name once


class Endpoint:
    """Exports the metrics of one rank, in SGLang's scheduler thread. `labels`: the labels of the rank."""

    def __init__(self, labels: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._labels = dict(labels)
        self._clock = clock
        self._counted: dict[str, float] = {}
        self._due_s = clock()

    def publish(self, metrics: Metrics) -> None:
        """Export the metrics that have changed, at most once a second."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + _EVERY_S
        about = metrics.describe()
        members: dict[str, list[MetricInfo]] = {}
        for info in about.values():
            members.setdefault(info.family, []).append(info)
        for name, value in metrics.snapshot().items():
            if isinstance(value, HistogramValue):
                continue
            info = about[name]
            labels = {**info.labels, **self._labels}
            help = joined_help(members[info.family])
            family = _family(info.type, f"hicache_{info.family}", help, tuple(labels)).labels(**labels)
            if info.type == "gauge":
                family.set(value)
                continue
            before = self._counted.get(name, 0.0)
            # A value below the previous value means that the store was reopened and counts from zero.
            family.inc(value - before if value >= before else value)
            self._counted[name] = value


def _family(kind: str, name: str, help: str, labels: tuple[str, ...]) -> Any:
    if name not in _FAMILIES:
        # The import is here, because SGLang must first set the folder in which its processes collect their metrics.
        from prometheus_client import Counter, Gauge

        if kind == "gauge":
            _FAMILIES[name] = Gauge(name, help, labels, multiprocess_mode="mostrecent")
        else:
            _FAMILIES[name] = Counter(name, help, labels)
    return _FAMILIES[name]
