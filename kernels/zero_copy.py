"""Copies pages between scattered rows of a device pool and pinned host pages, without a staging buffer.

    load     row slots[p*page_tokens + i*span] // span of a buffer = row i of this buffer in host page pages[p]
    store    the reverse

This suits many small pieces, each of which would need a separate call of the copy engine. The kernel accesses host
memory over the link. It runs few programs, because they occupy multiprocessors that the model uses. So each program has
many bytes in flight.

The rows of one launch are cut into pieces of at most COLS words, numbered in the order of host pages:

    piece ((p*layers + l)*BUFFERS + b)*PAGE*CHUNKS + i*CHUNKS + c
          words [c*COLS, (c+1)*COLS) of row i of buffer b of layer first + l of page p, PAGE rows of CHUNKS pieces each;
    tile t
          pieces [t*PIECES, (t+1)*PIECES), which one program copies together; program j of J takes tiles j, j + J, ...

See `kernels._pages` for the order of bytes in a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.kernels._pages import RowClass, width_within
from hicache.kernels._triton import WORDS, cdiv, jit, power_of_two, tl
from hicache.kernels.page_copy import PageMover

_NUM_WARPS = 16
_ACCESSES = 4  # accesses of a thread per tile; aligned ones have 16 bytes, which puts 32 KiB in flight in each program
# A tile has fewer pieces than a program has threads, so each thread can locate its own pieces without synchronisation.
MAX_PIECES = 16 * _NUM_WARPS
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 128, 2048
MAX_INDEX = 1 << 29  # maximum pieces of a launch, because the kernel computes piece numbers in 32 bits


@jit
def _locate(  # noqa: PLR0917 - Triton binds constants by position
    tile,
    table,
    pages,
    slots,
    num_pieces,
    per_page,
    first_layer,
    layer_stride,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    PIECES: tl.constexpr,
    WORD_BYTES: tl.constexpr,
):
    """Return the locations of the pieces of a tile, as tensors `[PIECES, 1]`. Asynchronous loads return the page, the
    slot, the byte offset of the buffer within a layer of a page, and the buffer's address. Computed values are the byte
    offset of layer and row, the first word within the row, and whether the piece exists."""
    CHUNKS: tl.constexpr = (ROW + COLS - 1) // COLS
    number = tile * PIECES + tl.arange(0, PIECES)[:, None]
    exists = number < num_pieces
    # clamped, so that no load needs a mask; unsigned division is cheaper
    piece = tl.minimum(number, num_pieces - 1).to(tl.uint32)
    per_page = per_page.to(tl.uint32)
    segment = piece // (PAGE * CHUNKS)
    i = (piece % (PAGE * CHUNKS) // CHUNKS).to(tl.int64)
    column = piece % CHUNKS * COLS
    p = (segment // per_page).to(tl.int64)
    q = segment % per_page  # q is l * BUFFERS + b

    page = tl.load(pages + p)
    slot = tl.load(slots + (p * PAGE + i) * SPAN)
    # Row 0 of the table: byte offsets within a layer of a page. Row 1 + l: addresses of layer l's buffers.
    offset = tl.load(table + q % BUFFERS)
    address = tl.load(table + (1 + first_layer) * BUFFERS + q)
    within = (first_layer + q // BUFFERS).to(tl.int64) * layer_stride + i * (ROW * WORD_BYTES)
    return page, slot, offset, address, within, column, exists


@jit(
    do_not_specialize=["num_pieces", "num_tiles", "per_page", "first_layer"],
    do_not_specialize_on_alignment=["table", "pages", "slots"],
)
def zero_copy_kernel(  # noqa: PLR0917 - Triton binds constants by position
    host,
    table,
    pages,
    slots,
    num_pieces,
    num_tiles,
    per_page,
    first_layer,
    page_stride,
    layer_stride,
    row_stride,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGN: tl.constexpr,
    LOAD: tl.constexpr,
):
    WORD_BYTES: tl.constexpr = host.dtype.element_ty.primitive_bitwidth // 8
    page, slot, offset, address, within, column, exists = _locate(
        tl.program_id(0), table, pages, slots, num_pieces, per_page, first_layer, layer_stride,
        BUFFERS, PAGE, SPAN, ROW, COLS, PIECES, WORD_BYTES,
    )  # fmt: skip
    # A `while` would carry its variables through shared memory and synchronise all threads in each iteration.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1):
        lane = column + tl.arange(0, COLS)[None, :]
        inside = exists
        if ROW % COLS != 0:
            inside = exists & (lane < ROW)
        in_host = host.to(tl.pointer_type(tl.int8)) + (page * page_stride + offset + within)
        in_pool = (address + slot // SPAN * row_stride).to(host.dtype)
        # Tell the compiler which words of tables and ids may be merged into one access, because it cannot infer this.
        in_host = tl.multiple_of(in_host.to(host.dtype), [ALIGN, ALIGN]) + lane
        in_pool = tl.multiple_of(in_pool, [ALIGN, ALIGN]) + lane
        if LOAD:
            words = tl.load(in_host, mask=inside, cache_modifier=".cg")
        else:
            words = tl.load(in_pool, mask=inside, cache_modifier=".cg")
        # Locate the next pieces while the current ones are in flight.
        page, slot, offset, address, within, column, exists = _locate(
            tile + tl.num_programs(0), table, pages, slots, num_pieces, per_page, first_layer, layer_stride,
            BUFFERS, PAGE, SPAN, ROW, COLS, PIECES, WORD_BYTES,
        )  # fmt: skip
        if LOAD:
            tl.store(in_pool, words, mask=inside, cache_modifier=".cs")
        else:
            tl.store(in_host, words, mask=inside, cache_modifier=".cs")


@dataclass(frozen=True)
class _Plan:
    """The arguments that are equal for all launches of one row class.

    `host`: the host pages as words, beginning with the first layer of the class in page 0. `strides`: bytes between
    pages, between layers, and between rows. `segment_pieces`: number of pieces of one buffer of one layer of one page.
    """

    host: torch.Tensor
    table: torch.Tensor
    strides: tuple[int, int, int]
    segment_pieces: int
    constants: dict[str, int]


class ZeroCopyMover:
    """Copies pages between the buffers of one pool and host pages, `[layer][buffer][row]`, without a staging buffer.

    Uses the tables of `mover`. Keeps the mover and the host memory alive. It has no state between calls, so threads may
    share it. Kernels run on the current stream of the pool's device, and read bytes that the CPU wrote before the call.
    The CPU may access the pages after an event that the caller records later on this stream. Until then, the caller
    keeps the index tensors alive. The host never waits, except in the torch twin for a pool on a GPU, which reads the
    ids on the host.
    """

    def __init__(self, mover: PageMover, host: torch.Tensor, blocks: int = 4) -> None:
        """Prepare copies between the pool of `mover` and host pages. `host`: uint8 `[pages, page_bytes]` in CPU memory,
        pinned if the pool is on a GPU. The bytes of each page must be contiguous. `blocks`: maximum number of programs
        of a launch."""
        page_bytes = mover.group_bytes(0, mover.num_layers)
        if host.dtype != torch.uint8 or host.dim() != 2 or host.shape[1] != page_bytes or host.stride(1) != 1:
            raise ValueError(
                f"host pages {tuple(host.shape)} of {host.dtype}, strides {host.stride()}: need uint8 [pages, "
                f"{page_bytes}], bytes contiguous"
            )
        table = mover.table
        if host.device.type != "cpu" or (table.device.type == "cuda" and not host.is_pinned()):
            raise ValueError(f"host pages on {host.device}, the pool on {table.device}: need pinned CPU memory")
        if blocks < 1:
            raise ValueError(f"blocks={blocks}: a launch needs at least 1")
        self._mover = mover
        self._table = table
        self._host = host
        self._blocks = blocks
        # Layers of different structure have separate launches, which begin at the offset of their layer in a page.
        starts = table.ends[: len(table.classes)]
        self._plans = [
            [_plan(rows, host[:, start:], table.page_tokens, table.ends[1]) for rows in classes]
            for start, classes in zip(starts, table.classes, strict=True)
        ]

    def compile(self) -> None:
        """Compile the kernels for any number of pages and layers. To do so, copies the rows of slot 0 to host page 0
        and back."""
        page, slots = (
            torch.zeros(n, dtype=torch.int64, device=self._table.device) for n in (1, self._mover.page_tokens)
        )
        self.store(slots, page, 0, self._mover.num_layers)
        self.load(page, slots, 0, self._mover.num_layers)

    def load(self, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Copy layers [first_layer, first_layer + num_layers) of host pages to rows of the pool.

        `pages`, int64 `[p]`: ids of the pages. `slots`, int64 `[p * page_tokens]`: slots of the rows. Both tensors are
        on the pool's device. A slot that occurs twice gets either value.
        """
        self._copy(pages, slots, first_layer, num_layers, load=True)

    def store(self, slots: torch.Tensor, pages: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Copy layers [first_layer, first_layer + num_layers) of the rows at `slots` to the host pages. This is the
        inverse of `load`. `pages` must be distinct."""
        self._copy(pages, slots, first_layer, num_layers, load=False)

    def _copy(self, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int, *, load: bool) -> None:
        self._mover.group_bytes(first_layer, num_layers)  # raises if the layers do not exist
        num_pages = self._table.num_pages_of(slots)
        if pages.dtype != torch.int64 or tuple(pages.shape) != (num_pages,):
            raise ValueError(f"pages {tuple(pages.shape)} of {pages.dtype}: need int64 ({num_pages},), as slots have")
        self._table.check_ids(pages, "pages")
        if not num_pages or not num_layers:
            return
        if self._table.kernels == "torch":
            self._copy_naive(pages, slots, first_layer, num_layers, load)
            return
        with torch.cuda.device_of(slots):
            if self._table.uniform:
                for plan in self._plans[0]:
                    self._launch(plan, pages, slots, first_layer, num_layers, load)
            else:
                for layer in range(first_layer, first_layer + num_layers):
                    for plan in self._plans[layer]:
                        self._launch(plan, pages, slots, 0, 1, load)

    def _copy_naive(
        self, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int, load: bool
    ) -> None:
        """Copy pages in torch, with the result of the kernel."""
        begin, end = self._table.ends[first_layer], self._table.ends[first_layer + num_layers]
        host, ids = self._host.numpy(), pages.cpu().numpy()  # numpy copies complete rows, torch single bytes
        if load:
            staging = torch.from_numpy(host[ids, begin:end]).to(self._table.device)
            self._mover.scatter(staging, slots, first_layer, num_layers)
        else:
            staging = torch.empty(len(ids), end - begin, dtype=torch.uint8, device=self._table.device)
            self._mover.gather(slots, staging, first_layer, num_layers)
            host[ids, begin:end] = staging.cpu().numpy()

    def _launch(
        self, plan: _Plan, pages: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int, load: bool
    ) -> None:
        """Launch the kernel once, or several times if the number of pieces exceeds MAX_INDEX."""
        per_page = num_layers * plan.constants["BUFFERS"]
        page_pieces = per_page * plan.segment_pieces
        at_once = max(1, MAX_INDEX // page_pieces)
        page_tokens = self._table.page_tokens
        for start in range(0, len(pages), at_once):
            part = pages[start : start + at_once]
            num_pieces = len(part) * page_pieces
            num_tiles = cdiv(num_pieces, plan.constants["PIECES"])
            zero_copy_kernel[(min(self._blocks, num_tiles),)](
                plan.host,
                plan.table,
                part,
                slots[start * page_tokens :],
                num_pieces,
                num_tiles,
                per_page,
                first_layer,
                *plan.strides,
                **plan.constants,
                LOAD=load,
                num_warps=_NUM_WARPS,
            )


def _plan(rows: RowClass, host: torch.Tensor, page_tokens: int, layer_bytes: int) -> _Plan:
    """Return the plan of a row class. `host`: the host pages as bytes, beginning with the first layer of the class."""
    width = width_within(host, rows.width)
    aligned_16 = rows.aligned_16 and width == 8 and host.stride(0) % 16 == 0 and host.data_ptr() % 16 == 0
    align = 16 if aligned_16 else width
    row_words = rows.row_bytes // width
    cols = _piece_words(row_words, width)
    tile_words = 32 * _NUM_WARPS * _ACCESSES * align // width
    constants = {
        "BUFFERS": rows.num_buffers,
        "PAGE": page_tokens // rows.span,
        "SPAN": rows.span,
        "ROW": row_words,
        "COLS": cols,
        "PIECES": min(MAX_PIECES, tile_words // cols),
        "ALIGN": align,
    }
    return _Plan(
        host[:1, :width].view(WORDS[width]),
        rows.table,
        (host.stride(0), layer_bytes, rows.row_stride),
        constants["PAGE"] * cdiv(row_words, cols),
        constants,
    )


def _piece_words(row_words: int, width: int) -> int:
    """Return the number of words of a piece. Among the allowed powers of two, it is the one that leaves the fewest
    words unused in the last piece of a row."""
    minimum, maximum = _MIN_PIECE_BYTES // width, _MAX_PIECE_BYTES // width
    if row_words <= minimum:
        return power_of_two(row_words)
    choices = [maximum >> n for n in range((maximum // minimum).bit_length())]
    return min(choices, key=lambda cols: (cdiv(row_words, cols) * cols, -cols))
