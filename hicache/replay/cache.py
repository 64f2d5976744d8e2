"""One cache without bytes: the real prefix tree, the real index of host pages and their eviction orders.

A block of a trace is a page of one token: the id of the prefix that it ends. Requests come one after the other, and
every copy is done at once. The steps are those of `hicache.flow`; `docs/replay.md` states them as rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from hicache.eviction.orders import KEPT_SHARE, deadline_s
from hicache.eviction.write_budget import PageUses, WriteBudget, names_of
from hicache.host.exclusive import ExclusiveIndex
from hicache.host.index import PageIndex
from hicache.host.run import RUN_TOKENS, HostRun, NewPages, RunPart, end_of, path_of, spans, used_alike, within
from hicache.host.write_ahead import ROUND_SHARE, WriteAhead, WrittenIndex
from hicache.replay.blocks import UNLIMITED, BlockKeys, BlockPool, ids_of
from hicache.replay.disk import DiskOrder
from hicache.replay.hints import NO_HINT, Hint
from hicache.replay.settings import ReplaySettings
from hicache.stores.tier import JOB_PAGES
from hicache.tiers import DISK, FULL
from hicache.tree.core import RadixTree
from hicache.tree.key import Tokens
from hicache.tree.node import TreeNode

_PAGE_TOKENS = 64  # of a host page, unless configured otherwise
_BLOCKS_PER_S = 100.0  # that requests ask for

_AT_EVICTION = ("write_back", "exclusive")


class BlockHits(NamedTuple):
    """Blocks of one prompt that need not be computed, by the tier that held them when the request came."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Copies:
    """Blocks that were copied: `loaded` host to device, `backed_up` device to host, `read` disk to host, `written` host
    to disk, `never_read` of these not read until the end."""

    loaded: int = 0
    backed_up: int = 0
    read: int = 0
    written: int = 0
    never_read: int = 0


