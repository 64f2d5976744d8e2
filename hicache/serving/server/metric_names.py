"""How Prometheus sees the engine's metrics: which are one family with labels. All others keep their name.

prefetch.landed_tokens  ->  hicache_prefetch_landed_tokens_total
admit.host_hit_tokens   ->  hicache_admit_hit_tokens_total{tier="host"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Series:
    """One series of a family, whose name lacks the `_total` of counters. `help`: of the family; empty: the metric's."""

    family: str
    help: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Family:
    """`members`: for each metric the values of `labels`."""

    name: str
    help: str
    labels: tuple[str, ...]
    members: Mapping[str, tuple[str, ...]]


_MOVEMENTS = {
    "restore": ("load", "host_to_device"),
    "backup": ("backup", "device_to_host"),
    "prefetch": ("read", "disk_to_host"),
    "persist": ("write", "host_to_disk"),
    "remote_prefetch": ("read", "remote_to_host"),
    "remote_persist": ("write", "host_to_remote"),
}
_MEMORY = ("device", "host")
_STORES = ("disk", "remote")
_TIERS = (*_MEMORY, *_STORES)
_QUEUES = {"reads": "read", "writes": "write"}
_METHODS = ("strided", "batched", "zero_copy")
_TRANSFERS = {"transfer": "full", "transfer_swa": "swa", "transfer_mamba": "mamba"}


def _moved(what: str, help: str) -> _Family:
    members = {f"{flow}.{what}": labels for flow, labels in _MOVEMENTS.items()}
    return _Family(f"movement_{what}", help, ("movement", "direction"), members)


def _queues(metric: str, help: str, name: str = "") -> list[_Family]:
    """One for each store."""
    return [
        _Family(
            f"{store}_{name or metric}",
            help,
            ("direction",),
            {f"{store}.{queue}_{metric}": (direction,) for queue, direction in _QUEUES.items()},
        )
        for store in _STORES
    ]


def _link(what: str, help: str) -> _Family:
    members = {
        f"{part}.{direction}_{method}_{what}": (component, direction, method)
        for part, component in _TRANSFERS.items()
        for direction in ("up", "down")
        for method in _METHODS
    }
    return _Family(f"transfer_link_{what}", help, ("component", "direction", "method"), members)


_FAMILIES = (
    _moved("bytes", "bytes of one copy between tiers"),
    _moved("seconds", "time of one copy between tiers"),
    _Family(
        "movement_bytes_per_second",
        "measured rate: of loads together, of reads that of one reader",
        ("movement", "direction"),
        {
            "cost.load_bytes_per_second": _MOVEMENTS["restore"],
            "cost.read_bytes_per_second": _MOVEMENTS["prefetch"],
            "cost.remote_read_bytes_per_second": _MOVEMENTS["remote_prefetch"],
        },
    ),
    _Family(
        "admit_hit_tokens",
        "tokens of admitted prompts by the tier that had them",
        ("tier",),
        {f"admit.{tier}_hit_tokens": (tier,) for tier in _TIERS},
    ),
    _Family(
        "admit_refused_attempts",
        "admissions refused for now, by reason",
        ("reason",),
        {
            f"admit.{reason}_attempts": (reason,)
            for reason in ("out_of_slots", "out_of_rows", "out_of_states", "transfer_busy", "prefetch_pending")
        },
    ),
    _Family(
        "evict_tokens",
        "tokens evicted from a tier: demoted where a tier below (of the host: any other) holds them, else lost",
        ("tier", "outcome"),
        {f"evict.{tier}_{outcome}_tokens": (tier, outcome) for tier in _MEMORY for outcome in ("demoted", "lost")},
    ),
    *(
        _Family(f"tier_{what}", help, ("tier",), {f"{tier}.{what}": (tier,) for tier in tiers})
        for what, help, tiers in (
            ("total_tokens", "tokens that a tier can hold", _MEMORY),
            ("used_tokens", "tokens that the cache or a request holds in a tier", _MEMORY),
            ("evictable_tokens", "tokens of a tier that nobody needs now", _MEMORY),
            ("used_ratio", "used share of a tier: of its tokens, of a store's budget", _TIERS),
        )
    ),
    _Family(
        "restore_gate_loads",
        "decisions of the load gate: accepted, declined (recomputed instead), unmeasured (loaded, a speed unknown)",
        ("decision",),
        {f"restore.{decision}_loads": (decision,) for decision in ("accepted", "declined", "unmeasured")},
    ),
    _Family(
        "prefetch_outcome_requests",
        "prefetches by what became of them; one may count under several outcomes",
        ("outcome",),
        {
            f"prefetch.{outcome}_requests": (outcome,)
            for outcome in ("waited", "skipped", "gave_up", "shared", "postponed")
        },
    ),
    *_queues("state", "breaker: 0 closed, 1 half open, 2 open", name="breaker_state"),
    *_queues("opens", "times that the breaker opened"),
    *_queues("failures", "calls that the store failed"),
    *_queues("refused_jobs", "jobs for which the store was not asked, because the breaker was open"),
    *_queues("stalled_jobs", "jobs under way for longer than the tier's I/O timeout"),
    *_queues("queued_jobs", "jobs that wait for a thread"),
    *_queues("queued_bytes", "bytes of their pages"),
    _Family(
        "transfer_copies",
        "copies between device and host, by component and method",
        ("component", "method"),
        {
            f"{part}.{method}_copies": (component, method)
            for part, component in _TRANSFERS.items()
            for method in ("unstaged", *_METHODS)
        },
    ),
    _link("bytes_per_second", "rate of the link by method, measured at the start"),
    _link("piece_seconds", "what a piece costs beside its bytes by method, measured at the start"),
    _link("issue_seconds", "what a piece costs the host by method, measured at the start"),
)

_SERIES = {
    metric: Series(f"hicache_{family.name}", family.help, dict(zip(family.labels, values, strict=True)))
    for family in _FAMILIES
    for metric, values in family.members.items()
}


def series_of(metric: str) -> Series:
    """What Prometheus calls a metric of the engine."""
    return _SERIES.get(metric) or Series(f"hicache_{metric.replace('.', '_')}")
