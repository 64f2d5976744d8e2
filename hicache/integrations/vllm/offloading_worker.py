"""vLLM's `OffloadingWorker` with hicache's transfer backends. The worker copies between vLLM's cache and the rows of
the CPU tier.

The rows are in vLLM's shared region. The scheduler's process, which reads and writes the disk, maps the same memory.
Each worker owns `cpu_page_bytes` bytes of each row, from `rank * cpu_page_bytes` on.

vLLM does not handle failed transfers: it would use the wrong bytes in the blocks. So a failed copy is repeated block by
block, and the server stops only if the second copy fails too.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from hicache.errors import OutOfMemory
from hicache.host.arena import CudaRegistry, PinnedRows, allocate_pinned, touch
from hicache.integrations.vllm.offloading_copies import Direction, chunk_blocks
from hicache.integrations.vllm.region_files import remove_names
from hicache.integrations.vllm.row_links import Link
from hicache.transfer import TransferOp

log = logging.getLogger(__name__)

_CANNOT_SHARE = (
    "where CUDA pins no memory that processes share (confidential computing), use TieringOffloadingSpec with "
    "HiCacheTier, whose copies need no pinned memory, or leave out disk and secondary_tiers"
)


class ChunkRows:
    """This worker's part of the rows of a region. `host`: uint8 [rows, cpu_page_bytes]. This object owns the region,
    and allocates its memory.

    `registry`: pins the rows, for a cache on a GPU. If the region cannot be pinned, `host` is private memory of this
    worker. If `is_shared`, other processes read or write the rows too, so the constructor raises OutOfMemory instead.
    """

    def __init__(
        self, region: SharedOffloadRegion, cpu_page_bytes: int, registry: CudaRegistry | None, *, is_shared: bool
    ) -> None:
        self._region = region
        self._is_named = True
        rows = region.base_tensor.view(torch.uint8).view(region.num_chunks, -1)
        start = (region.rank or 0) * cpu_page_bytes
        self.host = rows[:, start : start + cpu_page_bytes]
        self.rows_per_chunk = len(rows)
        self._pins = None
        self._is_private = False
        touch(self.host.numpy(), frozenset() if registry is None else registry.near(), "cpu_bytes_to_use")
        if registry is None:
            return
        try:
            self._pins = PinnedRows(rows, setting="cpu_bytes_to_use", registry=registry)
            self.rows_per_chunk = self._pins.rows_per_chunk
        except OutOfMemory as error:
            if is_shared:
                raise OutOfMemory(f"{error}; {_CANNOT_SHARE}") from None
            log.warning("%s. This worker allocates private memory of the same size instead", error)
            self.host = allocate_pinned(len(rows), cpu_page_bytes, setting="cpu_bytes_to_use", registry=registry)
            self._is_private = True

    def forget_name(self) -> None:
        """Remove the names of the region's files, because the scheduler and all workers are ready. If this worker uses
        private memory, free the region's memory too."""
        if self._is_named:
            self._is_named = self._region._creator = False
            remove_names(self._region.mmap_path)
            if self._is_private:
                self._region.mmap_obj.madvise(mmap.MADV_REMOVE)  # no process uses the region

    def close(self) -> None:
        """Unpin and unmap the region. No copy may be in flight."""
        if self._pins is not None:
            self._pins.close()
        del self.host, self._pins  # the region cannot be unmapped while a tensor refers to it
        self._region._creator &= os.path.exists(self._region.mmap_path)  # vLLM must not remove a name twice
        self._region.cleanup()


@dataclass
class _Job:
    """A transfer of vLLM. `copies`: the copies of the transfer, each with a function that repeats the copy."""

    job_id: int
    copies: list[tuple[TransferOp, Callable[[], TransferOp]]]
    is_repeated: bool = False
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(op.num_bytes for op, _ in self.copies)

    def is_done(self) -> bool:
        return all(op.done() for op, _ in self.copies)

    def wait(self) -> None:
        for op, _ in self.copies:
            op.wait()

    def repeat_failed(self) -> int:
        """Repeat the failed copies, unless copies of this job were already repeated. Returns the number of repeated
        copies."""
        failed = [] if self.is_repeated else [i for i, (op, _) in enumerate(self.copies) if op.error is not None]
        for i in failed:
            _, again = self.copies[i]
            self.copies[i] = again(), again
        self.is_repeated |= bool(failed)
        return len(failed)

    def result(self) -> TransferResult:
        error = next((op.error for op, _ in self.copies if op.error is not None), None)
        if error is not None:
            log.error("a transfer between vLLM's cache and the CPU tier failed twice; vLLM will stop: %s", error)
        seconds = sum(op.seconds() for op, _ in self.copies)
        return TransferResult(self.job_id, error is None, self.num_bytes, seconds)


class HiCacheOffloadingWorker(OffloadingWorker):
    """The worker. Only the worker's thread calls the methods. Transfers of one direction end in the order of their
    submission.

    `num_repeated`: copies that failed and were repeated.
    """

    def __init__(self, groups: list[list[Link]], rows: ChunkRows, blocks_per_chunk: int) -> None:
        """`groups`: the links of each cache group; groups may share links. `shutdown` closes `rows`."""
        self._rows = rows
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = groups
        self._links = list(dict.fromkeys(link for links in groups for link in links))
        self._jobs: dict[Direction, deque[_Job]] = {"store": deque(), "load": deque()}
        self.num_repeated = 0
        self._is_shut_down = False

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit("store", job_id, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Submit a load. `expedited` (vLLM 0.33 with sync_load_budget_bytes) is ignored: all loads run in the order of
        submission."""
        return self._submit("load", job_id, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        return [result for direction in self._jobs for result in self._finished(direction)]

    def wait(self, job_ids: set[int]) -> None:
        for jobs in self._jobs.values():
            for job in jobs:
                if job.job_id in job_ids:
                    job.wait()
                    self._repeat_failed(job)
                    job.wait()

    def shutdown(self) -> None:
        """Finish submitted copies and close the rows. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._groups = []
            while self._links:  # no variable may refer to the rows when they are unmapped
                self._links.pop().close()
            self._jobs["store"].clear()
            self._jobs["load"].clear()
            self._rows.close()

    def _submit(self, direction: Direction, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec) -> bool:
        assert isinstance(host, BlockIDsLoadStoreSpec)
        self._rows.forget_name()  # a transfer shows that the scheduler and all workers are ready
        chunks_by_group = chunk_blocks(
            host.block_ids, device.block_ids, device.group_sizes, device.block_indices, self._blocks_per_chunk
        )
        copies = [
            copy
            for links, group in zip(self._groups, chunks_by_group, strict=True)
            for link in links
            for copy in link.submit(direction, group)
        ]
        self._jobs[direction].append(_Job(job_id, copies))
        return True

    def _finished(self, direction: Direction) -> Iterator[TransferResult]:
        jobs = self._jobs[direction]
        while jobs and self._is_settled(jobs[0]):
            yield jobs.popleft().result()

    def _is_settled(self, job: _Job) -> bool:
        if not job.is_done():
            return False
        self._repeat_failed(job)
        return job.is_done()

    def _repeat_failed(self, job: _Job) -> None:
        num_failed = job.repeat_failed()
        if num_failed and not self.num_repeated:
            log.warning("a copy between vLLM's cache and the CPU tier failed and is made again, block by block")
        self.num_repeated += num_failed
