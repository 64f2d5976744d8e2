"""vLLM's manager of the CPU tier and the tiers below it, extended by hicache: it applies hints of requests, and counts
the reasons for which prompts are computed.

vLLM's spec always creates a manager of vLLM's class. So hicache changes the class of the existing manager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from hicache.integrations.vllm.gpu_copies import EvictsGpuCopies
from hicache.integrations.vllm.gpu_evictions import EvictedChunks
from hicache.integrations.vllm.hints import Continuations, by_group, chunks_in_order, hints_of
from hicache.metrics import AGE_BOUNDS
from hicache.pages.misses import USABLE, MissReason, MissReasons, count, miss_help
from hicache.pages.table import names_of

_REMEMBERED_CHUNKS = 1 << 16  # minimum number of chunks whose following chunk is recorded
MISSED_TOKENS: Final = "vllm:hicache_missed_tokens"
EVICTED_AGE: Final = "vllm:hicache_evicted_age_seconds"
HOST_USED: Final = "vllm:hicache_host_used_bytes"
HOST_TOTAL: Final = "vllm:hicache_host_total_bytes"


def miss_metrics() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of the manager by name, in the form in which vLLM declares metrics."""
    texts = "; ".join(f"{reason.label}: {text}" for reason, text in miss_help("chunk").items())
    age = "seconds since the last use of a chunk that was evicted"
    return {
        MISSED_TOKENS: OffloadingCounterMetadata(
            f"computed prompt tokens in complete chunks, by reason: {texts}", ("reason",)
        ),
        EVICTED_AGE: OffloadingHistogramMetadata(age, ("tier",), AGE_BOUNDS),
        HOST_USED: OffloadingGaugeMetadata("bytes of the CPU tier that have chunks, of all workers together"),
        HOST_TOTAL: OffloadingGaugeMetadata("bytes of the CPU tier for chunks, of all workers together"),
    }


