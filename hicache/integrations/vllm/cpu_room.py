"""The rows of vLLM's CPU tier, as requests that wait for the disk find them."""

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
    """Owned by the tier. vLLM's own policies evict what a request waits for, so under them nobody waits for rows."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self._spec = spec

    @cached_property
    def _policy(self) -> CachePolicy | None:
        """vLLM makes it, and the manager, before the first request and after this tier."""
        manager = self._spec.get_manager()
        return manager.primary_tier._policy if isinstance(manager, TieringOffloadingManager) else None

    def lacking(self, chunks: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those that the CPU tier neither has nor is about to get."""
        policy = self._policy
        return [chunk for chunk in chunks if policy is None or policy.get(chunk) is None]

    def rows(self, req_context: ReqContext, until: int, *, may_grow: bool) -> Rows:
        """For the request's tokens up to `until`, beside the rows that have some of them."""
        if not isinstance(self._policy, KeepsAwaited):
            return UNKNOWN_ROWS
        resident = self._resident(req_context, until)
        num_all = self._policy.cache_capacity - len(resident)
        return Rows(self._policy.num_obtainable(resident), num_all, may_grow)

    def keep(self, req_context: ReqContext, until: float, promotions: Promotions) -> None:
        """The request waits: what the CPU tier has of its tokens up to `until` stays."""
        if isinstance(self._policy, KeepsAwaited):
            self._policy.keep(self._resident(req_context, until), promotions)

    def _resident(self, req_context: ReqContext, until: float) -> list[OffloadKey]:
        policy, positions = self._policy, req_context._offload_key_positions
        assert policy is not None
        return [chunk for chunk, end in positions.items() if end <= until and policy.get(chunk) is not None]
