"""Decides the tier's answer to a look-up of chunks that are on the disk: hit (the chunks are loaded), miss, or retry.

This module determines the tokens of the chunks and the number of free rows of the CPU tier. The gate uses both to
decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from hicache.integrations.vllm.gate import UNKNOWN_ROWS, Candidate, LoadGate, Queue, Rows
from hicache.integrations.vllm.gpu_copies import EvictsGpuCopies
from hicache.integrations.vllm.lookups import Lookups
from hicache.integrations.vllm.promotions import Promotions


def chunk_tokens(config: OffloadingConfig) -> dict[int, int]:
    """Return the number of tokens in a chunk, by group of layers."""
    return {group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}


class CpuRows:
    """The free rows of vLLM's CPU tier, for requests that wait for the disk. The tier owns this object. Under vLLM's
    own policies no request waits for rows, because these policies may evict other chunks of the request during the
    wait."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self._spec = spec

    @cached_property
    def _policy(self) -> CachePolicy | None:
        """The policy of the CPU tier. vLLM creates the policy and the manager after this tier, but before the first
        request."""
        manager = self._spec.get_manager()
        return manager.primary_tier._policy if isinstance(manager, TieringOffloadingManager) else None

    def lacking(self, chunks: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that the CPU tier does not have and is not loading."""
        policy = self._policy
        return [chunk for chunk in chunks if policy is None or policy.get(chunk) is None]

    def rows(self, req_context: ReqContext, until: int, *, may_grow: bool) -> Rows:
        """Return the rows that the request can get for its tokens up to `until`. Rows that already have chunks of the
        request are not counted."""
        if not isinstance(self._policy, EvictsGpuCopies):
            return UNKNOWN_ROWS
        resident = self._resident(req_context, until)
        num_all = self._policy.cache_capacity - len(resident)
        return Rows(self._policy.num_obtainable(resident), num_all, may_grow)

    def keep(self, req_context: ReqContext, until: float, promotions: Promotions) -> None:
        """Keep those chunks of the request in the CPU tier that end at or before token `until`, while the request
        waits."""
        if isinstance(self._policy, EvictsGpuCopies):
            self._policy.keep(self._resident(req_context, until), promotions)

    def _resident(self, req_context: ReqContext, until: float) -> list[OffloadKey]:
        policy, positions = self._policy, req_context._offload_key_positions
        assert policy is not None
        return [chunk for chunk, end in positions.items() if end <= until and policy.get(chunk) is not None]


class Admission:
    """Decides on loads of chunks. The tier owns this object. `are_remote`: returns, for each chunk, whether it would be
    read from the remote store. `queue`: returns the pending loads. `chunk_tokens`: tokens of a chunk, by group of
    layers."""

    def __init__(
        self,
        gate: LoadGate,
        lookups: Lookups,
        are_remote: Callable[[Sequence[OffloadKey]], list[bool]],
        cpu_rows: CpuRows,
        queue: Callable[[], Queue],
        chunk_tokens: Mapping[int, int],
        chunk_bytes: int,
    ) -> None:
        self._gate = gate
        self._lookups = lookups
        self._are_remote = are_remote
        self._cpu_rows = cpu_rows
        self._queue = queue
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._waiting: dict[str, Promotions] = {}  # requests with loads, until they are scheduled

    def admits(self, chunk: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return whether to load a chunk that is on the disk, for a request. None means that vLLM should retry in the
        next step: the store has not answered for all chunks yet, or the CPU tier has too few free rows. If vLLM does
        not report the tokens of the chunk, the chunk is loaded."""
        gate, request = self._gate, req_context.req_id
        candidate = gate.candidate(request)
        if candidate is None or not candidate.loads:
            span = self.span([chunk], req_context)
            if span is None:
                return True
            if candidate is None or gate.needs_earlier_tokens(candidate, span[0]):
                candidate = self._add_candidate(chunk, span[0], req_context)
        if gate.is_due(candidate):
            held = self._lookups.held(request)
            if held is None:
                gate.end_late_wait(request, candidate)
            elif held:
                self._decide(candidate, held, req_context)
        if candidate.loads:
            return (req_context.get_offload_key_position(chunk) or 0) <= candidate.until
        return candidate.loads

    def promotions(self, req_context: ReqContext) -> Promotions:
        """Return the loads of a request. The object is created at the first load."""
        promotions = req_context.get_state(Promotions)
        if promotions is None:
            promotions = self._waiting[req_context.req_id] = Promotions()
            req_context.set_state(promotions)
        return promotions

    def waits_no_longer(self, request: str) -> None:
        """Record that the request is scheduled or has finished."""
        promotions = self._waiting.pop(request, None)
        if promotions is not None:
            promotions.waits = False

    def span(self, chunks: Sequence[OffloadKey], req_context: ReqContext) -> tuple[int, int] | None:
        """Return the tokens [start, end) of the prompt from the first chunk to the last chunk; None without chunks, or
        if vLLM does not report the tokens of a chunk."""
        spans = self._spans(chunks, req_context)
        return (min(start for start, _ in spans), spans[-1][1]) if spans else None

    def _spans(self, chunks: Sequence[OffloadKey], req_context: ReqContext) -> list[tuple[int, int]]:
        """Return the tokens [start, end) of each chunk, ordered by end. Returns [] if vLLM does not report the tokens
        of a chunk."""
        spans = []
        for chunk in chunks:
            end = req_context.get_offload_key_position(chunk)
            if end is None:
                return []
            spans.append((end - self._chunk_tokens.get(get_offload_group_idx(chunk), 0), end))
        return sorted(spans, key=lambda span: span[1])

    def _add_candidate(self, chunk: OffloadKey, start: int, req_context: ReqContext) -> Candidate:
        """Start a candidate for the request. If the request already has a candidate, the CPU tier has evicted chunks
        while the request waited. The request now needs more chunks, and the earlier decision and look-ups do not
        include these chunks."""
        request = req_context.req_id
        if self._gate.candidate(request) is not None:
            self._lookups.forget(request)
            self._lookups.lookup(chunk, request)
        # vLLM does not report the prompt length, and looks up chunks only until the first missing chunk.
        return self._gate.add_candidate(request, start, max(req_context._offload_key_positions.values()))

    def _decide(self, candidate: Candidate, held: list[OffloadKey], req_context: ReqContext) -> None:
        # A chunk that another request has loaded since the look-up, or is loading, needs no row and no read.
        chunks = self._cpu_rows.lacking(held) or held
        spans = self._spans(chunks, req_context)
        if not spans:
            return
        end_of = req_context.get_offload_key_position
        is_remote = self._are_remote(sorted(chunks, key=lambda chunk: end_of(chunk) or 0))
        until, request, queue = spans[-1][1], req_context.req_id, self._queue()
        if self._gate.has_waiting:
            rows = Rows(0, len(spans), may_grow=True)
        else:
            # A request with rows never waits for more rows, so every request will release its rows.
            may_grow = queue.releases_rows or bool(self._waiting.keys() - {request})
            rows = self._cpu_rows.rows(req_context, until, may_grow=may_grow)
        self._gate.decide(request, spans, self._chunk_bytes, queue, rows, is_remote)
        if candidate.loads:
            self._cpu_rows.keep(req_context, candidate.until, self.promotions(req_context))
