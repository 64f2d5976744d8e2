"""One cache without bytes: the real prefix tree and its eviction orders over device, host and disk.

A block of a trace is a page of one token, its id. Requests come one after the other, and every copy is done at once.
The steps are those of `hicache.flow`; `docs/replay.md` states them as rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch

from hicache.config.settings import short_repr
from hicache.errors import ConfigError
from hicache.eviction.policy import ORDERS
from hicache.tiers import DEVICE, DISK, FULL, HOST, Tier
from hicache.tree import PageHasher, RadixTree, TreeNode
from hicache.tree.key import Tokens

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
    remote: int = 0


class DiskOrder:
    """What a disk holds: page keys, least recently used first, as a page store evicts them. `capacity`: pages; None:
    unlimited. Several nodes may share one.

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


class CacheSimulation:
    """One node's cache. `remote`: a store behind its disk, which other nodes use too and a host tier reads from."""

    def __init__(self, settings: ReplaySettings, remote: DiskOrder | None = None) -> None:
        self.settings, self.remote = settings, remote
        self.tree = RadixTree(1, PageHasher(b"replay", 1), policy=settings.policy)
        self.disk = DiskOrder(settings.disk_blocks) if settings.disk_blocks != 0 else None
        self._has_host = settings.host_blocks != 0
        self._capacity = {DEVICE: settings.device_blocks, HOST: settings.host_blocks}
        self._slots = torch.zeros(1024, dtype=torch.int64)  # values that the tree copies and nobody reads

    def lookup(self, blocks: Tokens) -> int:
        """How many blocks of a prompt this node holds now, the remote tier left out. Changes nothing."""
        match = self.tree.match(blocks)
        length = match.full_len
        if self.disk is not None and length < len(blocks):
            length += self.disk.num_present(self.tree.names.of_prompt(match, blocks)[length:])
        return self._usable(length)

    def serve(self, blocks: Tokens) -> BlockHits:
        """One request, from its arrival to its end."""
        if len(blocks) > len(self._slots):
            self._slots = torch.zeros(2 * len(blocks), dtype=torch.int64)
        tree = self.tree
        host_len, disk_end = self._prefetch(blocks)
        match = tree.match(blocks)
        length = self._usable(match.full_len)
        device_len = min(match.device_len, length)
        node = tree.node_at(match, length)
        self._admit(node, len(blocks) - device_len)
        node = self._commit(node, blocks[length:])
        tree.touch(node, DEVICE)
        tree.unlock(node, DEVICE)
        if self._has_host:
            tree.touch(node, HOST)
            self._touch_disk(node)
            self._touch_remote(node)
        ends = [device_len, *(min(length, max(device_len, end)) for end in (host_len, disk_end)), length]
        return BlockHits(device_len, *(end - start for start, end in pairwise(ends)))

    def check(self) -> None:
        """Raise `InvariantError` where the tree does not hold what it should, or a tier holds more than it may."""
        self.tree.check()
        for tier, capacity in self._capacity.items():
            assert capacity is None or self._held(tier) <= capacity, f"{tier.name} holds {self._held(tier)}"

    # The steps of a request

    def _prefetch(self, blocks: Tokens) -> tuple[int, int]:
        """Disk and remote tier to host: what the disk adds to the host's prefix, and the remote tier to both. What came
        from the remote tier goes to the disk too. Returns where the host's prefix ended before, and the disk's part."""
        if not self._has_host:
            return 0, 0
        tree = self.tree
        match = tree.match(blocks)
        host_nodes = list(takewhile(lambda node: node.holds(FULL, HOST), match.nodes))
        host_len = min(match.full_len, host_nodes[-1].depth_tokens) if host_nodes else 0
        if (self.disk is None and self.remote is None) or host_len == len(blocks):
            return host_len, host_len
        keys = tree.names.of_prompt(match, blocks)
        disk_end = host_len + (self.disk.num_present(keys[host_len:]) if self.disk is not None else 0)
        num_found = disk_end - host_len
        if self.remote is not None:
            num_found += self.remote.num_present(keys[disk_end:])
        if num_found:
            self._read(tree.node_at(match, host_len), blocks, keys, num_found)
        return host_len, disk_end

    def _read(self, anchor: TreeNode, blocks: Tokens, keys: list[bytes], num_found: int) -> None:
        """The `num_found` blocks behind `anchor` to the host, as many as it has room for."""
        tree, start = self.tree, anchor.depth_tokens
        tree.lock(anchor, HOST)
        num_read = min(num_found, self._free(HOST) + tree.evictable(FULL, HOST))
        end = start + num_read
        self._make_room(HOST, num_read)
        inserted = tree.insert(anchor, blocks[start:end], self._slots[:num_read], HOST)
        for node in inserted.gained:
            node.page_keys = keys[node.depth_tokens - node.num_tokens : node.depth_tokens]
            node.holdings[FULL][HOST].stored = 0 if self.disk is None else DISK
        tree.unlock(anchor, HOST)
        if self.disk is not None:
            self.disk.put(keys[start:end])

    def _admit(self, node: TreeNode, num_needed: int) -> None:
        """Make room on the device for what the prefix up to `node` lacks there and what follows it, and load it."""
        tree, path = self.tree, node.path()[::-1]
        on_device = [at for at in path if at.holds(FULL, DEVICE)]
        pinned = on_device[-1] if on_device else tree.root
        tree.lock(pinned, DEVICE)
        tree.lock(node, HOST)
        self._make_room(DEVICE, num_needed)
        for at in path:
            at.hit_count += 1
        tree.lock(node, DEVICE)
        for at in path[len(on_device) :]:
            tree.begin_load(at, self._slots[: at.num_tokens])
        tree.unlock(node, HOST)
        tree.unlock(pinned, DEVICE)
        self._maybe_backup(node)

    def _commit(self, node: TreeNode, computed: Tokens) -> TreeNode:
        """Give the tree the blocks behind `node`, as many as the device has room for. Returns the node at their end, to
        which the lock on `node` moves."""
        computed = computed[: self._free(DEVICE)]
        inserted = self.tree.insert(node, computed, self._slots[: len(computed)], DEVICE)
        self.tree.move_lock(node, inserted.node, DEVICE)
        self._maybe_backup(inserted.node)
        return inserted.node

    def _touch_disk(self, node: TreeNode) -> None:
        """What the disk has of the path counts as used, whichever tier served it."""
        if self.disk is None:
            return
        for at in node.path():
            if at.is_stored(FULL):
                self.disk.touch(self.tree.names.of(at))

    def _touch_remote(self, node: TreeNode) -> None:
        """The remote tier gets what the host holds of the path; all of it counts as used there."""
        if self.remote is not None:
            on_host = takewhile(lambda at: at.holds(FULL, HOST), reversed(node.path()))
            self.remote.put([key for at in on_host for key in self.tree.names.of(at)])

    # Between the tiers

    def _maybe_backup(self, node: TreeNode) -> None:
        """Device to host: what the write policy wants of the end of the path that the host lacks."""
        if not self._has_host or self.settings.write_policy == "write_back":
            return
        hits = self.settings.selective_hits if self.settings.write_policy == "write_through_selective" else 0
        self._backup(list(takewhile(lambda at: at.hit_count >= hits, self._only_on_device(node))))

    def _only_on_device(self, node: TreeNode) -> list[TreeNode]:
        """The end of the path to `node` that the host lacks, root side first."""
        return list(takewhile(lambda at: not at.holds(FULL, HOST), node.path()))[::-1]

    def _backup(self, nodes: Sequence[TreeNode]) -> None:
        """Device to host, all of `nodes`, a piece of one path, or none of them."""
        if not nodes:
            return
        tree, last = self.tree, nodes[-1]
        tree.lock(last, DEVICE)
        tree.lock(last, HOST)
        is_done = self._make_room(HOST, sum(node.num_tokens for node in nodes))
        for node in nodes if is_done else ():
            tree.begin_backup(node, FULL, self._slots[: node.num_tokens])
            tree.end_backup(node, FULL, confirmed=True)
        tree.unlock(last, HOST)
        tree.unlock(last, DEVICE)
        if is_done and self.disk is not None:
            self._persist(nodes)

    def _persist(self, nodes: Sequence[TreeNode]) -> None:
        """Host to disk: what is not known to be there of `nodes`, a piece of one path."""
        assert self.disk is not None
        unstored = [node for node in nodes if not node.is_stored(FULL)]
        self.disk.put([key for node in unstored for key in self.tree.names.of(node)])
        for node in unstored:
            node.holdings[FULL][HOST].stored = DISK

    # Capacity

    def _usable(self, length: int) -> int:
        """A request uses no more blocks than the device holds."""
        return length if self.settings.device_blocks is None else min(length, self.settings.device_blocks)

    def _held(self, tier: Tier) -> int:
        return self.tree.account(FULL, tier).held

    def _free(self, tier: Tier) -> int:
        capacity = self._capacity[tier]
        return (1 << 62) if capacity is None else capacity - self._held(tier)

    def _make_room(self, tier: Tier, num_blocks: int) -> bool:
        """Evict until `num_blocks` are free. Where that cannot be: on the host evict nothing, on the device all."""
        tree, short = self.tree, num_blocks - self._free(tier)
        if tier is HOST and short > tree.evictable(FULL, HOST):
            return False
        while short > 0 and (node := tree.victim(FULL, tier, short)) is not None:
            if tier is DEVICE and self.settings.write_policy == "write_back" and self._has_host:
                self._backup(self._only_on_device(node))
            short -= sum(released.size for released in tree.drop(node, FULL, tier) if released.tier is tier)
        return short <= 0
