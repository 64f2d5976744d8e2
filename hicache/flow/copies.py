"""Copies between device and host, and capacity on the device.

A `Backup` copies pages from the device to the host: pages that the write policy selects, or pages that are evicted. A
`Load` copies pages from the host to slots of the device, layer by layer, while the forward pass that needs them runs.

Before a copy is submitted, its source pages are locked and its target pages allocated. `Copies.poll` applies ended
copies in the order of submission. The pages of a backup are published at its end; a failed backup frees its pool pages.
The nodes of a load are in the tree as soon as the load is submitted. A request that matches these nodes waits for each
layer by the load id. If a load fails, its nodes are removed from the tree.

If the device lacks capacity, the pages of the lowest rank are evicted. Under a write policy that copies at eviction,
evicted pages that the host lacks are backed up in one copy, and their slots are free when this copy has ended
(`CacheComponent.evicting`)."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.flow.components.base import Admission, CacheComponent
from hicache.flow.context import EngineContext, values_of
from hicache.flow.cost import LoadEstimate, LoadPolicy
from hicache.flow.lease import CacheRequest, Lease
from hicache.flow.located import Located, first_gap, slices_of
from hicache.flow.page_transfer import Copy, Load, PageTransfer, PromptRows
from hicache.flow.prompt import Prompt
from hicache.flow.write_policy import OnEviction
from hicache.flow.writes import Writes
from hicache.pages.key import PromptPages, component_keys
from hicache.pages.node import Released, TreeNode
from hicache.pages.policy import Ranks
from hicache.pages.states import COPY, HELD, IN_FLIGHT
from hicache.pages.table import NO_ROW, NO_ROWS, Mask, Rows
from hicache.tiers import FULL, Component, joined
from hicache.transfer.base import TransferOp
from hicache.transfer.counter import LayerTransferCounter

log = logging.getLogger(__name__)


class Unsaved(NamedTuple):
    """Consecutive pages of a prompt that are on the device; the host lacks at least one of these pages.

    `rows`: rows of the tree. `value`: the slots or states of these pages. `needs_full`: whether the host can use the
    windows or states only with their full pages; False if the device or a store has the full pages. `event_pages`: the
    pages as events report them. `uses`: uses of the pages, see `TierPages`."""

    component: CacheComponent
    rows: Rows
    value: torch.Tensor
    needs_full: bool
    event_pages: PromptPages | None
    uses: Ranks

    @property
    def first(self) -> int:
        """The index of the first page in the prompt."""
        return int(self.component.tree.table.index[self.rows[0]])

    @property
    def keys(self) -> list[bytes]:
        """The page keys, by which the host and the stores find the pages."""
        return component_keys(self.component.name, self.component.tree.table.keys_of(self.rows))

    def part(self, start: int, end: int) -> Unsaved:
        """Return pages [start, end)."""
        size = self.component.page_size
        return self._replace(
            rows=self.rows[start:end],
            value=self.value[start * size : end * size],
            event_pages=self.event_pages and self.event_pages.part(start, end),
            uses=self.uses[start:end],
        )


class _BackupPages(NamedTuple):
    """The pages of one component in a backup: host rows in the order of their slots. `full_rows`: rows of the full
    pages that windows or states need on the host; `NO_ROW` if the device or a store has the full pages."""

    rows: Rows
    slots: torch.Tensor
    full_rows: Rows


@dataclass(eq=False)
class Backup(Copy):
    """A copy of `pages`, by component, from device to host. `locked`: rows of the tree that the backup locks. `named`:
    rows of full pages that keep their numbers until the backup ends. `end`: the index after the last copied page of its
    prompt."""

    locked: dict[Component, Rows] = field(default_factory=dict)
    pages: dict[Component, _BackupPages] = field(default_factory=dict)
    named: list[Rows] = field(default_factory=list)
    end: int = 0


class Copies(PageTransfer):
    """All copies of an engine. Owned by the scheduler thread. Each of `writes` queues the pages that arrive on the
    host. `policy`: decides about loads."""

    def __init__(self, context: EngineContext, policy: LoadPolicy, writes: Sequence[Writes]) -> None:
        self._context, self.policy, self._writes = context, policy, tuple(writes)
        self._counters = [component.counter for component in context.components]
        self._backups, self._loads = deque[Backup](), deque[Load]()
        self._backs_up_evicted = context.has_host and context.write_policy.on_eviction is not OnEviction.DROP
        # Keys of pages whose backup was skipped, the latest last; and their maximum number, the pages that the device
        # can have.
        self._counted: dict[bytes, None] = {}
        self._max_counted = len(context.components) * context.full.capacity // context.tree.page_size
        self._exposed_s = 0.0
        if context.has_host:
            self._register_backups()
        self._register_loads()

    def _register_backups(self) -> None:
        metrics, count = self._context.metrics, self._context.metrics.counter
        help, labels = "bytes of a copy from device to host", {"operation": "backup", "direction": "device_to_host"}
        self._backup_bytes, self._backup_seconds = metrics.transfer(
            "backup", help, "duration of a copy from device to host", **labels
        )
        self._failed_backups = count(
            "backup.failures", "copies to the host that failed; their pages stayed on the device"
        )
        self._skipped = count(
            "backup.skipped_tokens", "tokens that were not backed up because no host page was free or evictable"
        )
        self._skipped_components = count(
            "backup.skipped_pages",
            "window pages and recurrent states that were not backed up because no host page was free or evictable",
        )
        self._backup_exposed = metrics.histogram(
            "backup.exposed_seconds",
            "time for which a call waited for a copy of evicted pages; 0: the call did not wait",
        )

    def _register_loads(self) -> None:
        metrics, count = self._context.metrics, self._context.metrics.counter
        help, labels = "bytes of a load from host to device", {"operation": "load", "direction": "host_to_device"}
        self._loaded_bytes, self._load_seconds = metrics.transfer(
            "restore", help, "duration of a load from host to device", **labels
        )
        self._timed_s = count("restore.timed_seconds", "total duration of the loads whose exposed time was measured")
        self._load_exposed_s = count("restore.exposed_seconds", "part of timed_seconds for which forward passes waited")
        self._failed_loads = count("restore.failures", "loads that failed; their pages stayed on the host")
        metrics.gauge(
            "restore.overlapped_ratio",
            "share of timed_seconds for which no forward pass waited",
            self._overlapped_ratio,
        )

    # The interface of a transfer

    def poll(self) -> bool:
        has_ended = False
        while self._backups and self._backups[0].done():
            self._end_backup()
            has_ended = True
        while self._loads and self._loads[0].done():
            self._end_load()
            has_ended = True
        return has_ended

    def is_busy(self) -> bool:
        return bool(self._backups or self._loads)

    def wait(self) -> None:
        """Block until all submitted copies have ended. The next `poll` applies their results."""
        for copy in (*self._backups, *self._loads):
            copy.wait()

    def device_locks(self, component: Component) -> Iterable[Rows]:
        yield from (backup.locked[component] for backup in self._backups if component in backup.locked)
        yield from (self._context.tree.locked_rows(component, load.node) for load in self._loads)

    def host_locks(self, component: Component) -> Iterable[Rows]:
        yield from (backup.pages[component].rows for backup in self._backups if component in backup.pages)
        yield from (load.pages[component].rows for load in self._loads if component in load.pages)

    def num_in_flight(self, component: Component) -> int:
        """Return the tokens or states of a component in copies that have not been applied."""
        num_backed_up = sum(len(backup.pages[component].slots) for backup in self._backups if component in backup.pages)
        num_loaded = sum(len(load.pages[component].rows) for load in self._loads if component in load.pages)
        return num_backed_up + num_loaded * self._context.by_name[component].page_size

    # Device to host

    def backup_selected(self, node: TreeNode, num_new: int = 0) -> None:
        """Back up the pages of the path to `node` that the write policy selects, in one copy, as far as the host has
        free or evictable pages. `num_new`: the number of pages at the end of the path that are new on the device."""
        if node.parent is None or not self._context.has_host:
            return
        tree, selects = self._context.tree, self._context.write_policy.selects
        table, path = tree.table, tree.path_rows(node)
        start = end = self._first_absent(path, num_new)
        if start < len(path):
            end += first_gap(selects(table, path[start:]))
        elif len(self._context.components) > 1 and selects(table, node.rows).all():
            start -= len(node.rows)  # the host has the node's full pages, but may lack its windows or states
        if end > start:
            self._submit_backup(self.unsaved(path[start:end]), path[:end], start)

    def backup_path(self, node: TreeNode) -> None:
        """Back up the pages of the path to `node`, even if the write policy does not select them, and wait for the
        copy. Does nothing under a policy that copies at eviction."""
        if node.parent is None or not self._context.has_host or self._backs_up_evicted:
            return
        path = self._context.tree.path_rows(node)
        start = self._first_absent(path, 0)
        start = start if start < len(path) else len(path) - len(node.rows)
        self._submit_backup(self.unsaved(path[start:]), path, start)
        self.end_backups()

    def backup_evicted(self, unsaved: Sequence[Unsaved], released: list[Released]) -> None:
        """Back up evicted pages. `unsaved`: the pages in the order of eviction: later pages of a prompt first. If the
        host lacks capacity, the pages evicted last are copied. `released`: the values of the pages. If a copy is
        submitted, the list is emptied, because the end of the backup frees the values. If nothing is copied, the list
        stays unchanged."""
        self._submit_backup(unsaved[::-1], NO_ROWS, 0, released)

    def end_backups(self) -> None:
        """Wait for all backups, and apply them."""
        while self._backups:
            self._backups[0].wait()
            self._end_backup()

    def unsaved(self, rows: Rows, only: Component | None = None) -> list[Unsaved]:
        """Return the pages of `rows` that the device has and the host lacks, FULL first, without pages of ended
        sessions. `only`: the component that is evicted, if the full pages stay on the device. Each item has consecutive
        pages."""
        found, tree = list[Unsaved](), self._context.tree
        for component in self._context.components:
            name, resident = component.name, component.resident
            if only not in (None, name):
                continue
            held = resident.held(rows)
            held = held[~resident.order.has_ended[held]]
            bounds = (tree.table.previous[held[1:]] != held[:-1]).nonzero()[0] + 1
            for run in np.split(held, bounds) if len(bounds) else [held] if len(held) else ():
                if self.lacks(component, run).any():
                    event_pages = tree.event_pages(run) if name == FULL and tree.events is not None else None
                    uses = resident.order.policy.uses_of(resident.order.at, run)
                    needs_full = only is None and name != FULL
                    found.append(Unsaved(component, run, resident.value(run), needs_full, event_pages, uses))
        return found

    def lacks(self, component: CacheComponent, rows: Rows) -> Mask:
        """Return which of the pages `rows` are neither on the host nor in flight to the host."""
        return ~component.pages.has(component.host_rows(rows), HELD | IN_FLIGHT)

    def _first_absent(self, path: Rows, num_new: int) -> int:
        """Return the smallest index from which on no page of the path is on the host or in flight to the host. If the
        host lacks one of the last `num_new` pages and has a later page, return the index of the first of these pages
        that the host lacks."""
        has = self._context.full.pages.has(path, HELD | IN_FLIGHT)
        absent, new = len(path) - first_gap(~has[::-1]), len(path) - num_new
        return min(absent, new + first_gap(has[new:])) if num_new else absent

    def _submit_backup(
        self, unsaved: Sequence[Unsaved], path: Rows, start: int, released: list[Released] | None = None
    ) -> None:
        """Submit the copies of `unsaved` pages, as far as the host has capacity. `path`: a prefix that is locked on the
        device until the copies end, with the windows and states of its pages from `start` on. `released`: values of
        evicted pages, which are freed when the copies end."""
        if not unsaved:
            return
        backup, evicting = Backup(), values_of(released) if released else {}
        with ExitStack() as undo:
            for component in self._context.components if len(path) else ():
                resident = component.resident
                backup.locked[component.name] = rows = path if component.name == FULL else resident.held(path[start:])
                resident.lock(rows)
                undo.callback(resident.unlock, rows)
            undo.callback(self._forget_named, backup)
            try:
                for component in self._context.components:
                    self._backup_component(backup, component, unsaved, is_resident=released is None)
            finally:
                if backup.operations:
                    undo.pop_all()
                    self._backups.append(backup)
                    for name, value in evicting.items():
                        component = self._context.by_name[name]
                        component.evicting[backup] = component.take_evicted(value)
                    if released:
                        released.clear()
                    if len(path) and self._context.tree.table.index[path[-1]] >= backup.end:
                        self._unlock_rest(backup)

    def _unlock_rest(self, backup: Backup) -> None:
        """Unlock the pages after the last copied page. The host has no capacity for these pages."""
        locked, index = backup.locked, self._context.tree.table.index
        backup.locked = {name: rows[index[rows] < backup.end] for name, rows in locked.items()}
        for name, rows in locked.items():
            self._context.by_name[name].resident.unlock(rows[index[rows] >= backup.end])

    def _backup_component(
        self, backup: Backup, component: CacheComponent, unsaved: Sequence[Unsaved], *, is_resident: bool
    ) -> None:
        """Submit the copy of the pages of one component, as far as the host has capacity, and count the other pages.
        `is_resident`: whether the pages stay on the device."""
        pages, is_full, used_at = component.pages, component.name == FULL, self._context.tree.table
        new, used, uses = list[Rows](), list[Rows](), list[Ranks]()
        values, full_rows = list[torch.Tensor](), list[Rows]()
        with ExitStack() as undo:
            for each in unsaved:
                if each.component is not component:
                    continue
                rows, needed = each.rows, each.rows if each.needs_full else np.full_like(each.rows, NO_ROW)
                if not is_full:  # full pages of the tree have rows already
                    rows = pages.table.add(each.keys, each.first)
                    pages.table.hold(rows)
                    undo.callback(pages.table.drop, rows)
                is_new = ~pages.has(rows, HELD | IN_FLIGHT)
                if each.needs_full:
                    is_new &= self._are_usable(needed)
                is_all = bool(is_new.all())
                at = () if is_all else np.flatnonzero(is_new).tolist()
                values += [each.value] if is_all else slices_of(each.value, at, component.page_size)
                new.append(rows[is_new])
                used.append(each.rows[is_new])
                uses.append(each.uses[is_new])
                full_rows.append(needed[is_new])
            if not new:
                return
            all_new, all_used = np.concatenate(new), np.concatenate(used)
            taken = pages.reserve(all_new, COPY, hits=used_at.hits[all_used], priority=used_at.priority[all_used])
            if len(taken) < len(all_new):
                self._skip(component, pages.table.keys_of(all_new[len(taken) :]), is_resident=is_resident)
            if not len(taken):
                return
            undo_taken = undo.enter_context(ExitStack())
            undo_taken.callback(pages.abandon, taken)
            pages.expected_uses[taken] = np.concatenate(uses)[: len(taken)]
            backup.end = max(backup.end, int(used_at.index[all_used[: len(taken)]].max()) + 1)
            for each in unsaved:
                if is_full and each.event_pages is not None and self._context.watch is not None:
                    self._context.watch.note(each.event_pages, pages.table.keys_of(taken))
            slots = component.device_ids(joined(values)[: len(taken) * component.page_size])
            named = np.concatenate(full_rows)[: len(taken)]
            if not is_full:
                required = named[named != NO_ROW]
                used_at.hold(required)
                backup.named.append(required)
            self._submit_pages(backup, component, _BackupPages(taken, slots, named))
            undo_taken.pop_all()

    @staticmethod
    def _submit_pages(backup: Backup, component: CacheComponent, pages: _BackupPages, *, is_raw: bool = False) -> None:
        """Submit a copy to the pool pages of `pages`. `is_raw`: pages are copied unpacked, each to two pool pages."""
        pool_pages = torch.from_numpy(component.pages.pool_page[pages.rows])
        second_pool_pages = torch.from_numpy(component.pages.second_pool_page[pages.rows]) if is_raw else None
        backup.add(component.transfer.store(pages.slots, pool_pages, second_pool_pages))
        backup.pages[component.name] = pages

    def _are_usable(self, full_rows: Rows) -> Mask:
        """Return which windows or states are usable: their full page is on the host, in flight to the host, or not
        needed there."""
        usable: Mask = (full_rows == NO_ROW) | self._context.full.pages.has(full_rows, HELD | COPY)
        return usable

    def _skip(self, component: CacheComponent, keys: Sequence[bytes], *, is_resident: bool) -> None:
        """Count pages for which the host has no capacity. The backup of a page that stays on the device is tried again
        when later pages are backed up, but the page is counted once."""
        num_pages = sum(not is_resident or key not in self._counted for key in keys)
        for key in keys if is_resident else ():
            self._counted.pop(key, None)
            self._counted[key] = None
        for key in list(itertools.islice(self._counted, max(0, len(self._counted) - self._max_counted))):
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

    def _end_backup(self) -> None:
        """Apply the oldest backup, which has ended."""
        self.is_partly_applied = True
        backup, raw = self._backups.popleft(), dict[CacheComponent, _BackupPages]()
        arrived, error = list[tuple[CacheComponent, Rows]](), backup.error
        for (name, pages), op in zip(backup.pages.items(), backup.operations, strict=True):
            component = self._context.by_name[name]
            if error is None:
                arrived.append((component, self._publish(component, pages, op, raw)))
                continue
            if name == FULL and self._context.watch is not None:
                self._context.watch.forget(component.pages.table.keys_of(pages.rows))
            component.pages.abandon(pages.rows)
        if error is None:
            self._backup_bytes.observe(backup.num_bytes)
            self._backup_seconds.observe(backup.seconds())
        else:
            self._failed_backups.value += 1
        next_backup = self._submit_raw(backup, raw) if raw else None
        if next_backup is None:
            if backup.named:
                self._forget_named(backup)
            for locked, rows in backup.locked.items():
                self._context.by_name[locked].resident.unlock(rows)
        if self._backs_up_evicted:
            self._free_evicted(backup, next_backup)
        for writes in self._writes:
            for component, rows in reversed(arrived):  # states and windows first: the disk evicts them first
                writes.arrived(component, rows)
        self.is_partly_applied = False

    def _submit_raw(self, backup: Backup, raw: Mapping[CacheComponent, _BackupPages]) -> Backup:
        """Copy unpacked the pages of `backup` that do not fit packed. The new backup takes over the locks of
        `backup`."""
        raw_backup = Backup(backup.locked, named=backup.named)
        for component, pages in raw.items():
            self._submit_pages(raw_backup, component, pages, is_raw=True)
        self._backups.append(raw_backup)
        return raw_backup

    def _forget_named(self, backup: Backup) -> None:
        for rows in backup.named:
            self._context.tree.table.drop(rows)

    def _publish(
        self, component: CacheComponent, saved: _BackupPages, op: TransferOp, raw: dict[CacheComponent, _BackupPages]
    ) -> Rows:
        """Publish the pages of an ended backup, and return their rows. Pages that do not fit packed are added to `raw`
        if the host has a second page for them."""
        pages, packing, (rows, slots, full_rows) = component.pages, component.packing, saved
        ok = np.ones(len(rows), np.bool_) if component.name == FULL else self._are_usable(full_rows)
        if packing is not None:
            misfits = np.array(op.misfits, np.int64)
            if not pages.second_pool_page[rows].any():
                packing.count(len(rows), len(misfits))
            misfits = misfits[ok[misfits]]
            if len(misfits):
                num_raw = len(pages.reserve_second(rows[misfits]))
                packing.drop(len(misfits) - num_raw)
                ok[misfits[num_raw:]] = False
                at = misfits[:num_raw]
                if num_raw:
                    of_raw = joined(slices_of(slots, at.tolist(), component.page_size))
                    raw[component] = _BackupPages(rows[at], of_raw, full_rows[at])
                here = np.ones(len(rows), np.bool_)
                here[at] = False
                rows, ok = rows[here], ok[here]
        watch = self._context.watch if component.name == FULL else None
        if watch is not None and not ok.all():
            watch.forget(pages.table.keys_of(rows[~ok]))
        arrived, events = pages.complete(rows, ok), self._context.tree.events
        if events is not None and watch is not None:
            for event_pages in watch.announced(pages.table.keys_of(arrived)):
                events.stored(event_pages, "CPU")
        return arrived

    def _free_evicted(self, backup: Backup, next_backup: Backup | None) -> None:
        """Free the values that `backup` read after their eviction, unless `next_backup` still reads them."""
        is_exposed = False
        for component in self._context.components:
            if backup not in component.evicting:
                continue
            is_exposed, ids = True, component.evicting.pop(backup)
            if next_backup is not None:
                component.evicting[next_backup] = ids
            else:
                component.free_evicted(ids)
        if is_exposed:
            self._backup_exposed.observe(self._exposed_s)

    # Capacity on the device

    def make_available(self, component: CacheComponent, size: int) -> bool:
        """Evict until `size` tokens or states of a component are free, and wait for the backups of the evicted pages.
        Returns False if too few pages can be evicted."""
        if size <= component.available() or self.prepare(component, size):
            return True
        self._wait_for(component, size)
        return size <= component.available()

    def prepare(self, component: CacheComponent, size: int) -> bool:
        """Evict until `size` tokens or states are free, without waiting for copies. Returns whether they are free now.
        If not, they may be free when the copies in `component.evicting` have ended."""
        short = size - component.available()
        if short <= 0:
            return True
        if component.evicting:
            short -= component.num_evicting
        if short > 0:
            self._evict(component, short)
        return size <= component.available()

    def wait_for_evicted(self) -> None:
        """Wait until the copies of all evicted pages have ended, and apply them."""
        for component in self._context.components:
            self._wait_for(component, component.available() + component.num_evicting)

    def _wait_for(self, component: CacheComponent, size: int) -> None:
        """Wait for backups of evicted pages until `size` tokens or states are free, or no backup of evicted pages is in
        flight."""
        while component.num_evicting and component.available() < size:
            start_s = time.perf_counter()
            self._backups[0].wait()
            self._exposed_s = time.perf_counter() - start_s
            self._end_backup()
            self._exposed_s = 0.0

    def _evict(self, component: CacheComponent, short: int) -> None:
        name, context = component.name, self._context
        released, evicting = list[Released](), list[Released]()  # freed at once; freed after their copy
        unsaved, evicted = list[Unsaved](), list[Rows]()
        try:
            while short > 0 and len(rows := component.resident.take(short)):
                for part in context.tree.by_node(rows):
                    if not len(part := component.resident.held(part)):
                        continue  # evicted with an earlier part
                    context.tree.table.hold(part)
                    evicted.append(part)
                    only = None if name == FULL else name  # evicting another component keeps the full pages
                    lacking = self.unsaved(part, only) if self._backs_up_evicted else []
                    left = context.evict(part, name)
                    unsaved += lacking
                    (evicting if lacking else released).extend(left)
                    short -= sum(item.size for item in left if item.component == name)
            self.backup_evicted(unsaved, evicting)
            for part in evicted:
                component.count_eviction(part)
        except BaseException:  # if the copy of one component raises, copies of other components may be in flight
            self.end_backups()
            raise
        finally:
            context.free([*released, *evicting])
            for part in evicted:
                context.tree.table.drop(part)

    # Host to device

    def estimate(self, num_bytes: int, start: int, end: int, num_delayed: int) -> LoadEstimate:
        """Compare a load of `num_bytes`, queued after the loads in flight, with computing positions [start, end), which
        delays `num_delayed` other requests."""
        for load in self._loads:
            num_bytes += load.num_bytes
        cost = self.policy.cost
        return LoadEstimate(cost.load_s(num_bytes), cost.prefill_s(start, end), num_delayed)

    def can_load(self) -> bool:
        """Return whether a load may be submitted now."""
        return all(map(LayerTransferCounter.can_begin, self._counters))

    def pin(self, request: CacheRequest, admission: Admission, undo: ExitStack) -> Lease:
        """Make a lease that locks the part of a prefix that is on the device, with the windows and states that the
        complete prefix needs. The callbacks of `undo` end the locks."""
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
        """Lock the host pages that are to be loaded, and return them. The callbacks of `held` end the locks. `is_used`:
        whether to count a use of the prefix on the host."""
        end, to_load = admission.length // self._context.tree.page_size, dict[Component, PromptRows]()
        for component in self._context.components:
            pages = admission.to_load.get(component.name)
            if is_used and component.name != FULL:  # for full pages, the table counts uses on both tiers together
                # An optional component requires no page, but may load some.
                first = min(component.first_required(end), pages[0] if pages else end)
                component.pages.table.hits[located.rows_of(component, range(first, end)).rows] += 1
            if pages:
                if component.name == FULL:
                    found = located.full_rows(pages[0], pages[-1] + 1)
                else:
                    found = located.rows_of(component, pages)
                to_load[component.name] = found
                component.pages.lock(found.rows)
                held.callback(component.pages.unlock, found.rows)
        return to_load

    def load(
        self,
        lease: Lease,
        prompt: Prompt,
        pages: Mapping[Component, PromptRows],
        slots: torch.Tensor,
        length: int,
    ) -> Load:
        """Load `pages` of `prompt`, by component, after the lease's node: full pages into the first of `slots`, a state
        into the lease's running state. The lock of the lease, for a prefix of `length` tokens, moves to the last loaded
        node, and the load owns the host locks of `pages` from now on.

        If this method raises, all submitted copies have ended, and `slots` still belong to the lease."""
        tree = self._context.tree
        load = Load(lease.node, prompt, pages)
        load.depends_on = tuple(self.loads_of(tree.path_rows(lease.node))) if self._loads else ()
        with ExitStack() as undo:
            undo.callback(self.detach, load)
            for component in self._context.components:
                if component.name in pages:
                    undo.callback(component.fail_load, load)
                    self._load_component(load, component, component.begin_load(load, lease, slots), undo)
            tree.lock(load.node)
            undo.callback(tree.unlock, load.node)
            tree.move_lock(lease.node, load.node, length - lease.node.depth_tokens)
            undo.pop_all()
        lease.node, lease.tree_len = load.node, load.node.depth_tokens
        for below in load.depends_on:
            below.readers += 1
        self._loads.append(load)
        return load

    def end_loads(self, loads: Sequence[Load]) -> None:
        """Wait until `loads` have ended, and apply their results. Afterwards, the caller may submit another load."""
        while self._loads and (any(not load.completed for load in loads) or not self.can_load()):
            self._loads[0].wait()
            self._end_load()

    def free(self, lease: Lease) -> None:
        """Free the slots, the states and the row of a lease, and detach the lease from its loads. The lease keeps its
        lock on the prefix."""
        with ExitStack() as steps:  # runs all callbacks, the last first, even if one raises
            for load in lease.loads:
                steps.callback(self.stop_reading, load)
            if lease.req_pool_idx is not None:
                steps.callback(self._context.req_to_token.free, lease)
            for component in reversed(self._context.components):
                steps.callback(component.release, lease)

    def loads_of(self, rows: Rows) -> list[Load]:
        """Return the loads in flight that write any of the pages `rows`, oldest first, without abandoned loads."""
        if not self._loads:
            return []
        numbers = set[int]()
        for component in self._context.components:
            numbers.update(component.resident.load[rows].tolist())
        return [load for load in self._loads if load.number in numbers]

    def has_failed(self, rows: Rows) -> bool:
        """Return whether a load in flight of any of the pages `rows` has failed. A request that uses these pages would
        fail too."""
        return bool(self._loads) and any(load.error is not None for load in self.loads_of(rows))

    @staticmethod
    def error_of(lease: Lease) -> Exception | None:
        """Return the error of a failed load of the lease's prefix, or None. Waits for the outcome of loads in
        flight."""
        for load in lease.loads:
            if load.error is None:
                load.wait_outcome()
            if load.error is not None:
                return load.error
        return None

    @property
    def loads(self) -> list[Load]:
        """The loads that have not been applied, oldest first."""
        return list(self._loads)

    def stop_reading(self, load: Load) -> None:
        """Record that a lease, or a load that depends on `load`, no longer reads its pages."""
        load.readers -= 1
        if load.completed and not load.readers:
            self._free_unread(load)

    def detach(self, load: Load) -> None:
        """Clear the load number of the pages of a load that has ended."""
        for name, rows in load.brings.items():
            self._context.by_name[name].resident.load[rows] = 0
        load.brings = {}

    @staticmethod
    def _load_component(load: Load, component: CacheComponent, targets: torch.Tensor, undo: ExitStack) -> None:
        counter, rows = component.counter, load.pages[component.name].rows
        pool_pages, second_pool_pages = torch.from_numpy(component.pages.pool_page[rows]), None
        if component.pages.second_pool_page[rows].any():
            second_pool_pages = torch.from_numpy(component.pages.second_pool_page[rows])
        load.load_ids[component.name] = load_id = counter.begin()
        undo.callback(counter.forget, load_id)
        undo.callback(counter.fail, load_id, TransferError("the load was not begun"))
        op = component.transfer.load(pool_pages, component.device_ids(targets), load_id, second_pool_pages)
        undo.callback(op.wait)
        load.add(op)

    def _end_load(self) -> None:
        """Apply the oldest load, which has ended."""
        self.is_partly_applied = True
        load, tree, components = self._loads.popleft(), self._context.tree, self._context.by_name
        depended_on, load.cause = load.depends_on, load.error
        load.depends_on, load.completed = (), True
        for name, (rows, _) in load.pages.items():
            components[name].pages.unlock(rows)
        if load.cause is None:
            if self._context.exclusive is not None and FULL in load.pages:
                self._context.exclusive.came_above(load.pages[FULL].rows)
            self._count_load(load)
            self.detach(load)
        else:
            self._failed_loads.value += 1
            # Dependent loads first: their pages are removed from the tree before the pages of this load.
            for other in reversed(self._loads):
                if other.error is not None:
                    self._abandon(other)
            self._abandon(load)
        tree.unlock(load.node)
        for name, values in load.orphan_states.items():
            components[name].free(torch.cat(values))
        load.orphan_states = {}
        for below in depended_on:
            self.stop_reading(below)
        if not load.readers:
            self._free_unread(load)
        self.is_partly_applied = False

    def _abandon(self, load: Load) -> None:
        """Remove the pages of a failed load from the tree. The slots of the load are not reused while a lease or
        another load reads them."""
        if load.abandoned:
            return
        load.abandoned = True
        for component in reversed(self._context.components):  # FULL last, because it removes the nodes
            component.fail_load(load)
        self.detach(load)

    def _free_unread(self, load: Load) -> None:
        """Free the load ids of a load that has ended and has no readers, and the slots of a failed load."""
        for slots in load.orphans:
            self._context.full.free(slots)
        load.orphans.clear()
        for name, load_id in load.load_ids.items():
            self._context.by_name[name].counter.forget(load_id)

    def _count_load(self, load: Load) -> None:
        seconds = load.seconds()
        self._loaded_bytes.observe(load.num_bytes)
        self._load_seconds.observe(seconds)
        load_id = load.load_ids.get(FULL)
        exposed_s = None if load_id is None else self._context.full.counter.exposed_s(load_id)
        if exposed_s is not None:
            self._timed_s.value += seconds
            self._load_exposed_s.value += min(seconds, exposed_s)
        if load.is_undelayed:
            self.policy.cost.observe_load(load.num_bytes, seconds)

    def _overlapped_ratio(self) -> float:
        return 1 - self._load_exposed_s.value / self._timed_s.value if self._timed_s.value else 0.0
