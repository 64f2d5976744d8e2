"""hicache's eviction policies for vLLM's CPU tier: `"eviction_policy": "SLRUPolicy"` and
`"cache_policy_module_path": "hicache.integrations.vllm"`.

When a request finishes, vLLM reports the chunks that the request used. The first chunk of the prompt counts as the most
recently used chunk, because a suffix cannot be used without its prefix.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from hicache.integrations.vllm.gpu_copies import GpuCopies
from hicache.integrations.vllm.hints import Hints
from hicache.integrations.vllm.promotions import AwaitedChunks, Promotions
from hicache.integrations.vllm.release import warn_of_untested_vllm
from hicache.pages.misses import MissReason, MissReasons
from hicache.pages.order import KEPT_SHARE, EvictionOrder, rank_policy
from hicache.pages.table import NO_ROWS, PageTable, Rows, names_of

log = logging.getLogger(__name__)

_MIN_CHUNK_TOKENS = 16  # minimum distance of two chunks of a request, in tokens
_MIN_TICKS = 1 << 12  # minimum ticks of a request, usually more than it has chunks


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk in the CPU tier. `created`, `last_use`: the tick of a request minus the chunk's position in the prompt.
    `is_evictable`: no request uses the chunk or waits for it. `has_ended`: the session of the chunk has ended, and no
    request has used the chunk since. `used_s`: time of the last use, in seconds of `time.monotonic`."""

    status: ChunkStatus
    created: int
    last_use: int
    used_s: float
    num_hits: int = 1
    is_evictable: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class _RequestTick:
    """The ticks of a request. `owner`: the policy that assigned them. `tick`: the time of the request's first chunk.
    Chunks after the first `num_ticks` have the time of the last tick."""

    owner: object
    tick: int
    num_ticks: int


@dataclass(frozen=True, slots=True)
class _Union:
    """The union of two sets of chunks. The union supports only the operator `in`, which is enough for vLLM's
    policies."""

    protected: Container[OffloadKey]
    others: Container[OffloadKey]

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.protected or key in self.others


@dataclass(frozen=True, slots=True)
class _Kept:
    """The chunks with a deadline."""

    table: PageTable
    order: EvictionOrder

    def __contains__(self, key: OffloadKey) -> bool:
        row = self.table.row(key)
        return row >= 0 and bool(self.order.keep[row])


