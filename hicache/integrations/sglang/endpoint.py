"""hicache's counters and gauges at SGLang's own `/metrics`, beside those that SGLang keeps of a backend.

SGLang's `StorageMetrics` has the pages and GB/s of reads and writes, and nothing else. The rest goes where it goes: to
the process' `prometheus_client`, from where SGLang gathers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hicache.metrics import HistogramValue, Metrics

_EVERY_S = 1.0
_FAMILIES: dict[str, Any] = {}  # of this process: prometheus_client takes each name once


class Endpoint:
    """One a rank, in SGLang's scheduler thread. `labels`: of the rank."""

    def __init__(self, labels: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._labels = dict(labels)
        self._clock = clock
        self._counted: dict[str, float] = {}
        self._due_s = clock()

    def publish(self, metrics: Metrics) -> None:
        """What has changed, once a second at most."""
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
            family.inc(value - before if value >= before else value)  # less: it was opened again
            self._counted[name] = value


def _family(kind: str, name: str, help: str, labels: tuple[str, ...]) -> Any:
    if name not in _FAMILIES:
        # Imported once SGLang has said where its processes gather what they count.
        from prometheus_client import Counter, Gauge

        if kind == "gauge":
            _FAMILIES[name] = Gauge(name, help, labels, multiprocess_mode="mostrecent")
        else:
            _FAMILIES[name] = Counter(name, help, labels)
    return _FAMILIES[name]
