"""Corrections of vLLM's scheduler. The corrections ensure that a block with a hash contains the tokens of this hash
when the block is stored or hit.

vLLM hashes the blocks of a request when it schedules the request, before the forward pass:

    [0, num_computed_tokens)                     computed, or being computed by the running pass
    [num_computed_tokens, tokens of this step)   hashed, and computed unless the request is preempted in this step

In two cases vLLM 0.32 and 0.33 have hashed blocks that are not computed:

1. With `--scheduling-policy priority` a step can schedule a request and preempt it later. The new blocks keep their
   hashes without being computed.
2. With asynchronous scheduling a request can be preempted while its last pass runs. The output of the pass then
   finishes the request, and vLLM's connector stores blocks that already belong to another request.

In a third case vLLM stores a chunk of several blocks from which the sliding window has removed some blocks:

3. vLLM stores a chunk if its last block exists. Blocks that left the window, or that a request did not need after a hit
   on the GPU, are skipped. In CPU memory, the places of these blocks still hold an earlier chunk, and a shorter prompt
loads them.

A request that hits one of these blocks or chunks would compute wrong tokens. This module replaces private methods of
vLLM, because vLLM's offloading interfaces do not report how many tokens are computed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

# The original methods of vLLM.
PREEMPT_REQUEST = Scheduler._preempt_request
NUM_OFFLOADABLE_TOKENS = OffloadingConnectorScheduler._calc_num_offloadable_tokens


def correct_scheduler() -> None:
    """Replace the two methods of vLLM in this process, which must be the scheduler's process. Idempotent."""
    Scheduler._preempt_request = _preempt_request
    OffloadingConnectorScheduler._calc_num_offloadable_tokens = _num_offloadable_tokens


def _preempt_request(scheduler: Scheduler, request: Request, *args: Any, **kwargs: Any) -> None:
    """Remove the hashes of the request's blocks with tokens that were not computed, then preempt the request."""
    for blocks in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks:
        for block in blocks:
            if (block.block_hash_num_tokens or 0) > request.num_computed_tokens:
                block.pool.evict_blocks({block.block_id})
    PREEMPT_REQUEST(scheduler, request, *args, **kwargs)


def _num_offloadable_tokens(
    scheduler: OffloadingConnectorScheduler, state: RequestOffloadState, num_tokens: int
) -> int:
    """Return how many of `num_tokens` tokens of a request the connector may store. For a finished request, the
    connector stores at most the computed tokens. A request that was preempted before it finished has no computed
    tokens."""
    if state.req.is_finished():
        num_tokens = min(num_tokens, state.req.num_computed_tokens)
    _skip_incomplete_chunks(state)
    num: int = NUM_OFFLOADABLE_TOKENS(scheduler, state, num_tokens)
    return num


def _skip_incomplete_chunks(state: RequestOffloadState) -> None:
    """Remove the last block of chunks that lack another block from the blocks that the connector may store, so that
    vLLM does not store these chunks. A chunk of recurrent layers needs only the state in its last block."""
    size = state.config.blocks_per_chunk
    for config, group in zip(state.config.kv_group_configs, state.group_states, strict=True):
        if size == 1 or config.sliding_window_size_in_chunks is None or isinstance(config.kv_cache_spec, MambaSpec):
            continue
        # When a request finishes, vLLM looks at earlier chunks again.
        first = 0 if state.req.is_finished() else group.next_stored_chunk_idx
        for end in range((first + 1) * size, len(group.block_ids) + 1, size):
            if 0 in group.block_ids[end - size : end]:
                group.block_ids[end - 1] = 0
