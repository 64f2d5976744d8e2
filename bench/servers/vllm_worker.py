"""Code of the benchmark and of tests that runs in vLLM's processes. It has random weights with which the output depends
on the cached KV, and a CPU tier that also works without a GPU, unlike vLLM's CPU tier. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.bench.servers.model import fill_with_normals

LOAD_FORMAT = "hicache_random"


@register_model_loader(LOAD_FORMAT)
class RandomLoader(DummyModelLoader):
    """vLLM's `dummy` loader, with other random weights."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        fill_with_normals(model)


class WorkerExtension:
    """Adds no methods. If `worker_extension_cls` names this class, each worker imports this module before the worker
    loads a model."""


class CopyingWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache and its CPU tier on machines without a GPU, where vLLM's worker does not
    run."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._blocks = [cache.tensor for cache in caches.tensors]
        widths = [cache.page_size_bytes * blocks_per_chunk for cache in caches.tensors]
        rows = [region.create_next_worker_view(width) for width in widths]
        self._rows = [view.unflatten(1, (blocks_per_chunk, -1)) for view in rows]  # [chunk, block in it, byte]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for blocks, rows in zip(self._blocks, self._rows, strict=True):
            for block, chunk, part in _places(src_spec, dst_spec.chunk_ids, rows.shape[1]):
                rows[chunk, part] = blocks[block].reshape(-1).view(torch.int8)
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        for blocks, rows in zip(self._blocks, self._rows, strict=True):
            for block, chunk, part in _places(dst_spec, src_spec.chunk_ids, rows.shape[1]):
                blocks[block] = rows[chunk, part].view(blocks.dtype).reshape(blocks[block].shape)
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing, because copies end in the call that submits them."""


def _places(spec: GPULoadStoreSpec, chunk_ids: Sequence[int], blocks_per_chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for each block, the block's id, its chunk, and its index within the chunk. The first block of a group may
    be inside of a chunk."""
    blocks, chunks = iter(spec.block_ids), iter(chunk_ids)
    for size, index in zip(spec.group_sizes, spec.block_indices, strict=True):
        chunk = -1
        for place in range(index, index + size):
            if place == index or place % blocks_per_chunk == 0:
                chunk = int(next(chunks))
            yield int(next(blocks)), chunk, place % blocks_per_chunk


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec` with workers that run without a GPU. These workers support only vLLM's default
    layout of rows."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert not self.config.canonical_layout, "the copies on CPUs know no canonical layout"
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region, self.blocks_per_chunk)
