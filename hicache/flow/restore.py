"""Host to device: pages go to slots, layer by layer, while the forward pass that needs them runs.

A load is submitted before the forward is launched. Matches see its nodes at once; whoever uses them waits for its
layers by the load id. Windows and states are loaded with it. The nodes of a load that fails leave the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import LoadEstimate, LoadPolicy
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.located import Located
from hicache.flow.movement import CopyMovement, Load, PromptRows
from hicache.flow.prompt import Prompt
from hicache.pages.table import Rows
from hicache.tiers import FULL, Component


class Restore(CopyMovement[Load]):
    def __init__(self, context: EngineContext, policy: LoadPolicy) -> None:
        super().__init__()
        self._context, self._policy = context, policy
        count, gauge = context.metrics.counter, context.metrics.gauge
        help, labels = "bytes of a load from host to device", {"movement": "load", "direction": "host_to_device"}
        self._bytes, self._seconds = context.metrics.movement("restore", help, "time that load took", **labels)
        self._timed_s = count("restore.timed_seconds", "time of the loads whose exposed time was measured")
        self._exposed_s = count("restore.exposed_seconds", "of that, what a forward pass stood still for")
        self._failures = count("restore.failures", "loads that failed; their pages stayed on the host")
        gauge("restore.hidden_ratio", "share of timed_seconds that ran under compute", self._hidden_ratio)

    def estimate(self, num_bytes: int, start: int, end: int, num_delayed: int) -> LoadEstimate:
        """Of loading `num_bytes` behind the loads in flight, and of computing positions [start, end) instead, while
        `num_delayed` others wait."""
        ahead_bytes = sum(load.num_bytes for load in self._in_flight)
        return self._policy.compare(self._policy.cost.load_s(ahead_bytes + num_bytes), start, end, num_delayed)

    def count_decision(self, estimate: LoadEstimate | None) -> None:
        """A request was admitted by that estimate; None: there was nothing to decide."""
        if estimate is not None:
            self._policy.choose(estimate)

    def complete(self, loads: Sequence[Load]) -> None:
        """Wait until these have ended, and another may be submitted."""
        while self._in_flight and (any(not load.completed for load in loads) or not self.can_submit()):
            self._in_flight[0].wait()
            self._end_first()

    def can_submit(self) -> bool:
        """Whether a load may be submitted now, whatever it brings."""
        return all(component.counter.can_begin() for component in self._context.components)

    def pin(self, request: CacheRequest, admission: Admission, undo: ExitStack) -> Lease:
        """A lease on what the device has of a prefix: it stays for that, with what its components need of it, until
        `undo` ends."""
        context, tree = self._context, self._context.tree
        node, ahead = tree.node_at(admission.match, admission.device_len), admission.length - admission.device_len
        lease = Lease(request, node, context.req_to_token.req_to_token, context.full.allocator.device)
        undo.callback(self.free, lease)
        tree.lock(node, ahead)
        undo.callback(lambda: tree.unlock(lease.node, admission.length - lease.node.depth_tokens))
        return lease

    def hold(
        self, admission: Admission, located: Located, held: ExitStack, *, is_used: bool = True
    ) -> dict[Component, PromptRows]:
        """What of a prefix is to be loaded stays on the host until `held` ends; returns where it is. `is_used`: what
        the host has of the prefix counts as used once more."""
        end, to_load = admission.length // self._context.tree.page_size, dict[Component, PromptRows]()
        for component in self._context.components:
            pages = admission.to_load.get(component.name)
            first = min(component.first_required(end), pages[0] if pages else end)  # what is optional may be loaded
            if is_used and component.name != FULL:  # of full pages the table has one count for both tiers
                component.pages.count_hit(located.rows_of(component, range(first, end)).rows)
            if pages:
                to_load[component.name] = found = located.rows_of(component, pages)
                component.pages.lock(found.rows)
                held.callback(component.pages.unlock, found.rows)
        return to_load

    def submit_load(
        self,
        lease: Lease,
        prompt: Prompt,
        pages: Mapping[Component, PromptRows],
        slots: torch.Tensor,
        length: int,
    ) -> Load:
        """Load `pages` of `prompt`, by component, behind the lease's node: full pages to the first of `slots`, a state
        to the lease's own state slot. The lock of the lease, for a prefix of `length` tokens, moves to the last loaded
        node, and the load owns the host locks of `pages` from now on.

        Where that raises, the copies that were submitted have ended, and `slots` are the lease's as before."""
        tree = self._context.tree
        load = Load(lease.node, prompt, pages, self.loads_of(tree.path_rows(lease.node)))
        with ExitStack() as undo:
            undo.callback(self.detach, load)
            for component in self._context.components:
                if component.name in pages:
                    undo.callback(component.fail_load, load)
                    self._submit(load, component, component.begin_load(load, lease, slots), undo)
            tree.lock(load.node)
            undo.callback(tree.unlock, load.node)
            tree.move_lock(lease.node, load.node, length - lease.node.depth_tokens)
            undo.pop_all()
        lease.node, lease.tree_len = load.node, load.node.depth_tokens
        for below in load.depends_on:
            below.readers += 1
        self._in_flight.append(load)
        return load

    def free(self, lease: Lease) -> None:
        """What a lease holds beside its lock on the prefix: slots and states of its own, its row, its part in loads."""
        with ExitStack() as steps:  # all of them, the last first, whatever raises
            for load in lease.loads:
                steps.callback(self.stop_reading, load)
            if lease.req_pool_idx is not None:
                steps.callback(self._context.req_to_token.free, lease)
            for component in reversed(self._context.components):
                steps.callback(component.release, lease)

    def loads_of(self, rows: Rows) -> list[Load]:
        """The loads in flight that bring anything of these pages, oldest first. An abandoned one brings nothing."""
        if not self._in_flight:
            return []
        numbers = {*np.concatenate([each.resident.load[rows] for each in self._context.components]).tolist()}
        return [load for load in self._in_flight if load.number in numbers]

    def has_failed(self, rows: Rows) -> bool:
        """Whether a load in flight that brings anything of these has failed: whoever joined it would fail with it."""
        return bool(self._in_flight) and any(load.error is not None for load in self.loads_of(rows))

    @staticmethod
    def error_of(lease: Lease) -> Exception | None:
        """Why a load of the lease's prefix failed; None if none did. Waits for the outcome of those in flight."""
        for load in lease.loads:
            if load.error is None:
                load.wait_outcome()
            if load.error is not None:
                return load.error
        return None

    def in_flight(self) -> list[Load]:
        """The loads that have not completed, oldest first."""
        return list(self._in_flight)

    def device_locks(self, component: Component) -> Iterable[Rows]:
        return (self._context.tree.locked_rows(component, load.node) for load in self._in_flight)

    def num_in_flight(self, component: Component) -> int:
        num_pages = sum(len(rows) for rows in self.host_locks(component))
        return num_pages * self._context.by_name[component].page_size

    def host_locks(self, component: Component) -> Iterable[Rows]:
        return (load.pages[component].rows for load in self._in_flight if component in load.pages)

    def stop_reading(self, load: Load) -> None:
        """A lease, or a load that depends on it, stops reading what `load` brought."""
        load.readers -= 1
        self._free_unread(load)

    @staticmethod
    def _submit(load: Load, component: CacheComponent, targets: torch.Tensor, undo: ExitStack) -> None:
        counter, rows = component.counter, load.pages[component.name].rows
        places, second_places = torch.from_numpy(component.pages.place[rows]), None
        if component.pages.second_place[rows].any():
            second_places = torch.from_numpy(component.pages.second_place[rows])
        load.load_ids[component.name] = load_id = counter.begin()
        undo.callback(counter.forget, load_id)
        undo.callback(counter.fail, load_id, TransferError("the load was not begun"))
        op = component.transfer.load(places, component.device_ids(targets), load_id, second_places)
        undo.callback(op.wait)
        load.copies.append(op)

    def _end(self, operation: Load) -> None:
        load, tree, components = operation, self._context.tree, self._context.by_name
        load.wait()
        depended_on = load.depends_on
        load.complete()
        for name, (rows, _) in load.pages.items():
            components[name].pages.unlock(rows)
        if load.error is None:
            if self._context.exclusive is not None and FULL in load.pages:
                self._context.exclusive.came_above(load.pages[FULL].rows)
            self._count(load)
            self.detach(load)
        else:
            self._failures.value += 1
            # Deepest first: what depends on the load leaves the device before it does.
            for other in reversed(self.in_flight()):
                if other.error is not None:
                    self._abandon(other)
            self._abandon(load)
        tree.unlock(load.node)
        for name, values in load.orphan_states.items():
            components[name].free(torch.cat(values))
        load.orphan_states = {}
        for below in depended_on:
            self.stop_reading(below)
        self._free_unread(load)

    def _hidden_ratio(self) -> float:
        return 1 - self._exposed_s.value / self._timed_s.value if self._timed_s.value else 0.0

    def _count(self, load: Load) -> None:
        seconds = load.seconds()
        self._bytes.observe(load.num_bytes)
        self._seconds.observe(seconds)
        load_id = load.load_ids.get(FULL)
        exposed_s = None if load_id is None else self._context.full.counter.exposed_s(load_id)
        if exposed_s is not None:
            self._timed_s.value += seconds
            self._exposed_s.value += min(seconds, exposed_s)
        if load.is_undelayed:
            self._policy.cost.observe_load(load.num_bytes, seconds)

    def _abandon(self, load: Load) -> None:
        """Take what a failed load was to bring off the device. Its slots stay out of use as long as they are read."""
        if load.abandoned:
            return
        load.abandoned = True
        for component in reversed(self._context.components):  # FULL last: its nodes leave the tree
            component.fail_load(load)
        self.detach(load)

    def detach(self, load: Load) -> None:
        """It writes nothing any more."""
        for name, rows in load.brings.items():
            self._context.by_name[name].resident.end_load(rows)
        load.brings = {}

    def _free_unread(self, load: Load) -> None:
        """Once it has completed and nobody reads it any more: its slots, where it failed, and its number."""
        if load.readers or not load.completed:
            return
        for slots in load.orphans:
            self._context.full.free(slots)
        load.orphans.clear()
        for name, load_id in load.load_ids.items():
            self._context.by_name[name].counter.forget(load_id)
