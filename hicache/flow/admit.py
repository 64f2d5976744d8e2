"""Admission: a request gets a locked prefix, slots for its other tokens and a row of the request table, or nothing.

Admission counts the capacity before it changes anything. A refused request takes no slot, row or lease. If the refusal
is `ExchangePending` under `exclusive`, pages may have been evicted for the request, and its prefix is locked
(`hicache.flow.staged_load`). Pages on the host are loaded unless recomputing them is estimated to cost all requests
less time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from hicache.errors import (
    ExchangePending,
    OutOfRows,
    OutOfSlots,
    OutOfStates,
    PrefetchPending,
    PromptTooLong,
    ResourceExhausted,
    TransferBusy,
)
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies
from hicache.flow.cost import LoadEstimate
from hicache.flow.lease import CacheRequest, Hit, Lease
from hicache.flow.located import Located, Unused
from hicache.flow.page_transfer import PromptRows
from hicache.flow.prompt import Prompts
from hicache.flow.staged_load import StagedLoad
from hicache.metrics import Metrics
from hicache.pages.key import Tokens
from hicache.pages.misses import USABLE, MissReason, count, miss_help
from hicache.pages.table import NO_ROWS, Rows, names_of
from hicache.pages.tree import Expectation
from hicache.tiers import DISK, FULL, REMOTE, Component, Store
from hicache.transfer.counter import NUM_PRODUCERS

_REFUSALS: dict[type[ResourceExhausted], tuple[str, str]] = {
    OutOfSlots: ("out_of_slots", "too few slots were free or evictable"),
    OutOfRows: ("out_of_rows", "no row of the request table was free"),
    OutOfStates: ("out_of_states", "too few recurrent states were free or evictable"),
    TransferBusy: ("transfer_busy", "the maximum number of loads was in flight"),
    PrefetchPending: ("prefetch_pending", "the prefetch of the request had not ended"),
    ExchangePending: ("exchange_pending", "evicted pages were being copied to the host"),
}
_REFUSED = "refused admissions, which the scheduler retries"
_HITS = {
    "device": "were on the device",
    "host": "were loaded from the host",
    "disk": "a prefetch had read from the disk",
    "remote": "a prefetch had read from the remote store",
}
_LABELS = {reason: reason.label for reason in MissReason}
_MISSED = {_LABELS[reason]: text for reason, text in miss_help("page").items()} | {
    "tail": "after the last complete page of the prompt",
    "unknown": "without a known reason, because an engine without a host tier does not remember evicted pages",
}


@dataclass(frozen=True)
class _Expected:
    """Pages on the device and on the host that a queued request will use, by component."""

    on_device: Expectation
    rows: Mapping[Component, Rows]

    def is_for(self, on_device: Expectation, rows: Mapping[Component, Rows]) -> bool:
        """Return whether this expectation has exactly the pages `on_device` and `rows`."""
        pairs = [(self.on_device, on_device), (self.rows, rows)]
        return all(np.array_equal(before[name], now[name]) for before, now in pairs for name in now)


class Admit:
    """Makes and extends leases. Owned by the scheduler thread. `staged`: the staged loads; None unless the write
    policy is `exclusive`."""

    def __init__(self, context: EngineContext, prompts: Prompts, copies: Copies) -> None:
        self._context, self._prompts, self._copies = context, prompts, copies
        self.staged = StagedLoad(context, copies) if context.exclusive is not None else None
        self._expectations: dict[str, _Expected] = {}
        self._register(context.metrics)

    def _register(self, metrics: Metrics) -> None:
        count = metrics.counter
        self._requests = count("admit.requests", "prompts admitted; a preempted request counts once")
        self._uncounted = count(
            "admit.uncounted_requests",
            "admissions that do not count as a new prompt: after a preemption, for further answers, warm-up",
        )
        self._uncounted_hits = count(
            "admit.uncounted_hit_tokens", "cached tokens of uncounted requests; they do not count as hits"
        )
        self._prompt = count("admit.prompt_tokens", "tokens of admitted prompts: hit tokens and computed tokens")
        self._hits = [
            count(f"admit.{tier}_hit_tokens", f"tokens of admitted prompts that {how}", "admit_hit_tokens", tier=tier)
            for tier, how in _HITS.items()
        ]
        self._computed = count(
            "admit.computed_tokens", "tokens of admitted prompts that were computed, because no tier provided them"
        )
        self._missed = {
            label: count(
                f"admit.{label}_missed_tokens", f"computed prompt tokens {text}", "admit_missed_tokens", reason=label
            )
            for label, text in _MISSED.items()
        }
        self._refused = {
            error: count(f"admit.{reason}_attempts", f"{_REFUSED}: {why}", "admit_refused_attempts", reason=reason)
            for error, (reason, why) in _REFUSALS.items()
        }
        metrics.gauge(
            "admit.hit_ratio", "hit tokens of all tiers divided by prompt_tokens, since the start", self._hit_ratio
        )
        metrics.gauge(
            "admit.expected_requests",
            "queued requests that announced their prompts, so that the pages of these prompts are evicted last",
            lambda: len(self._expectations),
        )

    @property
    def expected(self) -> Mapping[str, object]:
        """A view of the pages that queued requests will use, by request id."""
        return self._expectations

    def acquire(self, request: CacheRequest, num_delayed: int) -> Lease:
        """See `CacheEngine.acquire`. `num_delayed`: the number of other requests that wait while this request is
        computed."""
        while True:
            try:
                return self._acquire(request, num_delayed)
            except ExchangePending:
                if self.staged is None or not request.may_wait:
                    raise
                self.staged.advance()
            except ResourceExhausted:
                # Apply copies that have ended. Also take the capacity of a staged load that is ready for another
                # request.
                has_ended_copy = self._copies.poll()
                has_ended = self.staged is not None and self.staged.end_ready(request.request_id)
                if not (has_ended_copy or has_ended):
                    raise

    def _acquire(self, request: CacheRequest, num_delayed: int) -> Lease:
        context = self._context
        if self.staged is not None:
            self.staged.require_idle(request.request_id)
        for component in context.components:
            component.refuse_impossible(request)
        admission, located, estimate = self._count(request, num_delayed)
        for component in context.components:
            if not component.fits_now(admission):
                raise self._shortage(component, component.needed(admission))
        if not context.req_to_token.available_size():
            raise OutOfRows(context.config.max_requests)
        if any(admission.to_load.values()) and not self._copies.can_load():
            raise TransferBusy(f"the maximum of {NUM_PRODUCERS} loads is in flight")
        if self._copies.has_failed(admission.match.rows):
            raise TransferBusy("a load of this prefix has failed and not yet ended")
        if self.staged is not None and located is not None and self.staged.require(request, admission, located):
            admission, located, estimate = self._count(request, num_delayed)

        with ExitStack() as undo:
            lease = self._copies.pin(request, admission, undo)
            with ExitStack() as held:
                to_load = dict[Component, PromptRows]()
                if located is not None:
                    lease.keys = located.prompt.keys
                    is_used = self.staged is None or self.staged.of(request.request_id) is None
                    to_load = self._copies.hold(admission, located, held, is_used=is_used)
                for component in context.components:
                    if not self._copies.make_available(component, component.needed(admission)):
                        raise self._shortage(component, component.needed(admission))
                if context.req_to_token.alloc([lease]) is None:
                    raise OutOfRows(context.config.max_requests)
                lease.tree_len = lease.held_len = admission.device_len
                lease.hit = self._fill(lease, admission, located, to_load, held)
            self._copies.backup_selected(lease.node)
            lease.declines_load = estimate is not None and not self._copies.policy.choose(estimate)
            self._count_admitted(lease)
            undo.pop_all()
        return lease

    def join(self, lease: Lease, num_tokens: int, num_delayed: int) -> Hit:
        """See `CacheEngine.join`. If this method raises, the caller can only release the lease."""
        try:
            admission, located, _ = self._count(lease.request, num_delayed)
        except ExchangePending:
            return Hit()
        may_load = self._copies.can_load() and not self._copies.has_failed(admission.match.rows)
        if located is None or admission.length <= num_tokens or not may_load:
            return Hit()
        tree, full = self._context.tree, self._context.full
        with ExitStack() as undo, ExitStack() as held:
            node, ahead = tree.node_at(admission.match, admission.device_len), admission.length - admission.device_len
            tree.lock(node, ahead)
            undo.callback(tree.unlock, node, ahead)
            to_load = self._copies.hold(admission, located, held)
            num_own = lease.held_len - lease.tree_len
            for component in self._context.components:
                if not self._free_slots_for(component, component.needed_to_join(admission, num_own)):
                    return Hit()
            full.release(lease)
            tree.unlock(lease.node)
            before, lease.node = lease.tree_len, node
            lease.tree_len = lease.held_len = admission.device_len
            undo.pop_all()
            undo.callback(self._lock_alone, lease, admission.length)
            hit = self._fill(lease, admission, located, to_load, held, before, num_tokens)
            undo.pop_all()
        lease.hit += hit
        self._copies.backup_selected(lease.node)
        self._count_hit(lease, hit)
        return hit

    def locate(self, tokens: Tokens, namespace: str) -> tuple[int, int, Located | None]:
        """Return the number of prompt tokens that the device can serve, the number that device and host can serve
        together, and, with a host tier, the locations of the pages."""
        context, tree = self._context, self._context.tree
        match, located = tree.match(tokens, namespace), None
        usable = tree.usable_len(match)
        if context.has_host:
            located = Located(context, self._prompts.of(tokens, namespace, match), match)
            usable = located.last_end(located.host_end, 0, located.in_memory) * tree.page_size
        return min(usable, match.full_len), usable, located

    def count_missed(self, lease: Lease, in_stores: Sequence[Unused]) -> None:
        """Count the computed tokens of a lease by reason. `in_stores`: pages that stores have and that were not
        read."""
        page, reason = self._context.tree.page_size, MissReason.GATE if lease.declines_load else USABLE
        unused = [*in_stores, (lease.cached_len // page, lease.branching_len // page, reason)]
        lease.missed = self.missed(lease.keys, lease.cached_len, lease.prompt_len, unused)
        if lease.request.is_counted:
            for label, num_tokens in lease.missed.items():
                self._missed[label].value += num_tokens

    def missed(
        self, keys: Sequence[bytes], cached_len: int, num_tokens: int, unused: Sequence[Unused]
    ) -> dict[str, int]:
        """Return the number of computed tokens by reason, for positions [cached_len, num_tokens) of a prompt. `keys`:
        keys of the prompt's complete pages. The watch remembers the pages that the host evicted, skipped or failed to
        read."""
        watch, page = self._context.watch, self._context.tree.page_size
        if watch is None:
            return {"unknown": num_tokens - cached_len}
        missed, first = dict[str, int](), cached_len // page
        if first < len(keys):
            reasons = watch.miss_reasons.reasons(names_of(keys[first:]))
            for start, end, reason in unused:
                reasons[max(0, start - first) : max(0, end - first)] = reason
            if reasons[0] == USABLE:
                reasons[0] = MissReason.EVICTED  # the page is in memory, so its window or state is missing
            for reason_of, num_pages in count(reasons).items():
                missed[_LABELS[reason_of]] = num_pages * page
        tail = num_tokens - cached_len - max(0, len(keys) - first) * page
        return {**missed, "tail": tail} if tail > 0 else missed

    def refused(self, error: ResourceExhausted) -> None:
        """Count an admission that was refused with `error`."""
        for kind, counter in self._refused.items():
            counter.value += isinstance(error, kind)

    def expect(self, request_id: str, tokens: Tokens, namespace: str) -> int:
        """See `CacheEngine.expect`."""
        context, tree = self._context, self._context.tree
        cacheable = tokens[: self._max_cached(len(tokens))]
        match, rows = tree.match(cacheable, namespace), dict[Component, Rows]()
        usable = on_device = tree.usable_len(match)
        with ExitStack() as named:
            if context.has_host:
                located = Located(context, self._prompts.of(cacheable, namespace, match, request_id), match)
                end = located.last_end(located.host_end, 0, located.in_memory)
                usable = end * tree.page_size
                for component in context.components:
                    pages = range(component.first_required(end), end)
                    rows[component.name] = located.rows_added(component, pages)
                    named.callback(component.pages.table.forget, rows[component.name])
            old, of_device = self._expectations.get(request_id), tree.required(match.rows, on_device)
            if old is None or not old.is_for(of_device, rows):
                tree.expect(of_device)
                self._expect_rows(rows, 1)
                if old is not None:
                    self._end_expectation(request_id)
                self._expectations[request_id] = _Expected(of_device, rows)
        return usable

    def forget(self, request_id: str) -> None:
        """End the expectation of a request that is no longer queued."""
        if request_id in self._expectations:
            self._end_expectation(request_id)
        if self.staged is not None:
            self.staged.end(request_id)

    def _end_expectation(self, request_id: str) -> None:
        expected = self._expectations.pop(request_id)
        self._context.tree.forget(expected.on_device)
        self._expect_rows(expected.rows, -1)

    def _expect_rows(self, rows: Mapping[Component, Rows], change: int) -> None:
        for name, of_component in rows.items():
            self._context.by_name[name].pages.expect(of_component, change)

    def evict_ahead(self, leases: Mapping[str, Lease]) -> bool:
        """Evict pages before `leases` and queued requests need slots, so that these requests need not wait for copies.
        Returns whether a staged load is in progress."""
        assert self.staged is not None
        self.staged.evict_ahead(leases, has_queued=len(self._expectations) > 0)
        return self.staged.is_in_progress

    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """See `CacheEngine.extend`."""
        context, limit = self._context, self._context.config.max_context_len
        if lease.length + num_tokens > limit:
            raise PromptTooLong(lease.length + num_tokens, limit, "max_context_len")
        if lease.length + num_tokens > lease.held_len:
            need = context.full.in_pages(lease.length + num_tokens - lease.held_len)
            for component in context.components:
                if not self._free_slots_for(component, component.size_of(need)):
                    raise self._shortage(component, need)
            self._take_slots(lease, need)
        start, lease.length = lease.length, lease.length + num_tokens
        return lease.slots_of(start, lease.length)

    def _free_slots_for(self, component: CacheComponent, size: int) -> bool:
        """Free slots for a running request. If necessary, end the staged load of a request that is not admitted yet."""
        if self._copies.make_available(component, size):
            return True
        if self.staged is None or not self.staged.end():
            return False
        return self._copies.make_available(component, size)

    def _count(self, request: CacheRequest, num_delayed: int) -> tuple[Admission, Located | None, LoadEstimate | None]:
        """Return the admission that the request would get and, with a host tier, the locations of its pages and the
        estimate of its load."""
        context, tree, num_tokens = self._context, self._context.tree, len(request.tokens)
        reserve, limit = request.reserve_tokens, num_tokens
        if request.max_cached_tokens is not None:
            limit = min(num_tokens, request.max_cached_tokens + 1)
        cacheable = request.tokens[: self._max_cached(limit)]
        match = tree.match(cacheable, request.namespace)
        length, located, to_load = tree.usable_len(match), None, dict[Component, Sequence[int]]()
        estimate = None
        if context.has_host:
            prompt = self._prompts.of(cacheable, request.namespace, match, request.request_id)
            located = Located(context, prompt, match)
            length, to_load, estimate = self._with_host(located, length, num_delayed)
        end = num_tokens if reserve is None else min(num_tokens, length + reserve)
        device_len = min(length, match.full_len)
        num_slots = context.full.in_pages(end - device_len)
        num_own = num_slots - length + device_len
        return Admission(match, length, device_len, end, num_slots, num_own, to_load), located, estimate

    def _with_host(
        self, located: Located, resident: int, num_delayed: int
    ) -> tuple[int, dict[Component, Sequence[int]], LoadEstimate | None]:
        """Return the length of the usable prefix (at least `resident` tokens), the pages to load for it, and the
        estimate of this load. All components can use the prefix. Pages whose load is not worthwhile are left out."""
        page, estimate = self._context.tree.page_size, None
        end = located.last_end(located.host_end, resident // page, located.in_memory)
        for component in self._context.components:
            if component.evicting and located.arriving_end(end) > end:
                raise ExchangePending(
                    "pages of this prompt are being copied to the host: poll() until the copies have ended"
                )
        if end * page > resident:
            to_load, num_bytes = self._to_load(located, end)
            estimate = self._copies.estimate(num_bytes, resident, end * page, num_delayed)
            if estimate.is_worth_loading():
                return end * page, to_load, estimate
        return resident, self._to_load(located, resident // page)[0], estimate

    def _to_load(self, located: Located, end: int) -> tuple[dict[Component, Sequence[int]], int]:
        """Return the pages of a prefix of `end` pages that the device lacks, by component, and their bytes on the
        host."""
        to_load, num_bytes = dict[Component, Sequence[int]](), 0
        for component in self._context.components:
            to_load[component.name] = pages = component.pages_to_load(end, located)
            num_bytes += len(pages) * component.host.page_bytes
        return to_load, num_bytes

    def _max_cached(self, num_tokens: int) -> int:
        """Return the tokens in complete pages of a prompt without its last token, which is computed because the caller
        needs its logits."""
        page_size = self._context.tree.page_size
        return (num_tokens - 1) // page_size * page_size

    def _shortage(self, component: CacheComponent, needed: int) -> ResourceExhausted:
        return component.shortage(needed, self._copies.num_in_flight(component.name))

    def _take_slots(self, lease: Lease, num_slots: int, num_loaded: int = 0) -> torch.Tensor:
        """Append `num_slots` slots to the lease. A load will write to the first `num_loaded` of these slots."""
        slots = self._context.full.alloc(num_slots)
        with ExitStack() as undo:
            undo.callback(self._context.full.free, slots)
            for component in self._context.others:
                component.take(slots[num_loaded:])
            lease.write(lease.held_len, slots)
            undo.pop_all()
        lease.held_len += num_slots
        if self.staged is not None:
            self.staged.note_taken(num_slots - num_loaded)
        return slots

    def _fill(
        self,
        lease: Lease,
        admission: Admission,
        located: Located | None,
        to_load: Mapping[Component, PromptRows],
        held: ExitStack,
        start: int = 0,
        num_computed: int = 0,
    ) -> Hit:
        """Append slots to the lease, and submit the load of the pages `to_load` to the first of these slots.

        The load takes over the host locks of `held`. `start`: the number of tokens whose slots the row of the request
        already has. Returns the hit: the tokens after the first `num_computed` that need no computing."""
        tree, full, page = self._context.tree, self._context.full, self._context.tree.page_size
        lease.length, lease.cached_len = admission.end, admission.length
        full_len = admission.match.full_len if located is None else located.host_end * page
        lease.branching_len = full_len if full_len > admission.length else 0
        slots = self._take_slots(lease, admission.num_slots, admission.length - admission.device_len)
        rows = tree.path_rows(lease.node, start)
        if len(rows):
            lease.write(start, full.resident.value(rows, is_kept=False))
        staged = None if self.staged is None else self.staged.of(lease.request_id)
        loaded = to_load[FULL].rows if FULL in to_load else NO_ROWS
        tree.begin_use(np.concatenate((rows, loaded)), is_new=staged is None)
        device_len, sources = admission.device_len, Counter[Store]()
        if staged is not None:
            device_len, sources = min(device_len, staged.num_held * page), Counter(staged.sources)
        if FULL in to_load:
            sources += full.pages.take_sources(loaded, self._context.stores)
        if located is not None and to_load:
            load = self._copies.load(lease, located.prompt, to_load, slots, admission.length)
            held.pop_all()
            lease.read([*load.depends_on, load])
        elif lease.node.parent is not None:
            lease.read(self._copies.loads_of(tree.path_rows(lease.node)))
        for component in self._context.others:
            component.prepare_forward(lease, admission)
        if lease.priority and lease.node.parent is not None:
            tree.raise_priority(lease.node, lease.priority)
        num_loaded = admission.length - max(device_len, num_computed)
        disk = min(num_loaded, sources[DISK] * page)
        remote = min(num_loaded - disk, sources[REMOTE] * page)
        return Hit(max(0, device_len - num_computed), num_loaded - disk - remote, disk, remote)

    def _lock_alone(self, lease: Lease, length: int) -> None:
        """Lock the present prefix of a lease, instead of a prefix of `length` tokens."""
        ahead = length - lease.node.depth_tokens
        self._context.tree.lock(lease.node)
        self._context.tree.unlock(lease.node, ahead)

    def _count_admitted(self, lease: Lease) -> None:
        """Count an admitted prompt."""
        if lease.request.is_counted:
            self._requests.value += 1
            self._prompt.value += lease.prompt_len
            self._computed.value += lease.prompt_len - lease.cached_len
        else:
            self._uncounted.value += 1
        self._count_hit(lease, lease.hit)

    def _count_hit(self, lease: Lease, hit: Hit) -> None:
        """Count tokens that an admitted request need not compute."""
        if not lease.request.is_counted:
            self._uncounted_hits.value += hit.tokens
            return
        for counter, tokens in zip(self._hits, (hit.device, hit.host, hit.disk, hit.remote), strict=True):
            counter.value += tokens

    def _hit_ratio(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)
