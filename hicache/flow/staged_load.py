"""Staged loads: loads that alternate evictions and loads, under the write policy `exclusive`.

A request gets capacity on the device before it is admitted. With `may_wait=False`, its `acquire` does not wait for the
copies of evicted pages:

    | stage    | until                                                      | then                              |
    |----------|------------------------------------------------------------|-----------------------------------|
    | EVICTING | the pages evicted for the next step are on the host        | LOADING; READY for the last step  |
    | LOADING  | the load of a step has ended                               | EVICTING                          |
    | READY    | admission, or another request needs the capacity           | the load ends                     |
    | FAILED   | the caller gets the error                                  | the load ends                     |

A request moves from any stage to FAILED if a load of its prefix fails. A request also moves from EVICTING to FAILED if
a component has no capacity. `require` starts the load, and raises `ExchangePending` until the stage is READY; `poll`
advances the load. From the first call of `require` on, the request's pages on the device, and the host pages to load,
are locked.

Full pages are loaded in steps if the host has too few free pages for the pages that the device evicts. While a step is
loaded, the pages evicted for the next step are copied to the host pages of earlier steps, because the device already
has the pages of these steps. So the pages of at most two steps are on both tiers. The last step is loaded layer by
layer when the request is admitted, with the windows and states of its prefix. Only one staged load is in
progress at a time, because two requests would take each other's capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from enum import Enum, auto

import numpy as np

from hicache.errors import ExchangePending, ResourceExhausted, TransferBusy
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.copies import Copies
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.located import Located
from hicache.flow.page_transfer import Load, PageTransfer, PromptRows
from hicache.flow.prompt import Prompt
from hicache.pages.table import NO_ROWS, Rows
from hicache.tiers import FULL, Component, Store

_AHEAD_SHARE = 8  # divisor: at most an eighth of the device is evicted in advance


class Stage(Enum):
    """The stage of a staged load. The module's docstring has a table of the stages."""

    EVICTING = auto()
    LOADING = auto()
    READY = auto()
    FAILED = auto()


_IN_PROGRESS = (Stage.EVICTING, Stage.LOADING)


class StagedRequest:
    """A request with a staged load. Intervals of full pages of its prompt:

    [0, num_held)      were on the device at the beginning
    [num_held, done)   were loaded in steps; `sources` counts pages that were read from stores
    [done, step_end)   the next step; the last step ends at `end`
    [done, end)        are locked on the host, as are the windows and states that the prefix needs: `pages`

    `lease`: locks the part of the prefix that is on the device. `load`: the load of the last submitted step. `needed`:
    the tokens or states of each component that must be free at the admission. `locks.close()` ends the locks. `error`:
    the reason for FAILED.
    """

    def __init__(self, lease: Lease, prompt: Prompt, admission: Admission, page_size: int) -> None:
        self.lease = lease
        self.prompt = prompt
        self.end = admission.length // page_size
        self.num_held = self.done = self.step_end = admission.device_len // page_size
        self.needed = dict[CacheComponent, int]()
        self.pages = dict[Component, PromptRows]()
        self.sources = Counter[Store]()
        self.load: Load | None = None
        self.locks = ExitStack()
        self.stage = Stage.EVICTING
        self.error: ResourceExhausted | None = None


