"""One cache without bytes: the page table of the engine, its states and eviction orders, for two tiers over one row a
block.

A block of a trace is a page of one token: the id of the prefix that it ends, which is its row. Requests come one after
the other, and every copy is done at once. The steps are those of `hicache.flow`; `docs/replay.md` states them as rules.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hicache.pages.key import Tokens
from hicache.pages.order import KEPT_SHARE, deadline_s
from hicache.pages.policy import Ranks
from hicache.pages.states import COPY, READ, Counts, TierPages, step_pages
from hicache.pages.table import NO_ROWS, Mask, Rows, Seen
from hicache.pages.writes import ROUND_SHARE, PageUses, WriteBudget, WriteScheduler, WriteSource
from hicache.replay.blocks import UNLIMITED, BlockPool, BlockTable
from hicache.replay.disk import DiskOrder
from hicache.replay.hints import NO_HINT, Hint
from hicache.replay.settings import ReplaySettings
from hicache.tiers import DISK

_BLOCKS_PER_S = 100.0  # that requests ask for

_LARGE = 512  # blocks of a host
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
    """The tiers of one engine. `blocks_per_s`: that requests ask for, by which the disk has its write budget."""

    def __init__(self, settings: ReplaySettings, blocks_per_s: float = _BLOCKS_PER_S) -> None:
        self.settings = settings
        self._blocks_per_s = blocks_per_s
        self._num_asked = 0
        self._saves_at_eviction = settings.write_policy in _AT_EVICTION
        self._is_exclusive = settings.write_policy == "exclusive"
        self.table = BlockTable()
        self._touched = Seen()
        self._unsaved = list[tuple[Rows, Ranks]]()
        self.table.add_columns(self._touched)
        self.device = TierPages(BlockPool(settings.device_blocks), settings.policy, self.table, on_evict=self._note)
        self.disk = DiskOrder(settings.disk_blocks) if settings.disk_blocks != 0 else None
        self.host: TierPages | None = None
        if settings.host_blocks != 0:
            pool = BlockPool(settings.host_blocks)
            self.host = TierPages(pool, settings.host_order, self.table, is_exclusive=self._is_exclusive)
        self._writes: WriteScheduler | None = None
        self._uses = PageUses()
        if self.disk is not None and self.host is not None:
            self._budget = WriteBudget((settings.disk_write_budget or 0) * blocks_per_s, self._asked_s)
            self._source = WriteSource(self.host, 1, max(1, int(ROUND_SHARE * self.host.pool.num_pages)))
            self._writes = WriteScheduler([self._source], DISK, self._budget, self._uses)
        self._is_last = False  # of its session, the request that is served
        self._loaded = self._backed_up = self._read = 0

    def _asked_s(self) -> float:
        """Where all requests ask for as many blocks a second."""
        return self._num_asked / self._blocks_per_s

    def _note(self, rows: Rows) -> None:
        """The device is about to lose these, the first one first."""
        order, host = self.device.order, self.host
        if host is not None and self._saves_at_eviction:
            unsaved = rows[~host.has(rows) & ~order.has_ended[rows]]
            self._unsaved.append((unsaved, order.policy.uses_of(order.at, unsaved)))
            host.left_above(rows)

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
        device, host = self.device, self.host
        for tier in (device,) if host is None else (device, host):
            tier.order.expire(now_s)
        self._is_last = hint.session_end
        self.table.name_blocks(blocks)
        match_len = _first_gap(device.has(blocks))
        read = self._prefetch(blocks, match_len)
        length = match_len if host is None else match_len + _first_gap(host.has(blocks[match_len:]))
        length = min(length, device.pool.num_pages)
        device_len = min(match_len, length)
        self._loaded += length - device_len
        self._read += len(read)
        end = self._commit(blocks, self._admit(blocks, device_len, length))
        device.use(blocks[:end])
        device.unlock(blocks[:end])
        self._num_asked += len(blocks)
        self._touch_below(blocks, end, hint, now_s)
        num_disk = int(np.searchsorted(read, length))
        return BlockHits(device_len, length - device_len - num_disk, num_disk)

    def check(self) -> None:
        """Raise `InvariantError` where a tier does not hold what it should, or more than it may."""
        self.device.check()
        if self.host is not None:
            self.host.check()

    # The steps of a request

    def _prefetch(self, blocks: Tokens, device_len: int) -> Rows:
        """Read the blocks that only the disk has into the host. Returns the rows that came. Blocks before them, and
        those that earlier reads brought, stay locked."""
        host, disk = self.host, self.disk
        if host is None or disk is None:
            return NO_ROWS
        is_missing = ~host.has(blocks)
        is_missing[:device_len] = False
        missing = np.flatnonzero(is_missing)
        missing = missing[: disk.num_present(blocks[missing])]
        if not len(missing):
            return NO_ROWS
        followed = np.setdiff1d(missing - 1, missing)
        followed = blocks[followed[followed >= 0]]
        followed = followed[host.has(followed)]
        host.lock(followed)
        rows = host.reserve(blocks[missing[: host.capacity]], READ)
        host.mark_stored(rows, DISK.bit)
        host.landed(rows)
        read = missing[: len(rows)]
        host.unlock(followed)
        disk.read(blocks[read])
        return read

    def _admit(self, blocks: Tokens, device_len: int, length: int) -> int:
        """Free slots for the blocks of the prefix (`length` blocks) that the device lacks and for the blocks behind it,
        and load the prefix. Returns the end of the prefix, which is locked."""
        device, host = self.device, self.host
        device.lock(blocks[:device_len])
        device.order.go_on(blocks[:device_len])
        self.table.hits[blocks[:length]] += 1
        loaded = blocks[device_len:length]
        if host is not None:
            host.lock(loaded)
        if host is not None and self._is_exclusive:
            end = self._load_in_steps(host, blocks, device_len, length)
            self._make_available(len(blocks) - end)
            return end
        self._make_available(len(blocks) - device_len)
        self._load(loaded)
        self._maybe_backup(blocks[:length])
        if host is not None:
            host.unlock(loaded)
        return length

    def _load(self, rows: Rows) -> None:
        """Bring these to the device, where they are locked."""
        self._enter(rows, self.table.hits[rows])

    def _enter(self, rows: Rows, hits: Counts | int) -> None:
        taken = self.device.reserve(rows, COPY, hits=hits)
        assert len(taken) == len(rows), "made available before"
        self.device.lock(taken)
        self.device.landed(taken)

    def _load_in_steps(self, host: TierPages, blocks: Tokens, done: int, end: int) -> int:
        """Like `_load`, in steps: victims of the device take the host places of blocks that earlier steps loaded,
        except for the last two steps. Copies end at once here, so a large host makes all steps at once."""
        step, under_way = step_pages(host.pool.num_pages), deque[Rows]()
        while done < end:
            if len(under_way) > 1:
                self._land(host, under_way.popleft())
            last = host.step_end(done, end, end - done, self.device.pool.available())
            stop = last if host.pool.num_pages <= _LARGE else end
            self.device.make_room(stop - done)
            while done < stop:
                self._load(blocks[done:last])
                under_way.append(blocks[done:last])
                done, last = last, min(stop, last + step)
            while len(under_way) > 2:
                self._land(host, under_way.popleft())
            self._save_evicted()
        for rows in under_way:
            self._land(host, rows)
        return end

    @staticmethod
    def _land(host: TierPages, rows: Rows) -> None:
        """What a step brought is on the device."""
        host.unlock(rows)
        host.came_above(rows)

    def _commit(self, blocks: Tokens, start: int) -> int:
        """Add the blocks from `start` on to the device until it is full, locked. Returns their end."""
        end = min(len(blocks), start + self.device.pool.available())
        computed = blocks[start:end]
        hits = 1 if self.host is None else np.where(self.host.state[computed] != 0, self.table.hits[computed], 1)
        self._enter(computed, hits)
        if self.host is not None and self._is_exclusive:
            self.host.came_above(computed)
        if not self._is_last:
            self._maybe_backup(blocks[:end])
        return end

    def _touch_below(self, blocks: Tokens, end: int, hint: Hint, now_s: float) -> None:
        """What the tiers below have of the prefix counts as used, whichever tier served it; of the disk, what may be
        used again. Then what the request says of later ones counts."""
        used, host = blocks[:end], self.host
        if host is not None:
            host.use(used[host.has(used)])
        shared = self._end_session(used) if hint.session_end else end
        if hint.next_turn_within_s is not None:
            until_s = deadline_s(now_s, hint.next_turn_within_s)
            for tier in (self.device,) if host is None else (self.device, host):
                limit = math.inf if tier.pool.num_pages == UNLIMITED else KEPT_SHARE * tier.pool.num_pages
                tier.keep_until(used, until_s, limit)
        if self.disk is not None and self._writes is not None:
            self.disk.touch(blocks[:shared])
            self._uses.use(self.table.name[blocks[:shared]])
            self._writes.used(self._source, shared)
            self._write(self.disk, self._writes)

    def _write(self, disk: DiskOrder, writes: WriteScheduler) -> None:
        """Write to the disk until the scheduler chooses no more rows."""
        while (chosen := writes.next_round()) or not writes.is_done:
            for source, rows in chosen:
                num_before = disk.num_written
                disk.put(rows)
                self._budget.spend(disk.num_written - num_before, len(rows))
                source.pages.written(rows, np.ones(len(rows), np.bool_), DISK.bit)
                writes.answered(len(rows))
                disk.touch(self.table.with_paths(rows[::-1], self._touched))
                self._touched.age[:] = 0

    def _end_session(self, used: Rows) -> int:
        """Returns where others go on differently, from there on nothing of the prompt is shared."""
        shared = self.device.order.num_shared(used)
        for tier in (self.device,) if self.host is None else (self.device, self.host):
            tier.end_session(used[shared:])
        return shared

    # Between the tiers

    def _maybe_backup(self, rows: Rows) -> None:
        """Device to host: what the write policy wants of the end of a prefix, behind the last block on the host."""
        if self.host is not None and not self._saves_at_eviction:
            order, absent = self.device.order, rows[len(rows) - _first_gap(~self.host.has(rows)[::-1]) :]
            self._save(self.host, absent, order.policy.uses_of(order.at, absent))

    def _save(self, host: TierPages, rows: Rows, uses: Ranks) -> None:
        """Back up rows to the host while it has room, and from there to the disk. `uses`: the uses of each row on the
        device."""
        taken = host.reserve(rows, COPY, hits=self.table.hits[rows])
        host.expected_uses[taken] = uses[: len(taken)]
        host.landed(taken)
        self._backed_up += len(taken)
        if self._writes is not None:
            self._writes.arrived(self._source, taken)

    # Capacity

    def _make_available(self, num_blocks: int) -> None:
        """Evict from the device until `num_blocks` are free, or nothing is left to evict."""
        self.device.make_room(num_blocks)
        self._save_evicted()

    def _save_evicted(self) -> None:
        """Where the write policy saves what leaves, the host gets all victims together: if it has not room for all,
        those evicted last."""
        unsaved, self._unsaved = self._unsaved, []
        if unsaved and self.host is not None:
            rows, uses = (np.concatenate(column)[::-1] for column in zip(*unsaved, strict=True))
            self._save(self.host, rows, uses)


def _first_gap(has: Mask) -> int:
    """How many of these are true before the first that is not."""
    return len(has) if has.all() else int(has.argmin())
