"""Host and device exchange pages, step by step, where they are to hold different ones.

A load that needs the places of others, for whom the host has no room, makes room for one step of it at a time. What
leaves the device for a step goes to the host while the step before comes up, and takes the places of what came up in
the steps before that. So no more than two steps are in both places, and what the host drops is on the device by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from hicache.errors import TransferBusy
from hicache.flow.backup import DeviceEviction
from hicache.flow.context import EngineContext
from hicache.flow.lease import Lease
from hicache.flow.prompt import Prompt
from hicache.flow.restore import Restore
from hicache.host import HostRun, RunPart, within
from hicache.tiers import FULL, Component

TakeSlots = Callable[[Lease, int, int], torch.Tensor]


class Exchange:
    """Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, restore: Restore, eviction: DeviceEviction) -> None:
        self._context, self._restore, self._eviction = context, restore, eviction

    def applies_to(self, components: Collection[Component]) -> bool:
        """Whether a load of these is made in steps."""
        return self._context.exclusive is not None and FULL in components

    def load(
        self,
        lease: Lease,
        prompt: Prompt,
        parts: Sequence[RunPart],
        locked: list[HostRun],
        num_behind: int,
        take: TakeSlots,
    ) -> None:
        """Bring `parts` of `prompt` to the device behind the lease's node, and make `num_behind` slots available for
        what follows them. `locked`: their runs; as loads take the locks over, they leave the list. `take`: gives the
        lease slots that are available, so many, and so many of them for a load.

        Raises what `take` and `Restore.start` raise, TransferBusy where a step failed, and the shortage of slots.
        """
        full, index, page = self._context.full, self._context.exclusive, self._context.tree.page_size
        assert index is not None
        done, end = parts[0].start, parts[-1].end
        while done < end:
            last = index.step_end(done, end, full.available() // page, -(-num_behind // page))
            step, rest = within(parts, range(done, last)), within(parts, range(last, end))
            self._make_available(lease, (last - done) * page)
            slots = take(lease, (last - done) * page, (last - done) * page)
            load = self._restore.start(lease, prompt, {FULL: step}, slots)
            del locked[: len(step)]  # these locks are the load's now
            if rest and rest[0].run is step[-1].run:
                index.lock([rest[0].run])  # once for each step
                locked.insert(0, rest[0].run)
            lease.read([load])
            done = last
        self._make_available(lease, num_behind)

    def _make_available(self, lease: Lease, num_slots: int) -> None:
        """Of the loads of the lease all but the last have to end first, so that the host may drop what they brought."""
        self._restore.complete(lease.loads[:-1])
        if any(load.error is not None for load in lease.loads):
            raise TransferBusy("a load of this prefix has failed")
        if not self._eviction.make_available(self._context.full, num_slots):
            raise self._context.full.shortage(num_slots)
