"""Admission: a request gets a pinned prefix, slots for the rest and a row, or nothing at all.

Room is counted before anything changes, so a refused request leaves no trace, recency included. What the host holds is
loaded unless computing it again is estimated to be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hicache.errors import OutOfRows, OutOfSlots, PromptTooLong, TransferBusy, TransferError
from hicache.flow.base import CacheRequest, Hit, Lease, Load, Parts
from hicache.transfer.counter import NUM_PRODUCERS
from hicache.tree.base import Match
from hicache.tree.key import Tokens
from hicache.tree.node import Tier, TreeNode


class Loader(Protocol):
    """What admission asks of the flow that restores."""

    def worthwhile(self, num_tokens: int) -> bool: ...
    def can_start(self) -> bool: ...
    def start(self, nodes: list[TreeNode], slots: torch.Tensor) -> None: ...
    def loads_of(self, nodes: list[TreeNode]) -> list[Load]: ...
    def let_go(self, load: Load) -> None: ...


class Admission:
    """Makes, grows, commits and ends leases. Owned by the scheduler thread.

    `device_slots(n)` makes room on the device; `consider(node)` is told about every path that was used or grew.
    """

    def __init__(
        self,
        parts: Parts,
        loader: Loader,
        device_slots: Callable[[int], torch.Tensor | None],
        consider: Callable[[TreeNode], None],
    ) -> None:
        self._parts, self._loader = parts, loader
        self._device_slots, self._consider = device_slots, consider
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
        self._refuse_impossible(num_tokens)
        # The last token is always computed: its logits are what the caller wants.
        whole = (num_tokens - 1) // tree.page_size * tree.page_size
        match = tree.match(request.tokens[:whole], request.namespace)
        load_len = match.host_len if match.host_len and self._loader.worthwhile(match.host_len) else 0
        need = self._in_pages(num_tokens - match.device_len)
        self._refuse_now(need, load_len, match)

        node = tree.node_at(match, match.device_len + load_len)
        path = list(reversed(list(node.path())))
        to_load = [at for at in path if not at.holds(Tier.DEVICE)]
        pinned = (to_load[0].parent if to_load else node) or node
        tree.lock(pinned, Tier.DEVICE)
        tree.lock(node, Tier.HOST)
        slots = self._device_slots(need)
        if slots is not None:
            lease = self._make(request, node, path, to_load, slots)
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
            slots = self._device_slots(need)
            if slots is None:
                raise self._out_of_slots(need)
            self._write(lease, lease.held_len, slots)
            lease.held_len += need
        start, lease.length = lease.length, lease.length + num_tokens
        return lease.slots_of(start, lease.length)

    def commit(self, lease: Lease, tokens: Tokens) -> None:
        """See `CacheEngine.commit`."""
        tree = self._parts.tree
        for load in lease.loads:
            if load.failed and load.op.done():
                raise TransferError(f"{lease.request_id}: its prefix could not be loaded: {load.op.error}")
        start, end = lease.tree_len, min(len(tokens), lease.length) // tree.page_size * tree.page_size
        if end <= start:
            return
        slots = lease.slots_of(start, end)
        result = tree.insert(lease.node, tokens[start:end], slots, Tier.DEVICE)
        for twice in result.duplicates:  # another request was first: use its slots, give ours back
            self._write(lease, start + twice.start, twice.value)
            self._parts.allocator.free_run(slots[twice.start : twice.end])
        tree.lock(result.node, Tier.DEVICE)
        tree.unlock(lease.node, Tier.DEVICE)
        lease.node, lease.tree_len = result.node, end
        if result.duplicates:
            self._join_loads(lease, list(result.node.path()))
        self._consider(result.node)

    def release(self, lease: Lease) -> None:
        """See `CacheEngine.release`."""
        if lease.released:
            return
        lease.released = True
        if lease.held_len > lease.tree_len:
            self._parts.allocator.free_run(lease.slots_of(lease.tree_len, lease.held_len))
        self._parts.tree.unlock(lease.node, Tier.DEVICE)
        self._parts.tree.touch(lease.node, Tier.HOST)
        self._parts.req_to_token.free(lease.row)
        for load in lease.loads:
            self._loader.let_go(load)

    def _hit_rate(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)

    def _refuse_impossible(self, num_tokens: int) -> None:
        config, allocator = self._parts.config, self._parts.allocator
        if num_tokens < 1:
            raise PromptTooLong(0, config.max_context_len, "the prompt")
        if num_tokens > config.max_context_len:
            raise PromptTooLong(num_tokens, config.max_context_len, "max_context_len")
        most = allocator.size // allocator.page_size * allocator.page_size
        if num_tokens > most:
            raise PromptTooLong(num_tokens, most, "device_tokens")

    def _refuse_now(self, need: int, load_len: int, match: Match) -> None:
        """Raise, with nothing changed, when the request does not fit at this moment."""
        tree = self._parts.tree
        evictable = tree.evictable(Tier.DEVICE) - tree.unlocked_len(match, match.device_len)
        if need > self._parts.allocator.available_size() + evictable:
            raise self._out_of_slots(need)
        if not self._parts.req_to_token.available_size():
            raise OutOfRows(self._parts.config.max_requests)
        if load_len and not self._loader.can_start():
            raise TransferBusy(NUM_PRODUCERS)

    def _make(
        self, request: CacheRequest, node: TreeNode, path: list[TreeNode], to_load: list[TreeNode], slots: torch.Tensor
    ) -> Lease:
        """Everything fits: take the row, start the load, pin the path."""
        rows = self._parts.req_to_token.alloc(1)
        assert rows is not None
        lease = Lease(request, node, rows[0], self._parts.req_to_token.req_to_token)
        resident = [at.value(Tier.DEVICE) for at in path if at.holds(Tier.DEVICE)]
        device_len = sum(len(value) for value in resident)
        load_len = sum(len(at.key) for at in to_load)
        disk_len = sum(len(at.key) for at in to_load if at.from_disk)
        if resident:
            self._write(lease, 0, torch.cat(resident))
        self._write(lease, device_len, slots)
        if to_load:
            self._loader.start(to_load, slots[:load_len])
        self._parts.tree.lock(node, Tier.DEVICE)
        lease.hit = Hit(device_len, load_len - disk_len, disk_len)
        lease.cached_len = lease.tree_len = device_len + load_len
        lease.length, lease.held_len = len(request.tokens), device_len + len(slots)
        self._join_loads(lease, path)
        for at in path:
            at.hit_count += 1
        self._prompt.value += lease.length
        for counter, tokens in zip(self._hits, (device_len, load_len - disk_len, disk_len), strict=True):
            counter.value += tokens
        return lease

    def _join_loads(self, lease: Lease, path: list[TreeNode]) -> None:
        for load in self._loader.loads_of(path):
            if load not in lease.loads:
                load.users += 1
                lease.loads.append(load)

    def _write(self, lease: Lease, start: int, slots: torch.Tensor) -> None:
        """Note the slots of positions [start, start + len(slots)) in the request's row."""
        self._parts.req_to_token.write((lease.row, slice(start, start + len(slots))), slots.to(torch.int32))

    def _in_pages(self, num_tokens: int) -> int:
        page = self._parts.allocator.page_size
        return -(-num_tokens // page) * page

    def _out_of_slots(self, need: int) -> OutOfSlots:
        return OutOfSlots(need, self._parts.allocator.available_size(), self._parts.tree.evictable(Tier.DEVICE))
