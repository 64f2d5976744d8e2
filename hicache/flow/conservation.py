"""Every slot, page, state and row accounted for: the sums that hold whatever happened before.

device   free + held by the tree + owned by leases = all, and none twice: slots, window slots and states
host     free + held by the tree + waiting for bytes = all pages of each component's pool, and no page twice
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hicache.errors import InvariantError
from hicache.flow.base import Lease, Load, Parts
from hicache.host.pool import HostPagePool
from hicache.tree.node import Component, Place, Tier

_NONE = torch.empty(0, dtype=torch.int64)


def conservation(
    parts: Parts, leases: Sequence[Lease], loads: Sequence[Load], under_way: Mapping[Component, int]
) -> None:
    """Raise `InvariantError` with every violation, those that the parts find in themselves included.

    `loads`: those that have not landed. `under_way`: pages of each component's host pool that wait for their bytes.
    """
    found: list[str] = []
    hosts: dict[Component, HostPagePool | None] = {Component.FULL: parts.host}
    hosts.update({side.component: side.host for side in parts.sides})
    checks = [parts.tree.check, parts.allocator.check, parts.req_to_token.check]
    checks += [host.check for host in hosts.values() if host is not None]
    for check in checks:
        try:
            check()
        except InvariantError as error:
            found.extend(error.violations)
    owned = _owned(leases, loads)
    found.extend(_slots(parts, owned))
    found.extend(_windows(parts, owned))
    found.extend(_states(parts, leases, loads))
    for component, host in hosts.items():
        if host is not None:
            held = parts.tree.values(Place.of(component, Tier.HOST))
            waiting = under_way[component]
            sums = (host.available(), sum(map(len, held)), waiting)
            found.extend(_account(f"{component.name} pages of the host", sums, host.num_pages, held))
    used = parts.req_to_token.size - parts.req_to_token.available_size()
    if used != len(leases):
        found.append(f"rows: {used} are taken by {len(leases)} leases")
    if found:
        raise InvariantError("engine", found)


def _owned(leases: Sequence[Lease], loads: Sequence[Load]) -> list[torch.Tensor]:
    """Slots of leases, and of failed loads that leases or other loads still read."""
    owned = [lease.held(lease.tree_len, lease.held_len) for lease in leases]
    known = {*loads, *(load for lease in leases for load in lease.loads)}
    known |= {below for load in known for below in load.stands_on}
    return owned + [slots for load in known for slots in load.orphans]


def _slots(parts: Parts, owned: Sequence[torch.Tensor]) -> list[str]:
    allocator, windows = parts.allocator, parts.windows
    free = allocator.available_size() if windows is None else windows.allocator.full_available_size()
    held = parts.tree.values(Tier.DEVICE)
    total = allocator.size // allocator.page_size * allocator.page_size
    return _account("slots", (free, sum(map(len, held)), sum(map(len, owned))), total, [*held, *owned])


def _windows(parts: Parts, owned: Sequence[torch.Tensor]) -> list[str]:
    """Window slots: those whose full slot the tree counts a window for, and those of leases."""
    if parts.windows is None:
        return []
    allocator = parts.windows.allocator
    peers = [parts.windows.device_ids(value) for value in parts.tree.values(Place.SWA_DEVICE)]
    own_peers = [parts.windows.device_ids(slots) for slots in owned]
    own_peers = [slots[slots > 0] for slots in own_peers]
    total = allocator.size_swa // allocator.page_size * allocator.page_size
    sums = (allocator.swa_available_size(), sum(map(len, peers)), sum(map(len, own_peers)))
    return _account("window slots", sums, total, [*peers, *own_peers])


def _states(parts: Parts, leases: Sequence[Lease], loads: Sequence[Load]) -> list[str]:
    if parts.states is None:
        return []
    pool = parts.states.pool
    held = parts.tree.values(Place.MAMBA_DEVICE)
    of_leases = [state for lease in leases for state in (lease.mamba_pool_idx, lease.mamba_checkpoint_idx)]
    owned = [state.reshape(1) for state in of_leases if state is not None]
    owned += [state for load in loads for state in load.orphan_states]
    return _account("states", (pool.available_size(), len(held), len(owned)), pool.size, [*held, *owned])


def _account(what: str, sums: tuple[int, int, int], total: int, ids: Sequence[torch.Tensor]) -> list[str]:
    found = []
    if sum(sums) != total:
        found.append(f"{what}: {sums[0]} free + {sums[1]} in the tree + {sums[2]} elsewhere is not {total}")
    taken = torch.cat(list(ids)) if ids else _NONE
    if len(taken.unique()) != len(taken):
        found.append(f"{what}: one has two owners")
    if len(taken) and int(taken.min()) < 1:
        found.append(f"{what}: the sink was handed out")
    return found
