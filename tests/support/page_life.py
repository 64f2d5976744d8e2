"""The life of a page: the states that it goes through in each tier, derived from what an engine holds and has under
way, and a record that refuses every change that no row of the tables allows.

The rows are those of docs/invariants.md, and each names the calls in which it may be taken. A page is examined by its
place: on the device a slot or a state, on the host a page of the pool. Its key may change only where the place is free
between. So a split changes nothing, and one call may take several rows.

The device is examined after each verb of the engine; the host and what stores have of it also around each call of the
host's map, in which one thing happens.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from hicache import CacheEngine, Lease
from hicache.flow.components.base import CacheComponent
from hicache.flow.movement import Load
from hicache.host.run import HostRun
from hicache.tiers import FULL, MAMBA, Component
from hicache.tree.node import TreeNode

Row = tuple[str, str]
Table = Mapping[Row, str]
"""From a state to another, and the calls that may do that."""
Location = tuple[Component, object]
"""Where a component has something: a slot, a state, a page of the host; what a store has, by its key."""

_ANSWERS, _LANDS, _ENDS, _EVICTS = "poll flush", "poll flush acquire join", "release cancel", "extend commit track"

DEVICE: Table = {
    ("FREE", "OWNED"): f"acquire join {_EVICTS}",
    ("OWNED", "CACHED"): "commit",
    ("OWNED", "FREE"): f"commit {_ENDS} {_LANDS}",
    ("FREE", "LOADING"): _LANDS,
    ("LOADING", "CACHED"): _LANDS,
    ("LOADING", "FREE"): f"{_ENDS} {_LANDS}",
    ("CACHED", "FREE"): f"{_EVICTS} {_LANDS} reset",
    ("CACHED", "LEAVING"): f"{_EVICTS} {_LANDS}",
    ("LEAVING", "FREE"): f"{_EVICTS} {_LANDS}",
}
HOST: Table = {
    ("NONE", "COMING"): "reserve",
    ("NONE", "READING"): "reserve",
    ("COMING", "PUBLISHED"): "publish",
    ("COMING", "NONE"): "publish abandon",
    ("READING", "PUBLISHED"): "publish",
    ("READING", "NONE"): "publish abandon",
    ("PUBLISHED", "LOCKED"): "lock reserve publish abandon",
    ("LOCKED", "PUBLISHED"): "unlock publish abandon",
    ("PUBLISHED", "NONE"): "reserve reserve_second_pages clear discard",
}
STORE: Table = {
    ("UNKNOWN", "STORING"): f"{_EVICTS} {_ENDS} {_LANDS} backup",
    ("STORING", "STORED"): _ANSWERS,
    ("STORING", "UNKNOWN"): _ANSWERS,
    ("UNKNOWN", "STORED"): _ANSWERS,
    ("STORED", "UNKNOWN"): f"{_EVICTS} {_LANDS} backup reset",
}
TABLES = {"device": DEVICE, "host": HOST, "store": STORE}
_VERBS = (
    "prefetch expect poll acquire join extend commit next_stop track begin_forward backup release cancel flush reset"
)
_OF_THE_MAP = (
    "reserve reserve_second_pages publish abandon lock unlock clear discard count_use touch expect raise_priority"
)


class Held(NamedTuple):
    """The state of a place, and the key of the page there; None: it is a request's alone, or has left the tree."""

    state: str
    key: bytes | None = None


class _Page(NamedTuple):
    """What `node` holds of a page of a component: slots, or a state."""

    component: Component
    key: bytes
    node: TreeNode
    ids: list[int]


