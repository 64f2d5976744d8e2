"""Every slot, page, state and row accounted for: the sums that hold whatever happened before.

device   free + held by the tree + owned by leases = all, and none twice: slots, window slots and states
host     free + published + in flight = all pages of each component's pool, and no page twice
locks    of each node and of each run of host pages as many as leases and movements hold
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from hicache.errors import InvariantError
from hicache.flow.completion import Movement
from hicache.flow.context import EngineContext
from hicache.flow.lease import Lease
from hicache.flow.load import Load
from hicache.host import HostRun
from hicache.tiers import FULL
from hicache.tree.node import TreeNode


def check_engine(
    context: EngineContext, leases: Sequence[Lease], loads: Sequence[Load], movements: Sequence[Movement]
) -> None:
    """Raise `InvariantError` with every violation, those that the parts find in themselves included.

    `loads`: those that have not completed.
    """
    found: list[str] = []
    checks: list[Callable[[], None]] = [context.tree.check, context.full.allocator.check, context.req_to_token.check]
    for component in context.components:
        if component.has_host:
            num_waiting = sum(movement.pages_in_flight(component.name) for movement in movements)
            locks = Counter[HostRun](run for at in movements for run in at.host_locks(component.name))
            checks.append(partial(component.index.check, num_waiting, locks))
    for check in checks:
        try:
            check()
        except InvariantError as error:
            found.extend(error.violations)
    for component in context.components:
        found.extend(component.device_violations(leases, loads))
    num_rows = context.req_to_token.size - context.req_to_token.available_size()
    if num_rows != len(leases):
        found.append(f"rows: {num_rows} are taken by {len(leases)} leases")
    found.extend(_lock_violations(context, leases, movements))
    found += [f"{type(at).__name__}: what had ended was applied in part" for at in movements if at.is_torn]
    if found:
        raise InvariantError("engine", found)


def _lock_violations(context: EngineContext, leases: Sequence[Lease], movements: Sequence[Movement]) -> list[str]:
    """Of full pages, which each lock covers from the root on."""
    held = Counter[TreeNode]()
    for node in chain((lease.node for lease in leases), *(at.locks() for at in movements)):
        held.update(node.path())
    return [
        f"{node} is locked {node.locks(FULL)} times, by {held[node]} holders"
        for node in context.tree.nodes()
        if node.locks(FULL) != held[node]
    ]
