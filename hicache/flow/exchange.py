"""Device and host exchange pages, step by step, where they are to hold different ones.

A request for which others have to leave the device, whom the host lacks, is not admitted at once. It gets room first:

    require   it asks, and is refused while anything is under way for it; its prefix and what it loads stay meanwhile
    poll      the copies of a step have ended: the step is loaded, and the victims of the next one go
    end       it is admitted, or gone

A load of full pages for which the host has no room, beside the victims, is made in steps. What leaves the device for a
step goes to the host while the step before comes up, and takes the places of what came up in the steps before that. So
no more than two steps are in both places, and what the host drops is on the device by then. The last step, and the
windows and states that the prefix needs, are loaded when the request is admitted, layer by layer: when there is as much
room of each component as that takes. One request at a time: they would take each other's room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from hicache.errors import ExchangePending, ResourceExhausted, TransferBusy
from hicache.flow.backup import DeviceEviction
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.located import Located
from hicache.flow.movement import Load, Movement
from hicache.flow.prompt import Prompt
from hicache.flow.restore import Restore
from hicache.host.run import HostRun, RunPart, within
from hicache.tiers import FULL, Component, Store
from hicache.tree.node import TreeNode

_AHEAD_SHARE = 8  # of the device, at most one part in so many is made free before anybody asks for it


class _Wanted:
    """What a request gets before it is admitted.

    `lease`      its hold, and nobody else's, on what the device has of its prefix, which ends with page `end`
    `parts`      what is to be loaded of each component, locked on the host; of full pages [done, end)
    `step_end`   where the next step ends
    `needed`     what has to be free of each component when it is admitted
    `num_held`   full pages that the device had; `sources`: of those loaded since, what a read had brought, by store
    `hold`       ends all of that
    """

    def __init__(self, lease: Lease, prompt: Prompt, admission: Admission, page_size: int) -> None:
        self.lease, self.prompt, self.end = lease, prompt, admission.length // page_size
        self.num_held = self.done = self.step_end = admission.device_len // page_size
        self.needed = dict[CacheComponent, int]()
        self.parts = dict[Component, list[RunPart]]()
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
        self.is_room_due, self._num_taken = False, 0
        self._steps = context.metrics.counter("exchange.loads", "steps of loads for which others left the device")

    @property
    def is_under_way(self) -> bool:
        """Whether the next poll may make a step."""
        return self._wanted is not None and not (self._wanted.is_ready or self._wanted.error)

    def of(self, request_id: str) -> _Wanted | None:
        """What it has got so far."""
        wanted = self._wanted
        return wanted if wanted is not None and wanted.lease.request_id == request_id else None

    def require_idle(self, request_id: str) -> None:
        """Raise ExchangePending while anything is under way for the request; once, what made that fail."""
        wanted = self.of(request_id)
        if wanted is not None and wanted.error is not None:
            self.end()
            raise wanted.error
        if wanted is not None and not wanted.is_ready:
            raise ExchangePending(f"pages are exchanged for {request_id}: poll() until it is admitted")

    def require(self, request: CacheRequest, admission: Admission, located: Located) -> bool:
        """There is room for the request, and what it loads is one step. Whether anything has changed for that.

        Raises ExchangePending until it is so, the shortage of slots, and TransferBusy where a step failed."""
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
        """Until what is loaded has come, and what left has been copied; the next step begins then."""
        self._eviction.wait()
        self._restore.complete([self._wanted.load] if self._wanted is not None and self._wanted.load else [])
        self._advance()

    def end(self, request_id: str | None = None) -> bool:
        """The request, or whichever it is, gets no more; whether there was any. What came for it stays on the device
        while others need no room."""
        wanted = self._wanted if request_id is None else self.of(request_id)
        if wanted is not None:
            self._wanted = None
            wanted.hold.close()
        return wanted is not None

    def make_room(self, leases: Mapping[str, Lease], *, has_queued: bool) -> None:
        """For what requests take next, so that they wait for no copy then: as much as they took of their prompts since
        the last time, while any is left, and a page each. Once after each time that any took something."""
        if not self.is_room_due:
            return
        num_taken, self._num_taken, self.is_room_due = self._num_taken, 0, False
        left = sum([max(0, lease.prompt_len - lease.held_len) for lease in leases.values()])
        num_slots = self._context.tree.page_size * len(leases) + (num_taken if has_queued else min(num_taken, left))
        for component in self._context.components:
            size = min(component.size_ahead(num_slots, len(leases)), component.capacity // _AHEAD_SHARE)
            if size > component.available():
                self._eviction.prepare(component, size)

    def note_taken(self, num_slots: int) -> None:
        """A request took so many slots for tokens to be computed."""
        self._num_taken, self.is_room_due = self._num_taken + num_slots, True

    def poll(self) -> bool:
        return self._advance()

    def is_busy(self) -> bool:
        """Its copies and loads are those of other movements."""
        return False

    def locks(self) -> list[TreeNode]:
        return [] if self._wanted is None or self._wanted.error else [self._wanted.lease.node]

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        return (part.run for part in (self._wanted.parts.get(component, ()) if self._wanted is not None else ()))

    # Inside

    def _is_one_step(self, admission: Admission) -> bool:
        page, needed = self._context.tree.page_size, self._context.full.needed(admission)
        end = admission.length // page
        return self._step_end(admission.device_len // page, end, needed) == end

    def _step_end(self, start: int, end: int, num_slots: int) -> int:
        index, full, page = self._context.exclusive, self._context.full, self._context.tree.page_size
        assert index is not None
        return index.step_end(start, end, -(-num_slots // page), full.available() // page)

    def _begin(self, request: CacheRequest, admission: Admission, located: Located) -> None:
        """What it has on the device, and what of the rest the host has, stays from now on."""
        with ExitStack() as undo:
            lease = self._restore.pin(request, admission, undo)
            lease.read(self._restore.loads_of(lease.node.path()))
            wanted = _Wanted(lease, located.prompt, admission, self._context.tree.page_size)
            undo.callback(self._unlock, wanted)
            with ExitStack() as held:
                wanted.parts = self._restore.hold(admission, located, held)
                held.pop_all()
            wanted.needed = {component: component.needed(admission) for component in self._context.components}
            wanted.step_end = self._step_end(wanted.done, wanted.end, wanted.needed[self._context.full])
            wanted.hold, self._wanted = undo.pop_all(), wanted

    def _unlock(self, wanted: _Wanted) -> None:
        parts, wanted.parts = wanted.parts, {}
        for name, of_component in parts.items():
            self._context.by_name[name].index.unlock([part.run for part in of_component])

    def _advance(self) -> bool:
        """The next step, where nothing is under way any more; whether there was one."""
        wanted, full = self._wanted, self._context.full
        if wanted is None or not self.is_under_way or not (wanted.load is None or wanted.load.completed):
            return False
        if any(load.error is not None for load in wanted.lease.loads):
            return self._fail(wanted, TransferBusy("a load of this prefix has failed"))
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
        """What has to leave for the step behind it goes meanwhile."""
        full, index, done = self._context.full, self._context.exclusive, wanted.step_end
        assert index is not None
        parts = wanted.parts[FULL] = index.divided(wanted.parts[FULL], done)
        step, rest = within(parts, range(wanted.done, done)), within(parts, range(done, wanted.end))
        divided = [step[-1].run] if rest[0].run is step[-1].run else []
        slots, page = full.alloc(num_slots), self._context.tree.page_size
        with ExitStack() as undo:
            undo.callback(full.free, slots)
            index.lock(divided)  # others have it too: once for each step
            undo.callback(index.unlock, divided)
            load = self._restore.submit_load(wanted.lease, wanted.prompt, {FULL: step}, slots, wanted.end * page)
            wanted.load, wanted.parts[FULL], wanted.done = load, rest, done  # these locks are the load's now
            undo.pop_all()
        wanted.lease.read([load])
        wanted.sources += sources_of(step, rest)
        wanted.needed[full] -= num_slots
        self._steps.value += 1
        wanted.step_end = self._step_end(done, wanted.end, wanted.needed[full])
        self._eviction.prepare(full, (wanted.step_end - done) * page)

    @staticmethod
    def _fail(wanted: _Wanted, error: ResourceExhausted) -> bool:
        """Its next `require` raises that."""
        wanted.error = error
        wanted.hold.close()
        return True


def sources_of(parts: Sequence[RunPart], rest: Sequence[RunPart] = ()) -> Counter[Store]:
    """Of pages that a request uses those that a read had brought, by its store. They count once as that. `rest`: what
    the request loads later, of the last run perhaps."""
    found, later = Counter[Store](), {part.run for part in rest[:1]}
    for part in parts:
        if part.run.source is not None:
            found[part.run.source] += part.end - part.start
            if part.run not in later:
                part.run.source = None
    return found
