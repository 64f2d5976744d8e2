"""Functions for one complete engine: `check` of all slots, pages, states and rows; usage of its tiers; `reset`.

device   free + held by the tree + owned by leases = all, and none twice: slots, window slots and states
host     free + published + in flight = all pages of each component's pool, and no page twice
locks    the locks of each page of device and host equal those that leases and transfers hold
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from hicache.errors import InvalidArgument, InvariantError
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies
from hicache.flow.lease import Lease
from hicache.flow.page_transfer import Load, PageTransfer
from hicache.flow.reads import Prefetcher
from hicache.flow.writes import Writes
from hicache.metrics import Metrics, MetricType
from hicache.pages.node import Released
from hicache.pages.states import ABOVE, TierPages
from hicache.tiers import FULL
from hicache.transfer.base import TransferBackend

MemoryTier = Literal["device", "host"]
_TIERS = ("device", "host")
_TRANSFER_HELP: dict[str, tuple[MetricType, str]] = {
    "copies": ("counter", "number of copies by this method"),
    "delayed_copies": ("counter", "copies to the host that waited for the first layer of a load"),
    "bytes_per_second": ("gauge", "rate of the link by this method, measured at the start"),
    "piece_seconds": (
        "gauge",
        "fixed time for each piece of a copy by this method, without its bytes; measured at the start",
    ),
    "issue_seconds": ("gauge", "CPU time to queue a piece of a copy by this method, measured at the start"),
}


class Inspection(NamedTuple):
    """The transfers of an engine, and the parts that the transfers share. `prefetcher`: None if the engine has no
    store."""

    context: EngineContext
    copies: Copies
    writes: tuple[Writes, ...]
    prefetcher: Prefetcher | None


def check_engine(
    context: EngineContext, leases: Sequence[Lease], loads: Sequence[Load], transfers: Sequence[PageTransfer]
) -> None:
    """Raise `InvariantError` with all violations, including the violations that the parts of the engine report.

    `loads`: the loads that have not completed.
    """
    found: list[str] = []
    checks: list[Callable[[], None]] = [context.tree.check, context.full.allocator.check, context.req_to_token.check]
    for component in context.components:
        if component.has_host:
            locks = np.zeros_like(component.pages.order.locks)
            for rows in chain(*(transfer.host_locks(component.name) for transfer in transfers)):
                locks[rows] += 1
            checks.append(partial(component.pages.check, locks))
    if context.exclusive is not None:
        above = context.exclusive.state & ABOVE != 0
        num_wrong = int(np.count_nonzero(above & ~context.full.resident.order.is_held))
        found += [f"{num_wrong} host pages count as held by the device, which lacks them"] if num_wrong else []
    for check in checks:
        try:
            check()
        except InvariantError as error:
            found.extend(error.violations)
    known = list(dict.fromkeys(chain(loads, *(transfer.loads_read() for transfer in transfers))))
    for component in context.components:
        found.extend(component.device_violations(leases, known))
        found.extend(_lock_violations(component, leases, transfers))
    num_rows = context.req_to_token.size - context.req_to_token.available_size()
    if num_rows != len(leases):
        found.append(f"rows: {num_rows} are taken by {len(leases)} leases")
    found += [f"{type(transfer).__name__}: applied in part" for transfer in transfers if transfer.is_partly_applied]
    if found:
        raise InvariantError("engine", found)


def _lock_violations(
    component: CacheComponent, leases: Sequence[Lease], transfers: Sequence[PageTransfer]
) -> list[str]:
    """Return the violations of the locks of one component."""
    order, tree = component.resident.order, component.tree
    locks = np.zeros_like(order.locks)
    of_leases = (tree.locked_rows(component.name, lease.node) for lease in leases)
    for rows in chain(of_leases, *(transfer.device_locks(component.name) for transfer in transfers)):
        locks[rows] += 1
    wrong = np.flatnonzero(locks != order.locks)
    if not len(wrong):
        return []
    row = int(wrong[0])
    what = f"{len(wrong)} pages of {component.name} on the device have other locks"
    return [f"{what}: row {row} is locked {order.locks[row]} times, by {locks[row]} holders"]


def reset(context: EngineContext, names: Sequence[MemoryTier]) -> bool:
    """Drop all unlocked pages from these tiers, whether or not other tiers have them. Returns whether the tiers are
    empty."""
    for name in names:
        if name not in _TIERS:
            raise InvalidArgument(f"tier={name!r}: choose one of {', '.join(_TIERS)}")
    left = 0
    for component in context.components:
        if "device" in names:
            released: list[Released] = []
            try:
                resident = component.resident
                while len(rows := resident.held(resident.order.take(max(1, resident.order.num_evictable)))):
                    released += context.evict(rows, component.name)
            finally:
                context.free(released)
        if "host" in names and component.has_host:
            component.pages.evict_all()
            left += len(component.pages) + component.pages.num_in_flight
    if "device" in names:
        left += sum(component.resident.protected for component in context.components)
    return not left


def register_usage(context: EngineContext, num_leases: Callable[[], int]) -> None:
    """Register the usage of tiers and tree, and the numbers of the transfer backends, in the engine's metrics."""
    tree, gauge, full = context.tree, context.metrics.gauge, context.full
    total, available, of_tier = full.capacity, full.available, _gauges_of(context, "device")
    of_tier("total_tokens", "slots of the device tier", lambda: total)
    gauge("device.free_tokens", "free slots", available)
    of_tier("used_tokens", "slots that the cache or a request uses", lambda: total - available())
    of_tier("used_ratio", "used_tokens divided by total_tokens", lambda: 1 - available() / total)
    of_tier("evictable_tokens", "cached tokens that may be evicted", lambda: tree.evictable(FULL))
    gauge("device.protected_tokens", "cached tokens that requests or copies have locked", lambda: tree.protected(FULL))
    gauge("tree.nodes", "nodes of the prefix tree", lambda: tree.num_nodes)
    gauge("engine.leases", "admitted requests that have not been released", num_leases)
    if context.has_host:
        _register_host(context)
    if context.exclusive is not None:
        _register_exclusive(context.exclusive, context.metrics, context.tree.page_size)
    for component in context.components:
        if component.has_host:
            prefix = "transfer" if component.name == FULL else f"transfer_{component.name}"
            _register_transfer(context, prefix, component.name, component.transfer)


