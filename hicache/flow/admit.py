"""Admission: a request gets a pinned prefix, slots for the rest and a row, or nothing at all.

Room is counted before anything changes, so a refused request leaves no trace, recency included. What the host holds is
loaded unless computing it again is estimated to be faster. In a hybrid model the request also gets two states, the
first of which holds what the prefix left behind; in a model with windows, the window slots that the prefix needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hicache.errors import OutOfRows, OutOfSlots, OutOfStates, PromptTooLong, TransferBusy
from hicache.flow.base import CacheRequest, Hit, Lease, Load, LoadPlan, Parts
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.tree.base import Match
from hicache.tree.node import Place, Tier, TreeNode, joined

_STATES = 2  # of a request: the one that advances, and the last checkpoint


class Loader(Protocol):
    """What admission asks of the flow that restores."""

    def worthwhile(self, num_bytes: int, num_tokens: int) -> bool: ...
    def can_start(self) -> bool: ...
    def start(self, plan: LoadPlan, slots: torch.Tensor, state: torch.Tensor | None) -> Load: ...
    def loads_of(self, nodes: list[TreeNode]) -> list[Load]: ...


class Room(Protocol):
    """What admission asks of the flow that evicts."""

    def device_slots(self, num_tokens: int, num_bare: int = 0) -> torch.Tensor | None: ...
    def free_windows(self, num_tokens: int) -> bool: ...
    def free_states(self, num_states: int) -> bool: ...


class Admission:
    """Makes and grows leases. Owned by the scheduler thread.

    `room` makes room on the device; `consider(node)` is told about every path that was used.
    """

    def __init__(self, parts: Parts, loader: Loader, room: Room, consider: Callable[[TreeNode], None]) -> None:
        self._parts, self._loader, self._room, self._consider = parts, loader, room, consider
        count = parts.metrics.counter
        self._prompt = count("admit.prompt_tokens", "tokens of admitted prompts")
        self._hits = [
            count("admit.device_hit_tokens", "of them on the device at admission"),
            count("admit.host_hit_tokens", "of them on the host at admission"),
            count("admit.disk_hit_tokens", "of them on the host after a prefetch from disk"),
        ]
        parts.metrics.gauge("admit.hit_rate", "share of prompt tokens that needed no computing", self._hit_rate)

    def acquire(self, request: CacheRequest) -> Lease:
        """See `CacheEngine.acquire`."""
        tree, num_tokens = self._parts.tree, len(request.tokens)
        self._refuse_impossible(num_tokens, request.reserve_tokens)
        # The last token is always computed: its logits are what the caller wants.
        whole = (num_tokens - 1) // tree.page_size * tree.page_size
        match = tree.match(request.tokens[:whole], request.namespace)
        length, needs_load = self._usable(match)
        end = num_tokens if request.reserve_tokens is None else min(num_tokens, length + request.reserve_tokens)
        need = self._in_pages(end - min(length, match.device_len))
        self._refuse_now(need, length, needs_load, match)

        node = tree.node_at(match, length)
        plan = self._plan(node)
        lease = Lease(request, node, self._parts.req_to_token.req_to_token, self._parts.allocator.device)
        lease.length, lease.branching_len = end, match.full_len if match.full_len > length else 0
        pinned = (plan.pages[0].parent if plan.pages else node) or node
        tree.lock(pinned, Tier.DEVICE)
        tree.lock(node, Tier.HOST)
        try:
            slots = self._take(lease, plan, need)
            if slots is not None:
                self._fill(lease, plan, slots)
        finally:
            tree.unlock(node, Tier.HOST)
            tree.unlock(pinned, Tier.DEVICE)
        if slots is None:
            raise self._out_of_slots(need)
        self._consider(node)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> torch.Tensor:
        """See `CacheEngine.extend`."""
        most = self._parts.config.max_context_len
        if lease.length + num_tokens > most:
            raise PromptTooLong(lease.length + num_tokens, most, "max_context_len")
        if lease.length + num_tokens > lease.held_len:
            need = self._in_pages(lease.length + num_tokens - lease.held_len)
            slots = self._room.device_slots(need)
            if slots is None:
                raise self._out_of_slots(need)
            lease.write(lease.held_len, slots)
            lease.held_len += need
        start, lease.length = lease.length, lease.length + num_tokens
        return lease.slots_of(start, lease.length)

    def _hit_rate(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)

    # What is there

    def _usable(self, match: Match) -> tuple[int, bool]:
        """Tokens of the match to start from, and whether that takes a load: what every component can use, less what is
        not worth one."""
        tree = self._parts.tree
        best = tree.usable_len(match, match.full_len, on_host=True)
        resident = tree.usable_len(match, match.device_len, on_host=False)
        if best > resident and not self._loader.worthwhile(self._load_bytes(best, match), best - resident):
            return resident, False
        return best, best > resident

    def _load_bytes(self, length: int, match: Match) -> int:
        """About what a load of the first `length` tokens of a match would bring."""
        parts, num_bytes = self._parts, 0
        if parts.host is not None:
            num_bytes = max(0, length - match.device_len) // parts.host.page_tokens * parts.host.page_bytes
        if parts.windows is not None and parts.windows.host is not None:
            host = parts.windows.host
            num_bytes += min(length, parts.windows.rules.window) // host.page_tokens * host.page_bytes
        if parts.states is not None and parts.states.host is not None:
            num_bytes += parts.states.host.page_bytes
        return num_bytes

    def _plan(self, node: TreeNode) -> LoadPlan:
        """What the device lacks of the prefix that ends with `node`."""
        if self._parts.windows is not None:
            self._parts.windows.narrow(self._parts.tree, node)
        pages = [at for at in node.path() if not at.holds(Tier.DEVICE)][::-1]
        windows: list[TreeNode] = []
        if self._parts.windows is not None:
            windows = [at for at in self._parts.windows.rules.reach(node) if not at.holds(Place.SWA_DEVICE)][::-1]
        state = self._parts.states is not None and not node.is_root and not node.holds(Place.MAMBA_DEVICE)
        return LoadPlan(node, tuple(pages), tuple(windows), state)

    # Whether it fits

    def _refuse_impossible(self, num_tokens: int, reserve_tokens: int | None) -> None:
        config, allocator, windows = self._parts.config, self._parts.allocator, self._parts.windows
        if num_tokens > config.max_context_len:
            raise PromptTooLong(num_tokens, config.max_context_len, "max_context_len")
        most = allocator.size // allocator.page_size * allocator.page_size
        if num_tokens > most:
            raise PromptTooLong(num_tokens, most, "device_tokens")
        reserved = num_tokens if reserve_tokens is None else min(num_tokens, reserve_tokens)
        if windows is not None and self._in_pages(reserved) > windows.most_tokens:
            raise PromptTooLong(num_tokens, windows.most_tokens, "window_tokens (or acquire less with reserve_tokens)")

    def _refuse_now(self, need: int, length: int, needs_load: bool, match: Match) -> None:
        """Raise, with nothing changed, when the request does not fit at this moment."""
        parts, tree, windows, states = self._parts, self._parts.tree, self._parts.windows, self._parts.states
        free = parts.allocator.available_size() if windows is None else windows.allocator.full_available_size()
        if need > free + tree.evictable(Tier.DEVICE) - tree.unlocked_len(match, min(length, match.device_len)):
            raise self._out_of_slots(need)
        if windows is not None:
            missing, kept = self._window_tokens(match, length)
            wanted = need - max(0, length - match.device_len) + missing
            if wanted > windows.allocator.swa_available_size() + tree.evictable(Place.SWA_DEVICE) - kept:
                raise self._out_of_slots(need)
        if not parts.req_to_token.available_size():
            raise OutOfRows(parts.config.max_requests)
        if states is not None:
            available = states.pool.available_size()
            if available + max(0, tree.evictable(Place.MAMBA_DEVICE) - min(1, length)) < _STATES:
                raise OutOfStates(_STATES - available, available)
        if needs_load and not self._loader.can_start():
            raise TransferBusy(NUM_PRODUCERS)

    def _window_tokens(self, match: Match, length: int) -> tuple[int, int]:
        """Of the last window before the end of the first `length` tokens: those to be loaded, those to be pinned."""
        assert self._parts.windows is not None
        page, missing, kept = self._parts.tree.page_size, 0, 0
        start = max(0, length - self._parts.windows.rules.window) // page * page
        pos = 0
        for node in match.nodes:
            overlap = min(pos + node.num_tokens, length) - max(pos, start)
            if overlap > 0 and not node.holds(Place.SWA_DEVICE):
                missing += overlap
            elif overlap > 0 and not node.locks[Place.SWA_DEVICE]:
                kept += overlap
            pos += node.num_tokens
        return missing, kept

    def _in_pages(self, num_tokens: int) -> int:
        page = self._parts.allocator.page_size
        return -(-num_tokens // page) * page

    def _out_of_slots(self, need: int) -> OutOfSlots:
        return OutOfSlots(need, self._parts.allocator.available_size(), self._parts.tree.evictable(Tier.DEVICE))

    # Taking it

    def _take(self, lease: Lease, plan: LoadPlan, need: int) -> torch.Tensor | None:
        """A row, states, `need` slots, and window slots for what the last window lacks; all of it or None."""
        parts, windows = self._parts, self._parts.windows
        load_len = sum(node.num_tokens for node in plan.pages)
        slots = self._room.device_slots(need, load_len)
        if slots is None:
            return None
        fits = parts.states is None or self._room.free_states(_STATES)
        full_slots = _slots_of(plan, slots) if plan.windows else slots[:0]
        if fits and windows is not None:
            fits = self._room.free_windows(len(full_slots))
        if not fits or parts.req_to_token.alloc([lease]) is None:
            parts.allocator.free_run(slots)
            return None
        if windows is not None:  # last: nodes of the tree are among them, and keep what they get
            paired = windows.allocator.alloc_window(full_slots)
            assert paired, "room was made above"
        return slots

    def _fill(self, lease: Lease, plan: LoadPlan, slots: torch.Tensor) -> None:
        """Everything fits: note the slots, start the load, bring the state, pin the path."""
        parts, node = self._parts, plan.node
        path = list(node.path())[::-1]
        resident = [at.held(Tier.DEVICE) for at in path if at.holds(Tier.DEVICE)]
        device_len, load_len = sum(map(len, resident)), sum(at.num_tokens for at in plan.pages)
        disk_len = sum(at.num_tokens for at in plan.pages if at.from_disk)
        if resident:
            lease.write(0, joined(resident))
        lease.write(device_len, slots)
        state = None if lease.mamba_pool_idx is None else lease.mamba_pool_idx.reshape(1)
        if not plan.is_empty:
            load = self._loader.start(plan, slots[:load_len], state if plan.state else None)
            lease.join([load])
            lease.state_load = load if plan.state else None
        if parts.states is not None and state is not None and not plan.state and not node.is_root:
            with parts.states.copying():
                parts.states.pool.copy_from(node.held(Place.MAMBA_DEVICE), state)
        parts.tree.lock(node, Tier.DEVICE)
        lease.hit = Hit(device_len, load_len - disk_len, disk_len)
        lease.cached_len = lease.tree_len = device_len + load_len
        lease.held_len = device_len + len(slots)
        lease.join(self._loader.loads_of(path))
        for at in path:
            at.hit_count += 1
        parts.tree.prioritise(node, lease.priority)
        self._prompt.value += lease.prompt_len
        for counter, tokens in zip(self._hits, (device_len, load_len - disk_len, disk_len), strict=True):
            counter.value += tokens


def _slots_of(plan: LoadPlan, slots: torch.Tensor) -> torch.Tensor:
    """The full slots of the nodes whose windows a plan brings; `slots` starts with those of its pages."""
    of_pages: dict[TreeNode, torch.Tensor] = {}
    start = 0
    for node in plan.pages:
        of_pages[node] = slots[start : start + node.num_tokens]
        start += node.num_tokens
    return joined([of_pages[node] if node in of_pages else node.held(Tier.DEVICE) for node in plan.windows])
