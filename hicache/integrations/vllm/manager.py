"""vLLM's manager of the CPU tier and the tiers below, with the hints of requests.

vLLM's spec creates the manager, and names its class. So an existing manager becomes one of this class.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from hicache.integrations.vllm.gpu_copies import EvictsGpuCopies
from hicache.integrations.vllm.gpu_evictions import EvictedChunks
from hicache.integrations.vllm.hints import Continuations, by_group, chunks_in_order, hints_of

_REMEMBERED_CHUNKS = 1 << 16  # at least, for the chunks that follow them


class HiCacheManager(TieringOffloadingManager):
    """Called by vLLM's scheduler. Requests that exist only for a store of evicted chunks have no hints."""

    @classmethod
    def of(cls, manager: TieringOffloadingManager) -> HiCacheManager:
        """Make `manager` one of this class."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager._continuations = Continuations(max(_REMEMBERED_CHUNKS, 4 * manager.primary_tier._num_chunks))
        return manager

    _continuations: Continuations

    def on_new_request(self, req_context: ReqContext, **others: Any) -> RequestOffloadingContext:
        hints_of(req_context)  # warns of wrong hints when the request arrives
        context: RequestOffloadingContext = super().on_new_request(req_context, **others)
        return context

    def on_request_finished(self, req_context: ReqContext, **others: Any) -> None:
        super().on_request_finished(req_context, **others)
        if req_context.get_state(EvictedChunks) is not None:
            return
        chunks = chunks_in_order(req_context)
        groups = by_group(chunks)
        for of_group in groups.values():
            self._continuations.note(of_group)
        hints, policy = hints_of(req_context), self.primary_tier._policy
        if (hints.keep_s or hints.session_end) and isinstance(policy, EvictsGpuCopies):
            position = req_context._offload_key_positions
            shared_tokens = 0
            for of_group in groups.values():
                num_shared = self._continuations.num_shared(of_group)
                shared_tokens = max(shared_tokens, position[of_group[num_shared - 1]] if num_shared else 0)
            policy.apply_hints(hints, chunks, sum(position[chunk] <= shared_tokens for chunk in chunks))