def _register_host(context: EngineContext) -> None:
    pages, host, of_tier = context.full.pages, context.full.host, _gauges_of(context, "host")
    total, free = host.num_pages, host.available
    of_tier("total_tokens", "tokens for which the host tier has capacity", lambda: total * host.page_tokens)

    def used_tokens() -> int:
        return (total - free() - pages.num_raw) * host.page_tokens

    of_tier("used_tokens", "tokens in host pages; an unpacked (raw) page counts once", used_tokens)
    of_tier(
        "used_ratio",
        "used host pages divided by all host pages; an unpacked (raw) page uses two",
        lambda: 1 - free() / total,
    )
    context.metrics.gauge("host.free_pages", "free host pages", free)
    of_tier(
        "evictable_tokens",
        "tokens for which the free and evictable host pages have capacity; an unpacked (raw) page counts as two",
        lambda: pages.num_evictable * host.page_tokens,
    )


def _register_exclusive(pages: TierPages, metrics: Metrics, page_tokens: int) -> None:
    name, returned = "host.duplicate_tokens", "host.returned_tokens"
    metrics.gauge(
        name,
        "tokens of host pages that are also on the device",
        lambda: pages.num_first_out * page_tokens,
    )
    info: tuple[MetricType, str] = (
        "counter",
        "tokens that were copied to the host twice: the host evicted the first copy as a duplicate, and the device "
        "evicted the tokens later",
    )
    metrics.read_from({returned: info}, lambda: {returned: pages.num_returned * page_tokens})


def _gauges_of(context: EngineContext, tier: str) -> Callable[[str, str, Callable[[], float]], None]:
    """Return a function that registers a gauge of a tier, in a family with the tier as a label."""

    def gauge(name: str, help: str, read: Callable[[], float]) -> None:
        context.metrics.gauge(f"{tier}.{name}", help, read, f"tier_{name}", tier=tier)

    return gauge


def _register_transfer(context: EngineContext, prefix: str, component: str, transfer: TransferBackend) -> None:
    """Register the `stats` of a transfer backend: `up_strided_bytes_per_second` becomes `transfer.up_strided_...`."""
    metrics: dict[str, tuple[MetricType, str]] = {}
    families: dict[str, tuple[str, dict[str, str]]] = {}
    for name in transfer.stats():
        kind = name if name in _TRANSFER_HELP else next(kind for kind in _TRANSFER_HELP if name.endswith(f"_{kind}"))
        metrics[f"{prefix}.{name}"] = _TRANSFER_HELP[kind]
        *direction, method = name.removesuffix(f"_{kind}").split("_", kind != "copies")
        if kind == "copies":
            families[f"{prefix}.{name}"] = "transfer_copies", {"component": component, "method": method}
        elif direction:
            labels = {"component": component, "direction": direction[0], "method": method}
            families[f"{prefix}.{name}"] = f"transfer_link_{kind}", labels

    def read() -> Mapping[str, float]:
        return {f"{prefix}.{name}": value for name, value in transfer.stats().items()}

    context.metrics.read_from(metrics, read, families)
