"""The scheduler's part of `HiCacheConnector`. `HiCacheConnectorScheduler` extends vLLM's class by stores of chunks that
the GPU's cache evicts.

At the end of each step this class examines the blocks that vLLM has taken, and the blocks at the head of the queue of
free blocks, which vLLM evicts next:

    taken in this step | head of the queue: the watermark | rest of the queue | blocks in use
    late: stored       | ahead: stored, and fenced by     |                   |
    before the pass    | vLLM until the copy has ended    |                   |

A late or an early copy must end before the block is overwritten. For some caches, vLLM's model runner V2 clears blocks,
or copies blocks with partial hits, before it calls a connector. `connector.reason_for_eager_stores` excludes these
caches.

A chunk of several blocks is stored when the first of its blocks is evicted or is below the watermark. In full attention
this is the last block of the chunk, because requests free their last blocks first. A sliding window frees the blocks of
a running request from the beginning of the prompt, a few in each step:

    step 1 frees blocks 0 1 2, step 2 frees blocks 3 4 5    chunks of two blocks: 0 1 | 2 3 | 4 5
    queue of free blocks: 2 1 0 5 4 3                       chunk 2 3 is stored with block 2, while block 3 is cached

A store belongs to a request that exists only for the job of the store. The store does not pin its blocks. Pinning would
move a block to the end of the queue of free blocks, so vLLM would evict newer blocks before this block.

`features` lists the private names of vLLM that this module uses, and each start checks that vLLM has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import _ConnectorMetricName
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from hicache.integrations.vllm.gpu_copies import EvictsGpuCopies
from hicache.integrations.vllm.gpu_evictions import EvictedChunks, EvictionWatch, StepBlocks
from hicache.integrations.vllm.hints import hints_of
from hicache.integrations.vllm.offloading_spec import ConnectorSpec
from hicache.pages.misses import MissReason
from hicache.pages.table import names_of

_STEPS_AHEAD = 2  # steps whose blocks are stored ahead: the next step is scheduled while the stores of a step run
_SHARE = 8  # the watermark is at most 1/8 of the GPU's blocks, and 1/8 of the CPU tier's blocks


class _Chunk(NamedTuple):
    """A chunk to store. `blocks`: the chunk's blocks, first to last. `num_tokens`: tokens of the prompt up to the
    chunk's end."""

    blocks: list[int]
    num_tokens: int


class _EvictedChunk(NamedTuple):
    """A chunk of which the GPU evicts a block. `last`: id of the chunk's last block. `num_tokens`: tokens of the prompt
    up to the chunk's end."""

    key: OffloadKey
    last: int
    num_tokens: int


