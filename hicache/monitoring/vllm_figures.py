"""The figures of `hicache top`, computed from the metrics of a vLLM with a plug-in of hicache. Parses Prometheus text
without its package, because `hicache top` needs no extra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hicache.monitoring.figures import Series, sums_of
from hicache.pages.misses import MissReason

_RUNNING = "vllm:num_requests_running"
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TRANSFERS = {"loads": "load", "backups": "store"}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds_bucket": "first_token_s",
    "vllm:inter_token_latency_seconds_bucket": "between_tokens_s",
}
_OWN = "vllm:hicache_"
FIGURES: Mapping[str, Series] = {
    "server.start_time_s": Series("process_start_time_seconds"),
    "requests.running": Series(_RUNNING),
    "requests.waiting": Series("vllm:num_requests_waiting"),
    "prompt.tokens": Series("vllm:prompt_tokens_total"),
    **{
        f"hit_tokens.{tier}": Series("vllm:prompt_tokens_cached_by_source_total", {"source": tier})
        for tier in ("device", "host", "disk")
    },
    "tokens.reused": Series("vllm:prompt_tokens_cached_total"),
    "tokens.computed": Series("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "tokens.generated": Series("vllm:generation_tokens_total"),
    "used.disk": Series(f"{_OWN}disk_file_bytes"),
    "total.disk": Series(f"{_OWN}disk_budget_bytes"),
    **{
        f"moved_{unit}.{label}": Series(f"vllm:kv_offload_{way}_{name}_total")
        for label, way in _TRANSFERS.items()
        for unit, name in (("bytes", "bytes"), ("s", "time"))
    },
    **{
        f"moved_{unit}.disk {way}s": Series(f"vllm:kv_offload_tiering_{way}_{name}_total")
        for way in ("read", "write")
        for unit, name in (("bytes", "bytes"), ("s", "time"))
    },
    **{
        f"missed_tokens.{reason.label.replace('_', ' ')}": Series(
            f"{_OWN}missed_tokens_total", {"reason": reason.label}
        )
        for reason in MissReason
    },
    "gate.loaded": Series(f"{_OWN}load_gate_loads_total", {"decision": "accepted"}),
    "gate.loaded unmeasured": Series(f"{_OWN}load_gate_loads_total", {"decision": "unmeasured"}),
    "gate.computed instead": Series(f"{_OWN}load_gate_loads_total", {"decision": "declined"}),
    "drive.writes a day": Series(f"{_OWN}disk_drive_writes_per_day"),
    "faults.failed disk reads": Series(f"{_OWN}disk_failures_total", {"direction": "read"}),
    "faults.failed disk writes": Series(f"{_OWN}disk_failures_total", {"direction": "write"}),
    "faults.stalled disk jobs": Series(f"{_OWN}disk_stalled_jobs_total"),
    "faults.breaker opens": Series(f"{_OWN}disk_opens_total"),
    "faults.corrupt pages": Series(f"{_OWN}disk_corrupt_pages_total"),
    "faults.dropped stores": Series(f"{_OWN}disk_dropped_jobs_total"),
    "faults.store is read-only": Series(f"{_OWN}disk_read_only_flag"),
}


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


def vllm_figures(text: str) -> tuple[dict[str, float], dict[str, str]] | None:
    """Return the figures by name, and the model, of a vLLM's `/metrics`; None if the text is not vLLM's."""
    found = list(samples(text))
    running = next((sample for sample in found if sample.name == _RUNNING), None)
    if running is None:
        return None
    figures = sums_of(found, FIGURES)
    buckets: dict[tuple[str, float, str], float] = {}
    for sample in found:
        if group := _HISTOGRAMS.get(sample.name):
            bound = sample.labels.get("le", "+Inf")
            key = (group, float(bound), bound)
            buckets[key] = buckets.get(key, 0.0) + sample.value
    figures |= {f"{group}.{bound}": buckets[group, at, bound] for group, at, bound in sorted(buckets)}
    return figures, {"model": running.labels["model_name"]} if "model_name" in running.labels else {}
