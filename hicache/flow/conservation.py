"""Every slot, page and row accounted for: the sums that hold whatever happened before.

device   free + held by the tree + owned by leases = all slots, and no slot twice
host     free + held by the tree + waiting for bytes = all pages, and no page twice
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.errors import InvariantError
from hicache.flow.base import Lease, Parts
from hicache.tree.node import Tier


def conservation(parts: Parts, leases: Sequence[Lease], host_pages_under_way: int) -> None:
    """Raise `InvariantError` with every violation, those that the parts find in themselves included."""
    found: list[str] = []
    checks = [parts.tree.check, parts.allocator.check, parts.req_to_token.check]
    if parts.host is not None:
        checks.append(parts.host.check)
    for check in checks:
        try:
            check()
        except InvariantError as error:
            found.extend(error.violations)
    found.extend(_device(parts, leases))
    found.extend(_host(parts, host_pages_under_way))
    used = parts.req_to_token.size - parts.req_to_token.available_size()
    if used != len(leases):
        found.append(f"rows: {used} are taken by {len(leases)} leases")
    if found:
        raise InvariantError("engine", found)


def _device(parts: Parts, leases: Sequence[Lease]) -> list[str]:
    allocator, tree = parts.allocator, parts.tree
    owned = [lease.slots_of(lease.tree_len, lease.held_len) for lease in leases]
    orphaned = {id(load): load.orphans for lease in leases for load in lease.loads}
    owned += [slots for orphans in orphaned.values() for slots in orphans]
    held = tree.values(Tier.DEVICE)
    total = allocator.size // allocator.page_size * allocator.page_size
    parts_of = (allocator.available_size(), sum(map(len, held)), sum(map(len, owned)))
    found = []
    if sum(parts_of) != total:
        found.append(f"device: {parts_of[0]} free + {parts_of[1]} in the tree + {parts_of[2]} leased is not {total}")
    taken = torch.cat([*held, *owned]) if held or owned else torch.empty(0, dtype=torch.int64)
    if len(taken.unique()) != len(taken):
        found.append("device: a slot has two owners")
    if len(taken) and int(taken.min()) < 1:
        found.append("device: the sink was handed out")
    return found


def _host(parts: Parts, under_way: int) -> list[str]:
    host = parts.host
    if host is None:
        return []
    held = parts.tree.values(Tier.HOST)
    pages = torch.cat(held) if held else torch.empty(0, dtype=torch.int64)
    found = []
    if host.available() + len(pages) + under_way != host.num_pages:
        found.append(
            f"host: {host.available()} free + {len(pages)} in the tree + {under_way} waiting is not {host.num_pages}"
        )
    if len(pages.unique()) != len(pages):
        found.append("host: a page has two owners")
    return found
