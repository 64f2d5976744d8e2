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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, islice, takewhile
from typing import NamedTuple

import torch

from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext, values_of
from hicache.flow.movement import CopyMovement, JointOp
from hicache.flow.packing import MisfitPages
from hicache.flow.persist import Persist
from hicache.flow.prompt import event_pages_of
from hicache.host.run import HostRun, NewPages, pages_of, spans
from hicache.tiers import FULL, Component, joined
from hicache.transfer.base import TransferOp
from hicache.tree.base import Released
from hicache.tree.names import PageNames, PromptPages
from hicache.tree.node import TreeNode

log = logging.getLogger(__name__)


class Unsaved(NamedTuple):
    """What the host lacks of what `component` has on the device: pages, and the device value of the node of each.
    `event_pages` of pages of windows and states: the keys of the full pages without which they are of no use; None:
    those are elsewhere."""

    component: CacheComponent
    pages: list[NewPages]
    values: list[torch.Tensor]


class _Copy(JointOp):
    """Copies that were submitted together: to `runs`, from `slots`, by component; `locked` nodes are to unlock."""

    def __init__(self, locked: Sequence[TreeNode]) -> None:
        super().__init__()
        self.locked = tuple(locked)
        self.runs: dict[Component, list[HostRun]] = {}
        self.slots: dict[Component, torch.Tensor] = {}


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

    def maybe_backup(self, node: TreeNode) -> None:
        """Copy what the write policy wants of the path to `node`, together, as far as others may leave for it."""
        if node.parent is None:
            return
        wants = self._context.write_policy.wants
        wanted = list(takewhile(wants, self._only_on_device(node)))
        if not wanted and len(self._context.components) > 1 and wants(node):
            wanted = [node]  # its full pages were copied before
        if wanted:
            self._submit(self.unsaved(wanted), wanted)

    def backup_path(self, node: TreeNode) -> None:
        """Copy the path to `node` now, whatever the policy wants of it, and wait, so that its slots may be taken.

        A policy that copies at eviction does so then."""
        if node.parent is not None and not self._context.write_policy.at_eviction:
            nodes = self._only_on_device(node) or [node]
            self._submit(self.unsaved(nodes), nodes)
            self.wait_and_complete()

    def unsaved(self, nodes: Sequence[TreeNode], only: Component | None = None) -> list[Unsaved]:
        """What the host lacks of `nodes`, FULL first, or of the one component that they are to lose, whose full pages
        stay on the device; but for what is of sessions that have ended."""
        found = []
        for component in self._context.components:
            pages, values = list[NewPages](), list[torch.Tensor]()
            for node in nodes if only in (None, component.name) else ():
                if node.has(component.name) and not node.holdings[component.name].has_ended:
                    self._add_unsaved(node, component, pages, values)
            if only is not None:
                pages = [new._replace(event_pages=None) for new in pages]
            if pages:
                found.append(Unsaved(component, pages, values))
        return found

    def save(self, unsaved: Sequence[Unsaved], released: list[Released]) -> None:
        """Copy what leaves the device. `unsaved`: as nodes left, those that others follow behind them. Where the host
        has not room for all, what left last stays, and of that the beginning. `released`: its values, which leave the
        list where they are freed when the copy has ended; where nothing is copied they stay in it."""
        by_component: dict[Component, Unsaved] = {}
        for component, pages, values in reversed(unsaved):
            known = by_component.setdefault(component.name, Unsaved(component, [], []))
            known.pages.extend(pages)
            known.values.extend(values)
        self._submit([by_component[name] for name in self._context.by_name if name in by_component], (), released)

    def wait_for(self, component: CacheComponent, size: int) -> None:
        """Wait for copies of what has left the device until `size` of it are free, or none is under way."""
        while component.num_leaving and component.available() < size:
            start_s = time.perf_counter()
            self._in_flight[0].wait()
            self._exposed_s = time.perf_counter() - start_s
            self._end_first()
            self._exposed_s = 0.0

    def num_in_flight(self, component: Component) -> int:
        return sum(len(copy.slots[component]) for copy in self._in_flight if component in copy.slots)

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        return (run for copy in self._in_flight for run in copy.runs.get(component, ()))

    def locks(self) -> list[TreeNode]:
        return [node for copy in self._in_flight for node in copy.locked]

    def _only_on_device(self, node: TreeNode) -> list[TreeNode]:
        """The end of the path to `node` of whose nodes the host has not all pages, root side first."""
        index, names = self._context.full.index, self._context.tree.names
        return list(takewhile(lambda above: not index.is_whole(names.of(above)), node.climb()))[::-1]

    def _add_unsaved(
        self, node: TreeNode, component: CacheComponent, pages: list[NewPages], values: list[torch.Tensor]
    ) -> None:
        tree, value, keys = self._context.tree, node.value_of(component.name), self._context.tree.names.of(node)
        event_pages: PromptPages | Sequence[bytes] | None = None
        uses = tree.account(component.name).uses_of(node)
        first = node.depth_tokens // tree.page_size - len(keys)
        previous_key = tree.names.previous_key(node) if first and component.name == FULL else None
        if component.tree_component.at_node_end:
            keys, first = keys[-1:], first + len(keys) - 1
        if component.name != FULL:
            keys, event_pages = PageNames.of_component(component.name, keys), keys
        elif tree.events is not None:
            event_pages = tree.names.pages(node)
        new = NewPages(keys, previous_key, first, event_pages, 0, node.priority, node.hit_count, uses)
        absent = component.index.absent(new)
        pages += absent
        values += [value] * len(absent)

    def _submit(
        self, unsaved: Sequence[Unsaved], nodes: Sequence[TreeNode], released: list[Released] | None = None
    ) -> None:
        """Start the copies of what the host lacks of `nodes`, a piece of one path, as far as the host has capacity. Or
        of what has left the device, whose values, `released`, are freed with their end."""
        if not unsaved:
            return
        tree, leaving = self._context.tree, values_of(released or ())
        # The lock of the last covers the full pages of all; other components of the others need locks of their own.
        copy = _Copy(nodes if len(self._context.components) > 1 else nodes[-1:])
        with ExitStack() as undo:
            for node in copy.locked:
                tree.lock(node)
                undo.callback(tree.unlock, node)
            try:
                for each in unsaved:
                    self._skip(each.component, self._submit_copy(copy, each), stays=released is None)
            finally:
                if copy.copies:
                    undo.pop_all()
                    self._in_flight.append(copy)
                    for name, value in leaving.items():
                        component = self._context.by_name[name]
                        component.leaving[copy] = component.leave(value)
                    if released:
                        released.clear()

    def _submit_copy(self, copy: _Copy, unsaved: Unsaved) -> list[bytes]:
        """Submit one component's copy, as far as the host has capacity for it; returns the keys of what it has not."""
        component, new, values = unsaved if unsaved.component.name == FULL else self._with_full_pages(unsaved)
        index, size = component.index, component.page_size
        fits = index.fitting(new)
        left = [key for pages in new for key in pages.keys][sum(len(pages.keys) for pages in fits) :]
        runs = index.reserve(fits) if fits else None
        if runs is None:
            return left
        with ExitStack() as undo:
            for run in runs:
                undo.callback(index.abandon, run)
            copied = [
                value[pages.offset * size : (pages.offset + len(pages.keys)) * size]
                for pages, value in zip(fits, values, strict=False)
            ]
            self._copy(copy, component, runs, component.device_ids(joined(copied)), pages_of(runs))
            undo.pop_all()
        return left

    def _with_full_pages(self, unsaved: Unsaved) -> Unsaved:
        """Those pages of windows or states whose full pages the host has or gets."""
        is_coming, found = self._context.full.index.is_coming, Unsaved(unsaved.component, [], [])
        for pages, value in zip(unsaved.pages, unsaved.values, strict=True):
            full_keys = pages.event_pages and pages.event_pages[pages.offset : pages.offset + len(pages.keys)]
            of_use = [at for at in range(len(pages.keys)) if full_keys is None or is_coming(full_keys[at])]
            for start, end in spans(of_use):
                found.pages.append(pages.part(start, end)._replace(previous_key=pages.previous_key))
                found.values.append(value)
        return found

    @staticmethod
    def _copy(
        copy: _Copy,
        component: CacheComponent,
        runs: list[HostRun],
        slots: torch.Tensor,
        pages: torch.Tensor,
        second_pages: torch.Tensor | None = None,
    ) -> None:
        """Submit a copy of `slots` to `pages` of `runs`; `second_pages`: where they go there raw."""
        copy.copies.append(component.transfer.store(slots, pages, second_pages))
        copy.runs[component.name], copy.slots[component.name] = runs, slots

    def _publish(
        self, raw_copy: _Copy, component: CacheComponent, runs: list[HostRun], slots: torch.Tensor, op: TransferOp
    ) -> list[HostRun]:
        """Runs whose copy has ended: those that are there. Of the others `raw_copy` copies what did not fit, raw."""
        index, packing, raw = component.index, component.packing, MisfitPages(runs, op.misfits)
        if packing is not None and not runs[0].second_pages:
            packing.count(raw.num_pages, len(op.misfits))
        ok = {run: of_use for run in runs if not all(of_use := self._are_of_use(component, run))}
        for run, keys in raw.keys.items():
            if run in ok or not index.reserve_second_pages(run, keys):
                assert packing is not None
                packing.drop(len(keys))
                known = ok.get(run) or [True] * len(run.keys)
                ok[run] = [of_use and key not in keys for of_use, key in zip(known, run.keys, strict=True)]
        copied = [run for run in raw.keys if run not in ok]
        if copied:
            self._copy(raw_copy, component, copied, *raw.of(copied, slots))
        here = [run for run in runs if run not in raw.keys or run in ok]
        # The last first: the beginning of a prompt is the more recent.
        came = [index.publish(run, ok.get(run)) for run in reversed(here)]
        published = [run for of_run in reversed(came) for run in of_run]
        if (events := self._context.tree.events) is not None and component.name == FULL:
            for run in published:
                events.stored(event_pages_of(run), "CPU")
        return published

    def _are_of_use(self, component: CacheComponent, run: HostRun) -> list[bool]:
        """Of each page that was copied whether its full page is there: of two that were copied together, one may not
        fit when it is packed."""
        if component.name == FULL or run.event_pages is None:
            return [True] * len(run.keys)
        full_keys = run.event_pages[run.offset : run.offset + len(run.keys)]
        return [self._context.full.index.is_coming(key) for key in full_keys]

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
        copy, tree = operation, self._context.tree
        copy.wait()  # before its end nothing is known of its error
        confirmed = copy.error is None
        arrived: list[tuple[CacheComponent, list[HostRun]]] = []
        raw_copy = _Copy(copy.locked)
        for (name, runs), op in zip(copy.runs.items(), copy.copies, strict=True):
            component = self._context.by_name[name]
            if confirmed:
                arrived.append((component, self._publish(raw_copy, component, runs, copy.slots[name], op)))
            else:
                for run in reversed(runs):
                    component.index.abandon(run)
        if confirmed:
            self._bytes.observe(copy.num_bytes)
            self._seconds.observe(copy.seconds())
        else:
            self._failures.value += 1
        if raw_copy.copies:
            self._in_flight.append(raw_copy)  # which has the locks
        else:
            for node in copy.locked:
                tree.unlock(node)
        self._free_what_left(copy, raw_copy)
        for persist in self._persists:
            for component, runs in reversed(arrived):  # states and windows first: the disk evicts them first
                persist.store(component, runs)

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
        name = component.name
        released, leaving = list[Released](), list[Released]()  # what is free at once, and what is copied before
        victims = dict[TreeNode, list[Unsaved]]()
        try:
            while short > 0 and (node := component.device_victim(short)) is not None:
                only = None if name == FULL else name  # its full pages stay
                victims[node] = lacking = self._backup.unsaved([node], only) if self._backup is not None else []
                left = self._context.drop(node, name)
                (leaving if lacking else released).extend(left)
                short -= sum(item.size for item in left if item.component == name)
            if self._backup is not None:
                self._backup.save([*chain(*victims.values())], leaving)
            for node in victims:
                component.count_eviction(node)
        except BaseException:  # where the copy of one component raises, that of another may be under way
            if self._backup is not None:
                self._backup.wait_and_complete()
            raise
        finally:
            self._context.free([*released, *leaving])
