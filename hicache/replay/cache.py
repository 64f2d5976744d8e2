"""A simulated cache without bytes. It uses the engine's page table, page states and eviction orders for device and
host.

A block of a trace is one page of one token, and its row is the id of the prefix that ends with the block. Requests are
served one after the other, and every copy completes immediately. A request has the same steps as in `hicache.flow`;
`docs/replay.md` states these steps as rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
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

_BLOCKS_PER_S = 100.0  # assumed rate of requests for blocks, for simulated times.

_LARGE_HOST = 512  # number of blocks above which a host counts as large
_BACKUP_AT_EVICTION = ("write_back", "exclusive")  # write policies that copy a page when it is evicted


class BlockHits(NamedTuple):
    """The numbers of hit blocks of one prompt, by the tier that had them when the request arrived."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Copies:
    """The numbers of copied blocks: `loaded` from host to device, `backed_up` from device to host, `read` from disk to
    host, `written` from host to disk. `never_read`: blocks that were written to disk and never read by a request."""

    loaded: int = 0
    backed_up: int = 0
    read: int = 0
    written: int = 0
    never_read: int = 0


class CacheSimulation:
    """The simulated tiers of one engine.

    `blocks_per_s`: the rate of requested blocks. It converts the disk's write budget, which is given per requested
    block, into blocks per second."""

    def __init__(self, settings: ReplaySettings, blocks_per_s: float = _BLOCKS_PER_S) -> None:
        self.settings = settings
        self._blocks_per_s = blocks_per_s
        self._num_requested = 0
        self._backs_up_at_eviction = settings.write_policy in _BACKUP_AT_EVICTION
        self._is_exclusive = settings.write_policy == "exclusive"
        self.table = BlockTable()
        self._touched = Seen()
        self._evicted = list[tuple[Rows, Ranks, Mask]]()
        self.table.add_columns(self._touched)
        self.device = TierPages(
            BlockPool(settings.device_blocks), settings.policy, self.table, on_evict=self._record_eviction
        )
        self.disk = DiskOrder(settings.disk_blocks) if settings.disk_blocks != 0 else None
        self.host: TierPages | None = None
        if settings.host_blocks != 0:
            pool = BlockPool(settings.host_blocks)
            self.host = TierPages(pool, settings.host_order, self.table, is_exclusive=self._is_exclusive)
        self._writes: WriteScheduler | None = None
        self._uses = PageUses() if settings.disk_write_budget else None  # without a budget, all pages are written
        if self.disk is not None and self.host is not None:
            self._budget = WriteBudget((settings.disk_write_budget or 0) * blocks_per_s, self._trace_time_s)
            self._source = WriteSource(self.host, 1, max(1, int(ROUND_SHARE * self.host.pool.num_pages)))
            self._writes = WriteScheduler([self._source], DISK, self._budget, self._uses)
        self._is_last = False  # whether the served request is the last one of its session
        self._loaded = self._backed_up = self._read = 0

    def _trace_time_s(self) -> float:
        """Return the simulated seconds since the start of the trace: the number of requested blocks divided by
        `blocks_per_s`."""
        return self._num_requested / self._blocks_per_s

    def _record_eviction(self, rows: Rows) -> None:
        """Record rows that the device is about to evict, so that `_backup_evicted` can back them up. `rows`: in the
        order of eviction."""
        order = self.device.order
        if self.host is not None and self._backs_up_at_eviction:
            self._evicted.append((rows, order.policy.uses_of(order.at, rows), order.has_ended[rows]))

    @property
    def copies(self) -> Copies:
        """The numbers of copied blocks since the start, or since the last `reset_counts`."""
        written, useful = (0, 0) if self.disk is None else (self.disk.num_written, self.disk.num_useful)
        return Copies(self._loaded, self._backed_up, self._read, written, written - useful)

    def reset_counts(self) -> None:
        """Set the numbers of copies to zero."""
        self._loaded = self._backed_up = self._read = 0
        if self.disk is not None:
            self.disk.reset_counts()

    def serve(self, blocks: Tokens, hint: Hint = NO_HINT, now_s: float = 0.0) -> BlockHits:
        """Simulate one request from its arrival to its end, at the time `now_s`. `blocks`: ids of prefixes, see
        `prefix_ids`."""
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
        self._num_requested += len(blocks)
        self._touch_lower_tiers(blocks, end, hint, now_s)
        num_disk = int(np.searchsorted(read, length))
        return BlockHits(device_len, length - device_len - num_disk, num_disk)

    def check(self) -> None:
        """Raise `InvariantError` if a tier has wrong accounts or more blocks than its capacity."""
        self.device.check()
        if self.host is not None:
            self.host.check()

    # The steps of a request

    def _prefetch(self, blocks: Tokens, device_len: int) -> Rows:
        """Copy the blocks that only the disk has from the disk to the host. Returns the indices of these blocks in
        `blocks`.

        During the copy, host blocks directly before a copied block are locked."""
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
        host.complete(rows)
        read = missing[: len(rows)]
        host.unlock(followed)
        disk.read(blocks[read])
        return read

    def _admit(self, blocks: Tokens, device_len: int, length: int) -> int:
        """Load the blocks [device_len, length) of the prefix to the device, after evicting enough blocks for the
        complete prompt.

        Locks the prefix and returns its length."""
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
        """Load rows from the host to the device, and lock them there."""
        self._enter(rows, self.table.hits[rows])

    def _enter(self, rows: Rows, hits: Counts | int) -> None:
        taken = self.device.reserve(rows, COPY, hits=hits)
        assert len(taken) == len(rows), "the caller has evicted enough pages"
        self.device.complete(taken, keeps_locks=True)

    def _load_in_steps(self, host: TierPages, blocks: Tokens, done: int, end: int) -> int:
        """Load blocks [done, end) in steps. Blocks that the device evicts are backed up to the host pages of blocks
        that earlier steps loaded.

        The host pages of the last two steps stay locked. On a large host all steps run together, because the simulated
        copies complete immediately."""
        step, pending_steps = step_pages(host.pool.num_pages), list[Rows]()
        while done < end:
            pending_steps = self._complete(host, pending_steps, 1)
            last = host.step_end(done, end, end - done, self.device.pool.available())
            stop = last if host.pool.num_pages <= _LARGE_HOST else end
            self.device.ensure_free(stop - done)
            self._load(blocks[done:stop])
            pending_steps += [blocks[first:after] for first, after in pairwise((done, *range(last, stop, step), stop))]
            pending_steps, done = self._complete(host, pending_steps, 2), stop
            self._backup_evicted()
        self._complete(host, pending_steps, 0)
        return end

    @staticmethod
    def _complete(host: TierPages, steps: list[Rows], num_pending: int) -> list[Rows]:
        """Unlock the host pages of blocks that all steps except the last `num_pending` have loaded. Returns the last
        steps."""
        num_ended = max(0, len(steps) - num_pending)
        if num_ended:
            rows = np.concatenate(steps[:num_ended][::-1])  # the host evicts the blocks of the last step first
            host.unlock(rows)
            host.came_above(rows)
        return steps[num_ended:]

    def _commit(self, blocks: Tokens, start: int) -> int:
        """Add the computed blocks, from `start` on, to the device until the device is full, and lock them. Returns the
        end of the added blocks."""
        end = min(len(blocks), start + self.device.pool.available())
        computed = blocks[start:end]
        hits = 1 if self.host is None else np.where(self.host.state[computed] != 0, self.table.hits[computed], 1)
        self._enter(computed, hits)
        if self.host is not None and self._is_exclusive:
            self.host.came_above(computed)
        if not self._is_last:
            self._maybe_backup(blocks[:end])
        return end

    def _touch_lower_tiers(self, blocks: Tokens, end: int, hint: Hint, now_s: float) -> None:
        """Count a use of the prefix on the host and on the disk, even if the device served it, and apply the hint.

        If the hint ends the session, the disk counts no use of the prompt's end that no other prompt shares."""
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
            if self._uses is not None:
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
                paths = self.table.with_paths(rows[::-1], self._touched)
                self._touched.age[paths] = 0
                disk.touch(paths)

    def _end_session(self, used: Rows) -> int:
        """Move the unshared end of a session's last prompt to the head of the eviction order. Returns the number of
        blocks that other prompts share."""
        shared = self.device.order.num_shared(used)
        for tier in (self.device,) if self.host is None else (self.device, self.host):
            tier.end_session(used[shared:])
        return shared

    # Between the tiers

    def _maybe_backup(self, rows: Rows) -> None:
        """Back up the blocks of `rows` after the last one that the host has, unless the write policy backs up at
        eviction."""
        if self.host is not None and not self._backs_up_at_eviction:
            order, absent = self.device.order, rows[len(rows) - _first_gap(~self.host.has(rows)[::-1]) :]
            if len(absent):
                self._backup(self.host, absent, order.policy.uses_of(order.at, absent))

    def _backup(self, host: TierPages, rows: Rows, uses: Ranks) -> None:
        """Back up rows to the host while it has free pages. `uses`: expected uses of each row, from the device."""
        taken = host.reserve(rows, COPY, hits=self.table.hits[rows])
        host.expected_uses[taken] = uses[: len(taken)]
        host.complete(taken)
        self._backed_up += len(taken)
        if self._writes is not None:
            self._writes.arrived(self._source, taken)

    # Capacity

    def _make_available(self, num_blocks: int) -> None:
        """Evict from the device until `num_blocks` are free, or nothing is left to evict."""
        self.device.ensure_free(num_blocks)
        self._backup_evicted()

    def _backup_evicted(self) -> None:
        """Back up the evicted blocks together, the last evicted one first, until the host is full."""
        evicted, self._evicted = self._evicted, []
        if evicted and self.host is not None:
            rows, uses, has_ended = (np.concatenate(column)[::-1] for column in zip(*evicted, strict=True))
            self.host.left_above(rows)
            is_backed_up = ~(self.host.has(rows) | has_ended)
            if np.count_nonzero(is_backed_up):
                self._backup(self.host, rows[is_backed_up], uses[is_backed_up])


def _first_gap(has: Mask) -> int:
    """Return the number of true values before the first false one."""
    return len(has) if has.all() else int(has.argmin())
