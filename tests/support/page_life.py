"""The life of a page: the states that it goes through in each tier. `PageLives` derives them from the state of an
engine and its copies in flight, and reports every change of state that no row of the tables allows.

The rows are those of docs/invariants.md; each names the calls in which a page may take it. A page has a location: a
slot or a recurrent state on the device, a page of the pool on the host. The key at a location may change only through
the free state. So splitting a node changes no state, and one verb of the engine may take several rows.

The device is examined after each verb of the engine. Columns of `TierPages` say which pages the host has, and which of
these the stores and the device also have. These columns are examined before and after each call of a method of
`TierPages`, nested calls included.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hicache import CacheEngine, Lease
from hicache.flow.components.base import CacheComponent
from hicache.flow.page_transfer import Load
from hicache.pages.key import component_keys
from hicache.pages.states import ABOVE, COPY, HELD, RAW, READ
from hicache.tiers import FULL, MAMBA, Component

Row = tuple[str, str]
Table = Mapping[Row, str]
"""By row, the pair of an old and a new state: the calls that may change the one into the other."""
Location = tuple[Component, object]
"""A location of a component's page: a slot, a recurrent state or a host page by its number; a page in a store, or above
the host, by its key."""

_LANDS, _ENDS, _EVICTS = "poll flush acquire join", "release cancel", "extend commit track"

DEVICE: Table = {
    ("FREE", "OWNED"): f"acquire join {_EVICTS}",
    ("OWNED", "CACHED"): "commit",
    ("OWNED", "FREE"): f"commit {_ENDS} {_LANDS}",
    ("FREE", "LOADING"): _LANDS,
    ("LOADING", "CACHED"): _LANDS,
    ("LOADING", "FREE"): f"{_ENDS} {_LANDS}",
    ("CACHED", "FREE"): f"{_EVICTS} {_LANDS} reset",
    ("CACHED", "EVICTING"): f"{_EVICTS} {_LANDS}",
    ("EVICTING", "FREE"): f"{_EVICTS} {_LANDS}",
}
HOST: Table = {
    ("NONE", "COPY"): "reserve reserve_second",
    ("NONE", "READ"): "reserve",
    ("COPY", "HELD"): "complete",
    ("COPY", "NONE"): "abandon",
    ("READ", "HELD"): "complete",
    ("READ", "NONE"): "abandon",
    ("READ", "DISOWNED"): "disown",
    ("DISOWNED", "NONE"): "free_disowned",
    ("HELD", "LOCKED"): "lock reserve",
    ("LOCKED", "HELD"): "unlock reserve",
    ("HELD", "NONE"): "drop",
}
STORE: Table = {
    ("UNKNOWN", "STORING"): "begin_write",
    ("STORING", "STORED"): "written",
    ("STORING", "UNKNOWN"): "written",
    ("UNKNOWN", "STORED"): "mark_stored",
    ("STORED", "UNKNOWN"): "drop",
}
EXCLUSIVE: Table = {
    ("ALONE", "ABOVE"): "came_above",
    ("ABOVE", "ALONE"): "left_above",
}
TABLES = {"device": DEVICE, "host": HOST, "store": STORE, "exclusive": EXCLUSIVE}
_VERBS = (
    "prefetch expect poll acquire join extend commit next_stop track begin_forward backup release cancel flush reset"
)
_OF_PAGES = (
    "reserve reserve_second complete abandon disown free_disowned drop discard evict_all lock unlock came_above "
    "left_above begin_write written mark_stored"
)


class Held(NamedTuple):
    """The state of a location, and the key of the page there. The key is None if the page belongs to a request alone,
    or has left the tree."""

    state: str
    key: bytes | None = None


class _Page(NamedTuple):
    """The slots or the state of one page of a component on the device."""

    component: Component
    key: bytes
    is_locked: bool
    is_loading: bool
    ids: list[int]


class PageLives:
    """The states of all locations of one engine, as of the last look. Create this object before the engine is used.

    `seen`: how often each row was taken, with its tier. `broken`: changes that no row allows. After the first one every
    later verb raises, because a caller may catch the first error.
    """

    def __init__(self, engine: CacheEngine) -> None:
        self._inspect, self._context = engine.inspect, engine.inspect.context
        self._leases, self._verb = list[Lease](), ""
        on_host = [component for component in self._context.components if component.has_host]
        # By component: the calls of methods of its pages that have not returned, the host pages of abandoned reads, and
        # the columns as of the last look.
        self._calls: dict[Component, list[str]] = {component.name: [] for component in on_host}
        self._disowned: dict[Component, set[int]] = {component.name: set() for component in on_host}
        self._columns = dict[Component, list[object]]()
        self._targets = dict[Load, frozenset[Location]]()  # locations that a load in flight writes
        self._is_over = False
        self._states: dict[str, dict[Component, dict[Location, Held]]] = {tier: {} for tier in TABLES}
        self.seen, self.broken = Counter[tuple[str, str, str]](), list[str]()
        for verb in _VERBS.split():
            setattr(engine, verb, functools.partial(self._call, verb, getattr(engine, verb)))
        for component in on_host:
            for name in _OF_PAGES.split():
                call = functools.partial(self._call_pages, component, name, getattr(component.pages, name))
                setattr(component.pages, name, call)

    def end(self) -> None:
        """Stop examining calls."""
        self._is_over = True

    # Calls

    def _call(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._verb = verb
        try:
            result = call(*args, **kwargs)
            if verb == "acquire":
                self._leases.append(result)
            return result
        finally:
            if not self._is_over:
                with untraced():
                    self._look()
                assert not self.broken, self.broken[0]

    def _call_pages(
        self, component: CacheComponent, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_over:
            return call(*args, **kwargs)
        with untraced():
            self._look_below(component)
        calls, disowned = self._calls[component.name], self._disowned[component.name]
        calls.append(name)
        try:
            result = call(*args, **kwargs)
            if name == "disown":
                disowned.update(result)
            elif name == "free_disowned":
                disowned.difference_update(*args)
            return result
        finally:
            with untraced():
                self._look_below(component)
            calls.pop()

    # Looks

    def _look(self) -> None:
        """Examine all tiers after a verb of the engine."""
        states = {lease.state_load: lease.mamba_pool_idx for lease in self._leases if lease.mamba_pool_idx is not None}
        for load in self._inspect.copies.loads:
            if load not in self._targets:
                ids = [(MAMBA, int(states[load]))] if load in states else []
                for name, rows in load.brings.items():
                    component = self._context.by_name[name]
                    ids += [(name, at) for at in _ids(component.device_ids(component.resident.value(rows)))]
                self._targets[load] = frozenset(ids)
        self._targets = {load: ids for load, ids in self._targets.items() if not load.done()}
        self._leases = [lease for lease in self._leases if not lease.released]
        for component in self._context.components:
            if component.has_host:
                self._look_below(component)
        for node in self._context.tree.nodes():
            self._context.tree.keys_of(node)
        pages = [page for component in self._context.components for page in self._pages(component)]
        for component in self._context.components:
            self._enter("device", component.name, self._verb, dict(self._on_device(component, pages)))
        self._look_across(pages)

    def _look_below(self, component: CacheComponent) -> None:
        """Examine the columns of a component's pages, if they have changed."""
        pages, name = component.pages, component.name
        columns = pages.table.age, pages.state, pages.pool_page, pages.second_pool_page, pages.order.locks > 0
        now: list[object] = [column.tobytes() for column in (*columns, pages.stored, pages.writing)]
        now.append({*self._disowned[name]})
        if self._columns.get(name) == now:
            return
        self._columns[name], call = now, next(reversed(self._calls[name]), "")
        self._enter("host", name, call, dict(self._on_host(component)))
        self._enter("store", name, call, dict(self._in_stores(component)))
        above = np.flatnonzero(pages.state & ABOVE)
        self._enter("exclusive", name, call, {(name, key): Held("ABOVE", key) for key in pages.table.keys_of(above)})

    def _enter(self, tier: str, component: Component, call: str, now: dict[Location, Held]) -> None:
        """Check that each location kept its state, or changed it along rows of the tier's table."""
        before, nothing = self._states[tier].get(component, {}), Held(_nothing(tier))
        self._states[tier][component] = now
        if before == now:
            return
        for pool_page in before.keys() | now.keys():
            old, new = before.get(pool_page, nothing), now.get(pool_page, nothing)
            if old == new:
                continue
            rows = way(tier, call, old, new)
            if rows is None:
                where = f"{call or 'no call'}, in {self._verb}"
                self.broken.append(f"{tier}: {pool_page} went from {old} to {new} in {where}")
            self.seen.update((tier, *row) for row in rows or ())

    def _look_across(self, pages: Iterable[_Page]) -> None:
        """Check the states of the tiers against each other."""
        locked_above = {(page.component, page.key) for page in pages if page.is_locked}
        for component in self._calls:
            device, host, store = (self._states[tier].get(component, {}) for tier in ("device", "host", "store"))
            locked = {held.key for held in host.values() if held.state == "LOCKED"}
            left = self._keys_evicting(component)
            for held in device.values():
                if held.state == "LOADING" and held.key and held.key not in locked:
                    self.broken.append(f"a page of {component} is loaded from the host, where nobody has locked it")
            for held in host.values():
                stays = held.key in left or (component, held.key or b"") in locked_above
                if held.state == "COPY" and not stays:
                    self.broken.append(f"a page of {component} is copied that has left the device, or that may leave")
            for held in store.values():
                if held.state == "STORING" and held.key not in locked:
                    self.broken.append(f"a page of {component} is written to a store, and may leave the host")
        for name, at in {target for targets in self._targets.values() for target in targets}:
            held = self._states["device"][name].get((name, at))
            if held is None or held.state != ("OWNED" if name == MAMBA else "LOADING"):
                self.broken.append(f"{at} of {name} is {held} while a load writes it")
        for lease in self._leases:
            if any((FULL, at) not in self._states["device"][FULL] for at in _ids(lease.held_slots(0, lease.held_len))):
                self.broken.append(f"a slot that {lease.request_id} reads is free")

    def _keys_evicting(self, component: Component) -> set[bytes]:
        """Keys of pages that were evicted from the device, whose slots become free when their copies have ended."""
        at = self._context.by_name[component]
        copies: Any = at.evicting
        return {
            key
            for copy in copies
            if component in copy.pages
            for key in at.pages.table.keys_of(copy.pages[component].rows)
        }

    # States

    def _on_device(self, component: CacheComponent, pages: Iterable[_Page]) -> Iterator[tuple[Location, Held]]:
        """The locations of the device that are not free, with their states. If a failed load's slots may still be read,
        the load counts as not ended."""
        name = component.name
        loads = {*self._inspect.copies.loads, *(load for lease in self._leases for load in lease.loads)}
        loads |= {below for load in loads for below in load.depends_on}
        values = self._of_requests(loads) if name == MAMBA else self._of_slots(component, loads)
        yield from (((name, at), Held(state)) for state, value in values for at in _ids(value) if at)
        yield from (((name, at), Held("EVICTING")) for ids in component.evicting.values() for at in _ids(ids))
        for page in pages:
            if page.component == name:
                state = "LOADING" if page.is_loading else "CACHED"
                yield from (((name, at), Held(state, page.key)) for at in page.ids)

    def _of_slots(self, component: CacheComponent, loads: Iterable[Load]) -> Iterator[tuple[str, Any]]:
        for load in loads:
            yield from (("LOADING", component.device_ids(slots)) for slots in load.orphans)
        for lease in self._leases:
            yield "OWNED", component.device_ids(lease.held_slots(lease.tree_len, lease.held_len))

    def _of_requests(self, loads: Iterable[Load]) -> Iterator[tuple[str, Any]]:
        states = [at for lease in self._leases for at in (lease.mamba_pool_idx, lease.mamba_checkpoint_idx)]
        of_loads = chain.from_iterable(load.orphan_states.get(MAMBA, ()) for load in loads)
        yield from (("OWNED", state.reshape(1)) for state in (*states, *of_loads) if state is not None)

    def _pages(self, component: CacheComponent) -> Iterator[_Page]:
        tree, resident, size = self._context.tree, component.resident, component.page_size
        rows = resident.rows_held()
        keys = component_keys(component.name, tree.table.keys_of(rows))
        ids = _ids(component.device_ids(resident.value(rows)))
        for at, (key, row) in enumerate(zip(keys, rows.tolist(), strict=True)):
            is_locked, is_loading = bool(resident.order.locks[row]), bool(resident.load[row])
            yield _Page(component.name, key, is_locked, is_loading, ids[at * size : (at + 1) * size])

    def _on_host(self, component: CacheComponent) -> Iterator[tuple[Location, Held]]:
        """The host pages that are not free, with their states. A raw page has two host pages in one state."""
        pages, name = component.pages, component.name
        yield from (((name, at), Held("DISOWNED")) for at in self._disowned[name])
        is_locked = pages.order.locks > 0
        states = {"COPY": pages.state & COPY != 0, "READ": pages.state & READ != 0}
        is_held = pages.state & HELD != 0
        states |= {"LOCKED": is_held & is_locked, "HELD": is_held & ~is_locked}
        for state, is_so in states.items():
            rows = np.flatnonzero(is_so)
            for pool_pages in (pages.pool_page[rows], pages.second_pool_page[rows]):
                for at, key in zip(_ids(pool_pages), pages.table.keys_of(rows), strict=True):
                    if at:
                        yield (name, at), Held(state, key)

    def _in_stores(self, component: CacheComponent) -> Iterator[tuple[Location, Held]]:
        """The host's pages that a store has or is writing. The store's bit of a raw page does not count, because that
        store never writes it."""
        pages, name = component.pages, component.name
        is_packed = pages.state & RAW == 0
        for store in self._context.stores:
            is_writing, is_stored = (column & store.bit != 0 for column in (pages.writing, pages.stored))
            states = {"STORING": is_writing, "STORED": is_packed & is_stored & ~is_writing}
            for state, is_so in states.items():
                for key in pages.table.keys_of(np.flatnonzero(is_so)):
                    yield (name, (store, key)), Held(state, key)


def way(tier: str, call: str, old: Held, new: Held) -> list[Row] | None:
    """The fewest rows of a table that lead from the old state to the new one in a call; None if no rows do."""
    if None in (old.key, new.key) or old.key == new.key:
        return _way(tier, call, old.state, new.state)
    gone, come = _way(tier, call, old.state, _nothing(tier)), _way(tier, call, _nothing(tier), new.state)
    return None if gone is None or come is None else gone + come


@functools.cache
def _way(tier: str, call: str, old: str, new: str) -> list[Row] | None:
    ways: dict[str, list[Row]] = {old: []}
    for state in (found := [old]):
        for row, calls in TABLES[tier].items():
            if row[0] == state and row[1] not in ways and call in calls.split():
                ways[row[1]] = [*ways[state], row]
                found.append(row[1])
    return ways.get(new)


def _nothing(tier: str) -> str:
    """The state of a page that the tier does not hold."""
    return next(iter(TABLES[tier]))[0]


def _ids(value: Any) -> list[int]:
    return value.tolist()  # type: ignore[no-any-return]


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Remove the tracer that makes calls fail (failing_calls.py), because examining pages is no work of the engine."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