class CacheSimulation:
    """The tiers of one engine with host pages of `page_tokens`. `block_tokens`: of a block, of which a run on the host
    and a read from disk have as many as make the tokens of the engine's."""

    def __init__(
        self,
        settings: ReplaySettings,
        block_tokens: int = _PAGE_TOKENS,
        page_tokens: int = _PAGE_TOKENS,
        blocks_per_s: float = _BLOCKS_PER_S,
    ) -> None:
        self.settings = settings
        self._blocks_per_s = blocks_per_s
        self._num_asked = 0
        self._names = BlockKeys()
        self.tree = RadixTree(1, self._names, policy=settings.policy)
        self.disk = DiskOrder(settings.disk_blocks) if settings.disk_blocks != 0 else None
        self.host: PageIndex | None = None
        self._exclusive: ExclusiveIndex | None = None
        if settings.host_blocks != 0:
            run_blocks = max(1, RUN_TOKENS // block_tokens)
            pool, order = BlockPool(settings.host_blocks), settings.host_order
            if settings.write_policy == "exclusive":
                self.host = self._exclusive = ExclusiveIndex(pool, order, run_pages=run_blocks)
            else:
                self.host = PageIndex(pool, order, run_pages=run_blocks)
        self._ahead: WriteAhead | None = None
        self._uses = PageUses()
        if self.disk is not None and self.host is not None:
            self._budget = WriteBudget((settings.disk_write_budget or 0) * blocks_per_s, self._asked_s)
            self._written = WrittenIndex(self.host, 1, ROUND_SHARE * self.host.pool.num_pages)
            self._ahead = WriteAhead([self._written], DISK, self._budget, self._uses)
        self._job_blocks = max(1, JOB_PAGES * page_tokens // block_tokens)
        self._slots = torch.zeros(1024, dtype=torch.int64)  # values that the tree copies and nobody reads
        self._is_last = False  # of its session, the request that is served
        self._loaded = self._backed_up = self._read = 0

    def _asked_s(self) -> float:
        """Where all requests ask for as many blocks a second."""
        return self._num_asked / self._blocks_per_s

    @property
    def copies(self) -> Copies:
        """Since the beginning, or the last `count_anew`."""
        written, useful = (0, 0) if self.disk is None else (self.disk.num_written, self.disk.num_useful)
        return Copies(self._loaded, self._backed_up, self._read, written, written - useful)

    def count_anew(self) -> None:
        """Copies so far count no more."""
        self._loaded = self._backed_up = self._read = 0
        if self.disk is not None:
            self.disk.count_anew()

    def serve(self, blocks: Tokens, hint: Hint = NO_HINT, now_s: float = 0.0) -> BlockHits:
        """One request, from its arrival to its end, at `now_s`. `blocks`: ids of prefixes, see `prefix_ids`."""
        self.tree.expire(now_s)
        if self.host is not None:
            self.host.expire(now_s)
        self._is_last = hint.session_end
        if len(blocks) > len(self._slots):
            self._slots = torch.zeros(2 * len(blocks), dtype=torch.int64)
        tree = self.tree
        match = tree.match(blocks)
        keys = self._names.chain(b"", blocks) if self.host is not None else []
        parts = self.host.parts(keys) if self.host is not None else []
        read = self._prefetch(blocks, keys, match.full_len, parts)
        if self.host is not None and len(read):
            parts = self.host.parts(keys)
        length = self._usable(end_of(parts, match.full_len))
        device_len = min(match.full_len, length)
        self._loaded += length - device_len
        self._read += len(read)
        node = self._admit(tree.node_at(match, device_len), blocks, keys, length, parts)
        node = self._commit(node, blocks[length:], keys)
        tree.touch(node)
        tree.unlock(node)
        self._num_asked += len(blocks)
        self._touch_below(blocks, keys, node, hint, now_s)
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

    def _prefetch(
        self, blocks: Tokens, keys: Sequence[bytes], device_len: int, parts: Sequence[RunPart]
    ) -> Sequence[int]:
        """Disk to host: what the disk adds to memory, of which the host has `parts`. Returns which blocks came. One
        lock keeps what the read continues and what it has brought."""
        host, disk = self.host, self.disk
        if host is None or disk is None:
            return ()
        is_missing = np.ones(len(keys), np.bool_)
        is_missing[:device_len] = False
        for part in parts:
            is_missing[part.start : part.end] = False
        missing = np.flatnonzero(is_missing)
        missing = missing[: disk.num_present(blocks[missing])]
        if not len(missing):
            return ()
        held = end_of(parts, device_len)
        followed = [part.run for part in parts if device_len < part.end <= held]
        before = (host.get(keys[start - 1]) for start, _ in spans(missing.tolist()) if start)
        followed += [run for run in before if run is not None]
        host.lock(followed)
        read: list[int] = missing[: host.capacity].tolist()
        most, jobs = self._job_blocks, list[NewPages]()
        for start, end in spans(read):
            jobs += [_piece(keys, at, min(end, at + most)) for at in range(start, end, most)]
        for run in [run for job in jobs for run in host.reserve([job]) or ()]:  # what leaves, leaves for one job
            run.stored |= DISK.bit
            host.publish(run)
        host.unlock(followed)
        disk.read(blocks[read])
        return read

    def _admit(
        self, node: TreeNode, blocks: Tokens, keys: Sequence[bytes], length: int, parts: Sequence[RunPart]
    ) -> TreeNode:
        """Make slots available for what the prefix of `length` blocks, of which the host has `parts`, lacks behind
        `node` and what follows it, and load it. Returns the prefix's end, which is locked."""
        start = node.depth_tokens
        self.tree.lock(node)
        loaded: list[RunPart] = []
        if self.host is not None:
            used = self.host.count_use(within(parts, range(length)))
            loaded = within(used, range(start, length))
            self.host.lock(part.run for part in loaded)
        for at in node.path():
            at.begin_use()
        if self._exclusive is not None:
            end = self._load_in_steps(self._exclusive, node, blocks, loaded)
            self._make_available(len(blocks) - end.depth_tokens)
            return end
        self._make_available(len(blocks) - start)
        end = self._load(node, blocks, loaded)
        self._maybe_backup(end, keys)
        if self.host is not None:
            self.host.unlock(part.run for part in loaded)
        return end

    def _load(self, node: TreeNode, blocks: Tokens, parts: Sequence[RunPart]) -> TreeNode:
        """Bring `parts` to the device behind `node`. Returns the node at their end, to which its lock moves."""
        end, done = node, node.depth_tokens
        for last, hit_count in used_alike(parts):
            end = self.tree.insert(end, blocks[done:last], self._slots[: last - done], hit_count=hit_count).node
            done = last
        self.tree.move_lock(node, end)
        return end

    def _load_in_steps(self, host: ExclusiveIndex, node: TreeNode, blocks: Tokens, parts: list[RunPart]) -> TreeNode:
        """As `_load`, making room on the device step by step, so that what goes down takes the places of what has come
        up, which is all but the last step."""
        done, under_way = node.depth_tokens, deque[list[RunPart]]()
        end = parts[-1].end if parts else done
        while done < end:
            if len(under_way) > 1:
                self._land(host, under_way.popleft())
            last = host.step_end(done, end, end - done, self._free())
            parts = host.divided(parts, last)
            step = within(parts, range(done, last))
            self._make_available(last - done)
            node, done = self._load(node, blocks, step), last
            under_way.append(step)
        for step in under_way:
            self._land(host, step)
        return node

    @staticmethod
    def _land(host: ExclusiveIndex, parts: Sequence[RunPart]) -> None:
        """What a step brought is on the device."""
        host.unlock(part.run for part in parts)
        host.came_to_device(parts)

    def _commit(self, node: TreeNode, computed: Tokens, keys: Sequence[bytes]) -> TreeNode:
        """Give the tree the blocks behind `node`, as many as the device has room for. Returns the node at their end, to
        which the lock on `node` moves."""
        computed, start = computed[: self._free()], node.depth_tokens
        inserted = self.tree.insert(node, computed, self._slots[: len(computed)])
        self.tree.move_lock(node, inserted.node)
        if self._exclusive is not None:
            self._exclusive.came_to_device(self._exclusive.parts(keys[start : start + len(computed)]))
        if not self._is_last:
            self._maybe_backup(inserted.node, keys)
        return inserted.node

    def _touch_below(self, blocks: Tokens, keys: Sequence[bytes], node: TreeNode, hint: Hint, now_s: float) -> None:
        """What the tiers below have of the prefix counts as used, whichever tier served it; of the disk, what may be
        used again. Then what the request says of later ones counts."""
        if self.host is not None:
            used = keys[: node.depth_tokens]
            self.host.touch(self.host.runs_of(used))
            self.host.link(used)
        shared = self._end_session(node, keys) if hint.session_end else node
        if hint.next_turn_within_s is not None:
            self._keep(node, keys, deadline_s(now_s, hint.next_turn_within_s))
        if self.disk is not None and self._ahead is not None:
            self.disk.touch(blocks[: shared.depth_tokens])
            self._uses.use(names_of(keys[: shared.depth_tokens]))
            self._ahead.use(self._written, keys[: shared.depth_tokens])
            self._write_ahead(self.disk, self._ahead)

    def _write_ahead(self, disk: DiskOrder, ahead: WriteAhead) -> None:
        """Host to disk: what it gets by now."""
        while (chosen := ahead.next_round()) or not ahead.is_done:
            runs = [run for _, run in chosen]
            ids = _by_use(runs)
            for piece in [runs] if disk.takes_alike(ids) else [[run] for run in runs]:
                num_before = disk.num_written
                disk.put(ids if piece is runs else _by_use(piece))
                self._budget.spend(disk.num_written - num_before, sum(len(run.keys) for run in piece))
            for run in runs:
                run.stored |= DISK.bit
                ahead.note_answer(run)
            for path in _paths(runs):
                disk.touch(ids_of(run.keys for run in path))

    def _end_session(self, node: TreeNode, keys: Sequence[bytes]) -> TreeNode:
        """Returns the end of what others share."""
        shared = node
        for ended in self.tree.end_session(node):
            assert ended.parent is not None
            shared = ended.parent
        if self.host is not None:
            self.host.end_session(keys[shared.depth_tokens : node.depth_tokens])
        return shared

    def _keep(self, node: TreeNode, keys: Sequence[bytes], until_s: float) -> None:
        most = self.settings.device_blocks
        self.tree.keep(node, until_s, {FULL: math.inf if most is None else KEPT_SHARE * most})
        if self.host is not None:
            self.host.keep(keys[: node.depth_tokens], until_s, KEPT_SHARE * self.host.pool.num_pages)

    # Between the tiers

    def _maybe_backup(self, node: TreeNode, keys: Sequence[bytes]) -> None:
        """Device to host: what the write policy wants of the end of the path that the host lacks."""
        host = self.host
        if host is None or self.settings.write_policy in _AT_EVICTION:
            return
        wanted = list(takewhile(lambda at: keys[at.depth_tokens - 1] not in host, node.climb()))[::-1]
        pieces = [_piece(keys, at.depth_tokens - at.num_tokens, at.depth_tokens) for at in wanted]
        self._save([self._used_as(piece, at) for piece, at in zip(pieces, wanted, strict=True)])

    def _used_as(self, piece: NewPages, node: TreeNode) -> NewPages:
        return piece._replace(hit_count=node.hit_count, uses=self.tree.account(FULL).uses_of(node))

    def _save(self, pieces: Sequence[NewPages]) -> None:
        """Device to host, and from there to the disk, as far as the host has room."""
        host = self.host
        if not pieces or host is None:
            return
        absent = [new for piece in pieces for new in host.absent(piece)]
        came = host.reserve(host.fitting(absent)) or ()
        for run in reversed(came):
            host.publish(run)
            self._backed_up += len(run.keys)
        if self._ahead is not None:
            self._ahead.come(self._written, came)

    # Capacity

    def _usable(self, length: int) -> int:
        """A request uses no more blocks than the device holds."""
        return length if self.settings.device_blocks is None else min(length, self.settings.device_blocks)

    def _free(self) -> int:
        capacity = self.settings.device_blocks
        return UNLIMITED if capacity is None else capacity - self.tree.account(FULL).total

    def _make_available(self, num_blocks: int) -> None:
        """Evict from the device until `num_blocks` are free, or nothing is left to evict."""
        tree, short, unsaved = self.tree, num_blocks - self._free(), list[NewPages]()
        while short > 0 and (node := tree.victim(FULL, short)) is not None:
            if self.settings.write_policy in _AT_EVICTION and self.host is not None and not node.full.has_ended:
                previous_key = tree.names.previous_key(node) if node.depth_tokens > node.num_tokens else None
                piece = NewPages(tree.names.of(node), previous_key, node.depth_tokens - node.num_tokens)
                unsaved.append(self._used_as(piece, node))
            short -= sum(released.size for released in tree.drop(node, FULL))
            if self._exclusive is not None:
                self._exclusive.left_device(tree.names.of(node))
        self._save(unsaved[::-1])


def _by_use(runs: Sequence[HostRun]) -> Tokens:
    """The blocks of runs that are put one after the other, the most recently used first."""
    return ids_of(run.keys[::-1] for run in runs)[::-1]


def _paths(ends: Sequence[HostRun]) -> list[list[HostRun]]:
    """Of each of `ends` the runs up to it, from the first on, but those that a later one follows as well: the use of
    that path counts last."""
    seen = set[HostRun]()
    return [path_of(end, seen) for end in reversed(ends)][::-1]


def _piece(keys: Sequence[bytes], start: int, end: int) -> NewPages:
    """Blocks [start, end) of a prompt."""
    return NewPages(keys[start:end], keys[start - 1] if start else None, start)
