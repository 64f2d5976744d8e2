"""Exports the metrics of the stores and the gate through vLLM. The names are those of hicache's families with the
prefix `vllm:hicache_`; the directory of the store is a label.

vLLM declares the families in the process of its API server, which has no tier. Between steps, vLLM sends the values of
the tier to this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from hicache.flow.cost import CostModel
from hicache.integrations.vllm.gate import LoadGate
from hicache.metrics import Counter, MetricInfo, Metrics, flattened, joined_help
from hicache.stores.disk_and_remote import register_reads
from hicache.stores.tier import register_tier
from hicache.tiers import DISK, REMOTE

EVERY_S = 1.0
_NOT_MEASURED = {"cost.load_bytes_per_second"}  # vLLM, not hicache, loads from the CPU tier


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return all families by name, in the form in which vLLM declares metrics."""
    metrics = Metrics()
    LoadGate(CostModel("auto", {DISK: 1, REMOTE: 1}, metrics, time.monotonic), time.monotonic, metrics, job_bytes=1)
    dropped_jobs(metrics)
    misfit_pages(metrics)
    waited_requests(metrics)
    for store in (DISK, REMOTE):
        register_tier(metrics, store.name, dict, lambda queue: {})
    register_reads(metrics, lambda: 0)
    families: dict[str, list[MetricInfo]] = {}
    for name, info in metrics.describe().items():
        if name not in _NOT_MEASURED:
            families.setdefault(_family(info), []).append(info)
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {
        family: kinds[members[0].type](joined_help(members), labelnames=("store", *sorted(members[0].labels)))
        for family, members in families.items()
    }


def dropped_jobs(metrics: Metrics) -> Counter:
    return metrics.counter(
        "disk.dropped_jobs", "write jobs that the tier refused, mostly because too many bytes were queued"
    )


def waited_requests(metrics: Metrics) -> Counter:
    return metrics.counter("gate.waited_requests", "requests that waited for chunks that another node computed")


def misfit_pages(metrics: Metrics) -> Counter:
    return metrics.counter(
        "packing.misfit_pages", "chunks that did not fit the packed size, and so were not stored on disk"
    )


def _family(info: MetricInfo) -> str:
    return f"vllm:hicache_{info.family}"


class TierMetrics:
    """Reports changed values of the tier's metrics, at most every `EVERY_S` seconds. The tier owns this object.
    `store`: value of the label `store`."""

    def __init__(self, metrics: Metrics, store: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._described = metrics.describe()
        self._reported: dict[str, float] = {}
        self._next_s = clock()

    def take(self) -> OffloadingConnectorStats | None:
        """Return the increments of counters and the new values of gauges since the last report; None if no report is
        due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        stats = OffloadingConnectorStats()
        for name, number in flattened(self._metrics.snapshot()).items():
            value, reported = (
                float(number),
                self._reported.get(name),
            )  # float also for flags and states, for serialization
            if value == reported or name in _NOT_MEASURED:
                continue
            self._reported[name], info = value, self._described[name]
            labels = (self._store, *(text for _, text in sorted(info.labels.items())))
            if info.type == "gauge":
                stats.set_gauge(_family(info), value, labels)
            else:  # a lower value means that the store process restarted, and its counters with it
                stats.increase_counter(
                    _family(info), value - (reported or 0) if value >= (reported or 0) else value, labels
                )
        return stats
