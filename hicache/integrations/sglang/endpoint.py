"""Exports hicache's counters and gauges at SGLang's `/metrics`.

SGLang's `StorageMetrics` accepts only pages and GB/s of reads and writes. All other metrics are registered with the
`prometheus_client` of the process, from which SGLang collects its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hicache.metrics import HistogramValue, Metrics

_EVERY_S = 1.0
_FAMILIES: dict[str, Any] = {}  # one dict per process, because prometheus_client accepts each name once


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
        for name, value in metrics.snapshot().items():
            if isinstance(value, HistogramValue):
                continue
            info = about[name]
            labels = {**info.labels, **self._labels}
            family = _family(info.type, f"hicache_{info.family}", info.help, tuple(labels)).labels(**labels)
            if info.type == "gauge":
                family.set(value)
                continue
            before = self._counted.get(name, 0.0)
            # if the value is lower than before, the store was reopened
            family.inc(value - before if value >= before else value)
            self._counted[name] = value


def _family(kind: str, name: str, help: str, labels: tuple[str, ...]) -> Any:
    if name not in _FAMILIES:
        # Imported late: SGLang first sets the folder in which its processes collect their metrics.
        from prometheus_client import Counter, Gauge

        if kind == "gauge":
            _FAMILIES[name] = Gauge(name, help, labels, multiprocess_mode="mostrecent")
        else:
            _FAMILIES[name] = Counter(name, help, labels)
    return _FAMILIES[name]
