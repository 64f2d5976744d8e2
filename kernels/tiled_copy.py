"""Moves rows of all layers between slots; sources and targets may overlap.

    buffer[target[i]] = buffer[source[i]]    for every buffer, i in [0, n)

The result is as if all rows were read before any row is written. Targets are distinct. The number n of rows decides
between two methods:

    few     One launch. A program loads one tile (some columns of one buffer) of all n rows into registers, synchronises
            its threads, and stores the tile. No other program accesses that tile.
    many    A row is at risk if its source is another row's target. `_mark` writes i at every target; `_save` copies the
            rows at risk, usually none, to staging; `_copy` then reads each row from the pool or from staging. Buffers
            are processed in groups that limit the staging size, usually in a single group.

A table on the device has the addresses, row sizes and strides of the buffers, which may differ in row size. Offsets are
int64, and count the widest words that divide all rows.

Only callers with SGLang's interface use it, through `move_kv_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

FEW_BYTES = 64 << 10  # maximum bytes of the rows of one program: 32 registers per thread at 16 warps
STAGING_BYTES = 128 << 20
_WORDS_PER_PROGRAM = 2048
_MAX_COLS = 256
SCAN_ROWS = 256  # rows that a program scans for rows at risk, many because usually no row is at risk
_SAVE_SPLITS = 64  # maximum number of programs that share the buffers of a scanned block


def tile_bytes_for(stride_bytes: int) -> int:
    """Return the bytes of each row in a tile of the kernel for few rows. Wide rows have more bytes in a tile."""
    if stride_bytes >= 8192:
        return 512
    return 256 if stride_bytes >= 4096 else 128


@jit
def _buffer(word, table, index, ALIGN: tl.constexpr):
    """Return start, row size and slot stride, in words, of buffer `index`.

    The table has these numbers in units of ALIGN words, because this factor lets the compiler merge loads.
    """
    word_bytes: tl.constexpr = word.dtype.element_ty.primitive_bitwidth // 8
    address = tl.load(table + index * 3) * (ALIGN * word_bytes)
    start = tl.multiple_of(address.to(tl.pointer_type(word.dtype.element_ty)), ALIGN * word_bytes)
    row = tl.load(table + index * 3 + 1) * ALIGN
    stride = tl.load(table + index * 3 + 2) * ALIGN
    return start, row, stride


@jit
def _at_risk(stamps, i, slot, mask, generation):
    """Return whether another row of this move, which left a stamp with `generation`, writes to the source slot of row
    i."""
    stamp = tl.load(stamps + slot, mask=mask, other=0)
    return mask & ((stamp >> 32) == generation) & ((stamp & 0x7FFFFFFF) != i)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["table", "target", "source"])
def _few_kernel(word, table, target, source, num_rows, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    # Program (b, c): buffer b, words [c*COLS, (c+1)*COLS) of all rows.
    start, row, stride = _buffer(word, table, tl.program_id(0).to(tl.int64), ALIGN)
    i = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (i < num_rows)[:, None] & (column < row)[None, :]
    old = tl.load(source + i, mask=i < num_rows, other=0).to(tl.int64)
    new = tl.load(target + i, mask=i < num_rows, other=0).to(tl.int64)
    words = tl.load(start + old[:, None] * stride + column[None, :], mask=inside)
    tl.debug_barrier()  # every thread has loaded before any thread stores
    tl.store(start + new[:, None] * stride + column[None, :], words, mask=inside)


@jit(do_not_specialize=["num_rows", "generation"], do_not_specialize_on_alignment=["target"])
def _mark_kernel(stamps, target, num_rows, generation, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(target + i, mask=i < num_rows, other=0).to(tl.int64)
    tl.store(stamps + slot, (generation.to(tl.int64) << 32) | i, mask=i < num_rows)


@jit(
    do_not_specialize=["num_rows", "generation", "first", "num_buffers"],
    do_not_specialize_on_alignment=["table", "source"],
)
def _save_kernel(
    staging,
    found,
    stamps,
    table,
    source,
    num_rows,
    generation,
    first,
    num_buffers,
    WIDEST: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # Program (b, s) of S saves the rows at risk in [b*SCAN, (b+1)*SCAN), for the buffers first + s, first + s + S, ...
    # of the group. Program (b, 0) writes to `found` where `_copy` reads each row: the slot of the row, or -1 if the row
    # was saved.
    block = tl.program_id(0).to(tl.int64) * SCAN
    i = block + tl.arange(0, SCAN)
    old = tl.load(source + i, mask=i < num_rows, other=0).to(tl.int64)
    risk = _at_risk(stamps, i, old, i < num_rows, generation)
    if tl.program_id(1) == 0:
        tl.store(found + i, tl.where(risk, -1, old), mask=i < num_rows)
    if tl.max(risk.to(tl.int32), axis=0) > 0:
        for piece in range(0, SCAN, ROWS):
            n = block + piece + tl.arange(0, ROWS)
            slot = tl.load(source + n, mask=n < num_rows, other=0).to(tl.int64)
            risky = _at_risk(stamps, n, slot, n < num_rows, generation)
            for member in range(tl.program_id(1), num_buffers, tl.num_programs(1)):
                start, row, stride = _buffer(staging, table, (first + member).to(tl.int64), ALIGN)
                saved = staging + (num_rows.to(tl.int64) * member + n)[:, None] * WIDEST
                for begin in range(0, WIDEST, COLS):
                    column = begin + tl.arange(0, COLS)
                    inside = risky[:, None] & (column < row)[None, :]
                    words = tl.load(start + slot[:, None] * stride + column[None, :], mask=inside)
                    tl.store(saved + column[None, :], words, mask=inside)


@jit(do_not_specialize=["num_rows", "first"], do_not_specialize_on_alignment=["table", "target", "found"])
def _copy_kernel(
    staging,
    found,
    table,
    target,
    num_rows,
    first,
    WIDEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # Program (b, q, c): rows [b*ROWS, (b+1)*ROWS), buffer first + q, words [c*COLS, (c+1)*COLS).
    member = tl.program_id(1).to(tl.int64)
    start, row, stride = _buffer(staging, table, first + member, ALIGN)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLS + tl.arange(0, COLS)
    old = tl.load(found + i, mask=i < num_rows, other=0)
    new = tl.load(target + i, mask=i < num_rows, other=0).to(tl.int64)
    inside = (i < num_rows)[:, None] & (column < row)[None, :]
    word_bytes: tl.constexpr = staging.dtype.element_ty.primitive_bitwidth // 8
    # Choose the address first, then load once. This takes half of the registers that loading from both addresses and
    # choosing afterwards would take.
    row_at = tl.where(old < 0, staging + (member * num_rows + i) * WIDEST, start + old * stride)
    row_at = tl.multiple_of(row_at, ALIGN * word_bytes)
    words = tl.load(row_at[:, None] + column[None, :], mask=inside)
    tl.store(start + new[:, None] * stride + column[None, :], words, mask=inside)


class TiledCopy:
    """Moves rows between slots of one pool, in all buffers of the pool with one call.

    Owns the address table and an int64 stamp per slot, and keeps the buffers alive. Only one thread at a time may call
    it. Kernels run on the current stream of the buffers' device, and the host never waits.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], kernels: Kernels, tile_bytes: int | None = None) -> None:
        """Build the table of addresses of `buffers`, each `[slots, ...row]` with contiguous rows and the same number of
        slots. `tile_bytes`: bytes of each row in a tile of the kernel for few rows; None: the row sizes determine
        it."""
        check_kernels(kernels)
        slots = {len(buffer) for buffer in buffers}
        if len(slots) != 1:
            raise ValueError(
                f"buffers of {sorted(slots)} slots: a move needs at least one buffer, and equally many slots in all"
            )
        for index, buffer in enumerate(buffers):
            if buffer.dim() < 2 or not buffer[:1].is_contiguous():
                raise ValueError(
                    f"buffer {index}, {tuple(buffer.shape)}, strides {buffer.stride()}: need contiguous rows"
                )
        self._buffers = tuple(buffers)
        self._kernels = kernels
        self._device = buffers[0].device
        self._generation = 0
        sizes = [(b.data_ptr(), b[0].numel() * b.element_size(), b.stride(0) * b.element_size()) for b in buffers]
        self._width = widest_word(*(n for size in sizes for n in size))
        self._align = 2 if self._width == 8 and all(n % 16 == 0 for size in sizes for n in size) else 1
        self._widest = max(row for _, row, _ in sizes) // self._width
        self._tile_bytes = tile_bytes or tile_bytes_for(max(stride for _, _, stride in sizes))
        if kernels == "triton":
            unit = self._align * self._width
            table = [(start // unit, row // unit, stride // unit) for start, row, stride in sizes]
            self._table = torch.tensor(table, dtype=torch.int64, device=self._device)
            self._stamps = torch.zeros(slots.pop(), dtype=torch.int64, device=self._device)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows at slots `source` to slots `target`, int32 or int64 `[n]`. Raises ValueError for mismatching
        arguments.

        If two rows have the same target slot, this slot gets one of them.
        """
        if target.shape != source.shape or target.dim() != 1 or {target.device, source.device} != {self._device}:
            raise ValueError(
                f"targets {tuple(target.shape)} on {target.device}, sources {tuple(source.shape)} on {source.device}: "
                f"need equally many, in one dimension, on {self._device}"
            )
        if not target.numel():
            return
        if self._kernels == "torch":
            for buffer in self._buffers:
                rows = buffer if buffer.element_size() > 1 else buffer.view(torch.uint8)
                rows[target] = rows[source]
            return
        target, source = target.contiguous(), source.contiguous()
        with torch.cuda.device_of(target):
            rows_in_tile = power_of_two(target.numel())
            if rows_in_tile * min(self._tile_bytes, 128) <= FEW_BYTES:
                self._move_few(target, source, rows_in_tile)
            else:
                self._move_many(target, source)

    def _move_few(self, target: torch.Tensor, source: torch.Tensor, rows_in_tile: int) -> None:
        tile = self._tile_bytes
        while rows_in_tile * tile > FEW_BYTES:
            tile //= 2
        cols = min(power_of_two(self._widest), max(1, tile // self._width))
        held = rows_in_tile * cols * self._width
        _few_kernel[(len(self._buffers), cdiv(self._widest, cols))](
            self._word(),
            self._table,
            target,
            source,
            target.numel(),
            ROWS=rows_in_tile,
            COLS=cols,
            ALIGN=self._align,
            num_warps=4 if held <= 16 << 10 else 8 if held <= 32 << 10 else 16,
        )

    def _move_many(self, target: torch.Tensor, source: torch.Tensor) -> None:
        num_rows, num_buffers = target.numel(), len(self._buffers)
        # Stamps of earlier moves have lower generations; after 2**31 - 1 moves the count restarts.
        if self._generation == (1 << 31) - 1:
            self._stamps.zero_()
            self._generation = 0
        self._generation += 1
        _mark_kernel[(cdiv(num_rows, 1024),)](self._stamps, target, num_rows, self._generation, BLOCK=1024)
        buffer_bytes = num_rows * self._widest * self._width
        group = max(1, min(num_buffers, STAGING_BYTES // buffer_bytes))
        staging = torch.empty(group * buffer_bytes, dtype=torch.uint8, device=self._device).view(WORDS[self._width])
        found = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        cols = min(power_of_two(self._widest), _MAX_COLS)
        rows = max(1, min(SCAN_ROWS, _WORDS_PER_PROGRAM // cols))
        blocks, sizes = cdiv(num_rows, rows), {"WIDEST": self._widest, "ROWS": rows, "COLS": cols, "ALIGN": self._align}
        for first in range(0, num_buffers, group):
            members = min(group, num_buffers - first)
            _save_kernel[(cdiv(num_rows, SCAN_ROWS), min(members, _SAVE_SPLITS))](
                staging, found, self._stamps, self._table, source, num_rows, self._generation, first, members,
                SCAN=SCAN_ROWS, **sizes,
            )  # fmt: skip
            _copy_kernel[(blocks, members, cdiv(self._widest, cols))](
                staging, found, self._table, target, num_rows, first, **sizes
            )

    def _word(self) -> torch.Tensor:
        """Return a tensor whose element is a word; only its dtype is used."""
        return self._stamps[:1].view(WORDS[self._width])
