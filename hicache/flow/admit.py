"""Admission: a request gets a pinned prefix, slots for the rest and a row, or nothing at all.

Capacity is counted before anything changes, so a refused request leaves no trace, recency included. What the host holds
is loaded unless recomputing it is estimated to be faster.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from hicache.errors import (
    OutOfRows,
    OutOfSlots,
    OutOfStates,
    PrefetchPending,
    PromptTooLong,
    ResourceExhausted,
    TransferBusy,
)
from hicache.flow.backup import Backup
from hicache.flow.components import Admission
from hicache.flow.context import EngineContext
from hicache.flow.device_eviction import DeviceEviction
from hicache.flow.lease import CacheRequest, Hit, Lease
from hicache.flow.load import LoadPlan
from hicache.flow.restore import Restore
from hicache.tiers import DEVICE, FULL, HOST, Store, joined
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.tree.accounts import Expectation
from hicache.tree.base import Match
from hicache.tree.key import Tokens

_REFUSALS: dict[type[ResourceExhausted], tuple[str, str]] = {
    OutOfSlots: ("out_of_slots", "too few slots are free or evictable"),
    OutOfRows: ("out_of_rows", "no row of the request table is free"),
    OutOfStates: ("out_of_states", "too few recurrent states are free or evictable"),
    TransferBusy: ("transfer_busy", "as many loads are in flight as may be"),
    PrefetchPending: ("prefetch_pending", "its prefetch had not ended"),
}
_REFUSED = "admissions refused for now"
_HITS = {
    "device": "were on the device",
    "host": "were loaded from the host",
    "disk": "a prefetch had brought from the disk",
    "remote": "a prefetch had brought from the remote tier",
}


class Admit:
    """Makes and grows leases. Owned by the scheduler thread. `backup`: None without a host tier."""

    def __init__(
        self, context: EngineContext, restore: Restore, eviction: DeviceEviction, backup: Backup | None
    ) -> None:
        self._context, self._restore, self._eviction, self._backup = context, restore, eviction, backup
        count = context.metrics.counter
        self._requests = count("admit.requests", "requests admitted, each time anew after it was released")
        self._prompt = count("admit.prompt_tokens", "tokens of admitted prompts: those hit and those to be computed")
        self._hits = [
            count(f"admit.{tier}_hit_tokens", f"tokens of admitted prompts that {how}", "admit_hit_tokens", tier=tier)
            for tier, how in _HITS.items()
        ]
        self._computed = count("admit.computed_tokens", "tokens of admitted prompts that no tier provided")
        self._refused = {
            error: count(f"admit.{reason}_attempts", f"{_REFUSED}: {why}", "admit_refused_attempts", reason=reason)
            for error, (reason, why) in _REFUSALS.items()
        }
        self._expectations: dict[str, Expectation] = {}
        context.metrics.gauge(
            "admit.expected_requests",
            "queued requests whose prefixes are evicted last",
            lambda: len(self._expectations),
        )
        context.metrics.gauge(
            "admit.hit_ratio", "share of prompt tokens that were hit, since the start", self._hit_ratio
        )

    def acquire(self, request: CacheRequest) -> Lease:
        """See `CacheEngine.acquire`."""
        context, tree = self._context, self._context.tree
        for component in context.components:
            component.refuse_impossible(request)
        admission, needs_load = self._count(request)
        for component in context.components:
            component.refuse_now(admission)
        if not context.req_to_token.available_size():
            raise OutOfRows(context.config.max_requests)
        if needs_load and not self._restore.can_start():
            raise TransferBusy(f"the maximum of {NUM_PRODUCERS} loads is in flight")
        if self._restore.has_failed(admission.match.nodes):
            raise TransferBusy("a load of this prefix has failed and not yet ended")

        node = tree.node_at(admission.match, admission.length)
        for component in context.components:
            component.trim(node)
        plan = admission.plan = LoadPlan(node, {c.name: c.missing(node) for c in context.components})
        lease = Lease(request, node, context.req_to_token.req_to_token, context.full.allocator.device)
        lease.length = admission.end
        full_len = admission.match.full_len
        lease.branching_len = full_len if full_len > admission.length else 0
        with ExitStack() as undo:
            undo.callback(self._restore.free, lease)
            tree.lock(node, DEVICE)
            undo.callback(tree.unlock, node, DEVICE)
            with ExitStack() as held:
                tree.lock(node, HOST)
                held.callback(tree.unlock, node, HOST)
                self._start(lease, admission, plan, self._take(lease, admission))
            if self._backup is not None:
                self._backup.maybe_backup(node)
            self._note_admitted(lease)
            undo.pop_all()
        return lease

    def refused(self, error: ResourceExhausted) -> None:
        """An admission was refused with `error`."""
        for kind, counter in self._refused.items():
            counter.value += isinstance(error, kind)

    def expect(self, request_id: str, tokens: Tokens, namespace: str) -> None:
        """See `CacheEngine.expect`."""
        tree = self._context.tree
        match = tree.match(tokens[: self._max_cached(len(tokens))], namespace)
        node = tree.node_at(match, tree.usable_len(match, match.full_len, on_host=True))
        old = self._expectations.get(request_id)
        if old is None or old.node is not node:
            new = None if node.parent is None else tree.expect(node)
            self.forget(request_id)
            if new is not None:
                self._expectations[request_id] = new

    def forget(self, request_id: str) -> None:
        """The request is queued no more, or expects another prefix."""
        expectation = self._expectations.pop(request_id, None)
        if expectation is not None:
            self._context.tree.forget(expectation)

    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """See `CacheEngine.extend`."""
        context, limit = self._context, self._context.config.max_context_len
        if lease.length + num_tokens > limit:
            raise PromptTooLong(lease.length + num_tokens, limit, "max_context_len")
        if lease.length + num_tokens > lease.held_len:
            need = context.full.in_pages(lease.length + num_tokens - lease.held_len)
            for component in context.components:
                if not self._eviction.make_available(component, component.size_of(need)):
                    raise component.shortage(need)
            self._take_slots(lease, need)
        start, lease.length = lease.length, lease.length + num_tokens
        return lease.slots_of(start, lease.length)

    def _hit_ratio(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)

    def _count(self, request: CacheRequest) -> tuple[Admission, bool]:
        """What the request would get, and whether that takes a load."""
        tree, num_tokens, reserve = self._context.tree, len(request.tokens), request.reserve_tokens
        limit = num_tokens if request.max_cached_tokens is None else min(num_tokens, request.max_cached_tokens + 1)
        match = tree.match(request.tokens[: self._max_cached(limit)], request.namespace)
        length, needs_load = self._usable(match)
        end = num_tokens if reserve is None else min(num_tokens, length + reserve)
        device_len = min(length, match.device_len)
        num_slots = self._context.full.in_pages(end - device_len)
        return Admission(match, length, device_len, end, num_slots, num_slots - length + device_len), needs_load

    def _max_cached(self, num_tokens: int) -> int:
        """Whole pages of a prompt, less its last token, which is always computed: the caller wants its logits."""
        page_size = self._context.tree.page_size
        return (num_tokens - 1) // page_size * page_size

    def _usable(self, match: Match) -> tuple[int, bool]:
        """Tokens of the match to start from, and whether that takes a load: what every component can use, less what is
        not worth a load."""
        if not match.nodes:
            return 0, False
        tree = self._context.tree
        best = tree.usable_len(match, match.full_len, on_host=True)
        resident = tree.usable_len(match, match.device_len, on_host=False)
        if best > resident:
            num_bytes = sum(component.load_bytes(best, match) for component in self._context.components)
            if not self._restore.is_worthwhile(num_bytes, resident, best):
                return resident, False
        return best, best > resident

    def _take(self, lease: Lease, admission: Admission) -> torch.Tensor:
        """A row, and slots with what belongs to them. The lease holds what it has got, also where the rest raises."""
        for component in self._context.components:
            if not self._eviction.make_available(component, component.needed(admission)):
                raise component.shortage(component.needed(admission))
        if self._context.req_to_token.alloc([lease]) is None:
            raise OutOfRows(self._context.config.max_requests)
        lease.tree_len = lease.held_len = admission.device_len
        return self._take_slots(lease, admission.num_slots, admission.length - admission.device_len)

    def _take_slots(self, lease: Lease, num_slots: int, num_loaded: int = 0) -> torch.Tensor:
        """`num_slots` behind those that the lease holds. To the first `num_loaded` a load will bring what belongs to
        them."""
        slots = self._context.full.alloc(num_slots)
        with ExitStack() as undo:
            undo.callback(self._context.full.free, slots)
            for component in self._context.components:
                component.take(slots[num_loaded:])
            lease.write(lease.held_len, slots)
            undo.pop_all()
        lease.held_len += num_slots
        return slots

    def _start(self, lease: Lease, admission: Admission, plan: LoadPlan, slots: torch.Tensor) -> None:
        """Everything is taken: record the slots of the prefix, and start the load."""
        context, tree, node = self._context, self._context.tree, plan.node
        path = node.path()[::-1]
        resident = [at.held(FULL, DEVICE) for at in path if at.holds(FULL, DEVICE)]
        device_len, load_len = admission.device_len, admission.length - admission.device_len
        disk_len, remote_len = (
            sum(at.num_tokens for at in plan.missing[FULL] if at.source is store) for store in Store
        )
        if resident:
            lease.write(0, joined(resident))
        for at in path:
            at.hit_count += 1  # before what is loaded enters its order: entry and end are one use
        loads = [self._restore.start(plan, lease, slots)] if any(plan.missing.values()) else []
        lease.cached_len = lease.tree_len = admission.length  # the tree has what is loaded
        lease.hit = Hit(device_len, load_len - disk_len - remote_len, disk_len, remote_len)
        lease.read(loads)
        for component in context.components:
            component.start(lease, plan)
        if path:
            lease.read(self._restore.loads_of(path))
            tree.raise_priority(node, lease.priority)

    def _note_admitted(self, lease: Lease) -> None:
        self._requests.value += 1
        self._prompt.value += lease.prompt_len
        self._computed.value += lease.prompt_len - lease.cached_len
        hit = lease.hit
        for counter, tokens in zip(self._hits, (hit.device, hit.host, hit.disk, hit.remote), strict=True):
            counter.value += tokens
