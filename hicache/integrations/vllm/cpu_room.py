"""The free rows of vLLM's CPU tier, for requests that wait for the disk."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from hicache.integrations.vllm.gate import UNKNOWN_ROWS, Rows
from hicache.integrations.vllm.policy import KeepsAwaited
from hicache.integrations.vllm.promotions import Promotions


class CpuRoom:
    """Owned by the tier. Under vLLM's own policies no request waits for rows, because they may evict its other
    chunks."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self._spec = spec

    @cached_property
    def _policy(self) -> CachePolicy | None:
        """The policy of the CPU tier. vLLM creates it and the manager after this tier, but before the first request."""
        manager = self._spec.get_manager()
        return manager.primary_tier._policy if isinstance(manager, TieringOffloadingManager) else None

    def lacking(self, chunks: Iterable[OffloadKey]) -> list[OffloadKey]:
        """The chunks that the CPU tier neither has nor is loading."""
        policy = self._policy
        return [chunk for chunk in chunks if policy is None or policy.get(chunk) is None]

    def rows(self, req_context: ReqContext, until: int, *, may_grow: bool) -> Rows:
        """The rows that the request can get for its tokens up to `until`, in addition to rows that already have some of
        them."""
        if not isinstance(self._policy, KeepsAwaited):
            return UNKNOWN_ROWS
        resident = self._resident(req_context, until)
        num_all = self._policy.cache_capacity - len(resident)
        return Rows(self._policy.num_obtainable(resident), num_all, may_grow)

    def keep(self, req_context: ReqContext, until: float, promotions: Promotions) -> None:
        """Keep the request's tokens up to `until` that are in the CPU tier, while it waits."""
        if isinstance(self._policy, KeepsAwaited):
            self._policy.keep(self._resident(req_context, until), promotions)

    def _resident(self, req_context: ReqContext, until: float) -> list[OffloadKey]:
        policy, positions = self._policy, req_context._offload_key_positions
        assert policy is not None
        return [chunk for chunk, end in positions.items() if end <= until and policy.get(chunk) is not None]
