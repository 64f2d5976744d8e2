"""Corrections of vLLM's scheduler, so that a block with a hash holds the tokens of the hash when it is stored or hit.

vLLM hashes the blocks of a request when it schedules the request, before the forward pass:

    [0, num_computed_tokens)                     computed, or computed by a pass that is under way
    [num_computed_tokens, tokens of this step)   hashed, and computed unless the request is preempted in this step

Two cases break the rule in vLLM 0.32 and 0.33:

1. With `--scheduling-policy priority` a step can schedule a request and preempt it later. The new blocks keep their
   hashes without being computed.
2. With asynchronous scheduling a request can be preempted while its last pass runs. The output of the pass then
   finishes the request, and vLLM's connector stores blocks that already belong to another request.

Requests that hit such blocks or chunks would compute wrong tokens. Private methods of vLLM are replaced because the
interfaces of its offloading do not tell how many tokens are computed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

# vLLM's own methods.
PREEMPT_REQUEST = Scheduler._preempt_request
NUM_OFFLOADABLE_TOKENS = OffloadingConnectorScheduler._calc_num_offloadable_tokens


def correct_scheduler() -> None:
    """Replace the two methods of vLLM in this process, the scheduler's. Idempotent."""
    Scheduler._preempt_request = _preempt_request
    OffloadingConnectorScheduler._calc_num_offloadable_tokens = _num_offloadable_tokens


def _preempt_request(scheduler: Scheduler, request: Request, *args: Any, **kwargs: Any) -> None:
    """Preempt the request, after its blocks with tokens that were not computed have lost their hashes."""
    for blocks in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks:
        for block in blocks:
            if (block.block_hash_num_tokens or 0) > request.num_computed_tokens:
                block.pool.evict_blocks({block.block_id})
    PREEMPT_REQUEST(scheduler, request, *args, **kwargs)


def _num_offloadable_tokens(
    scheduler: OffloadingConnectorScheduler, state: RequestOffloadState, num_tokens: int
) -> int:
    """Tokens of a request that the connector may store, of `num_tokens`. A finished request stores at most its computed
    tokens: none if it was preempted before it finished."""
    if state.req.is_finished():
        num_tokens = min(num_tokens, state.req.num_computed_tokens)
    num: int = NUM_OFFLOADABLE_TOKENS(scheduler, state, num_tokens)
    return num
