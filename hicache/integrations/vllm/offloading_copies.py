"""Copies between vLLM's cache blocks on the device and the rows of vLLM's CPU tier, with hicache's transfer backends.

For a backend, a block of vLLM's cache is a token, a cache tensor is a layer, and a chunk is a page:

    row r of the CPU tier     one chunk of `blocks_per_chunk` blocks of every tensor, [tensor][block][bytes]
    tensor t in row r         [offset_t, offset_t + blocks_per_chunk * page_bytes_t), as in vLLM's own worker

At the ends of a prefix, a transfer may need only some blocks of a chunk. Blocks of an incomplete chunk are copied one
by one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.config.environment import kernel_choice
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.transfer import TransferBackend, TransferOp
from hicache.transfer.cpu import CpuTransfer
from hicache.transfer.cuda import CudaTransfer

Ids: TypeAlias = npt.NDArray[np.int64]
Direction = Literal["load", "store"]

_CHUNK_PAGES = 512  # chunks in one copy from device to host


@dataclass(frozen=True)
class ChunkBlocks:
    """The blocks of one cache group in a transfer.

    All blocks of the rows in `rows` [n] are transferred; `blocks` [n * blocks_per_chunk] are the device's blocks for
    these rows, in order. Of other rows, only single blocks are transferred: block `part_index[i]` of row `part_rows[i]`
    belongs to the device's block `part_blocks[i]`.
    """

    rows: Ids
    blocks: Ids
    part_rows: Ids
    part_index: Ids
    part_blocks: Ids


def chunk_blocks(
    rows: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    blocks_per_chunk: int,
) -> list[ChunkBlocks]:
    """Return the blocks of a transfer of vLLM, one item for each cache group. `group_sizes[g]`: number of `blocks` that
    belong to group g. `block_indices[g]`: index of the group's first block in the request. `rows`: the rows of the
    chunks that contain the blocks.

    Raises ValueError if the blocks do not belong to exactly these rows.
    """
    found, first_row, first_block = [], 0, 0
    for size, index in zip(group_sizes, block_indices, strict=True):
        position = index % blocks_per_chunk + np.arange(size, dtype=np.int64)
        num_rows = int(position[-1]) // blocks_per_chunk + 1 if size else 0
        of_group = rows[first_row : first_row + num_rows].astype(np.int64)
        if len(of_group) != num_rows:
            raise ValueError(f"{size} blocks from number {index} on lie in {num_rows} chunks, not in {len(of_group)}")
        chunk, ids = position // blocks_per_chunk, blocks[first_block : first_block + size].astype(np.int64)
        is_full_chunk = np.bincount(chunk, minlength=num_rows) == blocks_per_chunk
        is_of_full_chunk = is_full_chunk[chunk]
        part = ~is_of_full_chunk
        found.append(
            ChunkBlocks(
                of_group[is_full_chunk],
                ids[is_of_full_chunk],
                of_group[chunk[part]],
                position[part] % blocks_per_chunk,
                ids[part],
            )
        )
        first_row, first_block = first_row + num_rows, first_block + size
    if first_row != len(rows):
        raise ValueError(f"a transfer of {first_row} chunks names {len(rows)} rows")
    return found


class _NoLayers:
    """A layer counter that does nothing, because vLLM waits for complete loads and not for layers."""

    def queue_on_demand(self, load_id: int, queue: Callable[[int], None]) -> None:
        """Do nothing, because loads are queued when they are submitted."""

    def record(self, load_id: int, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Do nothing, because no forward pass waits for a layer."""

    def fail(self, load_id: int, error: Exception) -> None:
        """Do nothing, because the `TransferOp` of the load has the error."""