class HiCachePolicy(CachePolicy):
    """An eviction policy of hicache for vLLM's CPU tier. vLLM's manager owns the policy and calls it under the
    manager's lock.

    Each chunk has a row of an eviction order. vLLM reports one chunk at a time; all changes are applied to the order
    together, before chunks are chosen for eviction. Each request counts as one use of a chunk, as vLLM reports it.
    Chunks that were read from the disk for a waiting request are not evicted (`promotions`). Chunks that the GPU also
    has are evicted first (`gpu_copies`).

    Hints of a request (`hints`) change the class of its chunks in the order. A chunk with a deadline that only the GPU
    has gets a row of the order in advance, so that the deadline applies when the chunk is stored.
    """

    strategy: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        warn_of_untested_vllm()
        self._chunks: dict[OffloadKey, _Chunk] = {}
        self._changed: dict[OffloadKey, None] = {}
        self._num_evictable = 0
        self._new_order()
        self._awaited = AwaitedChunks()
        self.copies = GpuCopies()
        self.miss_reasons = MissReasons()
        self.evicted_ages_s = list[float]()
        self.clock = time.monotonic
        self._tick = 0
        # Times of the chunks that are about to be stored. `on_store_miss` records these times, because vLLM 0.32 does
        # not pass the request to `insert`.
        self._announced: dict[OffloadKey, int] = {}

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.status

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        announced = self._announced.pop(key, None)
        tick = self._times_of([key], req_context)[0] if announced is None else announced
        self._chunks[key] = _Chunk(chunk, tick, tick, self.clock())
        self._changed[key] = None
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        self._num_evictable -= self._chunks.pop(key).is_evictable
        self._changed[key] = None
        self.copies.clear_flag(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._use(list(keys), counted=None)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._release()
        missed = list(keys)
        self._announced = dict(zip(missed, self._times_of(missed, req_context), strict=True))
        self._awaited.announce(self._announced, req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of chunks by a running request. The chunks become as recent as the request, and suffixes are
        evicted first."""
        accessed, now_s = list(keys), self.clock()
        for key, tick in zip(accessed, self._times_of(accessed, req_context), strict=True):
            if (chunk := self._chunks.get(key)) is not None:
                chunk.last_use = max(chunk.last_use, tick)
                chunk.used_s, chunk.has_ended = now_s, False
                self._changed[key] = None

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._use(order_request_keys(key_groups, req_context), counted=reused_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._release()
        copies = self.copies.choose(n, _Union(protected, self._kept_copies()))
        evicted = self._evict_in_order(n - len(copies), {*protected, *copies})
        if evicted is None:
            return None
        evicted += [(key, self._chunks[key].status) for key in copies]
        for key in copies:
            self.remove(key)
        return evicted

    def _evict_in_order(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        if not n:
            return []
        self._update_order()
        self._expire()
        taken, kept = NO_ROWS, NO_ROWS
        while len(taken) < n and len(rows := self._order.take(n - len(taken))):
            is_kept = np.array([key in protected for key in self._table.keys_of(rows)], np.bool_)
            self._order.lock(rows)
            taken, kept = np.concatenate((taken, rows[~is_kept])), np.concatenate((kept, rows[is_kept]))
        if len(taken) < n:
            kept, taken = np.concatenate((kept, taken)), NO_ROWS
        self._order.unlock(kept)
        if len(taken) < n:
            return None
        keys, now_s = self._table.keys_of(taken), self.clock()
        chunks = [self._chunks.pop(key) for key in keys]
        for key, chunk in zip(keys, chunks, strict=True):
            self.copies.clear_flag(key)
            self.evicted_ages_s.append(now_s - chunk.used_s)
        self.miss_reasons.note(names_of(keys), MissReason.EVICTED)
        self._num_evictable -= n
        self._remove_rows(taken)
        return [(key, chunk.status) for key, chunk in zip(keys, chunks, strict=True)]

    def clear(self) -> None:
        self._chunks.clear()
        self._changed.clear()
        self._num_evictable = 0
        self._new_order()
        self._announced.clear()
        self._awaited.clear()
        self.copies.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        if key not in self._awaited:
            self._set_evictable(key, True)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._set_evictable(key, False)

    def num_chunks(self) -> int:
        """See `EvictsGpuCopies`."""
        return len(self._chunks)

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """See `EvictsGpuCopies`."""
        self._release()
        num_kept = sum(self._chunks[key].is_evictable for key in kept)
        return self.cache_capacity - len(self._chunks) + self._num_evictable - num_kept

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """See `EvictsGpuCopies`."""
        kept = list(chunks)
        self._awaited.add(kept, promotions)
        for key in kept:
            self.mark_non_evictable(key)

    def flag_on_gpu(self, keys: Collection[OffloadKey]) -> None:
        """See `EvictsGpuCopies`."""
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self.copies.flag(key, is_evictable=chunk.is_evictable)

    def evicted_from_gpu(self, keys: Sequence[OffloadKey]) -> None:
        """See `EvictsGpuCopies`."""
        for key in keys:
            self.copies.clear_flag(key)
        self._use(keys, counted=set())

    def apply_hints(self, hints: Hints, chunks: Sequence[OffloadKey], num_shared: int) -> None:
        """See `EvictsGpuCopies`."""
        if hints.session_end:
            for key in chunks[num_shared:]:
                if (chunk := self._chunks.get(key)) is not None:
                    chunk.has_ended = True
                    self._changed[key] = None
            self.copies.end_session(chunks[num_shared:])
        elif hints.keep_s:
            self._update_order()
            kept = [key for key in chunks if key in self._chunks or self.copies.is_on_gpu(key)]
            missing = [key for key in kept if key not in self._table]
            self._add_rows(missing)
            self._expected.update(dict.fromkeys(missing))
            limit = KEPT_SHARE * self.cache_capacity
            until_s = self.clock() + hints.keep_s
            self._order.keep_until(self._table.find(kept), until_s, limit, hints.priority)
            self._forget_ended()

    def _kept_copies(self) -> Container[OffloadKey]:
        """Return the chunks with a deadline. A chunk with a deadline is not evicted as a copy of a GPU chunk, because
        its deadline would end."""
        return _Kept(self._table, self._order) if self._order.num_kept else ()

    def _release(self) -> None:
        """Make chunks evictable if no request waits for them any longer."""
        for key in self._awaited.take_released():
            if key in self._chunks and self._chunks[key].status.ref_cnt == 0:
                self.mark_evictable(key)

    def _set_evictable(self, key: OffloadKey, is_evictable: bool) -> None:
        chunk = self._chunks[key]
        self._num_evictable += is_evictable - chunk.is_evictable
        chunk.is_evictable = is_evictable
        self._changed[key] = None
        self.copies.set_evictable(key, is_evictable)

    def _use(self, keys: Sequence[OffloadKey], counted: set[OffloadKey] | None) -> None:
        """Record a use of chunks. `keys` are in the order of the prompt. `counted`: the chunks for which a hit is
        counted; None for all chunks."""
        self._tick += max(1, len(keys))
        now_s = self.clock()
        for i, key in enumerate(keys):
            if (chunk := self._chunks.get(key)) is not None:
                chunk.last_use = self._tick - i
                chunk.used_s, chunk.has_ended = now_s, False
                chunk.num_hits += counted is None or key in counted
                self._changed[key] = None

    def _times_of(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> list[int]:
        """Return the time of each chunk: the tick of the request minus the chunk's position in its prompt."""
        positions = [None if req_context is None else req_context.get_offload_key_position(key) for key in keys]
        known = [position // _MIN_CHUNK_TOKENS for position in positions if position is not None]
        if req_context is None or len(known) < len(keys):
            self._tick += len(keys)
            return [*range(self._tick - len(keys) + 1, self._tick + 1)]
        state = req_context.get_state(_RequestTick)
        if state is None or state.owner is not self:
            num_ticks = max([_MIN_TICKS, *known]) + 1
            self._tick += num_ticks
            state = _RequestTick(self, self._tick, num_ticks)
            req_context.set_state(state)
        return [state.tick - min(position, state.num_ticks - 1) for position in known]

    # The order

    def _new_order(self) -> None:
        self._table = PageTable()
        self._order = EvictionOrder(self._table, rank_policy(self.strategy), is_linked=False)
        self._expected = dict[OffloadKey, None]()  # chunks with a deadline and a row that the CPU tier lacks

    def _update_order(self) -> None:
        """Apply all changes since the last call of this method to the eviction order."""
        changed, self._changed = self._changed, {}
        table, order = self._table, self._order
        evicted = table.known([key for key in changed if key not in self._chunks])
        evicted = evicted[order.is_held[evicted]]
        if len(evicted):
            self._remove_rows(evicted)
        chunks = {key: self._chunks[key] for key in changed if key in self._chunks}
        if not chunks:
            return
        self._add_rows([key for key in chunks if key not in table])
        rows = table.find([*chunks])
        order.enter(rows[~order.is_held[rows]])
        for key in chunks:
            self._expected.pop(key, None)
        order.at.created[rows] = [chunk.created for chunk in chunks.values()]
        order.at.last_use[rows] = [chunk.last_use for chunk in chunks.values()]
        table.hits[rows] = [chunk.num_hits for chunk in chunks.values()]
        is_evictable = np.array([chunk.is_evictable for chunk in chunks.values()])
        has_ended = np.array([chunk.has_ended for chunk in chunks.values()])
        order.rank_again(rows)
        order.end_session(rows[has_ended & ~order.has_ended[rows]])
        order.go_on(rows[~has_ended])
        order.unlock(rows[is_evictable & (order.locks[rows] > 0)])
        order.lock(rows[~is_evictable & (order.locks[rows] == 0)])

    def _add_rows(self, chunks: Sequence[OffloadKey]) -> None:
        """Create a locked row of the eviction order for each chunk."""
        if chunks:
            rows = self._table.add_unnamed(len(chunks), 0)
            self._table.set_keys(rows, chunks)
            self._table.hold(rows)
            self._order.lock(rows)

    def _expire(self) -> None:
        """End the deadlines that have passed."""
        num_kept = self._order.num_kept
        if num_kept:
            self._order.expire(self.clock())
            if self._order.num_kept < num_kept:
                self._forget_ended()

    def _forget_ended(self) -> None:
        """Remove the rows of chunks that the CPU tier lacks and whose deadlines have ended."""
        rows = self._table.find([*self._expected])
        ended = rows[self._order.keep[rows] == 0]
        for key in self._table.keys_of(ended):
            del self._expected[key]
        self._order.unlock(ended)
        self._table.drop(ended)

    def _remove_rows(self, rows: Rows) -> None:
        """Remove rows whose chunks were evicted."""
        self._order.unlock(rows[self._order.locks[rows] > 0])
        self._order.leave(rows)
        self._table.drop(rows)


class LRUPolicy(HiCachePolicy):
    """Evicts the least recently used chunk first."""

    strategy = "lru"


class LFUPolicy(HiCachePolicy):
    """Evicts the chunk with the fewest uses first; of chunks with equally many uses, the least recently used chunk."""

    strategy = "lfu"


class SLRUPolicy(HiCachePolicy):
    """Evicts chunks that only one request has used before all other chunks; within both groups, the least recently used
    chunk first."""

    strategy = "slru"


class FIFOPolicy(HiCachePolicy):
    """Evicts the oldest chunk first."""

    strategy = "fifo"


class ARCPolicy(ARCCachePolicy):
    """vLLM's policy `arc`, with two changes: chunks for which a request waits are not evicted (`promotions`), and
    chunks that the GPU also has are evicted first (`gpu_copies`)."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        warn_of_untested_vllm()
        self._awaited = AwaitedChunks()
        self.copies = GpuCopies()
        self.miss_reasons = MissReasons()
        self.evicted_ages_s = list[float]()  # always empty: vLLM's `arc` records no times
        self._has_warned = False

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self.copies.clear_flag(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        missed = list(keys)
        self._awaited.take_released()
        self._awaited.announce(missed, req_context)
        super().on_store_miss(missed, req_context)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._awaited.take_released()
        copies = self.copies.choose(n, _Union(protected, self._awaited))
        evicted: list[tuple[OffloadKey, ChunkStatus]] | None = super().evict(
            n - len(copies), _Union({*protected, *copies}, self._awaited)
        )
        if evicted is None:
            return None
        for key, _ in evicted:
            self.copies.clear_flag(key)
        self.miss_reasons.note(names_of([key for key, _ in evicted]), MissReason.EVICTED)
        for key in copies:
            chunk = self.get(key)
            assert chunk is not None
            evicted.append((key, chunk))
            self.remove(key)
        return evicted

    def clear(self) -> None:
        super().clear()
        self._awaited.clear()
        self.copies.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        self.copies.set_evictable(key, True)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.copies.set_evictable(key, False)

    def num_chunks(self) -> int:
        """See `EvictsGpuCopies`."""
        return len(self.t1) + len(self.t2)

    def num_obtainable(self, kept: Iterable[OffloadKey]) -> int:
        """See `EvictsGpuCopies`."""
        self._awaited.take_released()
        held = _Union(set(kept), self._awaited)
        chunks = itertools.chain(self.t1.items(), self.t2.items())
        num_held = sum(chunk.ref_cnt != 0 or key in held for key, chunk in chunks)
        return self.cache_capacity - num_held

    def keep(self, chunks: Iterable[OffloadKey], promotions: Promotions) -> None:
        """See `EvictsGpuCopies`."""
        self._awaited.add(chunks, promotions)

    def apply_hints(self, hints: Hints, chunks: Sequence[OffloadKey], num_shared: int) -> None:
        """Ignore the hints and log one warning, because vLLM's `arc` has no eviction order to which hints could
        apply."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("hints of requests are ignored in the CPU tier: set eviction_policy to lru, slru, lfu or fifo")

    def flag_on_gpu(self, keys: Collection[OffloadKey]) -> None:
        """See `EvictsGpuCopies`."""
        for key in keys:
            if (chunk := self.get(key)) is not None:
                self.copies.flag(key, is_evictable=chunk.ref_cnt == 0)

    def evicted_from_gpu(self, keys: Sequence[OffloadKey]) -> None:
        """See `EvictsGpuCopies`."""
        for key in reversed(keys):
            self.copies.clear_flag(key)
            for chunks in (self.t1, self.t2):
                if key in chunks:
                    chunks.move_to_end(key)
