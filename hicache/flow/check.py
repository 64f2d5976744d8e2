"""Every slot, page, state and row accounted for: the sums that hold whatever happened before.

device   free + held by the tree + owned by leases = all, and none twice: slots, window slots and states
host     free + held by the tree + waiting for bytes = all pages of each component's pool, and no page twice
locks    of each node, on each tier, as many as leases and movements hold
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from hicache.errors import InvariantError
from hicache.flow.completion import Movement
from hicache.flow.components.base import CacheComponent, account_violations
from hicache.flow.context import EngineContext
from hicache.flow.lease import Lease
from hicache.flow.load import Load
from hicache.tiers import DEVICE, FULL, HOST, Tier
from hicache.tree.node import TreeNode


def check_engine(
    context: EngineContext, leases: Sequence[Lease], loads: Sequence[Load], movements: Sequence[Movement]
) -> None:
    """Raise `InvariantError` with every violation, those that the parts find in themselves included.

    `loads`: those that have not completed.
    """
    found: list[str] = []
    checks = [context.tree.check, context.full.allocator.check, context.req_to_token.check]
    checks += [component.host.check for component in context.components if component.has_host]
    for check in checks:
        try:
            check()
        except InvariantError as error:
            found.extend(error.violations)
    for component in context.components:
        found.extend(component.device_violations(leases, loads))
        if component.has_host:
            num_waiting = sum(movement.pages_in_flight(component.name) for movement in movements)
            found.extend(_host_violations(context, component, num_waiting))
    num_rows = context.req_to_token.size - context.req_to_token.available_size()
    if num_rows != len(leases):
        found.append(f"rows: {num_rows} are taken by {len(leases)} leases")
    found.extend(_lock_violations(context, leases, movements))
    found += [f"{type(at).__name__}: what had ended was applied in part" for at in movements if at.is_torn]
    if found:
        raise InvariantError("engine", found)


def _lock_violations(context: EngineContext, leases: Sequence[Lease], movements: Sequence[Movement]) -> list[str]:
    """Of full pages, which each lock covers from the root on."""
    held = Counter[tuple[TreeNode, Tier]]()
    for node, tier in chain(((lease.node, DEVICE) for lease in leases), *(at.locks() for at in movements)):
        held.update((above, tier) for above in node.path())
    locks = {(node, tier): node.locks(FULL, tier) for node in context.tree.nodes() for tier in Tier}
    return [
        f"{node} is locked {number} times on {tier.name}, by {held[node, tier]} holders"
        for (node, tier), number in locks.items()
        if number != held[node, tier]
    ]


def _host_violations(context: EngineContext, component: CacheComponent, num_waiting: int) -> list[str]:
    held = context.tree.values(component.name, HOST)
    sums = (component.host.available(), sum(map(len, held)), num_waiting)
    return account_violations(f"{component.name} pages of the host", sums, component.host.num_pages, held)
