"""The figures that `hicache top` and the page at `/dashboard` show, and for each figure the metric that it is computed
from.

`FIGURES` names the metrics for `hicache top` and for the page; the server computes the values. `server_figures` has the
names of the metrics of vLLM and SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client.core import Metric

TIERS = ("device", "host", "disk", "remote")
# Upper bounds of the server's histograms, in seconds.
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
BETWEEN_TOKENS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_MOVES = {
    "loads": "host_to_device",
    "backups": "device_to_host",
    "disk reads": "disk_to_host",
    "disk writes": "host_to_disk",
}


@dataclass(frozen=True)
class Series:
    """All samples of the metric `name` that have these labels. The value of the series is the sum of these samples. If
    `is_shared`, each sample is a value of the whole server, and the value of the series is the largest sample."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_shared: bool = False


def _counts(group: str, name: str, bounds_s: Sequence[float]) -> dict[str, Series]:
    """Return, for each bound of a histogram, the series that counts observations up to this bound."""
    bounds = (*map(str, bounds_s), "+Inf")
    return {f"{group}.{bound}": Series(f"{name}_bucket", {"le": bound}) for bound in bounds}


# A figure is named GROUP.LABEL. All figures of a group are shown, each with its label. A figure is left out if the
# server does not export its metric, for example because the server does not have the tier.
FIGURES: Mapping[str, Series] = {
    "server.start_time_s": Series("process_start_time_seconds"),
    "requests.running": Series("hicache_requests_running"),
    "requests.waiting": Series("hicache_requests_queued"),
    "prompt.tokens": Series("hicache_admit_prompt_tokens_total"),
    **{f"hit_tokens.{tier}": Series("hicache_admit_hit_tokens_total", {"tier": tier}) for tier in TIERS},
    **{f"saved_s.{tier}": Series("hicache_saved_prefill_seconds_total", {"tier": tier}) for tier in TIERS},
    "tokens.reused": Series("hicache_admit_hit_tokens_total"),
    "tokens.computed": Series("hicache_admit_computed_tokens_total"),
    "tokens.generated": Series("hicache_generation_tokens_total"),
    **{f"used.{tier}": Series("hicache_tier_used_tokens", {"tier": tier}) for tier in TIERS[:2]},
    "used.disk": Series("hicache_disk_file_bytes"),
    **{f"total.{tier}": Series("hicache_tier_total_tokens", {"tier": tier}) for tier in TIERS[:2]},
    "total.disk": Series("hicache_disk_budget_bytes"),
    **{
        f"moved_bytes.{move}": Series("hicache_transfer_bytes_sum", {"direction": direction})
        for move, direction in _MOVES.items()
    },
    **{
        f"moved_s.{move}": Series("hicache_transfer_seconds_sum", {"direction": direction})
        for move, direction in _MOVES.items()
    },
    "drive.written a day": Series("hicache_disk_drive_writes_per_day"),
    "loads.timed_s": Series("hicache_restore_timed_seconds_total"),
    "loads.exposed_s": Series("hicache_restore_exposed_seconds_total"),
    **{
        f"evicted_tokens.{tier}, {outcome}": Series("hicache_evict_tokens_total", {"tier": tier, "outcome": outcome})
        for tier in TIERS[:2]
        for outcome in ("demoted", "lost")
    },
    **{
        f"prefetch.{outcome.replace('_', ' ')}": Series("hicache_prefetch_outcome_requests_total", {"outcome": outcome})
        for outcome in ("waited", "skipped", "abandoned", "coalesced", "deferred")
    },
    "gate.loaded": Series("hicache_restore_gate_loads_total", {"decision": "accepted"}),
    "gate.loaded unmeasured": Series("hicache_restore_gate_loads_total", {"decision": "unmeasured"}),
    "gate.computed instead": Series("hicache_restore_gate_loads_total", {"decision": "declined"}),
    **_counts("first_token_s", "hicache_time_to_first_token_seconds", FIRST_TOKEN_S),
    **_counts("between_tokens_s", "hicache_inter_token_seconds", BETWEEN_TOKENS_S),
    "faults.failed requests": Series("hicache_requests_total", {"outcome": "error"}),
    "faults.failed backups": Series("hicache_backup_failures_total"),
    "faults.failed loads": Series("hicache_restore_failures_total"),
    "faults.failed disk reads": Series("hicache_disk_failures_total", {"direction": "read"}),
    "faults.failed disk writes": Series("hicache_disk_failures_total", {"direction": "write"}),
    "faults.stalled disk jobs": Series("hicache_disk_stalled_jobs_total"),
    "faults.breaker opens": Series("hicache_disk_opens_total"),
    "faults.corrupt pages": Series("hicache_disk_corrupt_pages_total"),
    "faults.copies dropped": Series("hicache_disk_backup_dropped_pages_total"),
    "faults.failed copies": Series("hicache_disk_backup_failed_pages_total"),
    "faults.lost pages": Series("hicache_prefetch_lost_pages_total"),
    "faults.pages not stored": Series("hicache_persist_failed_pages_total"),
    "faults.store is read-only": Series("hicache_disk_read_only_flag"),
}


class Sampled(Protocol):
    """A sample of a metric, with the attributes of `prometheus_client`'s class."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def value(self) -> float: ...


def figures(families: Iterable[Metric]) -> dict[str, float]:
    """Return the value of each figure of hicache's own server by name, in the order of `FIGURES`."""
    return sums_of((sample for family in families for sample in family.samples), FIGURES)


def sums_of(samples: Iterable[Sampled], table: Mapping[str, Series]) -> dict[str, float]:
    """Return the value of each series of `table` by name, in its order. Series without samples, and values that are not
    finite, are left out."""
    by_name: dict[str, list[tuple[str, Series]]] = {}
    for figure, series in table.items():
        by_name.setdefault(series.name, []).append((figure, series))
    found: dict[str, float] = {}
    for sample in samples:
        for figure, series in by_name.get(sample.name, ()):
            if series.labels.items() <= sample.labels.items() and math.isfinite(sample.value):
                before = found.get(figure, 0.0)
                found[figure] = max(before, sample.value) if series.is_shared else before + sample.value
    return {figure: found[figure] for figure in table if figure in found}
