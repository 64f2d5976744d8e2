"""Both sides of vLLM's offloading, scheduler and worker, in one process and without an engine.

Specs, managers and types are those of vLLM and hicache; the requests are made up."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingConfig, OffloadingGroupConfig

from hicache.integrations.vllm.offloading_spec import HiCacheOffloadingSpec
from vllm_tier_case import CONFIG, place
from waiting import eventually

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Cache:
    """The shape of a KV cache. `groups[g]`: the tensors that cache group g uses, by index into `widths` (bytes of a
    block)."""

    num_blocks: int = 64
    widths: tuple[int, ...] = (2048, 2048, 2048)
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    blocks_per_chunk: int = 1

    @property
    def chunk_bytes(self) -> int:
        return -(-sum(self.widths) * self.blocks_per_chunk // 4096) * 4096

    def on(self, device: str) -> CanonicalKVCaches:
        """The zeroed tensors of a worker on `device`."""
        tensors = [torch.zeros(self.num_blocks, width, dtype=torch.int8, device=device) for width in self.widths]
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
            [[CanonicalKVCacheRef(i, self.widths[i]) for i in of_group] for of_group in self.groups],
        )


def offloading_config(cache: Cache, extra: dict[str, Any]) -> OffloadingConfig:
    """The configuration that vLLM makes for one worker. Every call has a new engine id."""
    groups = (
        OffloadingGroupConfig(BLOCK_TOKENS, tuple(f"layers.{g}.{i}.attn" for i in tensors), g)
        for g, tensors in enumerate(cache.groups)
    )
    return replace(
        CONFIG,
        groups=tuple(groups),
        worker_kv_bytes_per_block=sum(cache.widths),
        extra_config=extra,
        engine_id=f"hicache-test-{uuid.uuid4().hex}",
        cache=OffloadingCacheConfig(BLOCK_TOKENS, cache.blocks_per_chunk),
    )


class Engine:
    """A scheduler with its manager, and a worker with a cache. Jobs are sent and settled as vLLM's connector does."""

    def __init__(self, cache: Cache, extra: dict[str, Any], device: str = "cpu") -> None:
        self.cache = cache
        config = offloading_config(cache, extra)
        self.spec = HiCacheOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        kv_caches = cache.on(device)
        self.tensors = [entry.tensor for entry in kv_caches.tensors]
        self.worker = HiCacheOffloadingSpec(config).get_worker(kv_caches)
        self._requests = itertools.count()
        self._jobs = itertools.count()

    def request(self) -> ReqContext:
        context = ReqContext(f"request-{next(self._requests)}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step of the scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Run steps until no job is in flight between CPU and disk."""

        def is_settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        eventually(is_settled)

    def write(self, block: int, content: int, group: int = 0, *, is_random: bool = False) -> None:
        """Fill a block with bytes that only `content` has."""
        for i in self.cache.groups[group]:
            self.tensors[i][block] = block_bytes(content, i, self.cache.widths[i], is_random).to(self.tensors[i].device)

    def holds(self, block: int, content: int, group: int = 0, *, is_random: bool = False) -> bool:
        return all(
            torch.equal(self.tensors[i][block].cpu(), block_bytes(content, i, self.cache.widths[i], is_random))
            for i in self.cache.groups[group]
        )

    def has(self, keys: Sequence[Any], context: ReqContext) -> bool:
        """Whether all keys reach the CPU tier: look up all of them in each step until the results are final."""
        place(keys, context, BLOCK_TOKENS * self.cache.blocks_per_chunk)

        def results() -> set[LookupResult] | None:
            found = {self.manager.lookup(key, context) for key in keys}
            return found if found.isdisjoint({LookupResult.RETRY, LookupResult.HIT_PENDING}) else self.step()

        return eventually(results) == {LookupResult.HIT}

    def store(self, keys: Sequence[Any], blocks: Sequence[int], group: int = 0) -> list[Any]:
        """Store chunk i from the blocks [i * blocks_per_chunk, (i + 1) * blocks_per_chunk). Returns the keys that the
        manager accepted."""
        context, per_chunk = self.request(), self.cache.blocks_per_chunk
        output = self.manager.prepare_store(keys, context)
        stored = [] if output is None else output.keys_to_store
        if output is not None and stored:
            chosen = [
                blocks[i * per_chunk + j] for i, key in enumerate(keys) if key in stored for j in range(per_chunk)
            ]
            success = self._run(True, output.store_spec, self._on_device(chosen, group))
            self.manager.complete_store(stored, context, success)
        self.manager.on_request_finished(context)
        return list(stored)

    def load(self, keys: Sequence[Any], blocks: Sequence[int], group: int = 0) -> bool:
        """Look all keys up and, if all are found, load them. Returns whether all were found."""
        context = self.request()
        found = self.has(keys, context)
        if found:
            spec = self.manager.prepare_load(keys, context)
            assert self._run(False, spec, self._on_device(blocks, group))
            self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return found

    def finish(self, num_jobs: int) -> list[int]:
        """Wait for `num_jobs` jobs of the worker, which must all succeed. Returns the numbers of the jobs in the order
        in which they ended."""
        done: list[TransferResult] = []
        eventually(lambda: done.extend(self.worker.get_finished()) or len(done) >= num_jobs)
        assert all(result.success and result.transfer_size for result in done)
        return [result.job_id for result in done]

    def reset(self) -> None:
        """Empty the CPU tier, as `reset_prefix_cache` with `reset_connector` does. No job may be in flight."""
        self.settle()
        self.manager.reset_cache()
        flushed = getattr(self.manager, "on_reset_flushed", None)  # new in vLLM 0.33
        if flushed is not None:
            flushed()

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def _on_device(self, blocks: Sequence[int], group: int) -> GPULoadStoreSpec:
        sizes = [len(blocks) if g == group else 0 for g in range(len(self.cache.groups))]
        return GPULoadStoreSpec(list(blocks), sizes, [0] * len(sizes))

    def _run(self, is_store: bool, on_host: Any, on_device: GPULoadStoreSpec) -> bool:
        job = next(self._jobs)
        if is_store:
            assert self.worker.submit_store(job, on_device, on_host)
        else:
            assert self.worker.submit_load(job, on_host, on_device)
        self.worker.wait({job})
        (result,) = self.worker.get_finished()
        assert result.job_id == job
        return bool(result.success)


def block_bytes(content: int, tensor: int, num_bytes: int, is_random: bool = False) -> torch.Tensor:
    """Bytes of a block: numbers in bfloat16, which fit when packed. `is_random`: random bits, which do not fit."""
    generator = torch.Generator().manual_seed(content * 64 + tensor)
    if is_random:
        return torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, generator=generator)
    return (torch.rand(num_bytes // 2, generator=generator) + 0.01).bfloat16().view(torch.int8)


@contextlib.contextmanager
def engines_on(device: str) -> Iterator[Callable[[Cache, dict[str, Any]], Engine]]:
    """A function that makes engines on `device`. All engines are closed at the end."""
    with contextlib.ExitStack() as made:

        def make(cache: Cache, settings: dict[str, Any]) -> Engine:
            return made.enter_context(contextlib.closing(Engine(cache, settings, device)))

        yield make
