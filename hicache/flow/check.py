"""Every slot, page, state and row accounted for: the sums that hold whatever happened before.

device   free + held by the tree + owned by leases = all, and none twice: slots, window slots and states
host     free + held by the tree + waiting for bytes = all pages of each component's pool, and no page twice
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.errors import InvariantError
from hicache.flow.components.base import CacheComponent, account_violations
from hicache.flow.context import EngineContext
from hicache.flow.lease import Lease
from hicache.flow.load import Load
from hicache.tree.node import HOST, Component


def check_engine(
    context: EngineContext, leases: Sequence[Lease], loads: Sequence[Load], in_flight: Mapping[Component, int]
) -> None:
    """Raise `InvariantError` with every violation, those that the parts find in themselves included.

    `loads`: those that have not completed. `in_flight`: pages of each host pool that wait for their bytes.
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
            found.extend(_host_violations(context, component, in_flight[component.name]))
    num_rows = context.req_to_token.size - context.req_to_token.available_size()
    if num_rows != len(leases):
        found.append(f"rows: {num_rows} are taken by {len(leases)} leases")
    if found:
        raise InvariantError("engine", found)


def _host_violations(context: EngineContext, component: CacheComponent, num_waiting: int) -> list[str]:
    held = context.tree.values(component.name, HOST)
    sums = (component.host.available(), sum(map(len, held)), num_waiting)
    return account_violations(f"{component.name} pages of the host", sums, component.host.num_pages, held)
