"""Device to host, and capacity on the device.

A backup locks its nodes, reserves host pages for what the host has not, and submits one copy for each component. Only
when the copy is confirmed are the pages published; a failed copy gives them back. Window slots and states are copied
with the pages of their nodes; those that were added later are copied on their own.

Where the device lacks capacity, what is least worth keeping leaves. What the host has is loaded again when it is
needed; what it has not is copied there first where the write policy says so, all victims together, and is lost
otherwise. The slots of these are free when their copy has ended, for which who can waits elsewhere (`prepare`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext, values_of
from hicache.flow.located import first_gap, rows_below, slices_of
from hicache.flow.movement import CopyMovement, JointOp
from hicache.flow.persist import Persist
from hicache.pages.policy import Ranks
from hicache.pages.states import COPY, HELD, IN_FLIGHT
from hicache.pages.table import Mask, Rows
from hicache.tiers import FULL, Component, joined
from hicache.transfer.base import TransferOp
from hicache.tree.base import Released
from hicache.tree.names import PromptPages
from hicache.tree.node import TreeNode

log = logging.getLogger(__name__)


class Unsaved(NamedTuple):
    """Consecutive pages of a prompt that `component` has on the device; the host lacks some of these pages.

    `rows`: of the tree; `value`: their slots or states. `needs_full`: a window or state is of no use unless the host
    has its full page, or gets it; False: it is elsewhere. `event_pages`: what events tell of full pages. `uses`: how
    requests used them, see `TierPages`."""

    component: CacheComponent
    rows: Rows
    value: torch.Tensor
    needs_full: bool
    event_pages: PromptPages | None
    uses: Ranks

    @property
    def first(self) -> int:
        """The page that the first is of the prompt."""
        return int(self.component.tree.table.index[self.rows[0]])

    @property
    def full_keys(self) -> list[bytes] | None:
        """Of the full pages that have to be on the host; None: they are elsewhere."""
        return self.component.tree.table.keys_of(self.rows) if self.needs_full else None

    @property
    def keys(self) -> list[bytes]:
        """Under which the host and the stores know the pages."""
        tree = self.component.tree
        return tree.names.of_component(self.component.name, tree.table.keys_of(self.rows))

    def part(self, start: int, end: int) -> Unsaved:
        """The `start`-th to the `end`-th page."""
        size = self.component.page_size
        return self._replace(
            rows=self.rows[start:end],
            value=self.value[start * size : end * size],
            event_pages=self.event_pages and self.event_pages.part(start, end),
            uses=self.uses[start:end],
        )


class _ToCopy(NamedTuple):
    """The pages of one component in a copy: host rows in the order of their slots. `full_keys`: as in `Unsaved`; None
    for a page whose full page is not in this copy."""

    rows: Rows
    slots: torch.Tensor
    full_keys: list[bytes | None]


class _Copy(JointOp):
    """Copies that were submitted together, `pages` by component; `locked` rows of the tree are to unlock."""

    def __init__(self, locked: Mapping[Component, Rows]) -> None:
        super().__init__()
        self.locked = locked
        self.pages: dict[Component, _ToCopy] = {}


class Backup(CopyMovement[_Copy]):
    """What arrives on the host is handed to each of `persists`."""

    def __init__(self, context: EngineContext, persists: Sequence[Persist]) -> None:
        super().__init__()
        self._context, self._persists = context, tuple(persists)
        count = context.metrics.counter
        help, labels = "bytes of a copy from device to host", {"movement": "backup", "direction": "device_to_host"}
        self._bytes, self._seconds = context.metrics.movement("backup", help, "time that copy took", **labels)
        self._failures = count("backup.failures", "copies to the host that failed; their pages stayed on the device")
        self._skipped = count("backup.skipped_tokens", "tokens not backed up because the host had no page to give")
        self._skipped_components = count(
            "backup.skipped_pages", "pages of windows and states that were not backed up for that reason"
        )
        # Pages that were skipped, the last at the end; and how many of all components the device may hold.
        self._counted: dict[bytes, None] = {}
        self._max_counted = len(context.components) * context.full.capacity // context.tree.page_size
        self._exposed_s = 0.0
        self._exposed = context.metrics.histogram(
            "backup.exposed_seconds", "what a call stood still for a copy of what leaves; 0: it ended beside others"
        )

    def maybe_backup(self, node: TreeNode, num_new: int = 0) -> None:
        """Copy what the write policy wants of the path to `node`, together, as far as others may leave for it. The
        last `num_new` pages are new on the device."""
        if node.parent is None:
            return
        tree, wants = self._context.tree, self._context.write_policy.wants
        table, path = tree.table, tree.path_rows(node)
        start = self._first_absent(path, num_new)
        end = start + first_gap(wants(table, path[start:]))
        if start == len(path) and len(self._context.components) > 1 and wants(table, node.rows).all():
            start -= len(node.rows)  # its full pages were copied before
        if end > start:
            self._submit(self.unsaved(path[start:end]), self._locks(path[:end], start))

    def backup_path(self, node: TreeNode) -> None:
        """Copy the path to `node` now, whatever the policy wants of it, and wait, so that its slots may be taken.

        A policy that copies at eviction does so then."""
        if node.parent is not None and not self._context.write_policy.at_eviction:
            path = self._context.tree.path_rows(node)
            start = self._first_absent(path, 0)
            start = start if start < len(path) else len(path) - len(node.rows)
            self._submit(self.unsaved(path[start:]), self._locks(path, start))
            self.wait_and_complete()

    def unsaved(self, rows: Rows, only: Component | None = None) -> list[Unsaved]:
        """The pages of `rows` that the device has and the host lacks, FULL first, but none of ended sessions. `only`:
        of the one component that the pages are to lose; their full pages stay on the device. Consecutive pages are
        together."""
        found = []
        for component in self._context.components:
            if only not in (None, component.name):
                continue
            held = component.resident.held(rows)
            held = held[~component.resident.order.has_ended[held]]
            bounds = np.flatnonzero(self._context.tree.table.previous[held[1:]] != held[:-1]) + 1
            for run in np.split(held, bounds) if len(held) else ():
                if self.lacks(component, run).any():
                    found.append(self._of_run(run, component, needs_full=only is None and component.name != FULL))
        return found

    def save(self, unsaved: Sequence[Unsaved], released: list[Released]) -> None:
        """Copy what leaves the device. `unsaved`: as nodes left, those that others follow behind them. Where the host
        has not room for all, what left last stays, and of that the beginning. `released`: its values, which leave the
        list where they are freed when the copy has ended; where nothing is copied they stay in it."""
        self._submit(unsaved[::-1], {}, released)

    def wait_for(self, component: CacheComponent, size: int) -> None:
        """Wait for copies of what has left the device until `size` of it are free, or none is under way."""
        while component.num_leaving and component.available() < size:
            start_s = time.perf_counter()
            self._in_flight[0].wait()
            self._exposed_s = time.perf_counter() - start_s
            self._end_first()
            self._exposed_s = 0.0

    def num_in_flight(self, component: Component) -> int:
        return sum(len(copy.pages[component].slots) for copy in self._in_flight if component in copy.pages)

    def host_locks(self, component: Component) -> Iterable[Rows]:
        return (copy.pages[component].rows for copy in self._in_flight if component in copy.pages)

    def device_locks(self, component: Component) -> Iterable[Rows]:
        return (copy.locked[component] for copy in self._in_flight if component in copy.locked)

    def lacks(self, component: CacheComponent, rows: Rows) -> Mask:
        """Which of these pages of the tree the host neither has nor gets."""
        of_host = rows_below(self._context, {component.name: rows})[component.name]
        return ~component.pages.has(of_host, HELD | IN_FLIGHT)

    def _first_absent(self, path: Rows, num_new: int) -> int:
        """Where the pages at the end of a path begin that the host neither has nor gets; or where such pages of the
        last `num_new` begin, though the host has pages behind them."""
        lacks = ~self._context.full.pages.has(path, HELD | IN_FLIGHT)
        new = len(path) - num_new
        return min(len(path) - first_gap(lacks[::-1]), new + first_gap(~lacks[new:]))

    def _locks(self, path: Rows, start: int) -> dict[Component, Rows]:
        """The pages to lock while pages of a path from the `start`-th on are copied."""
        held = {each.name: each.resident.held(path[start:]) for each in self._context.components[1:]}
        return {FULL: path, **held}

    def _of_run(self, rows: Rows, component: CacheComponent, *, needs_full: bool) -> Unsaved:
        tells_events = component.name == FULL and self._context.tree.events is not None
        return Unsaved(
            component=component,
            rows=rows,
            value=component.resident.value(rows),
            needs_full=needs_full,
            event_pages=self._context.tree.event_pages(rows) if tells_events else None,
            uses=component.resident.uses_of(rows),
        )

    def _submit(
        self, unsaved: Sequence[Unsaved], locked: Mapping[Component, Rows], released: list[Released] | None = None
    ) -> None:
        """Start the copies of `unsaved` pages, as far as the host has capacity. Pages `locked` stay on the device
        meanwhile. `released`: values of pages that have left the device, which are freed when the copies end."""
        if not unsaved:
            return
        copy, leaving = _Copy(locked), values_of(released or ())
        with ExitStack() as undo:
            for name, rows in locked.items():
                self._context.by_name[name].resident.lock(rows)
                undo.callback(self._context.by_name[name].resident.unlock, rows)
            try:
                for component in self._context.components:
                    of_component = [each for each in unsaved if each.component is component]
                    if of_component:
                        refused = self._submit_copy(copy, component, of_component)
                        self._skip(component, refused, stays=released is None)
            finally:
                if copy.copies:
                    undo.pop_all()
                    self._in_flight.append(copy)
                    for name, value in leaving.items():
                        component = self._context.by_name[name]
                        component.leaving[copy] = component.leave(value)
                    if released:
                        released.clear()

    def _submit_copy(self, copy: _Copy, component: CacheComponent, unsaved: Sequence[Unsaved]) -> list[bytes]:
        """Submit one component's copy, as far as the host has capacity for it; returns the keys of what it has not."""
        pages, found = component.pages, list[tuple[Unsaved, Rows, Mask]]()
        with ExitStack() as named:
            for each in unsaved:
                rows = each.rows if component.name == FULL else pages.table.add(each.keys, each.first)
                pages.table.hold(rows)
                named.callback(pages.table.drop, rows)
                is_new = ~pages.has(rows, HELD | IN_FLIGHT) & self._are_of_use(each.full_keys, len(rows))
                found.append((each, rows[is_new], is_new))
            new = np.concatenate([rows for _, rows, _ in found])
            used = np.concatenate([each.rows[is_new] for each, _, is_new in found])
            hits, priority = self._context.tree.table.hits[used], self._context.tree.table.priority[used]
            taken = pages.reserve(new, COPY, hits=hits, priority=priority)
            if len(taken):
                with ExitStack() as undo:
                    undo.callback(pages.abandon, taken)
                    uses = np.concatenate([each.uses[is_new] for each, _, is_new in found])
                    pages.expected_uses[taken] = uses[: len(taken)]
                    self._copy_taken(copy, component, found, taken)
                    undo.pop_all()
            return pages.table.keys_of(new[len(taken) :])

    def _copy_taken(
        self, copy: _Copy, component: CacheComponent, found: Sequence[tuple[Unsaved, Rows, Mask]], taken: Rows
    ) -> None:
        """Submit the copy of the first pages of `found`, which have places: `taken`."""
        full_keys, values, watch = list[bytes | None](), list[torch.Tensor](), self._context.watch
        for each, _, is_new in found:
            at, of_full = np.flatnonzero(is_new).tolist(), each.full_keys
            values += slices_of(each.value, at, component.page_size)
            full_keys += [None if of_full is None else of_full[i] for i in at]
            if each.event_pages is not None and watch is not None:
                watch.note(each.event_pages, component.pages.table.keys_of(taken))
        slots = component.device_ids(joined(values)[: len(taken) * component.page_size])
        self._copy(copy, component, _ToCopy(taken, slots, full_keys[: len(taken)]))

    def _are_of_use(self, full_keys: Sequence[bytes] | None, num_pages: int) -> Mask:
        """Of pages of windows or states which have their full pages on the host, or get them."""
        if full_keys is None:
            return np.ones(num_pages, np.bool_)
        full = self._context.full.pages
        return full.has(full.table.find(full_keys), HELD | COPY)

    @staticmethod
    def _copy(copy: _Copy, component: CacheComponent, to_copy: _ToCopy, *, is_raw: bool = False) -> None:
        """Submit a copy to the places of its pages; `is_raw`: to both of each, not packed."""
        places = torch.from_numpy(component.pages.place[to_copy.rows])
        second_places = torch.from_numpy(component.pages.second_place[to_copy.rows]) if is_raw else None
        copy.copies.append(component.transfer.store(to_copy.slots, places, second_places))
        copy.pages[component.name] = to_copy

    def _publish(self, raw_copy: _Copy, component: CacheComponent, copied: _ToCopy, op: TransferOp) -> Rows:
        """Give the pages of an ended copy their next state. `raw_copy` copies the pages that do not fit packed."""
        pages, packing, (rows, slots, full_keys) = component.pages, component.packing, copied
        misfits = np.array(op.misfits, np.int64)
        if packing is not None and not pages.second_place[rows].any():
            packing.count(len(rows), len(misfits))
        known = [key is None for key in full_keys]
        ok = np.array(known, np.bool_)
        if not ok.all():
            ok |= self._are_of_use([key or b"" for key in full_keys], len(rows))
        misfits = misfits[ok[misfits]]
        if len(misfits):
            assert packing is not None
            num_raw = len(pages.reserve_second(rows[misfits]))
            packing.drop(len(misfits) - num_raw)
            ok[misfits[num_raw:]] = False
            raw = misfits[:num_raw]
            if num_raw:
                of_raw = joined(slices_of(slots, raw.tolist(), component.page_size))
                self._copy(raw_copy, component, _ToCopy(rows[raw], of_raw, [full_keys[at] for at in raw]), is_raw=True)
            here = np.ones(len(rows), np.bool_)
            here[raw] = False
            rows, ok = rows[here], ok[here]
        watch, events = self._context.watch, self._context.tree.events
        if component.name == FULL and watch is not None:
            watch.forget(pages.table.keys_of(rows[~ok]))
        came = pages.landed(rows, ok)
        if events is not None and watch is not None and component.name == FULL:
            for told in watch.told(pages.table.keys_of(came)):
                events.stored(told, "CPU")
        return came

    def _skip(self, component: CacheComponent, keys: Sequence[bytes], *, stays: bool) -> None:
        """Count what the host has no capacity for. What stays on the device is tried again with all that comes behind
        it, and counts once."""
        num_pages = sum(not stays or key not in self._counted for key in keys)
        for key in keys if stays else ():
            self._counted.pop(key, None)
            self._counted[key] = None
        for key in list(islice(self._counted, max(0, len(self._counted) - self._max_counted))):
            del self._counted[key]
        if component.name != FULL:
            self._skipped_components.value += num_pages
            return
        num_tokens = num_pages * self._context.tree.page_size
        if num_tokens and not self._skipped.value:
            log.warning(
                "%d tokens are not backed up: of %d host pages none can be evicted for them; raise host_bytes",
                num_tokens,
                self._context.full.host.num_pages,
            )
        self._skipped.value += num_tokens

    def _end(self, operation: _Copy) -> None:
        copy = operation
        copy.wait()  # before its end nothing is known of its error
        confirmed = copy.error is None
        arrived: list[tuple[CacheComponent, Rows]] = []
        raw_copy = _Copy(copy.locked)
        for (name, copied), op in zip(copy.pages.items(), copy.copies, strict=True):
            component = self._context.by_name[name]
            if confirmed:
                arrived.append((component, self._publish(raw_copy, component, copied, op)))
                continue
            if name == FULL and self._context.watch is not None:
                self._context.watch.forget(component.pages.table.keys_of(copied.rows))
            component.pages.abandon(copied.rows)
        if confirmed:
            self._bytes.observe(copy.num_bytes)
            self._seconds.observe(copy.seconds())
        else:
            self._failures.value += 1
        if raw_copy.copies:
            self._in_flight.append(raw_copy)  # which has the locks
        else:
            for locked, rows in copy.locked.items():
                self._context.by_name[locked].resident.unlock(rows)
        self._free_what_left(copy, raw_copy)
        for persist in self._persists:
            for component, rows in reversed(arrived):  # states and windows first: the disk evicts them first
                persist.store(component, rows)

    def _free_what_left(self, copy: _Copy, raw_copy: _Copy) -> None:
        """What left the device before `copy`, unless `raw_copy` still reads it."""
        left = {at: ids for at in self._context.components if (ids := at.leaving.pop(copy, None)) is not None}
        if left:
            self._exposed.observe(self._exposed_s)
        for component, ids in left.items():
            if raw_copy.copies:
                component.leaving[raw_copy] = ids
            else:
                component.free_left(ids)


