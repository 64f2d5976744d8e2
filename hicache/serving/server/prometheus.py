"""The metrics of the server and of its engine in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hicache.metrics import HistogramValue, MetricInfo, MetricValue, joined_help
from hicache.monitoring.figures import BETWEEN_TOKENS_S, FIRST_TOKEN_S, TIERS

_OUTCOMES = ("stop", "length", "abort", "timeout", "error")
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class ServerMetrics:
    """All metrics of one server, in a separate registry. Only the event loop writes metrics; any thread may call
    `text`."""

    def __init__(
        self,
        model_name: str,
        num_running: Callable[[], int],
        num_queued: Callable[[], int],
        engine_metrics: Callable[[], Mapping[str, MetricValue]],
        engine_described: Mapping[str, MetricInfo],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.about = {"version": metadata.version("hicache"), "model": model_name}
        Info("hicache", "Version of the server, and the model that it serves", registry=registry).info(self.about)
        self.requests = Counter(
            "hicache_requests", f"Ended prompts by outcome: {', '.join(_OUTCOMES)}", ["outcome"], registry=registry
        )
        for outcome in _OUTCOMES:
            self.requests.labels(outcome)  # begins at 0, so that `rate()` counts the first error
        self.http = Counter("hicache_http_responses", "HTTP responses", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter(
            "hicache_prompt_tokens", "Tokens of admitted prompts that have ended", registry=registry
        )
        self.cached_tokens = Counter(
            "hicache_cached_tokens", "Hit tokens of admitted prompts that have ended", ["tier"], registry=registry
        )
        self.saved_s = Counter(
            "hicache_saved_prefill_seconds",
            "Time that computing the hit tokens would have taken, by the measured prefill speed",
            ["tier"],
            registry=registry,
        )
        for tier in TIERS:
            self.saved_s.labels(tier)
        self.generated_tokens = Counter("hicache_generation_tokens", "Tokens generated", registry=registry)
        self.ttft_s = Histogram(
            "hicache_time_to_first_token_seconds",
            "Time from the arrival of a prompt to its first token",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "hicache_inter_token_seconds",
            "Time between two tokens of an answer",
            buckets=BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.request_s = Histogram(
            "hicache_request_seconds",
            "Time from the arrival of a prompt to the end of its answer",
            buckets=_REQUEST_S,
            registry=registry,
        )
        running = Gauge("hicache_requests_running", "Prompts that have slots of the device tier", registry=registry)
        running.set_function(num_running)
        queued = Gauge("hicache_requests_queued", "Prompts that wait for slots", registry=registry)
        queued.set_function(num_queued)
        registry.register(EngineCollector(engine_metrics, engine_described))
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Collects the engine's metrics at each scrape. The name of a metric in Prometheus is `hicache_`, the family, and
    for counters `_total`. If a metric lacks a label of its family, the label is empty, which Prometheus treats as
    absent.

    `metrics`: returns the result of `CacheEngine.metrics`, possibly slightly old. `described`:
    `CacheEngine.describe()`.
    """

    def __init__(self, metrics: Callable[[], Mapping[str, MetricValue]], described: Mapping[str, MetricInfo]) -> None:
        self._metrics = metrics
        self._described = described
        self._members: dict[str, list[MetricInfo]] = {}
        for info in described.values():
            self._members.setdefault(info.family, []).append(info)

    def collect(self) -> Iterator[Metric]:
        families = {family: _family(members) for family, members in self._members.items()}
        for name, value in self._metrics().items():
            info = self._described[name]
            labels = [info.labels.get(label, "") for label in _labels(self._members[info.family])]
            _add(families[info.family], labels, value)
        yield from (family for family in families.values() if family.samples)

    def describe(self) -> list[Metric]:
        """Return the metric families without values. Prometheus calls this at registration, so that it does not collect
        values then."""
        return [_family(members) for members in self._members.values()]


def _family(members: Sequence[MetricInfo]) -> Metric:
    first = members[0]
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    kind: Callable[..., Metric] = kinds[first.type]
    return kind(f"hicache_{first.family}", joined_help(members), labels=_labels(members))


def _labels(members: Sequence[MetricInfo]) -> list[str]:
    return [*{label: None for info in members for label in info.labels}]


def _add(family: Metric, labels: list[str], value: MetricValue) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramValue)
        bounds = [*map(floatToGoString, (*value.bounds, float("inf")))]
        family.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        assert not isinstance(value, HistogramValue)
        family.add_metric(labels, value)