class PageLives:
    """The states of all places of one engine, as of the last look. Made before the engine is used.

    `seen`: how often each row was taken, with its tier. `broken`: what no row allows; once there is any, each later
    verb raises it, for who calls one may catch the first error.
    """

    def __init__(self, engine: CacheEngine) -> None:
        self._inspect, self._context = engine.inspect, engine.inspect.context
        self._leases, self._verb = list[Lease](), ""
        self._coming: dict[Component, set[HostRun]] = {at.name: set() for at in self._context.components if at.has_host}
        self._last: tuple[CacheComponent | None, str] = None, ""  # of the calls of maps, not examined yet
        self._is_inside = self._is_over = False
        self._states: dict[str, dict[Component, dict[Location, Held]]] = {tier: {} for tier in TABLES}
        self.seen, self.broken = Counter[tuple[str, str, str]](), list[str]()
        for verb in _VERBS.split():
            setattr(engine, verb, functools.partial(self._call, verb, getattr(engine, verb)))
        for component in self._context.components:
            for name in _OF_THE_MAP.split() if component.has_host else ():
                call = functools.partial(self._call_map, component, name, getattr(component.index, name))
                setattr(component.index, name, call)

    def end(self) -> None:
        """What follows is not examined."""
        self._is_over = True

    # Calls

    def _call(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._verb = verb
        try:
            result = call(*args, **kwargs)
            if verb in ("acquire", "join") and result not in self._leases:
                self._leases.append(result)
            return result
        finally:
            if not self._is_over:
                with untraced():
                    self._look()
                assert not self.broken, self.broken[0]

    def _call_map(
        self, component: CacheComponent, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if name == "discard" and not self._is_over:  # within a call of another component's map
            last, self._last = self._last, (component, name)
            try:
                return call(*args, **kwargs)
            finally:
                with untraced():
                    self._look_below(component)
                self._last = last
        if self._is_inside or self._is_over:  # the map calls itself
            return call(*args, **kwargs)
        with untraced():
            self._look_below(self._last[0])
        self._last, self._is_inside = (component, name), True
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_inside = False
        if name == "reserve":
            self._coming[component.name].update(result or ())
        elif name in ("publish", "abandon"):
            self._coming[component.name].remove(args[0])
        return result

    # Looks

    def _look(self) -> None:
        """After a verb, at everything."""
        self._leases = [lease for lease in self._leases if not lease.released]
        self._look_below(*self._context.components)
        pages = [page for node in self._context.tree.nodes() for page in self._pages(node)]
        for component in self._context.components:
            self._enter("device", component.name, self._verb, dict(self._on_device(component, pages)))
        self._look_across(pages)

    def _look_below(self, *components: CacheComponent | None) -> None:
        """At the host and what stores have of it. A state of a read is known when the call of the map has returned."""
        for component in components:
            if component is not None and component.has_host:
                name = component.name
                call = self._last[1] if component is self._last[0] else ""
                self._enter("host", name, call, dict(self._on_host(component)))
                if self._context.stores:
                    self._enter("store", name, self._verb, dict(self._in_stores(component)))

    def _enter(self, tier: str, component: Component, call: str, now: dict[Location, Held]) -> None:
        """Each place is as it was, or went along rows of the tier's table."""
        before, nothing = self._states[tier].get(component, {}), Held(_nothing(tier))
        self._states[tier][component] = now
        if before == now:
            return
        for place in before.keys() | now.keys():
            old, new = before.get(place, nothing), now.get(place, nothing)
            if old == new:
                continue
            rows = way(tier, call, old, new)
            if rows is None:
                where = f"{call or 'no call of the map'}, in {self._verb}"
                self.broken.append(f"{tier}: {place} went from {old} to {new} in {where}")
            self.seen.update((tier, *row) for row in rows or ())

    def _look_across(self, pages: Iterable[_Page]) -> None:
        """What the states of the tiers say of one another."""
        nodes = {(page.component, page.key): page.node for page in pages}
        for component in self._coming:
            device, host, store = (self._states[tier].get(component, {}) for tier in TABLES)
            locked = {held.key for held in host.values() if held.state == "LOCKED"}
            left = self._keys_leaving(component)
            for held in device.values():
                if held.state == "LOADING" and held.key and held.key not in locked:
                    self.broken.append(f"a page of {component} is loaded from the host, where nobody has locked it")
            for held in host.values():
                node = nodes.get((component, held.key or b""))
                if held.state == "COMING" and held.key not in left and (node is None or not node.locks(component)):
                    self.broken.append(f"a page of {component} is copied from a node that is gone, or that may go")
            for held in store.values():
                if held.state == "STORING" and held.key not in locked:
                    self.broken.append(f"a page of {component} is written to a store, and may leave the host")
        for lease in self._leases:
            if any((FULL, at) not in self._states["device"][FULL] for at in _ids(lease.held_slots(0, lease.held_len))):
                self.broken.append(f"a slot that {lease.request_id} reads is free")

    def _keys_leaving(self, component: Component) -> set[bytes]:
        """Of pages that have left the device, whose slots are free when their copies have ended."""
        copies: Any = self._context.by_name[component].leaving
        return {key for copy in copies for run in copy.runs.get(component, ()) for key in run.keys}

    # States

    def _on_device(self, component: CacheComponent, pages: Iterable[_Page]) -> Iterator[tuple[Location, Held]]:
        """What is not free. A failed load's slots that somebody may still read are as if it had not ended."""
        name = component.name
        loads = {*self._inspect.restore.in_flight(), *(load for lease in self._leases for load in lease.loads)}
        loads |= {below for load in loads for below in load.depends_on}
        values = self._of_requests(loads) if name == MAMBA else self._of_slots(component, loads)
        yield from (((name, at), Held(state)) for state, value in values for at in _ids(value) if at)
        yield from (((name, at), Held("LEAVING")) for ids in component.leaving.values() for at in _ids(ids))
        for page in pages:
            if page.component == name:
                state = "LOADING" if any(run.component == name for run in page.node.runs) else "CACHED"
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

    def _pages(self, node: TreeNode) -> Iterator[_Page]:
        names = self._context.tree.names
        for component in self._context.components:
            name, size = component.name, component.page_size
            if node.has(name):
                keys = names.of(node)[-1:] if component.tree_component.at_node_end else names.of(node)
                ids = _ids(component.device_ids(node.value_of(name)))
                for i, key in enumerate(names.of_component(name, keys)):
                    yield _Page(name, key, node, ids[i * size : (i + 1) * size])

    def _on_host(self, component: CacheComponent) -> Iterator[tuple[Location, Held]]:
        index, name = component.index, component.name
        for run in self._coming[name]:
            state = "COMING" if run.job is None else "READING"
            yield from (((name, at), Held(state, key)) for key, at in zip(run.keys, run.ids, strict=True))
        for key in index:
            run = index.get(key)
            assert run is not None
            at = run.ids[run.keys.index(key)]
            yield (name, at), Held("LOCKED" if run.locks else "PUBLISHED", key)

    def _in_stores(self, component: CacheComponent) -> Iterator[tuple[Location, Held]]:
        """Of what is on the host."""
        name, index = component.name, component.index
        for key in index:
            run = index.get(key)
            assert run is not None
            for store in self._context.stores:
                if run.stored & store.bit and key not in run.second_pages:
                    yield (name, (store, key)), Held("STORED", key)
        for store, persist in zip(self._context.stores, self._inspect.persists, strict=True):
            for run in persist.host_locks(name):
                sent = (key for key in run.keys if key not in run.second_pages)
                yield from (((name, (store, key)), Held("STORING", key)) for key in sent)


def way(tier: str, call: str, old: Held, new: Held) -> list[Row] | None:
    """The fewest rows of a table that lead from one to the other in a call; None where none do."""
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
    """The state of what is not held."""
    return next(iter(TABLES[tier]))[0]


def _ids(value: Any) -> list[int]:
    return value.tolist()  # type: ignore[no-any-return]


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Without the tracer that has calls fail (failing_calls.py): a look is none of the engine's."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