@runtime_checkable
class ExplainsMisses(Protocol):
    """The interface of hicache's tier for the manager. `miss_reasons`: the reasons for chunks whose stores or loads
    failed."""

    miss_reasons: MissReasons

    def note_used(self, chunks: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record that a scheduled request uses these chunks; any tier may have served them. `chunks` are in the order
        of the prompt."""
        ...

    def miss_reason(self, chunk: OffloadKey, req_context: ReqContext) -> MissReason | None:
        """Return why a chunk that the tier may have was not loaded for a scheduled request; None if the tier does not
        have the chunk."""
        ...


@dataclass(slots=True)
class _Queried:
    """The look-ups of a request, stored in its `ReqContext`. `first`: the earliest chunk that was looked up in the last
    step with look-ups, in the group of layers that vLLM looked up first; the GPU has the chunks before this chunk.
    `loaded_end`: end of the chunks that are loaded, in tokens."""

    first: OffloadKey | None = None
    loaded_end: int = 0


class HiCacheManager(TieringOffloadingManager):
    """The manager, which vLLM's scheduler calls. Requests that exist only for a store of evicted chunks have no hints,
    and are not counted."""

    _continuations: Continuations
    _chunk_tokens: Mapping[int, int]
    _waiting: dict[str, ReqContext]  # requests that were not scheduled yet
    _asking: ReqContext | None  # the request that was looked up last in this step
    _missed: Counter[MissReason]  # tokens since the last `get_stats`
    _chunk_bytes: int
    _reported_chunks: int | None  # number of chunks in the CPU tier at the last `get_stats`
    _policy: EvictsGpuCopies

    @classmethod
    def of(cls, manager: TieringOffloadingManager, chunk_tokens: Mapping[int, int], chunk_bytes: int) -> HiCacheManager:
        """Change the class of `manager` to this class, and return it. `chunk_tokens`: tokens of a chunk, by group of
        layers. `chunk_bytes`: bytes of a chunk in the CPU tier, of all workers together."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        policy = manager.primary_tier._policy
        assert isinstance(policy, EvictsGpuCopies)
        manager._policy = policy
        manager._continuations = Continuations(max(_REMEMBERED_CHUNKS, 4 * policy.cache_capacity))
        manager._chunk_tokens = chunk_tokens
        manager._waiting = {}
        manager._asking = None
        manager._missed = Counter()
        manager._chunk_bytes = chunk_bytes
        manager._reported_chunks = None
        return manager

    def on_new_request(self, req_context: ReqContext, **others: Any) -> RequestOffloadingContext:
        if req_context.get_state(EvictedChunks) is None:
            hints_of(req_context)  # warns of wrong hints when the request arrives
            self._waiting[req_context.req_id] = req_context
        context: RequestOffloadingContext = super().on_new_request(req_context, **others)
        return context

    def lookup(self, key: OffloadKey, req_context: ReqContext, **others: Any) -> LookupResult:
        asked, position = _asked(req_context), req_context._offload_key_positions
        if self._asking is not req_context or asked.first is None:
            self._asking, asked.first = req_context, key
        else:  # vLLM looks up the chunks of a sliding window from the end of the prompt
            is_earlier = position.get(key, math.inf) < position.get(asked.first, 0)
            if is_earlier and get_offload_group_idx(key) == get_offload_group_idx(asked.first):
                asked.first = key
        result: LookupResult = super().lookup(key, req_context, **others)
        return result

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        position = req_context.get_offload_key_position
        _asked(req_context).loaded_end = max((position(key) or 0 for key in keys), default=0)
        return super().prepare_load(keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered = list(keys)
        output: PrepareStoreOutput | None = super().prepare_store(offered, req_context)
        if output is None:
            lacking = [key for key in offered if self._policy.get(key) is None]
            self._policy.miss_reasons.note(names_of(lacking), MissReason.NO_ROWS)
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        super().complete_store(keys, req_context, success)
        if not success:
            self._policy.miss_reasons.note(names_of(list(keys)), MissReason.FAILED)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._asking = None
        for request in context.new_req_ids:
            if (req_context := self._waiting.pop(request, None)) is not None:
                self._count_missed(req_context)

    def on_request_finished(self, req_context: ReqContext, **others: Any) -> None:
        super().on_request_finished(req_context, **others)
        if req_context.get_state(EvictedChunks) is not None:
            return
        self._waiting.pop(req_context.req_id, None)
        self.apply_hints(req_context)

    def apply_hints(self, req_context: ReqContext) -> None:
        """Apply the hints of a request that has finished. A second call for the same request has the same effect."""
        chunks = chunks_in_order(req_context)
        groups = by_group(chunks)
        for of_group in groups.values():
            self._continuations.note(of_group)
        # If another session ended while this request ran, it does not end the chunks that both share.
        self._policy.copies.ended.difference_update(chunks)
        hints = hints_of(req_context)
        if hints.keep_s or hints.session_end:
            position = req_context._offload_key_positions
            shared_tokens = 0
            for of_group in groups.values():
                num_shared = self._continuations.num_shared(of_group)
                shared_tokens = max(shared_tokens, position[of_group[num_shared - 1]] if num_shared else 0)
            self._policy.apply_hints(hints, chunks, sum(position[chunk] <= shared_tokens for chunk in chunks))

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats: OffloadingConnectorStats | None = super().get_stats()
        missed, self._missed = self._missed, Counter()
        ages_s, self._policy.evicted_ages_s = self._policy.evicted_ages_s, []
        num_chunks = self._policy.num_chunks()
        if not missed and not ages_s and num_chunks == self._reported_chunks:
            return stats
        stats = OffloadingConnectorStats() if stats is None else stats
        for reason, num_tokens in missed.items():
            stats.increase_counter(MISSED_TOKENS, num_tokens, (reason.label,))
        for age_s in ages_s:
            stats.observe_histogram(EVICTED_AGE, age_s, ("cpu",))
        if num_chunks != self._reported_chunks:
            self._reported_chunks = num_chunks
            stats.set_gauge(HOST_USED, num_chunks * self._chunk_bytes)
            stats.set_gauge(HOST_TOTAL, self._policy.cache_capacity * self._chunk_bytes)
        return stats

    @staticmethod
    def _note_used(tiers: Sequence[ExplainsMisses], chunks: Sequence[OffloadKey], req_context: ReqContext) -> None:
        for tier in tiers if chunks else ():
            tier.note_used(chunks, req_context)

    def _count_missed(self, req_context: ReqContext) -> None:
        """Count, by reason, the complete chunks of a prompt that the GPU computes from now on. The computed chunks
        follow the chunks of the GPU's cache and the loaded chunks, in the group of layers that vLLM looks up first."""
        asked, tiers = _asked(req_context), [tier for tier in self.secondary_tiers if isinstance(tier, ExplainsMisses)]
        if asked.first is None:
            self._note_used(tiers, chunks_in_order(req_context), req_context)
            return  # no chunk was looked up: the GPU has all chunks but the last
        group, position = get_offload_group_idx(asked.first), req_context._offload_key_positions
        chunk_tokens = self._chunk_tokens[group]
        start = max(position[asked.first] - chunk_tokens, asked.loaded_end)
        in_order = chunks_in_order(req_context)
        self._note_used(tiers, [key for key in in_order if position[key] <= start], req_context)
        chunks = [key for key in by_group(in_order).get(group, ()) if position[key] > start]
        if not chunks:
            return
        names = names_of(chunks)
        reasons = self._policy.miss_reasons.reasons(names)
        for tier in tiers:
            of_tier = tier.miss_reasons.reasons(names)
            reasons = np.where(of_tier == MissReason.NEVER_STORED, reasons, of_tier)
        for i, key in enumerate(chunks):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.is_ready:
                reasons[i] = USABLE
            for tier in tiers:
                reason = tier.miss_reason(key, req_context)
                reasons[i] = reasons[i] if reason is None else reason
        self._missed.update({reason: num * chunk_tokens for reason, num in count(reasons).items()})


def _asked(req_context: ReqContext) -> _Queried:
    asked = req_context.get_state(_Queried)
    if asked is None:
        asked = _Queried()
        req_context.set_state(asked)
    return asked