class StagedLoad(PageTransfer):
    """Staged loads, for one request at a time. Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, copies: Copies) -> None:
        self._context, self._copies = context, copies
        self._request: StagedRequest | None = None
        self._is_eviction_due, self._num_taken = False, 0
        self._steps = context.metrics.counter(
            "exchange.loads", "steps of staged loads, for which the device evicted other pages"
        )

    @property
    def is_in_progress(self) -> bool:
        """Return whether the next poll may start a step."""
        return self._request is not None and self._request.stage in _IN_PROGRESS

    def of(self, request_id: str) -> StagedRequest | None:
        """Return the staged request with this id, or None."""
        request = self._request
        return request if request is not None and request.lease.request_id == request_id else None

    def require_idle(self, request_id: str) -> None:
        """Raise ExchangePending while the staged load of the request is in progress. If the load has failed, raise its
        error, once."""
        request = self.of(request_id)
        if request is not None and request.error is not None:
            self.end()
            raise request.error
        if request is not None and request.stage in _IN_PROGRESS:
            raise ExchangePending(f"the staged load of {request_id} is in progress: poll() and retry")

    def require(self, request: CacheRequest, admission: Admission, located: Located) -> bool:
        """Start or check the staged load of a request. Returns when the capacity for the admission is free; True if
        the caller has to count the admission again.

        Raises ExchangePending until the capacity is free, the shortage of a component, and TransferBusy if a step
        failed."""
        staged, components = self.of(request.request_id), self._context.components
        is_free = all(component.needed(admission) <= component.available() for component in components)
        if is_free and (staged is not None or self._is_one_step(admission)):
            return False
        if staged is None and self.is_in_progress:
            raise ExchangePending("the staged load of another request is in progress: poll() and retry")
        self.end()
        self._begin(request, admission, located)
        self.poll()
        self.require_idle(request.request_id)
        return True

    def advance(self) -> None:
        """Wait for the copies of a step, and start the next step."""
        self._copies.wait_for_evicted()
        load = None if self._request is None else self._request.load
        self._copies.end_loads([] if load is None else [load])
        self.poll()

    def end(self, request_id: str | None = None) -> bool:
        """End the staged load of the request `request_id`; None: of any request. Returns whether a staged load was
        ended. Loaded pages stay on the device, unlocked."""
        request = self._request if request_id is None else self.of(request_id)
        if request is not None:
            self._request = None
            request.locks.close()
        return request is not None

    def end_ready(self, request_id: str) -> bool:
        """End the staged load of another request if it is READY. Returns whether a staged load was ended."""
        request = self._request
        is_other = request is not None and request.stage is Stage.READY and self.of(request_id) is None
        return is_other and self.end()

    def evict_ahead(self, leases: Mapping[str, Lease], *, has_queued: bool) -> None:
        """Evict pages before `leases` need slots, so that these requests need not wait for copies. Evicts one page for
        each lease. While prompt tokens are left, it also evicts the number of slots that prompts took since the last
        call. Does nothing until a request has taken slots again."""
        if not self._is_eviction_due:
            return
        num_taken, self._num_taken, self._is_eviction_due = self._num_taken, 0, False
        left = sum([max(0, lease.prompt_len - lease.held_len) for lease in leases.values()])
        num_slots = self._context.tree.page_size * len(leases) + (num_taken if has_queued else min(num_taken, left))
        for component in self._context.components:
            size = min(component.size_ahead(num_slots, len(leases)), component.capacity // _AHEAD_SHARE)
            if size > component.available():
                self._copies.prepare(component, size)

    def note_taken(self, num_slots: int) -> None:
        """Record that a request took `num_slots` slots for tokens to be computed."""
        self._num_taken, self._is_eviction_due = self._num_taken + num_slots, True

    def poll(self) -> bool:
        """Start the next step if the copies of the last step have ended. Returns whether anything changed."""
        request = self._request
        if request is None or request.stage is Stage.FAILED:
            return False
        if any(load.error is not None for load in request.lease.loads):
            return self._fail(request, TransferBusy("a load of this prefix has failed"))
        if request.stage is Stage.READY or not (request.load is None or request.load.completed):
            return False
        request.stage = Stage.EVICTING
        is_last, num_slots = request.step_end == request.end, self._num_tokens(request.step_end - request.done)
        sizes: Mapping[CacheComponent, int] = request.needed if is_last else {self._context.full: num_slots}
        lacking = [component for component, size in sizes.items() if not self._copies.prepare(component, size)]
        for component in lacking:
            if not component.num_evicting:
                return self._fail(request, component.shortage(sizes[component]))
        if lacking or not (is_last or self._copies.can_load()):
            return False
        if is_last:
            request.stage = Stage.READY
        elif self._has_grown(request):
            self.end()  # other requests loaded pages of its prompt; the next `acquire` counts the rest
        else:
            self._load_step(request, num_slots)
        return True

    def is_busy(self) -> bool:
        """Return False, because `Copies` reports the copies of the steps as busy."""
        return False

    def device_locks(self, component: Component) -> Iterable[Rows]:
        request = self._request
        if request is None or request.error:
            return []
        ahead = self._num_tokens(request.end) - request.lease.node.depth_tokens
        return [self._context.tree.locked_rows(component, request.lease.node, ahead)]

    def loads_read(self) -> Iterable[Load]:
        return [] if self._request is None or self._request.error else self._request.lease.loads

    def host_locks(self, component: Component) -> Iterable[Rows]:
        request = self._request
        return [request.pages[component].rows] if request is not None and component in request.pages else []

    # Implementation

    def _num_tokens(self, num_pages: int) -> int:
        return num_pages * self._context.tree.page_size

    def _is_one_step(self, admission: Admission) -> bool:
        page, needed = self._context.tree.page_size, self._context.full.needed(admission)
        end = admission.length // page
        return self._step_end(admission.device_len // page, end, needed) == end

    def _step_end(self, start: int, end: int, num_slots: int) -> int:
        pages, full, page = self._context.exclusive, self._context.full, self._context.tree.page_size
        assert pages is not None
        return pages.step_end(start, end, -(-num_slots // page), full.available() // page)

    def _begin(self, request: CacheRequest, admission: Admission, located: Located) -> None:
        """Lock the prefix on the device, and the host pages to load."""
        with ExitStack() as undo:
            lease = self._copies.pin(request, admission, undo)
            path = self._context.tree.path_rows(lease.node)
            lease.read(self._copies.loads_of(path))
            staged = StagedRequest(lease, located.prompt, admission, self._context.tree.page_size)
            undo.callback(self._unlock, staged)
            with ExitStack() as held:
                staged.pages = self._copies.hold(admission, located, held)
                held.pop_all()
            loaded = staged.pages[FULL].rows if FULL in staged.pages else NO_ROWS
            self._context.tree.begin_use(np.concatenate((path, loaded)))
            staged.needed = {component: component.needed(admission) for component in self._context.components}
            staged.step_end = self._step_end(staged.done, staged.end, staged.needed[self._context.full])
            staged.locks, self._request = undo.pop_all(), staged

    def _unlock(self, request: StagedRequest) -> None:
        pages, request.pages = request.pages, {}
        for name, (rows, _) in pages.items():
            self._context.by_name[name].pages.unlock(rows)

    def _has_grown(self, request: StagedRequest) -> bool:
        """Return whether the device has more pages of the prefix than this request has loaded."""
        tree, prompt = self._context.tree, request.prompt
        match = tree.match(prompt.tokens[: self._num_tokens(request.end)], prompt.namespace)
        return match.full_len > request.lease.node.depth_tokens

    def _load_step(self, request: StagedRequest, num_slots: int) -> None:
        """Load the next step, and evict for the step after it."""
        full, done, of_full = self._context.full, request.step_end, request.pages[FULL]
        step, rest = of_full.between(request.done, done), of_full.between(done, request.end)
        slots = full.alloc(num_slots)
        with ExitStack() as undo:
            undo.callback(full.free, slots)
            length = self._num_tokens(request.end)
            load = self._copies.load(request.lease, request.prompt, {FULL: step}, slots, length)
            request.load, request.pages[FULL], request.done = (
                load,
                rest,
                done,
            )  # the load now owns the locks of the step
            request.stage = Stage.LOADING
            undo.pop_all()
        request.lease.read([load])
        request.sources += full.pages.take_sources(step.rows, self._context.stores)
        request.needed[full] -= num_slots
        self._steps.value += 1
        request.step_end = self._step_end(done, request.end, request.needed[full])
        self._copies.prepare(full, self._num_tokens(request.step_end - done))

    @staticmethod
    def _fail(request: StagedRequest, error: ResourceExhausted) -> bool:
        """Move a request to the stage FAILED. The next `require_idle` raises the error."""
        request.stage, request.error = Stage.FAILED, error
        request.locks.close()
        return True
