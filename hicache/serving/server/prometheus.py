"""The server's metrics in Prometheus' format, with those of the engine beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric, UntypedMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class ServerMetrics:
    """All metrics of one server, in a registry of its own. Written on the event loop; `text` from any thread."""

    def __init__(
        self,
        num_running: Callable[[], int],
        num_queued: Callable[[], int],
        engine_stats: Callable[[], Mapping[str, float]],
        engine_help: Mapping[str, str],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "hicache_requests", "Prompts by how they ended: stop, length, abort, timeout, error", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.http = Counter("hicache_http_responses", "HTTP responses", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("hicache_prompt_tokens", "Tokens of admitted prompts", registry=registry)
        self.cached_tokens = Counter(
            "hicache_cached_tokens", "Tokens of prompts that were found in a tier", ["tier"], registry=registry
        )
        self.generated_tokens = Counter("hicache_generation_tokens", "Tokens generated", registry=registry)
        self.ttft_s = Histogram(
            "hicache_time_to_first_token_seconds", "From arrival to the first token", buckets=_TTFT_S, registry=registry
        )
        self.inter_token_s = Histogram(
            "hicache_inter_token_seconds", "Between two tokens of a prompt", buckets=_INTER_TOKEN_S, registry=registry
        )
        self.request_s = Histogram(
            "hicache_request_seconds", "From arrival to the end of a prompt", buckets=_REQUEST_S, registry=registry
        )
        running = Gauge("hicache_requests_running", "Prompts that hold slots of the device tier", registry=registry)
        running.set_function(num_running)
        queued = Gauge("hicache_requests_queued", "Prompts that wait for slots", registry=registry)
        queued.set_function(num_queued)
        registry.register(_EngineCollector(engine_stats, engine_help))
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """`engine.stats()` as `hicache_engine_*`, dots as underscores."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], help: Mapping[str, str]) -> None:
        self._stats, self._help = stats, help

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats().items():
            yield UntypedMetricFamily(f"hicache_engine_{name.replace('.', '_')}", self._help.get(name, name), value)
