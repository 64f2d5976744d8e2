"""One cache without bytes: the real prefix tree, the real index of host pages and their eviction orders.

A block of a trace is a page of one token, its id. Requests come one after the other, and every copy is done at once.
The steps are those of `hicache.flow`; `docs/replay.md` states them as rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch

from hicache.config.settings import short_repr
from hicache.errors import ConfigError
from hicache.eviction.policy import ORDERS
from hicache.host import NewPages, PageIndex, RunPart, path_of, spans, used_alike, within
from hicache.stores.tier import JOB_PAGES
from hicache.tiers import DISK, FULL
from hicache.tree import PageHasher, RadixTree, TreeNode
from hicache.tree.key import Tokens

_UNLIMITED = 1 << 62

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


@dataclass(frozen=True)
class ReplaySettings:
    """Capacities in blocks: None for unlimited, 0 for no such tier, which the device cannot be. `policy`: the eviction
    order of device and host; the disk's is always lru. ConfigError for what no cache can have."""

    device_blocks: int | None
    host_blocks: int | None = 0
    disk_blocks: int | None = 0
    policy: str = "lru"
    write_policy: str = "write_through"
    selective_hits: int = 2

    def __post_init__(self) -> None:
        for name, least in (("device_blocks", 1), ("host_blocks", 0), ("disk_blocks", 0), ("selective_hits", 1)):
            value = vars(self)[name]
            is_unlimited = value is None and name != "selective_hits"
            if not is_unlimited and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}={short_repr(value)} is no whole number of at least {least}")
        if self.disk_blocks != 0 and self.host_blocks == 0:
            raise ConfigError("the disk tier needs a host tier; give host_blocks")
        for name, words in (("policy", tuple(ORDERS)), ("write_policy", WRITE_POLICIES)):
            if vars(self)[name] not in words:
                raise ConfigError(f"{name}={short_repr(vars(self)[name])} is unknown; use one of {', '.join(words)}")

    @property
    def total_blocks(self) -> int | None:
        """Of all tiers; None where one is unlimited."""
        sizes = (self.device_blocks, self.host_blocks, self.disk_blocks)
        return None if None in sizes else sum(size for size in sizes if size is not None)


class BlockHits(NamedTuple):
    """Blocks of one prompt that need not be computed, by the tier that held them when the request came."""

    device: int = 0
    host: int = 0
    disk: int = 0


class DiskOrder:
    """What a disk holds: page keys, least recently used first, as a page store evicts them. `capacity`: pages; None:
    unlimited.

    Keys of one call follow each other in a prompt: the first becomes the most recently used, so suffixes go first.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def num_present(self, keys: Iterable[bytes]) -> int:
        """How many of `keys` are held before the first that is not. No use."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request used these; those that are not held are ignored."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def put(self, keys: Sequence[bytes]) -> None:
        """Hold these, evicting others, and at last their own suffix. What is held already counts as used."""
        self.touch(keys)
        for key in [key for key in reversed(keys) if key not in self._keys]:
            self._keys[key] = None
            if self._capacity is not None and len(self._keys) > self._capacity:
                self._keys.popitem(last=False)


class BlockPool:
    """Counts host pages, `num_pages` of them, where there are no bytes: see `HostPagePool`."""

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = _UNLIMITED if num_pages is None else num_pages
        self._used, self._next_id = 0, 1

    def available(self) -> int:
        return self.num_pages - self._used

    def alloc(self, num_pages: int) -> torch.Tensor:
        self._used += num_pages
        self._next_id += num_pages
        return torch.arange(self._next_id - num_pages, self._next_id)

    def free(self, pages: torch.Tensor) -> None:
        self._used -= len(pages)

    def check(self) -> None:
        """The index counts what is used."""


