"""vLLM's own scheduler and connector over hicache's offloading, with a worker that computes numbers instead of a model.

The keys and values of a token are one number, which depends on the numbers of all earlier tokens in the blocks of its
request. So if a block was not computed, or belongs to another request, each later number and the answer change.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 32
VOCABULARY = 500
_ALL = 1 << 30  # window of full attention
CHUNK_BYTES = 2 * 2 * BLOCK_TOKENS * 32 * 4  # keys and values of 2 heads of 32 elements in float32
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
}


def answer_to(prompt: Sequence[int], num_tokens: int, window: int = _ALL) -> list[int]:
    """The answer to a prompt without any cache. `window`: tokens of the sliding window."""
    total, values, tokens = 0, list[int](), list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        value = _value(total, tokens[position])
        values.append(value)
        total += value - (values[position - window + 1] if position >= window - 1 else 0)
        if position >= len(prompt) - 1:
            tokens.append(value % VOCABULARY)
    return tokens[len(prompt) :]


def _value(total: int, token: int) -> int:
    """The number of a token; `total` is the sum of the numbers of all tokens before it that are in its window."""
    return zlib.crc32(b"%d,%d" % (total, token))


class Worker:
    """A worker that copies and computes in the order of vLLM's worker. `blocks[b]`: the numbers of a block of the
    device. `rows`: the memory of the CPU tier, int64 `[chunks, ...]`, which begins with the numbers of a chunk.
    `num_stored`, `num_loaded`: numbers of blocks."""

    def __init__(self, rows: npt.NDArray[np.int64], blocks_per_chunk: int, window: int) -> None:
        self._window = window
        self.blocks = defaultdict[int, list[int]](lambda: [0] * BLOCK_TOKENS)
        self.rows = rows[:, : blocks_per_chunk * BLOCK_TOKENS].reshape(len(rows), blocks_per_chunk, BLOCK_TOKENS)
        self._blocks_per_chunk = blocks_per_chunk
        self.num_stored = 0
        self.num_loaded = 0
        self._stores = list[tuple[int, Any]]()  # stores that the last step made; their copies begin in the next step

    def run(self, output: SchedulerOutput, requests: dict[str, tuple[list[int], list[int], int]]) -> ModelRunnerOutput:
        """Run one step. `requests`: for each request its tokens, its blocks, and how many tokens are computed before
        the step."""
        metadata = output.kv_connector_metadata
        flushed = [(job, metadata.store_jobs.pop(job)) for job in metadata.jobs_to_flush if job in metadata.store_jobs]
        stores, self._stores = [*self._stores, *flushed], list(metadata.store_jobs.items())
        for _, job in stores:
            blocks, size = job.src_spec.block_ids, self._blocks_per_chunk
            first = job.src_spec.block_indices[0] % size
            for n, block in enumerate(blocks, first):
                self.rows[job.dst_spec.chunk_ids[n // size], n % size] = self.blocks[block]
            self.num_stored += len(blocks)
        for job in metadata.load_jobs.values():
            stored = self.rows[job.src_spec.chunk_ids].reshape(-1, BLOCK_TOKENS)
            first = job.dst_spec.block_indices[0] % self._blocks_per_chunk
            for block, numbers in zip(job.dst_spec.block_ids, stored[first:], strict=False):
                self.blocks[block] = numbers.tolist()
                self.num_loaded += 1
        sampled = [self._compute(*requests[name], num) for name, num in output.num_scheduled_tokens.items()]
        done = dict.fromkeys([*(job for job, _ in stores), *metadata.load_jobs], 1)
        return ModelRunnerOutput(
            req_ids=list(requests),
            req_id_to_index={name: i for i, name in enumerate(requests)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving={job.req_id for job in metadata.load_jobs.values()},
                kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=done),
            ),
        )

    def _compute(self, tokens: list[int], blocks: list[int], start: int, num: int) -> list[int]:
        """Compute the tokens; returns the next token if all of the request's tokens are computed."""

        def number(at: int) -> int:
            return self.blocks[blocks[at // BLOCK_TOKENS]][at % BLOCK_TOKENS]

        value, total = 0, sum(map(number, range(max(0, start - self._window + 1), start)))
        for at in range(start, start + num):
            value = _value(total, tokens[at])
            self.blocks[blocks[at // BLOCK_TOKENS]][at % BLOCK_TOKENS] = value
            total += value - (number(at - self._window + 1) if at >= self._window - 1 else 0)
        return [value % VOCABULARY] if start + num == len(tokens) else []


class Engine:
    """`answers`: the tokens of each request so far. `preempted`: how often each request was preempted. `num_cached`:
    prompt tokens that were not computed. `is_async`: the scheduler schedules a step while the previous one runs.
    `connector`: the scheduler side of vLLM's connector or of hicache's. `window`: tokens of the sliding window."""

    def __init__(
        self,
        folder: Path,
        extra: dict[str, Any],
        *,
        is_async: bool,
        num_blocks: int,
        connector: str = "OffloadingConnector",
        window: int = _ALL,
        **arguments: Any,
    ) -> None:
        (folder / "config.json").write_text(json.dumps(_MODEL))
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=640,
            prefix_caching_hash_algo="sha256",
            async_scheduling=is_async,
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_connector_module_path="hicache.integrations.vllm" if connector.startswith("HiCache") else None,
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
            **{"enable_prefix_caching": True, **arguments},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        shape: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        is_full = window == _ALL
        attention = FullAttentionSpec(**shape) if is_full else SlidingWindowSpec(**shape, sliding_window=window)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], attention)])
        cache.hash_block_size = BLOCK_TOKENS
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            config, cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS
        )
        self.connector = self.scheduler.connector.connector_scheduler
        rows = np.asarray(self.connector.manager.primary_tier.get_kv_memoryview()).view(np.int64)
        self.worker = Worker(rows, self.connector.config.blocks_per_chunk, window)
        self._is_closed = False
        self._is_async, self._arrivals = is_async, itertools.count()
        self.answers = dict[str, list[int]]()
        self.preempted = Counter[str]()
        self.num_cached = 0
        self._has_computed = False  # in the last step
        self._running = deque[tuple[SchedulerOutput, ModelRunnerOutput]]()

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        priority: int = 0,
        kv_transfer_params: dict[str, Any] | None = None,
        **of_request: Any,
    ) -> None:
        """`of_request`: more arguments of vLLM's `Request`."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        of_request |= {"arrival_time": float(next(self._arrivals)), "priority": priority}
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, **of_request)
        self.answers[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._has_computed = output.total_num_scheduled_tokens > 0
        self.preempted.update(output.preempted_req_ids or ())
        self._running.append(
            (output, self.worker.run(output, {n: self._state(n, output) for n in output.num_scheduled_tokens}))
        )
        if not self._is_async or len(self._running) == 2:
            self._update()

    def finish(self) -> None:
        """Step until there is nothing to do, not even a copy. After a step that computes nothing it pauses, as vLLM's
        engine core does, so that the threads of a store can take the interpreter."""
        while self.scheduler.has_requests():
            self.step()
            if not self._has_computed and self.scheduler.has_requests():
                time.sleep(0.001)
        while self._running:
            self._update()

    def close(self) -> None:
        """Finish the transfers. Idempotent. vLLM releases the memory of the CPU tier last, and fails if a view of this
        memory still exists."""
        if not self._is_closed:
            self._is_closed = True
            self.finish()
            del self.worker.rows
            self.scheduler.shutdown()

    def _state(self, name: str, output: SchedulerOutput) -> tuple[list[int], list[int], int]:
        request = self.scheduler.requests[name]
        sampled = [token for _, result in self._running for token in _sampled(result, name)]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return (
            [*request.all_token_ids, *sampled],
            blocks,
            request.num_computed_tokens - output.num_scheduled_tokens[name],
        )

    def _update(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._running.popleft()).values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self.num_cached += output.prefill_stats.num_cached_tokens
                self.answers[output.request_id] += output.new_token_ids


def _sampled(result: ModelRunnerOutput, name: str) -> list[int]:
    return result.sampled_token_ids[result.req_id_to_index[name]] if name in result.req_id_to_index else []