class HiCacheConnectorScheduler(OffloadingConnectorScheduler):
    """The scheduler class, which vLLM's scheduler calls from its thread. Each step decides once which blocks are
    stored.

    `num_ahead`: chunks stored before their blocks were taken. `num_late`: chunks stored in the step that took their
    blocks. `num_lost`: chunks that the GPU evicted without a store, because no row was free or another block of the
    chunk was missing. A chunk with a missing block does not count if the reason for its next miss is already known.
    """

    def __init__(self, spec: ConnectorSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        policy = self.manager.primary_tier._policy
        assert isinstance(policy, EvictsGpuCopies)
        self._policy: EvictsGpuCopies = policy
        self._stores_computed = spec.stores_computed
        self._groups = {config.group_idx: i for i, config in enumerate(self.config.kv_group_configs)}
        # Groups with a sliding window and chunks of several blocks.
        self._windowed = {
            config.group_idx
            for config in self.config.kv_group_configs
            if config.sliding_window_size_in_chunks is not None and self.config.blocks_per_chunk > 1
        }
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._step_blocks = sum(cdiv(max_tokens, config.tokens_per_block) for config in self.config.kv_group_configs)
        self._pool: BlockPool
        self._watch = EvictionWatch(None)
        self._watermark = 0
        self._step = StepBlocks()
        self._computing = set[bytes]()  # hashes of the blocks that the step completes
        self._hashes_of = dict[OffloadKey, tuple[bytes, ...]]()  # hashes of a chunk's blocks
        # The newest chunk of each block that does not end a chunk; only for the groups in `_windowed`.
        self._chunk_of = dict[bytes, OffloadKey]()
        self._num_noted = dict[str, list[int]]()  # number of recorded chunks by request and group
        self._excluded = set[OffloadKey]()  # chunks that `max_offload_tokens` of all their requests excludes
        self._offered = set[OffloadKey]()  # chunks below the watermark that the CPU tier has or stores
        self._arrived = dict[OffloadKey, str]()  # request of each chunk with a finished transfer
        self._store_jobs = set[int]()  # jobs of chunks that the GPU evicts
        self.num_ahead = 0
        self.num_late = 0
        self.num_lost = 0

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Receive the block pool of the GPU's cache. vLLM calls this method once."""
        self._pool = pool
        self._watch = pool.metrics_collector = EvictionWatch(pool.metrics_collector)
        self._policy.copies.is_on_gpu = self._is_on_gpu
        cpu_blocks = self._policy.cache_capacity * self.config.blocks_per_chunk
        self._watermark = min(_STEPS_AHEAD * self._step_blocks, pool.num_gpu_blocks // _SHARE, cpu_blocks // _SHARE)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        # The load gate counts the tokens of all waiting prompts; vLLM itself sets the chunks at the first lookup.
        self._req_status[request.request_id].update_offload_keys()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        if request.num_computed_tokens:  # a request that never ran decides nothing about chunks of other requests
            self._note_chunks([request.request_id])
        self._num_noted.pop(request.request_id, None)
        return finished

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        worker_meta = connector_output.kv_connector_worker_meta
        completed = worker_meta.completed_jobs if worker_meta is not None else ()
        jobs = {job_id: self._jobs[job_id] for job_id in completed if job_id in self._jobs}
        super().update_connector_output(connector_output)
        for job_id, job in jobs.items():
            if job_id in self._jobs:
                continue  # other workers have not finished the job
            if job_id in self._store_jobs:
                self._store_jobs.remove(job_id)
            else:
                self._arrived |= dict.fromkeys(job.keys, job.req_id)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._offered.clear()
        self._arrived.clear()
        self._store_jobs.clear()

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        """Update the state for this step. vLLM calls this method at the end of a step, before it looks for stores whose
        blocks were taken."""
        super()._update_req_states(scheduler_output)
        self._step = self._watch.take()
        self._current_batch_allocated_block_ids |= self._step.taken
        self._note_chunks(scheduler_output.num_scheduled_tokens)
        self._note_computing(scheduler_output.num_scheduled_tokens)
        self._flag_gpu_copies()

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Return the stores of this step. vLLM calls this method at the end of a step."""
        jobs: dict[int, TransferJob] = {}
        if self._stores_computed:
            jobs = super()._build_store_jobs(scheduler_output)
        else:
            self._skip_computed(scheduler_output.num_scheduled_tokens)
        self._end_sessions(scheduler_output.finished_req_ids or ())
        return jobs | self._store_late() | self._store_ahead()

    def _end_sessions(self, finished: Iterable[str]) -> None:
        """Apply the hints of finished requests before this step stores their chunks, because hints decide whether the
        chunks are stored. vLLM reports finished requests to the manager only after the stores."""
        copies = self._policy.copies
        copies.evicted = {self._chunk_of.get(block_hash, block_hash) for block_hash in self._step.evicted}
        for status in map(self._req_status.get, finished):
            if status is not None and (copies.ended or hints_of(status.req_context).session_end):
                self.manager.apply_hints(status.req_context)
        copies.evicted = ()

    def _skip_computed(self, num_scheduled_tokens: dict[str, int]) -> None:
        """Mark all chunks of these requests as stored. Otherwise vLLM would examine all blocks of their sliding windows
        in each step."""
        for req_id, num_tokens in num_scheduled_tokens.items():
            status = self._req_status[req_id]
            status.advance_stored_idx(status.req.num_computed_tokens + num_tokens)

    def _note_computing(self, num_scheduled_tokens: dict[str, int]) -> None:
        """Record the blocks that this step completes. vLLM has set the hashes of these blocks before they are
        computed."""
        self._computing.clear()
        if self.config.blocks_per_chunk == 1:
            return  # each chunk has only one block
        size = self.config.tokens_per_hash
        for req_id, num_tokens in num_scheduled_tokens.items():
            request = self._req_status[req_id].req
            start = request.num_computed_tokens // size
            end = (request.num_computed_tokens + num_tokens) // size
            for group in self._groups:
                suffix = group.to_bytes(4, "big")
                self._computing.update(block_hash + suffix for block_hash in request.block_hashes[start:end])

    def _flag_gpu_copies(self) -> None:
        """Flag the chunks of the CPU tier that the GPU has again, after hits and finished transfers. The blocks of a
        load get their hashes when the request of the load is scheduled. If the request was aborted, the blocks never
        get hashes."""
        on_gpu = [key for key in self._step.hit if not self._windowed or self._is_on_gpu(key)]
        for key, req_id in list(self._arrived.items()):
            if self._is_on_gpu(key):
                on_gpu.append(key)
            elif req_id in self._req_status:
                continue
            del self._arrived[key]
        # A chunk that was hit below the watermark is in use now. When the chunk is below the watermark again, it is
        # offered again.
        self._offered -= self._step.hit
        self._policy.copies.ended -= self._step.hit
        self._policy.flag_on_gpu(on_gpu)

    def _store_late(self) -> dict[int, TransferJob]:
        """Store the chunks that this step has evicted and the CPU tier lacks. The forward pass waits for these
        stores."""
        chunks = dict[OffloadKey, _Chunk]()
        held = dict[OffloadKey, None]()
        for block_hash, evicted in self._step.evicted.items():
            candidate = self._chunk_to_evict(block_hash, evicted.block_id, evicted.num_tokens)
            if candidate is None or self._block_of(block_hash) is not None:
                continue
            key = candidate.key
            if self._policy.get(key) is not None:
                if key not in self._offered:
                    held[key] = None
            elif (blocks := self._blocks_of(key, candidate.last, is_late=True)) is not None:
                chunks[key] = _Chunk(blocks, candidate.num_tokens)
            else:
                self._note_incomplete(key)
        self._policy.copies.ended.difference_update(self._step.evicted)
        self._policy.evicted_from_gpu([*held][::-1])
        jobs = self._store(chunks, is_late=True)
        self._current_batch_jobs_to_flush |= jobs.keys()
        return jobs

    def _store_ahead(self) -> dict[int, TransferJob]:
        """Store the chunks below the watermark that the CPU tier lacks. Each chunk is stored once while it is below the
        watermark."""
        chunks = dict[OffloadKey, _Chunk]()
        held = dict[OffloadKey, None]()
        offered = set[OffloadKey]()
        for block in islice(self._pool.free_block_queue.iter_blocks_after(None), self._watermark):
            block_hash = block.block_hash
            if block_hash is None:
                continue
            key = self._chunk_of.get(block_hash, block_hash)
            if key in self._offered:
                offered.add(key)
                continue
            candidate = self._chunk_to_evict(block_hash, block.block_id, block.block_hash_num_tokens)
            if candidate is None or self._block_of(block_hash) != block.block_id:
                continue
            if self._policy.get(key) is not None:
                held[key] = None
            elif (blocks := self._blocks_of(key, candidate.last, is_late=False)) is not None:
                chunks[key] = _Chunk(blocks, candidate.num_tokens)
        self._policy.evicted_from_gpu([*held][::-1])
        self._offered = offered.union(held)
        return self._store(chunks, is_late=False)

    def _store(self, chunks: dict[OffloadKey, _Chunk], *, is_late: bool) -> dict[int, TransferJob]:
        """Return a job that stores the chunks, at most one chunk for each row that the CPU tier can free. `chunks`: in
        the order in which the GPU evicts the chunks."""
        keys = list(chunks)
        num_rows = self._policy.num_obtainable(()) if keys else 0
        if is_late:  # the most recently used chunks are worth most
            num_refused = max(0, len(keys) - num_rows)
            self._note_lost(keys[:num_refused], MissReason.NO_ROWS)
            keys = keys[num_refused:]
        else:
            keys = keys[:num_rows]
        if not keys:
            return {}
        # The worker expects all blocks of one group before the blocks of the next group.
        keys.sort(key=get_offload_group_idx)
        context = ReqContext(f"hicache-evicted-{self._job_counter}")
        context.set_state(EvictedChunks())
        for key in keys:
            context.set_offload_key_position(key, chunks[key].num_tokens)
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(keys, context)
        self.manager.on_request_finished(context)
        if output is None:
            self._connector_stats.increase_counter(_ConnectorMetricName.ALLOCATION_FAILURE)
            if is_late:
                self._note_lost(keys, MissReason.NO_ROWS)
            return {}
        if is_late:
            self.num_late += len(keys)
        else:
            self.num_ahead += len(keys)
            self._offered.update(keys)
        return self._job_of(context, {key: chunks[key] for key in output.keys_to_store}, output.store_spec)

    def _note_lost(self, keys: Sequence[OffloadKey], reason: MissReason) -> None:
        """Record chunks that the GPU evicts without a store."""
        self.num_lost += len(keys)
        self._policy.miss_reasons.note(names_of(keys), reason)

    def _note_incomplete(self, key: OffloadKey) -> None:
        """Record a chunk that cannot be stored, because the GPU has evicted another of its blocks before. A known
        reason is kept: the chunk found no row at that eviction, or was stored and evicted from the CPU tier."""
        if self._policy.miss_reasons.reasons(names_of([key]))[0] == MissReason.NEVER_STORED:
            self._note_lost([key], MissReason.EVICTED)

    def _job_of(self, context: ReqContext, chunks: dict[OffloadKey, _Chunk], rows: Any) -> dict[int, TransferJob]:
        """Register the job of a store. If a later step takes a block of these chunks, vLLM finds the block in
        `_block_id_to_pending_jobs`, and does not overwrite the block before the copy has ended."""
        blocks = list[int]()
        sizes = [0] * len(self.config.kv_group_configs)
        for key, chunk in chunks.items():
            blocks += chunk.blocks
            sizes[self._groups[get_offload_group_idx(key)]] += len(chunk.blocks)
        job_id = self._generate_job_id()
        self._store_jobs.add(job_id)
        fenced = list(dict.fromkeys(blocks))
        self._jobs[job_id] = TransferJobStatus(
            req_id=context.req_id,
            pending_count=self.config.num_workers,
            keys=set(chunks),
            is_store=True,
            fenced_block_ids=fenced,
        )
        for block_id in fenced:
            self._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        # vLLM removes the state of the request when the job ends.
        request = SimpleNamespace(request_id=context.req_id, kv_transfer_params=None, is_finished=lambda: True)
        status = RequestOffloadState(self.config, request, context, None)
        status.finished_signaled = True
        status.transfer_jobs = {job_id}
        self._req_status[context.req_id] = status
        source = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=[0] * len(sizes))
        return {job_id: TransferJob(context.req_id, source, rows)}

    def _block_of(self, block_hash: bytes) -> int | None:
        """Return the id of a block of the GPU's cache with this hash, of which there may be several; None without
        one."""
        block = self._pool.cached_block_hash_to_block.get_one_block(block_hash)
        return None if block is None else block.block_id

    def _is_on_gpu(self, key: OffloadKey) -> bool:
        """Return whether the GPU's cache has the chunk. In full attention only the last block of the chunk is checked:
        requests free their last blocks first, so the last block of a chunk is evicted first."""
        is_windowed = get_offload_group_idx(key) in self._windowed
        hashes = self._hashes_of.get(key, (key,)) if is_windowed else (key,)
        return all(self._block_of(block_hash) is not None for block_hash in hashes)

    def _chunk_to_evict(self, block_hash: bytes, block_id: int, num_tokens: int | None) -> _EvictedChunk | None:
        """Return the chunk that is stored when the GPU evicts this block; None if no chunk should be stored then. A
        block that does not end its chunk causes a store only if the chunk's last block is computed and still
        cached."""
        key = self._chunk_of.get(block_hash, block_hash)
        if key != block_hash:
            last = self._pool.cached_block_hash_to_block.get_one_block(key)
            if last is None or last.block_id in self._step.taken or key in self._computing:
                return None
            block_id = last.block_id
            num_tokens = last.block_hash_num_tokens
        if num_tokens is None or not self._ends_chunk(key, num_tokens):
            return None
        return _EvictedChunk(key, block_id, num_tokens)

    def _ends_chunk(self, block_hash: bytes, num_tokens: int) -> bool:
        """Return whether a chunk ends with the block that has this hash, and whether this chunk should be stored."""
        group = self._groups.get(get_offload_group_idx(block_hash))
        if group is None:
            return False
        if block_hash in self._excluded or block_hash in self._policy.copies.ended:
            return False
        return num_tokens % self.config.kv_group_configs[group].tokens_per_chunk == 0

    def _blocks_of(self, key: OffloadKey, last: int, *, is_late: bool) -> list[int] | None:
        """Return the blocks of a chunk whose last block is `last`. Returns None unless all blocks contain the tokens of
        the chunk when they are copied. If `is_late`, blocks are copied before the forward pass of this step, otherwise
        after this pass."""
        if self.config.blocks_per_chunk == 1:
            return [last]
        hashes = self._hashes_of.get(key)
        if hashes is None:
            return None
        blocks = list[int]()
        for block_hash in hashes[:-1]:
            evicted, block_id = self._step.evicted.get(block_hash), self._block_of(block_hash)
            # The block with this hash may be a second copy, which another request computes in this step.
            is_new = block_id in self._step.taken or block_hash in self._computing
            if is_late and evicted is not None:
                blocks.append(evicted.block_id)
            elif block_id is not None and not (is_late and is_new):
                blocks.append(block_id)
            else:
                return None
        return [*blocks, last]

    def _note_chunks(self, req_ids: Iterable[str]) -> None:
        """Record the properties of chunks that are known only while their requests run: the hashes of their blocks, and
        whether the chunks may be stored."""
        per_chunk = self.config.blocks_per_chunk
        for status in map(self._req_status.get, req_ids):
            if status is None or (per_chunk == 1 and status.max_offload_tokens is None and not self._excluded):
                continue
            noted = self._num_noted.setdefault(status.req.request_id, [0] * len(status.group_states))
            for i, (config, state) in enumerate(zip(self.config.kv_group_configs, status.group_states, strict=True)):
                step, suffix = config.hashes_per_chunk // per_chunk, config.group_idx.to_bytes(4, "big")
                max_tokens = math.inf if status.max_offload_tokens is None else status.max_offload_tokens
                for n in range(noted[i], len(state.offload_keys)):
                    key, end = state.offload_keys[n], (n + 1) * config.hashes_per_chunk
                    ends = range(end - config.hashes_per_chunk + step, end + 1, step)
                    self._hashes_of[key] = tuple(status.req.block_hashes[at - 1] + suffix for at in ends)
                    if config.group_idx in self._windowed:
                        self._chunk_of |= dict.fromkeys(self._hashes_of[key][:-1], key)
                    if (n + 1) * config.tokens_per_chunk <= max_tokens:
                        self._excluded.discard(key)
                    elif n >= state.num_hit_chunks:  # an earlier request has decided about chunks that were hit
                        self._excluded.add(key)
                noted[i] = len(state.offload_keys)
        if len(self._hashes_of) > 4 * self._pool.num_gpu_blocks:
            self._hashes_of = {
                key: hashes
                for key, hashes in self._hashes_of.items()
                if key in self._step.evicted or self._block_of(key) is not None
            }
            self._chunk_of = {at: key for at, key in self._chunk_of.items() if key in self._hashes_of}
            self._excluded &= self._hashes_of.keys()
            self._num_noted.clear()  # the next step records the chunks again that unfinished requests will compute
