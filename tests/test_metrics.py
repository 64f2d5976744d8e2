"""Metrics are exact with several threads, cost nothing when idle, and each name has one meaning."""

from __future__ import annotations

import itertools
import math
import random
import threading
from pathlib import Path

import pytest

from component_case import PACKABLE, WIDER, config
from hicache import build_engine
from hicache.config import DiskConfig
from hicache.metrics import BYTES_BOUNDS, Counter, HistogramValue, MetricInfo, Metrics, flattened
from memory_store import MemoryPageStore


def test_counts_of_several_threads_add_up_exactly() -> None:
    """No increment is lost when each thread owns its counter."""
    metrics = Metrics()
    counters = [metrics.counter("disk.read_pages", "pages read") for _ in range(4)]

    def count(counter: Counter) -> None:
        for step in range(20_000):
            counter.value += step % 3

    threads = [threading.Thread(target=count, args=(counter,)) for counter in counters]
    for thread in threads:
        thread.start()
    seen = [metrics.snapshot()["disk.read_pages"] for _ in range(50)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert metrics.snapshot() == {"disk.read_pages": 4 * sum(step % 3 for step in range(20_000))}


def test_names_come_sorted_and_described() -> None:
    """A snapshot and the descriptions list the same names in the same, sorted order. A metric without a family is its
    own family."""
    metrics = Metrics()
    metrics.counter("evict.host_tokens", "tokens evicted", "evict_tokens", tier="host").value += 5
    metrics.gauge("alloc.free_tokens", "free slots", lambda: 2.5)
    metrics.read_from({"disk.hit_pages": ("counter", "pages read")}, lambda: {"disk.hit_pages": 7})
    metrics.counter("disk.read_bytes", "bytes read")
    expected = {"alloc.free_tokens": 2.5, "disk.hit_pages": 7, "disk.read_bytes": 0, "evict.host_tokens": 5}
    assert list(metrics.snapshot().items()) == list(expected.items())
    described = metrics.describe()
    assert list(described) == list(expected)
    assert described["evict.host_tokens"] == MetricInfo(
        "counter", "tokens", "tokens evicted", "evict_tokens", {"tier": "host"}
    )
    assert described["disk.hit_pages"] == MetricInfo("counter", "pages", "pages read", "disk_hit_pages", {})


def test_the_metrics_of_an_engine_have_one_vocabulary(tmp_path: Path, device: str) -> None:
    """The engine has windows, states, packed pages and all tiers. Counters only count, and ratios and rates are gauges.
    The metrics of a family have one type and the same labels, with different values."""
    described: dict[str, MetricInfo] = {}
    for model in (WIDER["window"], WIDER["hybrid"]):
        disk = DiskConfig(path=tmp_path / str(model.window), budget_bytes=1 << 26)
        settings = config(disk=disk, device=device, kv_packing="4", **PACKABLE)
        with build_engine(settings, model, remote=MemoryPageStore(1 << 20)) as engine:
            assert engine.metrics().keys() == engine.describe().keys() == engine.stats().keys()
            described |= engine.describe()
    assert len(described) > 100
    families: dict[str, list[MetricInfo]] = {}
    for name, info in described.items():
        if info.unit in ("ratio", "state", "flag") or info.unit.endswith("_per_second"):
            assert info.type == "gauge", name
        if info.unit in ("attempts", "failures", "errors", "opens", "retries", "evictions", "touches"):
            assert info.type == "counter", name
        families.setdefault(info.family, []).append(info)
    assert len(families) < len(described)
    for family, members in families.items():
        assert len({(info.type, *info.labels) for info in members}) == 1, family
        assert len({(*info.labels.values(),) for info in members}) == len(members), family


def test_a_name_means_one_thing() -> None:
    """A second meaning or kind for an existing name is refused and changes nothing."""
    metrics = Metrics()
    metrics.counter("disk.read_bytes", "bytes read").value += 1
    metrics.gauge("host.free_pages", "free pages", lambda: 4)
    with pytest.raises(ValueError):
        metrics.counter("disk.read_bytes", "bytes written")
    with pytest.raises(ValueError):
        metrics.histogram("disk.read_bytes", "bytes read")
    with pytest.raises(ValueError):
        metrics.gauge("disk.read_bytes", "bytes read", lambda: 9)
    with pytest.raises(ValueError):
        metrics.counter("host.free_pages", "free pages")
    with pytest.raises(ValueError):
        metrics.histogram("disk.read_pages", "pages read")
    assert metrics.snapshot() == {"disk.read_bytes": 1, "host.free_pages": 4}


def test_a_histogram_puts_each_value_in_its_bucket() -> None:
    """A bucket holds values up to its bound, and the last bucket holds all larger values. Values of all threads add up,
    and a flat view has the sum."""
    metrics, rng = Metrics(), random.Random(0)
    histograms = [metrics.histogram("disk.read_bytes", "bytes of a read") for _ in range(2)]
    values = [
        *BYTES_BOUNDS,
        *(bound + 1 for bound in BYTES_BOUNDS),
        0,
        *(rng.lognormvariate(20, 6) for _ in range(500)),
    ]
    for index, value in enumerate(values):
        histograms[index % 2].observe(value)
    found = metrics.snapshot()["disk.read_bytes"]
    assert isinstance(found, HistogramValue) and found.bounds == BYTES_BOUNDS
    edges = [-1, *BYTES_BOUNDS, math.inf]
    expected = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]
    assert found.counts == tuple(expected) and found.count == len(values)
    assert found.sum == pytest.approx(math.fsum(values))
    assert flattened(metrics.snapshot()) == {"disk.read_bytes": found.sum}