class CacheSimulation:
    """The tiers of one engine."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self.tree = RadixTree(1, PageHasher(b"replay", 1), policy=settings.policy)
        self.disk = DiskOrder(settings.disk_blocks) if settings.disk_blocks != 0 else None
        self.host = None if settings.host_blocks == 0 else PageIndex(BlockPool(settings.host_blocks), settings.policy)
        self._slots = torch.zeros(1024, dtype=torch.int64)  # values that the tree copies and nobody reads

    def serve(self, blocks: Tokens) -> BlockHits:
        """One request, from its arrival to its end."""
        if len(blocks) > len(self._slots):
            self._slots = torch.zeros(2 * len(blocks), dtype=torch.int64)
        tree = self.tree
        match = tree.match(blocks)
        keys = tree.names.of_prompt(match, blocks) if self.host is not None else []
        read = self._prefetch(keys, match.full_len)
        length = self._usable(match.full_len if self.host is None else self.host.held_end(keys, match.full_len))
        device_len = min(match.full_len, length)
        node = self._admit(tree.node_at(match, device_len), blocks, keys, length)
        node = self._commit(node, blocks[length:], keys)
        tree.touch(node)
        tree.unlock(node)
        self._touch_below(keys[: node.depth_tokens])
        num_disk = bisect_left(read, length)
        return BlockHits(device_len, length - device_len - num_disk, num_disk)

    def check(self) -> None:
        """Raise `InvariantError` where the tree does not hold what it should, or a tier holds more than it may."""
        self.tree.check()
        capacity, held = self.settings.device_blocks, self.tree.account(FULL).total
        assert capacity is None or held <= capacity, f"the device holds {held}"
        if self.host is not None:
            self.host.check(Counter())

    # The steps of a request

    def _prefetch(self, keys: list[bytes], device_len: int) -> list[int]:
        """Disk to host: what the disk adds to memory. Returns which blocks came."""
        if self.host is None or self.disk is None:
            return []
        missing = self.host.lacking(keys, device_len)
        num_found = self.disk.num_present(keys[at] for at in missing)
        before = self.host.runs_of(keys[device_len : self.host.held_end(keys, device_len)])
        self.host.lock(before)
        read = missing[: min(num_found, self.host.capacity)]
        for start in range(0, len(read), JOB_PAGES):
            self._enter(_pieces(keys, read[start : start + JOB_PAGES]))
        self.host.unlock(before)
        self.disk.touch([keys[at] for at in read])
        return read

    def _enter(self, pieces: Sequence[NewPages]) -> None:
        """What the host lacks of `pieces`, as far as it fits."""
        assert self.host is not None
        absent = [new for piece in pieces for new in self.host.absent(piece)]
        for run in reversed(self.host.reserve(self.host.fitting(absent)) or ()):
            self.host.publish(run)
            run.stored = 0 if self.disk is None else DISK

    def _admit(self, node: TreeNode, blocks: Tokens, keys: list[bytes], length: int) -> TreeNode:
        """Make slots available for what the prefix of `length` blocks lacks behind `node` and what follows it, and load
        it. Returns the prefix's end, which is locked."""
        tree, start = self.tree, node.depth_tokens
        tree.lock(node)
        parts: list[RunPart] = []
        if self.host is not None:
            parts = within(self.host.count_use(self.host.parts(keys[:length])), range(start, length))
            self.host.lock(part.run for part in parts)
        self._make_available(len(blocks) - start)
        for at in node.path():
            at.hit_count += 1
        end, done = node, start
        for last, hit_count in used_alike(parts):
            end = tree.insert(end, blocks[done:last], self._slots[: last - done], hit_count=hit_count).node
            done = last
        tree.move_lock(node, end)
        self._maybe_backup(end, keys)
        if self.host is not None:
            self.host.unlock(part.run for part in parts)
        return end

    def _commit(self, node: TreeNode, computed: Tokens, keys: list[bytes]) -> TreeNode:
        """Give the tree the blocks behind `node`, as many as the device has room for. Returns the node at their end, to
        which the lock on `node` moves."""
        computed = computed[: self._free()]
        inserted = self.tree.insert(node, computed, self._slots[: len(computed)])
        self.tree.move_lock(node, inserted.node)
        self._maybe_backup(inserted.node, keys)
        return inserted.node

    def _touch_below(self, keys: list[bytes]) -> None:
        """What the tiers below have of the prefix counts as used, whichever tier served it."""
        if self.host is None:
            return
        self.host.touch(self.host.runs_of(keys))
        if self.disk is not None:
            self.disk.touch(keys)

    # Between the tiers

    def _maybe_backup(self, node: TreeNode, keys: list[bytes]) -> None:
        """Device to host: what the write policy wants of the end of the path that the host lacks."""
        host = self.host
        if host is None or self.settings.write_policy == "write_back":
            return
        hits = self.settings.selective_hits if self.settings.write_policy == "write_through_selective" else 0
        lacking = list(takewhile(lambda at: keys[at.depth_tokens - 1] not in host, node.climb()))[::-1]
        wanted = list(takewhile(lambda at: at.hit_count >= hits, lacking))
        pieces = [_piece(keys, at.depth_tokens - at.num_tokens, at.depth_tokens) for at in wanted]
        self._save([self._used_as(piece, at) for piece, at in zip(pieces, wanted, strict=True)])

    def _used_as(self, piece: NewPages, node: TreeNode) -> NewPages:
        return piece._replace(hit_count=node.hit_count, uses=self.tree.account(FULL).uses_of(node))

    def _save(self, pieces: Sequence[NewPages]) -> None:
        """Device to host, and from there to the disk, as far as the host has room."""
        if pieces and self.host is not None:
            self._enter(pieces)
            if self.disk is not None:
                self.disk.put([key for piece in pieces for key in piece.keys if key in self.host])
                last = (self.host.get(piece.keys[-1]) for piece in pieces)
                for path in (path_of(run) for run in last if run is not None):
                    self.disk.touch([key for run in path for key in run.keys])

    # Capacity

    def _usable(self, length: int) -> int:
        """A request uses no more blocks than the device holds."""
        return length if self.settings.device_blocks is None else min(length, self.settings.device_blocks)

    def _free(self) -> int:
        capacity = self.settings.device_blocks
        return _UNLIMITED if capacity is None else capacity - self.tree.account(FULL).total

    def _make_available(self, num_blocks: int) -> None:
        """Evict from the device until `num_blocks` are free, or nothing is left to evict."""
        tree, short, unsaved = self.tree, num_blocks - self._free(), list[NewPages]()
        while short > 0 and (node := tree.victim(FULL, short)) is not None:
            if self.settings.write_policy == "write_back" and self.host is not None:
                before = tree.names.before(node) if node.depth_tokens > node.num_tokens else None
                piece = NewPages(tree.names.of(node), before, node.depth_tokens - node.num_tokens)
                unsaved.append(self._used_as(piece, node))
            short -= sum(released.size for released in tree.drop(node, FULL))
        self._save(unsaved[::-1])


def _piece(keys: Sequence[bytes], start: int, end: int) -> NewPages:
    """Blocks [start, end) of a prompt."""
    return NewPages(keys[start:end], keys[start - 1] if start else None, start)


def _pieces(keys: Sequence[bytes], indices: Sequence[int]) -> list[NewPages]:
    """These blocks, ascending, in pieces without a gap."""
    return [_piece(keys, start, end) for start, end in spans(indices)]