class DeviceEviction:
    """Owned by the scheduler thread. `backup`: None without a host tier."""

    def __init__(self, context: EngineContext, backup: Backup | None) -> None:
        self._context = context
        self._backup = backup if context.write_policy.at_eviction else None

    def make_available(self, component: CacheComponent, size: int) -> bool:
        """Evict until `size` tokens or states of a component are free; False when that cannot be. Waits for copies of
        what is evicted."""
        if self.prepare(component, size):
            return True
        if self._backup is not None:
            self._backup.wait_for(component, size)
        return size <= component.available()

    def wait(self) -> None:
        """Until all that was evicted has been copied, or was not."""
        if self._backup is not None:
            for component in self._context.components:
                self._backup.wait_for(component, component.available() + component.num_leaving)

    def prepare(self, component: CacheComponent, size: int) -> bool:
        """The same without waiting: whether so many are free now. Where they are not and `component.leaving` has
        something, they may be when that has been copied."""
        short = size - component.available() - component.num_leaving
        if short > 0:
            self._evict(component, short)
        return size <= component.available()

    def _evict(self, component: CacheComponent, short: int) -> None:
        name, context = component.name, self._context
        released, leaving = list[Released](), list[Released]()  # what is free at once, and what is copied before
        unsaved, victims = list[Unsaved](), list[Rows]()
        try:
            while short > 0 and len(rows := component.resident.take(short)):
                for part in context.tree.by_node(rows):
                    if not len(part := component.resident.held(part)):
                        continue  # it left with those before
                    context.tree.table.hold(part)
                    victims.append(part)
                    only = None if name == FULL else name  # its full pages stay
                    lacking = self._backup.unsaved(part, only) if self._backup is not None else []
                    left = context.evict(part, name)
                    unsaved += lacking
                    (leaving if lacking else released).extend(left)
                    short -= sum(item.size for item in left if item.component == name)
            if self._backup is not None:
                self._backup.save(unsaved, leaving)
            for part in victims:
                component.count_eviction(part)
        except BaseException:  # where the copy of one component raises, that of another may be under way
            if self._backup is not None:
                self._backup.wait_and_complete()
            raise
        finally:
            context.free([*released, *leaving])
            for part in victims:
                context.tree.table.drop(part)
