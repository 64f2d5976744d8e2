"""Copies between vLLM's cache blocks and rows of its CPU tier that contain packed chunks (`row_packing`).

A transfer backend copies complete chunks, and packs and unpacks them on the device. For the backend, a token is a
token, a cache tensor is a layer, and a chunk is a page. Other copies use scratch memory of one chunk on the device, in
vLLM's layout `[tensor][block][bytes]`:

    a part of a chunk is loaded    row -> unpacked in scratch memory -> blocks
    a chunk did not fit            blocks -> scratch memory -> first part to the row, the rest to memory of the worker
    a copy failed                  repeated in one of these two ways

If only some blocks of a chunk are stored, copies of one stored block fill the missing blocks, which no load reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hicache.config.environment import kernel_choice
from hicache.errors import ConfigError, TransferError
from hicache.flow.packing import are_too_many
from hicache.integrations.vllm.block_shapes import BlockShape, digest_of
from hicache.integrations.vllm.offloading_copies import (
    ChunkBlocks,
    Direction,
    Ids,
    PlainOp,
    chunk_backend,
)
from hicache.integrations.vllm.row_packing import TRAILER_BYTES, RowKind, RowPacking
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.transfer import TransferBackend, TransferOp

log = logging.getLogger(__name__)


@dataclass
class Misfits:
    """Counts stored chunks, and chunks that did not fit their packed size. All links of a worker share one counter."""

    stored: int = 0
    misfits: int = 0
    _is_reported: bool = field(default=False, init=False)

    def count(self, stored: int, misfits: int) -> None:
        self.stored += stored
        self.misfits += misfits
        if not self._is_reported and are_too_many(self.misfits, self.stored):
            self._is_reported = True
            log.warning(
                "%d of %d chunks do not fit their packed size: the worker keeps a part of each in memory in "
                "addition to cpu_bytes_to_use, and none of them is stored on disk; set kv_packing to off",
                self.misfits,
                self.stored,
            )


@dataclass(frozen=True)
class _Part:
    """Bytes [start, end) of each row in the CPU tier. A part has the packed tiles of one shape, of all tensors with
    tiles of this shape. `scratch_packer`, `scratch_slots`: packer and slots of the scratch memory, into which one chunk
    is unpacked."""

    shape: BlockShape
    start: int
    backend: TransferBackend
    scratch_packer: PagePacker
    scratch_slots: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.scratch_packer.page_bytes


class PackedChunkLink:
    """Transfers between the cache tensors of one group and this worker's part of each row. See `ChunkLink`.

    `shapes[i]`: shapes of the tiles in blocks of `tensors[i]`. Raises ConfigError if the packed tiles do not fit the
    rows. `rests`: for each row whose chunk did not fit, the second part of the chunk.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[BlockShape]],
        host: torch.Tensor,
        blocks_per_chunk: int,
        packing: RowPacking,
        misfits: Misfits,
        *,
        rows_per_chunk: int,
        staging_bytes: int,
    ) -> None:
        self._host = host
        self._blocks_per_chunk = blocks_per_chunk
        self._packing = packing
        self._device = tensors[0].device
        self._misfits = misfits
        self._on_gpu = self._device.type == "cuda"
        self._row_bytes = packing.part_bytes - TRAILER_BYTES  # bytes of a chunk in a row
        self._trailers = host.numpy()[:, self._row_bytes : packing.part_bytes]
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        sizes = [blocks_per_chunk * tensor.shape[1] for tensor in tensors]
        self._scratch = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        parts = [part.view(blocks_per_chunk, -1) for part in self._scratch.split(sizes)]
        self._pairs = list(zip(tensors, parts, strict=True))
        members: dict[BlockShape, list[int]] = {}
        for index, of_tensor in enumerate(shapes):
            for shape in of_tensor:
                members.setdefault(shape, []).append(index)
        self._shape_digest = digest_of(list(members.items()))
        self.parts: list[_Part] = []
        for shape, indices in members.items():
            self.parts.append(self._part(shape, indices, rows_per_chunk, staging_bytes))
            self.parts[-1].backend.start()
            self.parts[-1].scratch_packer.compile()
        self.rests: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._num_loads = 0

    def submit(self, direction: Direction, chunks: ChunkBlocks) -> list[tuple[TransferOp, Callable[[], TransferOp]]]:
        """Start the copies. Returns each copy with a function that repeats the copy in another way."""
        if direction == "load":
            return self._load(chunks)
        rows, blocks = self._with_parts(chunks)
        return [self._store(rows, blocks)] if len(rows) else []

    def close(self) -> None:
        """Finish submitted copies."""
        for part in self.parts:
            part.backend.close()
        if self._stream is not None:
            self._stream.synchronize()

    def _part(self, shape: BlockShape, indices: Sequence[int], rows_per_chunk: int, staging_bytes: int) -> _Part:
        tokens, kernels = shape.tokens * self._blocks_per_chunk, kernel_choice(self._device)
        on_device = [shape.buffers(self._pairs[i][0]) for i in indices]
        in_scratch = [shape.within(self._pairs[i][1].shape[1]) for i in indices]
        scratch = [of.buffers(self._pairs[i][1]) for i, of in zip(indices, in_scratch, strict=True)]
        try:
            packer = PagePacker(on_device, tokens, kernels, self._packing.format)
            scratch_packer = PagePacker(scratch, tokens, kernels, self._packing.format)
        except ValueError as error:
            raise ConfigError(f"kv_packing cannot pack this cache: {error}; set kv_packing to off") from error
        start = self.parts[-1].end if self.parts else 0
        if start + packer.page_bytes > self._row_bytes:
            raise ConfigError(
                f"a packed chunk of this cache has {start + packer.page_bytes} bytes, and vLLM gives rows of "
                f"{self._row_bytes}; set kv_packing to off"
            )
        backend = chunk_backend(
            self._host[:, start : start + packer.page_bytes],
            PageMover(on_device, tokens, kernels),
            rows_per_chunk=rows_per_chunk,
            staging_bytes=staging_bytes,
            packer=packer,
        )
        slots = in_scratch[0].slots(np.arange(self._blocks_per_chunk)).to(self._device)
        return _Part(shape, start, backend, scratch_packer, slots)

    def _with_parts(self, chunks: ChunkBlocks) -> tuple[Ids, Ids]:
        """Return all rows to store, and for each row all blocks of a chunk. Blocks that are not stored are replaced by
        a stored block of the same chunk."""
        rows, starts = np.unique(chunks.part_rows, return_index=True)
        blocks = np.repeat(chunks.part_blocks[starts][:, None], self._blocks_per_chunk, 1)
        blocks[np.searchsorted(rows, chunks.part_rows), chunks.part_index] = chunks.part_blocks
        return np.concatenate([chunks.rows, rows]), np.concatenate([chunks.blocks, blocks.reshape(-1)])

    def _store(self, rows: Ids, blocks: Ids) -> tuple[TransferOp, Callable[[], TransferOp]]:
        self._forget(rows)
        pages = torch.from_numpy(rows)
        ops = [part.backend.store(part.shape.slots(blocks), pages) for part in self.parts]
        of_row = blocks.reshape(-1, self._blocks_per_chunk)
        return _StoreOp(ops, partial(self._stored, rows, of_row)), partial(self._keep_raw, rows, of_row)

    def _stored(self, rows: Ids, blocks: Ids, misfits: Sequence[int]) -> None:
        """Complete a store whose packed chunks are in the rows. `misfits`: positions, in `rows`, of the chunks that do
        not fit."""
        self._misfits.count(len(rows), len(misfits))
        self._trailers[rows] = self._trailer(RowKind.PACKED)
        if misfits:
            # This copy does not wait for the current stream, because the blocks were written before the store was
            # submitted.
            raw = self._keep_raw(rows[misfits], blocks[misfits], behind_current=False)
            if raw.error is not None:
                raise raw.error

    def _keep_raw(self, rows: Ids, blocks: Ids, *, behind_current: bool = True) -> TransferOp:
        """Store raw chunks in two parts with plain copies. The copies are complete on return."""
        op = PlainOp(len(rows) * self._scratch.numel(), self._device)
        with op.timed(self._stream, behind_current=behind_current):
            for row, of_row in zip(rows.tolist(), blocks, strict=True):
                ids = self._to_device(of_row)
                for tensor, part in self._pairs:
                    torch.index_select(tensor, 0, ids, out=part)
                raw, tag = self._scratch.cpu(), os.urandom(8)
                self._host[row, : self._row_bytes] = raw[: self._row_bytes]
                self.rests[row] = tag, raw[self._row_bytes :].clone()
                self._trailers[row] = self._trailer(RowKind.RAW, tag)
        return op

    def _load(self, chunks: ChunkBlocks) -> list[tuple[TransferOp, Callable[[], TransferOp]]]:
        ops: list[tuple[TransferOp, Callable[[], TransferOp]]] = []
        is_packed = self._are_packed(chunks.rows)
        self._forget(chunks.rows[is_packed])  # the disk has overwritten raw chunks in these rows
        blocks = chunks.blocks.reshape(-1, self._blocks_per_chunk)
        if is_packed.any():
            rows, of_row = chunks.rows[is_packed], blocks[is_packed]
            again = partial(self._load_blocks, *self._by_block(rows, of_row))
            pages, flat = torch.from_numpy(rows), of_row.reshape(-1)
            for part in self.parts:
                op = part.backend.load(pages, part.shape.slots(flat), self._num_loads)
                self._num_loads += 1
                if self._on_gpu:
                    op.wait_outcome()  # also queues the remaining layers, which no forward pass will request
                ops.append((op, again))
        singly = self._by_block(chunks.rows[~is_packed], blocks[~is_packed])
        parts = chunks.part_rows, chunks.part_index, chunks.part_blocks
        for one_by_one in (singly, parts):
            if len(one_by_one[0]):
                again = partial(self._load_blocks, *one_by_one)
                ops.append((again(), again))
        return ops

    def _by_block(self, rows: Ids, blocks: Ids) -> tuple[Ids, Ids, Ids]:
        """Return for each block of complete chunks: its row, its index in the chunk, and its number in the cache."""
        index = np.tile(np.arange(self._blocks_per_chunk), len(rows))
        return np.repeat(rows, self._blocks_per_chunk), index, blocks.reshape(-1)

    def _load_blocks(self, rows: Ids, index: Ids, blocks: Ids) -> TransferOp:
        """Copy block `index[i]` of row `rows[i]` to the device's block `blocks[i]`, one chunk after another."""
        op = PlainOp(len(blocks) * self._scratch.numel() // self._blocks_per_chunk, self._device)
        with op.timed(self._stream):
            for row in np.unique(rows).tolist():
                self._unpack(row)
                of_row = rows == row
                source, target = (self._to_device(ids[of_row]) for ids in (index, blocks))
                for tensor, part in self._pairs:
                    tensor.index_copy_(0, target, part[source])
        return op

    def _unpack(self, row: int) -> None:
        """Copy the chunk of a row to the scratch memory. A packed chunk is unpacked."""
        if not self._are_packed(np.array([row]))[0]:
            rest = self._raw_rest(row)
            self._scratch[: self._row_bytes].copy_(self._host[row, : self._row_bytes], non_blocking=True)
            self._scratch[self._row_bytes :].copy_(rest, non_blocking=True)
            return
        for part in self.parts:
            staging = self._host[row, part.start : part.end].to(self._device, non_blocking=True)[None]
            part.scratch_packer.scatter(staging, part.scratch_slots, 0, part.scratch_packer.num_layers)

    def _to_device(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy(ids).to(self._device, non_blocking=True)

    def _are_packed(self, rows: Ids) -> npt.NDArray[np.bool_]:
        are_packed: npt.NDArray[np.bool_] = (self._trailers[rows] == self._trailer(RowKind.PACKED)).all(1)
        return are_packed

    def _forget(self, rows: Ids) -> None:
        """Remove the second parts of raw chunks in these rows, because the rows now contain other chunks."""
        if self.rests:
            for row in rows.tolist():
                self.rests.pop(row, None)

    def _raw_rest(self, row: int) -> torch.Tensor:
        """Return the second part of the raw chunk in a row. Raises TransferError if the row does not contain the chunk
        that this worker stored."""
        tag, rest = self.rests.get(row, (b"", torch.empty(0)))
        if not tag or (self._trailers[row] != self._trailer(RowKind.RAW, tag)).any():
            raise TransferError(f"row {row} of the CPU tier has no chunk that this worker can read")
        return rest

    def _trailer(self, kind: RowKind, tag: bytes = bytes(8)) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytes([kind]) + self._shape_digest + tag, np.uint8)


class _StoreOp:
    """The stores of all parts of some chunks. Before the operation is done, `settle` is called once with the positions
    of the chunks that do not fit."""

    is_undelayed, misfits = False, ()

    def __init__(self, ops: Sequence[TransferOp], settle: Callable[[Sequence[int]], None]) -> None:
        self._ops = ops
        self._settle = settle
        self._is_settled = False
        self.num_bytes = sum(op.num_bytes for op in ops)
        self.error: Exception | None = None

    def done(self) -> bool:
        if not self._is_settled and all(op.done() for op in self._ops):
            self._end()
        return self._is_settled

    def wait(self) -> None:
        for op in self._ops:
            op.wait()
        if not self._is_settled:
            self._end()

    def wait_outcome(self) -> None:
        self.wait()

    def seconds(self) -> float:
        return sum(op.seconds() for op in self._ops)

    def _end(self) -> None:
        self._is_settled = True
        self.error = next((op.error for op in self._ops if op.error is not None), None)
        if self.error is None:
            try:
                self._settle(sorted({at for op in self._ops for at in op.misfits}))
            except RuntimeError as error:
                self.error = error
