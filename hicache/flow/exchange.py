"""Device and host exchange pages, step by step, where they are to hold different ones.

A request for which others have to leave the device, whom the host lacks, is not admitted at once. It gets room first:

    require   it asks, and is refused while anything is under way for it; its prefix and what it loads stay meanwhile
    poll      the copies of a step have ended: the step is loaded, and the victims of the next one go
    end       it is admitted, or gone

A load for which the host has no room, beside the victims, is made in steps. What leaves the device for a step goes to
the host while the step before comes up, and takes the places of what came up in the steps before that. So no more than
two steps are in both places, and what the host drops is on the device by then. The last step is loaded when the request
is admitted, layer by layer. One request at a time: they would take each other's room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from hicache.errors import ExchangePending, ResourceExhausted, TransferBusy
from hicache.flow.backup import DeviceEviction
from hicache.flow.components.base import Admission
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
    """What a request gets before it is admitted. `lease`, which nobody else has, is its hold on what is on the device.

    `parts`       of pages [done, end) of `prompt`, which are to be loaded: locked on the host
    `step_end`    where the next step ends; the last is none of this
    `num_behind`  slots for what follows the last step
    `num_held`    pages that the device had; `sources`: of those loaded since, what a read had brought, by store
    """

    def __init__(self, lease: Lease, prompt: Prompt, parts: list[RunPart], num_held: int, num_behind: int) -> None:
        self.lease, self.prompt, self.parts, self.num_behind = lease, prompt, parts, num_behind
        self.num_held = self.done = self.step_end = num_held
        self.end = parts[-1].end if parts else num_held
        self.sources = Counter[Store]()
        self.load: Load | None = None
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
        """Raise ExchangePending while anything is under way for the request."""
        if (wanted := self.of(request_id)) is not None and not (wanted.is_ready or wanted.error):
            raise ExchangePending(f"pages are exchanged for {request_id}: poll() until it is admitted")

    def require(self, request: CacheRequest, admission: Admission, located: Located) -> bool:
        """There is room for the request, and what it loads is one step. Whether anything has changed for that.

        Raises ExchangePending until it is so, the shortage of slots, and TransferBusy where a step failed."""
        full, wanted = self._context.full, self.of(request.request_id)
        has_room = full.needed(admission) <= full.available()
        if wanted is None:
            if has_room and self._is_one_step(admission):
                return False
            if self.is_under_way:
                raise ExchangePending("pages are exchanged for another request: poll() until it is admitted")
            self.end()
            self._begin(request, admission, located)
        elif wanted.is_ready and has_room:
            return False
        elif wanted.is_ready:
            num_loaded = (wanted.end - wanted.done) * self._context.tree.page_size
            wanted.is_ready, wanted.num_behind = False, max(0, full.needed(admission) - num_loaded)
        self._advance()
        if (wanted := self._wanted) is not None and wanted.error is not None:
            self.end()
            raise wanted.error
        self.require_idle(request.request_id)
        return True

    def wait(self) -> None:
        """Until what is under way has ended; the next step begins then."""
        self._eviction.wait()
        self._restore.complete([self._wanted.load] if self._wanted is not None and self._wanted.load else [])
        self._advance()

    def end(self, request_id: str | None = None) -> bool:
        """The request, or whichever it is, gets no more; whether there was any. What came for it stays on the device
        while others need no room."""
        wanted = self._wanted if request_id is None else self.of(request_id)
        if wanted is not None:
            self._wanted = None
            self._release(wanted)
        return wanted is not None

    def make_room(self, leases: Mapping[str, Lease], *, has_queued: bool) -> None:
        """For what requests take next, so that they wait for no copy then: as much as they took of their prompts since
        the last time, while any is left, and a page each. Once after each time that any took something."""
        if not self.is_room_due:
            return
        num_taken, self._num_taken, self.is_room_due = self._num_taken, 0, False
        page, full = self._context.tree.page_size, self._context.full
        left = sum([max(0, lease.prompt_len - lease.held_len) for lease in leases.values()])
        wanted = page * len(leases) + (num_taken if has_queued else min(num_taken, left))
        wanted = min(wanted, full.capacity // _AHEAD_SHARE)
        if wanted > full.available():
            self._eviction.prepare(full, wanted)

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
        return (part.run for part in (self._wanted.parts if self._wanted is not None and component == FULL else ()))

    # Inside

    def _is_one_step(self, admission: Admission) -> bool:
        pages, page = admission.to_load.get(FULL, ()), self._context.tree.page_size
        return not pages or self._step_end(pages[0], pages[-1] + 1, -(-admission.num_own // page)) > pages[-1]

    def _step_end(self, start: int, end: int, num_behind: int) -> int:
        index, full = self._context.exclusive, self._context.full
        assert index is not None
        return index.step_end(start, end, full.available() // self._context.tree.page_size, num_behind)

    def _begin(self, request: CacheRequest, admission: Admission, located: Located) -> None:
        """What it has on the device, and what of the rest the host has, stays from now on."""
        context, tree, index = self._context, self._context.tree, self._context.full.index
        node, pages = tree.node_at(admission.match, admission.device_len), admission.to_load.get(FULL, ())
        lease = Lease(request, node, context.req_to_token.req_to_token, context.full.allocator.device)
        with ExitStack() as undo:
            undo.callback(self._restore.free, lease)
            tree.lock(node)
            undo.callback(lambda: tree.unlock(lease.node))
            lease.read(self._restore.loads_of(node.path()))
            used = index.count_use(located.parts(context.full, range(admission.length // tree.page_size)))
            parts, num_held = within(used, pages), admission.device_len // tree.page_size
            wanted = _Wanted(lease, located.prompt, parts, num_held, admission.num_own)
            wanted.step_end = self._step_end(wanted.done, wanted.end, -(-admission.num_own // tree.page_size))
            index.lock([part.run for part in parts])
            self._wanted = wanted
            undo.pop_all()

    def _advance(self) -> bool:
        """The next step, where nothing is under way any more; whether there was one."""
        wanted, full = self._wanted, self._context.full
        if wanted is None or wanted.is_ready or wanted.error is not None:
            return False
        if wanted.load is not None and not wanted.load.completed:
            return False
        if any(load.error is not None for load in (*wanted.lease.loads, *filter(None, [wanted.load]))):
            return self._fail(wanted, TransferBusy("a load of this prefix has failed"))
        num_slots = (wanted.step_end - wanted.done) * self._context.tree.page_size
        is_last = wanted.step_end == wanted.end
        has_room = self._eviction.prepare(full, num_slots)
        if has_room and is_last:
            num_slots += wanted.num_behind
            has_room = self._eviction.prepare(full, num_slots)
        if not has_room:
            return not full.leaving and self._fail(wanted, full.shortage(num_slots))
        if not is_last and not self._restore.can_submit():
            return False
        if is_last:
            wanted.is_ready = True
        else:
            self._load_step(wanted, num_slots)
        return True

    def _load_step(self, wanted: _Wanted, num_slots: int) -> None:
        """What has to leave for the step behind it goes meanwhile."""
        full, index, done, end = self._context.full, self._context.exclusive, wanted.step_end, wanted.end
        assert index is not None
        wanted.parts = index.divided(wanted.parts, done)
        step, rest = within(wanted.parts, range(wanted.done, done)), within(wanted.parts, range(done, end))
        divided = [step[-1].run] if rest and rest[0].run is step[-1].run else []
        slots = full.alloc(num_slots)
        with ExitStack() as undo:
            undo.callback(full.free, slots)
            index.lock(divided)  # others have it too: once for each step
            undo.callback(index.unlock, divided)
            wanted.load = self._restore.submit_load(wanted.lease, wanted.prompt, {FULL: step}, slots)
            wanted.parts, wanted.done = rest, done  # these locks are the load's now
            undo.pop_all()
        wanted.lease.read([wanted.load])
        wanted.sources += sources_of(step, rest)
        self._steps.value += 1
        page = self._context.tree.page_size
        wanted.step_end = self._step_end(done, end, -(-wanted.num_behind // page))
        self._eviction.prepare(full, (wanted.step_end - done) * page)

    def _fail(self, wanted: _Wanted, error: ResourceExhausted) -> bool:
        """Its next `require` raises that."""
        wanted.error = error
        self._release(wanted)
        return True

    def _release(self, wanted: _Wanted) -> None:
        """What it holds, once."""
        if wanted.lease.released:
            return
        wanted.lease.released, parts, wanted.parts = True, wanted.parts, []
        with ExitStack() as steps:
            steps.callback(self._restore.free, wanted.lease)
            steps.callback(self._context.tree.unlock, wanted.lease.node)
            steps.callback(self._context.full.index.unlock, [part.run for part in parts])


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
