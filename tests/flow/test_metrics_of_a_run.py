"""Metrics over random requests: counters only grow, and tokens and bytes add up across the tiers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import component_case
from hicache import CacheEngine, CacheRequest, ModelGeometry, build_engine
from hicache.config import DiskConfig
from hicache.metrics import HistogramValue, MetricValue, flattened
from hicache.serving.server.prometheus import EngineCollector
from toy_model import GEOMETRY, compute, config, prompt

PAGE, TOKEN_BYTES = 8, 192
Served = tuple[CacheEngine, dict[str, int]]
TRANSFERS = ("restore", "backup", "prefetch", "persist")


def prompts(seed: int, count: int) -> Iterator[np.ndarray]:
    """Prompts that share prefixes of several lengths and need more pages than device and host hold."""
    rng = np.random.default_rng(seed)
    bases = [rng.integers(0, 50, 96) for _ in range(12)]
    for _ in range(count):
        base = bases[int(rng.integers(len(bases)))]
        yield np.concatenate([base[: int(rng.integers(8, 97))], rng.integers(0, 50, int(rng.integers(1, 24)))])


def grown(before: dict[str, MetricValue], after: dict[str, MetricValue], engine: CacheEngine) -> bool:
    """Whether no counter and no bucket is smaller than before."""
    for name, info in engine.describe().items():
        old, new = before[name], after[name]
        if isinstance(old, HistogramValue):
            assert isinstance(new, HistogramValue) and old.bounds == new.bounds
            if any(b < a for a, b in zip((*old.counts, old.sum), (*new.counts, new.sum), strict=True)):
                return False
        elif info.type == "counter" and new < old:  # type: ignore[operator]
            return False
    return True


@pytest.fixture(scope="module", params=["write_through", "write_back"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CacheEngine, dict[str, int]]]:
    """An engine after a random run, and the sums of the hits of its leases."""
    disk = DiskConfig(path=str(tmp_path_factory.mktemp("disk") / "store"), budget_bytes=1 << 26)
    settings = {"host_bytes": 26 * PAGE * TOKEN_BYTES, "write_policy": request.param, "disk": disk}
    asked = {"requests": 0, "prompt": 0, "device": 0, "host": 0, "disk": 0}
    with build_engine(config(**settings), GEOMETRY) as engine:
        before = engine.metrics()
        for n, tokens in enumerate(prompts(1, 80)):
            engine.prefetch(f"r{n}", tokens, mode="wait_complete")
            engine.flush()
            with engine.acquire(CacheRequest(f"r{n}", tokens)) as lease:
                compute(engine, lease, tokens, lease.cached_len, len(tokens))
                engine.commit(lease, tokens)
            asked["requests"] += 1
            asked["prompt"] += len(tokens)
            for tier in ("device", "host", "disk"):
                asked[tier] += getattr(lease.hit, tier)
            engine.flush()
            engine.check()
            after = engine.metrics()
            assert grown(before, after, engine)
            before = after
        yield engine, asked


def test_tokens_and_bytes_are_conserved(served: Served) -> None:
    """Hit and computed tokens together are the requested tokens. The bytes of a transfer are those of its tokens. Each
    token that reached the host is still there or was evicted."""
    engine, asked = served
    stats, values = engine.stats(), engine.metrics()
    hits = {tier: stats[f"admit.{tier}_hit_tokens"] for tier in ("device", "host", "disk")}
    assert hits == {tier: asked[tier] for tier in hits} and all(hits.values())
    assert stats["admit.requests"] == asked["requests"]
    assert sum(hits.values()) + stats["admit.computed_tokens"] == stats["admit.prompt_tokens"] == asked["prompt"]
    assert stats["admit.hit_ratio"] == sum(hits.values()) / asked["prompt"]

    page_bytes = PAGE * TOKEN_BYTES
    moved = {transfer: stats[f"{transfer}.bytes"] / TOKEN_BYTES for transfer in TRANSFERS}
    assert moved["restore"] == hits["host"] + hits["disk"]
    assert moved["prefetch"] == stats["prefetch.read_tokens"] == stats["disk.hit_pages"] * PAGE
    # Pages that return to the host are sent to the store again, but not written twice.
    assert stats["persist.bytes"] >= stats["disk.put_raw_bytes"] == stats["disk.put_pages"] * page_bytes
    evicted = stats["evict.host_demoted_tokens"]
    assert stats["evict.host_lost_tokens"] == 0 < evicted  # the disk had all evicted tokens
    assert moved["backup"] + moved["prefetch"] == stats["host.used_tokens"] + evicted
    assert stats["device.used_tokens"] + stats["device.free_tokens"] == stats["device.total_tokens"] == 128
    for transfer in TRANSFERS:
        num_bytes, seconds = values[f"{transfer}.bytes"], values[f"{transfer}.seconds"]
        assert isinstance(num_bytes, HistogramValue) and isinstance(seconds, HistogramValue)
        assert num_bytes.count == seconds.count > 0
    assert 0 <= stats["restore.exposed_seconds"] <= stats["restore.timed_seconds"] == stats["restore.seconds"]
    gated = sum(stats[f"restore.{decision}_loads"] for decision in ("accepted", "declined", "unmeasured"))
    assert gated >= values["restore.bytes"].count  # type: ignore[union-attr]


def test_prometheus_reads_the_same(served: Served) -> None:
    """The Prometheus exposition parses, and has each metric once, under its name and labels, with its type and
    value."""
    engine, _ = served
    registry, values = CollectorRegistry(), engine.metrics()
    registry.register(EngineCollector(lambda: values, engine.describe()))
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert len(samples) == sum(len(family.samples) for family in families.values())
    for name, info in engine.describe().items():
        exposed, value = f"hicache_{info.family}", values[name]
        family, labels = families[exposed], frozenset(info.labels.items())
        assert family.type == info.type and family.documentation
        if not isinstance(value, HistogramValue):
            assert samples.pop((exposed + "_total" * (info.type == "counter"), labels)) == value, name
            continue
        assert samples.pop((f"{exposed}_sum", labels)) == value.sum
        assert samples.pop((f"{exposed}_count", labels)) == value.count
        below = 0
        for bound, count in zip((*value.bounds, np.inf), value.counts, strict=True):
            below += count
            (bucket,) = [
                key
                for key in samples
                if key[0] == f"{exposed}_bucket" and labels < key[1] and float(dict(key[1])["le"]) == bound
            ]
            assert samples.pop(bucket) == below
    assert not samples
    assert flattened(values) == engine.stats()


@pytest.mark.parametrize("model", component_case.EACH_MODEL)
def test_a_page_without_host_capacity_counts_once(model: ModelGeometry) -> None:
    """A prompt that is longer than the host may be committed and admitted any number of times: each token counts once,
    as copied to the host or as skipped. Each page of tokens counts at most one window or state."""
    tokens, sizes = prompt(1, 20 * PAGE + 1), {"device_tokens": 512, "mamba_size": 32, "window_tokens": 512}
    sizes |= {"host_bytes": 13 * PAGE * TOKEN_BYTES, "host_states": 3, "write_policy": "write_through"}
    settings = component_case.config(**sizes)
    with build_engine(settings, model) as engine, engine.acquire(CacheRequest("a", tokens)) as lease:
        for end in range(2 * PAGE, 20 * PAGE + 1, 2 * PAGE):
            component_case.compute(engine, lease, tokens, end - 2 * PAGE, end, model)
            engine.commit(lease, tokens[:end])
            engine.flush()
        with engine.acquire(CacheRequest("b", tokens)):
            engine.flush()
        full, *others = (len(component.pages) for component in engine.inspect.context.components)
        stats = engine.stats()
        assert full < 20 and full * PAGE + stats["backup.skipped_tokens"] == 20 * PAGE
        assert sum(others) + stats["backup.skipped_pages"] <= 20
