"""The figures of `hicache top`, computed from the metrics of a vLLM or SGLang with a plug-in of hicache. Parses
Prometheus text without its package, because `hicache top` needs no extra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hicache.monitoring.figures import Series, sums_of
from hicache.pages.misses import MissReason

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _of_the_disk(prefix: str) -> dict[str, Series]:
    """Return the figures of hicache's gate and disk. `prefix`: prefix of hicache's metrics in this server."""
    return {
        "gate.loaded": Series(f"{prefix}load_gate_loads_total", {"decision": "accepted"}),
        "gate.loaded unmeasured": Series(f"{prefix}load_gate_loads_total", {"decision": "unmeasured"}),
        "gate.computed instead": Series(f"{prefix}load_gate_loads_total", {"decision": "declined"}),
        "drive.written a day": Series(f"{prefix}disk_drive_writes_per_day"),
        "faults.failed disk reads": Series(f"{prefix}disk_failures_total", {"direction": "read"}),
        "faults.failed disk writes": Series(f"{prefix}disk_failures_total", {"direction": "write"}),
        "faults.stalled disk jobs": Series(f"{prefix}disk_stalled_jobs_total"),
        "faults.breaker opens": Series(f"{prefix}disk_opens_total"),
        "faults.corrupt pages": Series(f"{prefix}disk_corrupt_pages_total"),
        "faults.store is read-only": Series(f"{prefix}disk_read_only_flag"),
    }


VLLM: Mapping[str, Series] = {
    "server.start_time_s": Series("process_start_time_seconds"),
    "requests.running": Series("vllm:num_requests_running"),
    "requests.waiting": Series("vllm:num_requests_waiting"),
    "prompt.tokens": Series("vllm:prompt_tokens_total"),
    **{
        f"hit_tokens.{tier}": Series("vllm:prompt_tokens_cached_by_source_total", {"source": tier})
        for tier in ("device", "host", "disk")
    },
    "tokens.reused": Series("vllm:prompt_tokens_cached_total"),
    "tokens.computed": Series("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "tokens.generated": Series("vllm:generation_tokens_total"),
    "used_bytes.host": Series("vllm:hicache_host_used_bytes"),
    "total_bytes.host": Series("vllm:hicache_host_total_bytes"),
    "used.disk": Series("vllm:hicache_disk_file_bytes"),
    "total.disk": Series("vllm:hicache_disk_budget_bytes"),
    **{
        f"moved_{unit}.{label}": Series(f"vllm:kv_offload_{way}_{name}_total")
        for label, way in (("loads", "load"), ("backups", "store"))
        for unit, name in (("bytes", "bytes"), ("s", "time"))
    },
    **{
        f"moved_{unit}.disk {way}s": Series(f"vllm:kv_offload_tiering_{way}_{name}_total")
        for way in ("read", "write")
        for unit, name in (("bytes", "bytes"), ("s", "time"))
    },
    **{
        f"missed_tokens.{reason.label.replace('_', ' ')}": Series(
            "vllm:hicache_missed_tokens_total", {"reason": reason.label}
        )
        for reason in MissReason
    },
    **_of_the_disk("vllm:hicache_"),
    "faults.dropped stores": Series("vllm:hicache_disk_dropped_jobs_total"),
}
# SGLang's endpoint has no start time. Its ranks have hicache's metrics each, and share one budget.
SGLANG: Mapping[str, Series] = {
    "requests.running": Series("sglang:num_running_reqs"),
    "requests.waiting": Series("sglang:num_queue_reqs"),
    "prompt.tokens": Series("sglang:prompt_tokens_total"),
    **{
        f"hit_tokens.{tier}": Series("sglang:cached_tokens_total", {"cache_source": source})
        for tier, source in (("device", "device"), ("host", "host"), ("disk", "storage"))
    },
    "tokens.reused": Series("sglang:cached_tokens_total"),
    "tokens.computed": Series("sglang:uncached_prompt_tokens_histogram_sum"),
    "tokens.generated": Series("sglang:generation_tokens_total"),
    "used.host": Series("sglang:hicache_host_used_tokens"),
    "used.disk": Series("hicache_disk_file_bytes"),
    "total.host": Series("sglang:hicache_host_total_tokens"),
    "total.disk": Series("hicache_disk_budget_bytes", is_shared=True),
    "moved_bytes.loads": Series("sglang:load_back_bytes_total"),
    "moved_s.loads": Series("sglang:load_back_duration_seconds_sum"),
    "moved_bytes.backups": Series("sglang:hicache_backup_bytes_total"),
    "moved_s.backups": Series("sglang:hicache_backup_duration_seconds_sum"),
    "moved_bytes.disk writes": Series("hicache_disk_put_raw_bytes_total"),
    **_of_the_disk("hicache_"),
}


class _Server(NamedTuple):
    """The metrics of a server. `prefix`: prefix of the server's own metrics."""

    prefix: str
    figures: Mapping[str, Series]

    @property
    def histograms(self) -> dict[str, str]:
        """Return the group of figures of each histogram, by the name of its buckets."""
        return {
            f"{self.prefix}time_to_first_token_seconds_bucket": "first_token_s",
            f"{self.prefix}inter_token_latency_seconds_bucket": "between_tokens_s",
        }


_SERVERS = (_Server("vllm:", VLLM), _Server("sglang:", SGLANG))


class Sample(NamedTuple):
    """A line of Prometheus text."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Yield the samples of Prometheus text. Lines that are no samples are skipped."""
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is not None:
            try:
                value = float(found[3])
            except ValueError:
                continue
            yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)


def server_figures(text: str) -> tuple[dict[str, float], dict[str, str]] | None:
    """Return the figures by name, and the model, of the `/metrics` of vLLM or SGLang; None if the text is of another
    server."""
    found = list(samples(text))
    for server in _SERVERS:
        name = server.figures["requests.running"].name
        running = next((sample for sample in found if sample.name == name), None)
        if running is not None:
            about = {"model": running.labels["model_name"]} if "model_name" in running.labels else {}
            return sums_of(found, server.figures) | _buckets(found, server.histograms), about
    return None


def _buckets(found: list[Sample], histograms: Mapping[str, str]) -> dict[str, float]:
    """Return the counts of the histograms by name of the figure, in the order of the bounds."""
    buckets: dict[tuple[str, float, str], float] = {}
    for sample in found:
        if group := histograms.get(sample.name):
            bound = sample.labels.get("le", "+Inf")
            key = (group, float(bound), bound)
            buckets[key] = buckets.get(key, 0.0) + sample.value
    return {f"{group}.{bound}": buckets[group, at, bound] for group, at, bound in sorted(buckets)}
