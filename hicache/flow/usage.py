"""What the tiers of an engine hold, and what its transfers count, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache.flow.context import EngineContext
from hicache.metrics import MetricType
from hicache.tiers import FULL
from hicache.transfer.base import TransferBackend

_TRANSFER_HELP: dict[str, tuple[MetricType, str]] = {
    "copies": ("counter", "copies made by this method"),
    "delayed_copies": ("counter", "copies to the host that waited for the first layer of a load"),
    "bytes_per_second": ("gauge", "rate of the link by this method, measured at the start"),
    "piece_seconds": ("gauge", "what a piece costs beside its bytes by this method, measured at the start"),
    "issue_seconds": ("gauge", "what a piece costs the host by this method, measured at the start"),
}


def register_usage(context: EngineContext, num_leases: Callable[[], int]) -> None:
    """Enter how full the tiers and the tree are, and the numbers of the transfer backends, in the engine's metrics."""
    tree, gauge, full = context.tree, context.metrics.gauge, context.full
    total, available, of_tier = full.capacity, full.available, _gauges_of(context, "device")
    of_tier("total_tokens", "slots of the device tier", lambda: total)
    gauge("device.free_tokens", "slots nobody holds", available)
    of_tier("used_tokens", "slots that the cache or a request holds", lambda: total - available())
    of_tier("used_ratio", "used_tokens over total_tokens", lambda: 1 - available() / total)
    of_tier("evictable_tokens", "tokens cached and needed by no request", lambda: tree.evictable(FULL))
    gauge(
        "device.protected_tokens",
        "tokens cached and needed by a request or a copy",
        lambda: tree.protected(FULL),
    )
    gauge("tree.nodes", "nodes of the prefix tree", lambda: tree.num_nodes)
    gauge("engine.leases", "requests admitted and not released", num_leases)
    if context.has_host:
        _register_host(context)
    for component in context.components:
        if component.has_host:
            part = "transfer" if component.name == FULL else f"transfer_{component.name}"
            _register_transfer(context, part, component.name, component.transfer)


def _register_host(context: EngineContext) -> None:
    index, host, of_tier = context.full.index, context.full.host, _gauges_of(context, "host")
    total, free = host.num_pages, host.available
    of_tier("total_tokens", "tokens that the host tier can hold", lambda: total * host.page_tokens)
    of_tier("used_tokens", "tokens of host pages that somebody holds", lambda: (total - free()) * host.page_tokens)
    of_tier("used_ratio", "used_tokens over total_tokens", lambda: 1 - free() / total)
    context.metrics.gauge("host.free_pages", "host pages nobody holds", free)
    of_tier("evictable_tokens", "tokens on the host, needed by nobody", lambda: index.num_evictable * host.page_tokens)


def _gauges_of(context: EngineContext, tier: str) -> Callable[[str, str, Callable[[], float]], None]:
    """Enters what every tier has, as one family with the tier for a label."""

    def gauge(name: str, help: str, read: Callable[[], float]) -> None:
        context.metrics.gauge(f"{tier}.{name}", help, read, f"tier_{name}", tier=tier)

    return gauge


def _register_transfer(context: EngineContext, part: str, component: str, transfer: TransferBackend) -> None:
    """Metrics by the names of the backend's `stats`: `up_strided_bytes_per_second` is `transfer.up_strided_...`."""
    metrics: dict[str, tuple[MetricType, str]] = {}
    families: dict[str, tuple[str, dict[str, str]]] = {}
    for name in transfer.stats():
        kind = name if name in _TRANSFER_HELP else next(kind for kind in _TRANSFER_HELP if name.endswith(f"_{kind}"))
        metrics[f"{part}.{name}"] = _TRANSFER_HELP[kind]
        *direction, method = name.removesuffix(f"_{kind}").split("_", kind != "copies")
        if kind == "copies":
            families[f"{part}.{name}"] = "transfer_copies", {"component": component, "method": method}
        elif direction:
            labels = {"component": component, "direction": direction[0], "method": method}
            families[f"{part}.{name}"] = f"transfer_link_{kind}", labels

    def read() -> Mapping[str, float]:
        return {f"{part}.{name}": value for name, value in transfer.stats().items()}

    context.metrics.read_from(metrics, read, families)