class SingleBlocks:
    """Copies blocks of some tensors one by one, for parts of chunks and to repeat failed transfers.

    `tensors`: uint8 [num_blocks, page_bytes]. `host`: uint8 [rows, bytes], with only the bytes of these tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], host: torch.Tensor, blocks_per_chunk: int) -> None:
        widths = [blocks_per_chunk * tensor.shape[1] for tensor in tensors]
        parts = [part.unflatten(1, (blocks_per_chunk, -1)) for part in host.split(widths, 1)]
        self._pairs = list(zip(tensors, parts, strict=True))
        self._block_bytes = sum(tensor.shape[1] for tensor in tensors)
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def copy(self, direction: Direction, rows: Ids, index: Ids, blocks: Ids) -> TransferOp:
        """Copy blocks after the work that is queued on the current stream. A load copies block `index[i]` of row
        `rows[i]` to the device's block `blocks[i]`; a store copies in the other direction. Without a GPU the copy is
        complete on return."""
        op = PlainOp(len(blocks) * self._block_bytes, self._device)
        with op.timed(self._stream):
            for tensor, part in self._pairs:
                for row, i, block in zip(rows.tolist(), index.tolist(), blocks.tolist(), strict=True):
                    on_host, on_device = part[row, i], tensor[block]
                    dst, src = (on_device, on_host) if direction == "load" else (on_host, on_device)
                    dst.copy_(src, non_blocking=True)
        return op

    def close(self) -> None:
        """Finish submitted copies."""
        if self._stream is not None:
            self._stream.synchronize()


class PlainOp:
    """A `TransferOp` of plain copies on one stream, or of copies that are already complete."""

    is_undelayed, misfits = False, ()

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self.error: Exception | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0

    @contextlib.contextmanager
    def timed(self, stream: torch.cuda.Stream | None, *, behind_current: bool = True) -> Iterator[None]:
        """Run the copies of the `with` block on `stream`, after the work of the current stream if `behind_current`. If
        a copy raises RuntimeError, store it in `error`."""
        start = time.perf_counter()
        try:
            if stream is None:
                yield
            else:
                if behind_current:
                    stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(stream):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record(stream)
                    try:
                        yield
                    finally:
                        end.record(stream)
                        self._events = begin, end
        except RuntimeError as error:
            self.error = error
        self._seconds = time.perf_counter() - start

    def done(self) -> bool:
        return self._events is None or self._events[1].query()

    def wait(self) -> None:
        if self._events is not None:
            self._events[1].synchronize()

    def wait_outcome(self) -> None:
        """Do nothing, because errors of plain copies are known when the copies are submitted."""

    def seconds(self) -> float:
        return self._seconds if self._events is None else float(self._events[0].elapsed_time(self._events[1])) / 1e3


def chunk_backend(
    host: torch.Tensor,
    mover: PageMover,
    *,
    rows_per_chunk: int,
    staging_bytes: int,
    packer: PagePacker | None = None,
) -> TransferBackend:
    """Return the transfer backend between the device of `mover` and `host`. `packer`: if given, pages on `host` are
    packed."""
    if mover.table.device.type != "cuda":
        return CpuTransfer(host, mover, _NoLayers(), packer)
    return CudaTransfer(
        host,
        mover,
        _NoLayers(),
        rows_per_chunk=rows_per_chunk,
        device_page_tokens=1,
        staging_bytes=staging_bytes,
        chunk_tokens=_CHUNK_PAGES * mover.page_tokens,
        packer=packer,
    )


class ChunkLink:
    """Transfers between consecutive cache tensors and the part of each row for these tensors. A transfer backend copies
    complete chunks.

    `tensors`: uint8 [num_blocks, page_bytes]; there may be gaps between blocks. `host`: uint8 [rows, bytes], pinned if
    the device is a GPU; there may be gaps between rows. `rows_per_chunk`: rows that are pinned together. The worker's
    thread calls the methods.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        host: torch.Tensor,
        blocks_per_chunk: int,
        *,
        rows_per_chunk: int,
        staging_bytes: int,
    ) -> None:
        self.single = SingleBlocks(tensors, host, blocks_per_chunk)
        self._blocks_per_chunk = blocks_per_chunk
        self._device = tensors[0].device
        mover = PageMover([[tensor] for tensor in tensors], blocks_per_chunk, kernel_choice(self._device))
        self.backend = chunk_backend(host, mover, rows_per_chunk=rows_per_chunk, staging_bytes=staging_bytes)
        self.backend.start()
        self._num_loads = 0

    def submit(self, direction: Direction, chunks: ChunkBlocks) -> list[tuple[TransferOp, Callable[[], TransferOp]]]:
        """Start the copies. Returns each copy with a function that repeats the copy block by block."""
        ops: list[tuple[TransferOp, Callable[[], TransferOp]]] = []
        if len(chunks.rows):
            index = np.tile(np.arange(self._blocks_per_chunk), len(chunks.rows))
            rows = np.repeat(chunks.rows, self._blocks_per_chunk)
            again = partial(self.single.copy, direction, rows, index, chunks.blocks)
            ops.append((self._copy_full_chunks(direction, chunks), again))
        if len(chunks.part_rows):
            again = partial(self.single.copy, direction, chunks.part_rows, chunks.part_index, chunks.part_blocks)
            ops.append((again(), again))
        return ops

    def close(self) -> None:
        """Finish submitted copies."""
        self.backend.close()
        self.single.close()

    def _copy_full_chunks(self, direction: Direction, chunks: ChunkBlocks) -> TransferOp:
        pages, slots = torch.from_numpy(chunks.rows), torch.from_numpy(chunks.blocks)
        if direction == "store":
            return self.backend.store(slots, pages)
        op = self.backend.load(pages, slots, self._num_loads)
        self._num_loads += 1
        if self._device.type == "cuda":
            op.wait_outcome()  # also queues the remaining layers, which no forward pass will request
        return op
