"""Room for a request on the device, made before it is admitted, where device and host hold different pages.

What has to leave the device, and the host lacks, is copied to the host first. No call waits for these copies:

    require   raises ExchangePending until there is room; what the request has on the device, and what it loads from the
              host, is locked from its first call on
    poll      where the copies of a step have ended, it loads the step, and evicts what leaves for the next one
    end       the request was admitted, or is gone, or another one needs the room before it is: the locks end

Where the host has no room for all that leaves, full pages are loaded in steps. The host drops what the device has as
well: what leaves for a step is copied to the places of pages that earlier steps have loaded, while the step before it
is loaded. So at most two steps are on both tiers.

The last step is loaded when the request is admitted, layer by layer, and the windows and states of its prefix with it.
Until then room is made for all that admission takes of each component. One request at a time gets room like this, for
two would take each other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import numpy as np

from hicache.errors import ExchangePending, ResourceExhausted, TransferBusy
from hicache.flow.backup import DeviceEviction
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.located import Located
from hicache.flow.movement import Load, Movement, PromptRows
from hicache.flow.prompt import Prompt
from hicache.flow.restore import Restore
from hicache.pages.table import NO_ROWS, Rows
from hicache.tiers import FULL, Component, Store

_AHEAD_SHARE = 8  # of the device, at most one part in so many is made free before anybody asks for it


class _Wanted:
    """The request for which room is made. Full pages of its prompt:

    [0, num_held)      were on the device at the beginning
    [num_held, done)   were loaded in steps; of these `sources` counts what a read had brought, by store
    [done, step_end)   the next step, the last one where that is `end`
    [done, end)        are locked on the host, as are the windows and states that the prefix needs: `pages`

    `lease` locks what the device has of the prefix, `load` is that of the last step, `needed` is what has to be free of
    each component when the request is admitted. `hold.close()` ends the locks. `error`: why it gets no room.
    """

    def __init__(self, lease: Lease, prompt: Prompt, admission: Admission, page_size: int) -> None:
        self.lease, self.prompt, self.end = lease, prompt, admission.length // page_size
        self.num_held = self.done = self.step_end = admission.device_len // page_size
        self.needed = dict[CacheComponent, int]()
        self.pages = dict[Component, PromptRows]()
        self.sources = Counter[Store]()
        self.load: Load | None = None
        self.hold = ExitStack()
        self.is_ready = False
        self.error: ResourceExhausted | None = None


class Exchange(Movement):
    """Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, restore: Restore, eviction: DeviceEviction) -> None:
        self._context, self._restore, self._eviction = context, restore, eviction
        self._wanted: _Wanted | None = None
        self._is_room_due, self._num_taken = False, 0
        self._steps = context.metrics.counter("exchange.loads", "steps of loads for which others left the device")

    @property
    def is_under_way(self) -> bool:
        """Whether the next poll may make a step."""
        return self._wanted is not None and not (self._wanted.is_ready or self._wanted.error)

    def of(self, request_id: str) -> _Wanted | None:
        """Its room, as far as it is made."""
        wanted = self._wanted
        return wanted if wanted is not None and wanted.lease.request_id == request_id else None

    def require_idle(self, request_id: str) -> None:
        """Raise ExchangePending while room is made for the request, and once the error where that failed."""
        wanted = self.of(request_id)
        if wanted is not None and wanted.error is not None:
            self.end()
            raise wanted.error
        if wanted is not None and not wanted.is_ready:
            raise ExchangePending(f"pages are exchanged for {request_id}: poll() until it is admitted")

    def require(self, request: CacheRequest, admission: Admission, located: Located) -> bool:
        """Returns when there is room for all that admission takes: whether `admission` has to be counted anew.

        Raises ExchangePending until then, the shortage of a component, and TransferBusy where a step failed."""
        wanted, components = self.of(request.request_id), self._context.components
        has_room = all(component.needed(admission) <= component.available() for component in components)
        if has_room and (wanted is not None or self._is_one_step(admission)):
            return False
        if wanted is None and self.is_under_way:
            raise ExchangePending("pages are exchanged for another request: poll() until it is admitted")
        self.end()
        self._begin(request, admission, located)
        self._advance()
        self.require_idle(request.request_id)
        return True

    def wait(self) -> None:
        """Wait for the copies of a step, and begin the next one."""
        self._eviction.wait()
        self._restore.complete([self._wanted.load] if self._wanted is not None and self._wanted.load else [])
        self._advance()

    def end(self, request_id: str | None = None) -> bool:
        """Make no more room for the request, or for any; whether that was under way. What was loaded for it stays on
        the device, unlocked."""
        wanted = self._wanted if request_id is None else self.of(request_id)
        if wanted is not None:
            self._wanted = None
            wanted.hold.close()
        return wanted is not None

    def end_ready(self, request_id: str) -> bool:
        """End the exchange of another request whose room is made and not taken; whether there was one."""
        wanted = self._wanted
        return wanted is not None and wanted.is_ready and self.of(request_id) is None and self.end()

    def make_room(self, leases: Mapping[str, Lease], *, has_queued: bool) -> None:
        """Evict for what `leases` take next, so that they wait for no copy then: as much as was taken of prompts since
        the last time, while any is left of them, and a page each. Nothing before anybody has taken something again."""
        if not self._is_room_due:
            return
        num_taken, self._num_taken, self._is_room_due = self._num_taken, 0, False
        left = sum([max(0, lease.prompt_len - lease.held_len) for lease in leases.values()])
        num_slots = self._context.tree.page_size * len(leases) + (num_taken if has_queued else min(num_taken, left))
        for component in self._context.components:
            size = min(component.size_ahead(num_slots, len(leases)), component.capacity // _AHEAD_SHARE)
            if size > component.available():
                self._eviction.prepare(component, size)

    def note_taken(self, num_slots: int) -> None:
        """A request took so many slots for tokens to be computed."""
        self._num_taken, self._is_room_due = self._num_taken + num_slots, True

    def poll(self) -> bool:
        return self._advance()

    def is_busy(self) -> bool:
        """Its copies are those of backup and restore."""
        return False

    def device_locks(self, component: Component) -> Iterable[Rows]:
        wanted = self._wanted
        if wanted is None or wanted.error:
            return []
        ahead = wanted.end * self._context.tree.page_size - wanted.lease.node.depth_tokens
        return [self._context.tree.locked_rows(component, wanted.lease.node, ahead)]

    def loads_read(self) -> Iterable[Load]:
        return [] if self._wanted is None or self._wanted.error else self._wanted.lease.loads

    def host_locks(self, component: Component) -> Iterable[Rows]:
        wanted = self._wanted
        return [wanted.pages[component].rows] if wanted is not None and component in wanted.pages else []

    # Inside

    def _is_one_step(self, admission: Admission) -> bool:
        page, needed = self._context.tree.page_size, self._context.full.needed(admission)
        end = admission.length // page
        return self._step_end(admission.device_len // page, end, needed) == end

    def _step_end(self, start: int, end: int, num_slots: int) -> int:
        pages, full, page = self._context.exclusive, self._context.full, self._context.tree.page_size
        assert pages is not None
        return pages.step_end(start, end, -(-num_slots // page), full.available() // page)

    def _begin(self, request: CacheRequest, admission: Admission, located: Located) -> None:
        """Lock what the device has of the prefix, and what is to be loaded on the host."""
        with ExitStack() as undo:
            lease = self._restore.pin(request, admission, undo)
            path = self._context.tree.path_rows(lease.node)
            lease.read(self._restore.loads_of(path))
            wanted = _Wanted(lease, located.prompt, admission, self._context.tree.page_size)
            undo.callback(self._unlock, wanted)
            with ExitStack() as held:
                wanted.pages = self._restore.hold(admission, located, held)
                held.pop_all()
            loaded = wanted.pages[FULL].rows if FULL in wanted.pages else NO_ROWS
            self._context.tree.begin_use(np.concatenate((path, loaded)))
            wanted.needed = {component: component.needed(admission) for component in self._context.components}
            wanted.step_end = self._step_end(wanted.done, wanted.end, wanted.needed[self._context.full])
            wanted.hold, self._wanted = undo.pop_all(), wanted

    def _unlock(self, wanted: _Wanted) -> None:
        pages, wanted.pages = wanted.pages, {}
        for name, (rows, _) in pages.items():
            self._context.by_name[name].pages.unlock(rows)

    def _advance(self) -> bool:
        """Make the next step, where the copies of the last one have ended; whether anything was done."""
        wanted, full = self._wanted, self._context.full
        if wanted is None or wanted.error is not None:
            return False
        if any(load.error is not None for load in wanted.lease.loads):
            return self._fail(wanted, TransferBusy("a load of this prefix has failed"))
        if wanted.is_ready or not (wanted.load is None or wanted.load.completed):
            return False
        is_last = wanted.step_end == wanted.end
        num_slots = (wanted.step_end - wanted.done) * self._context.tree.page_size
        sizes: Mapping[CacheComponent, int] = wanted.needed if is_last else {full: num_slots}
        lacking = [component for component, size in sizes.items() if not self._eviction.prepare(component, size)]
        for component in lacking:
            if not component.num_leaving:
                return self._fail(wanted, component.shortage(sizes[component]))
        if lacking or not (is_last or self._restore.can_submit()):
            return False
        if is_last:
            wanted.is_ready = True
        elif self._has_grown(wanted):
            self.end()  # others have brought what it was to load: what is left is found when it asks again
        else:
            self._load_step(wanted, num_slots)
        return True

    def _has_grown(self, wanted: _Wanted) -> bool:
        """Whether the device has more of the prefix than came for this request."""
        tree, prompt = self._context.tree, wanted.prompt
        match = tree.match(prompt.tokens[: wanted.end * tree.page_size], prompt.namespace)
        return match.full_len > wanted.lease.node.depth_tokens

    def _load_step(self, wanted: _Wanted, num_slots: int) -> None:
        """Load the next step, and evict what leaves for the one after it."""
        full, done, of_full = self._context.full, wanted.step_end, wanted.pages[FULL]
        step, rest = of_full.between(wanted.done, done), of_full.between(done, wanted.end)
        slots, page = full.alloc(num_slots), self._context.tree.page_size
        with ExitStack() as undo:
            undo.callback(full.free, slots)
            load = self._restore.submit_load(wanted.lease, wanted.prompt, {FULL: step}, slots, wanted.end * page)
            wanted.load, wanted.pages[FULL], wanted.done = load, rest, done  # the locks of the step are the load's now
            undo.pop_all()
        wanted.lease.read([load])
        wanted.sources += full.pages.take_sources(step.rows, self._context.stores)
        wanted.needed[full] -= num_slots
        self._steps.value += 1
        wanted.step_end = self._step_end(done, wanted.end, wanted.needed[full])
        self._eviction.prepare(full, (wanted.step_end - done) * page)

    @staticmethod
    def _fail(wanted: _Wanted, error: ResourceExhausted) -> bool:
        """`require_idle` raises the error."""
        wanted.error = error
        wanted.hold.close()
        return True
