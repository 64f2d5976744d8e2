"""Copies pages between the scattered rows of a device pool and a staging buffer in the order of host pages.

A copy handles a group of layers. Staging row p is the part of host page p that belongs to these layers,
`[layer][buffer][row]`; see `kernels._pages` for the order of bytes. Rows are copied in the widest word that divides
their sizes, strides and addresses. Buffers of equal row size and span share a launch, unless their layers differ in
structure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hicache.kernels._pages import PageTable, RowClass
from hicache.kernels._triton import WORDS, Kernels, cdiv, jit, on_device, power_of_two, tl

_COLS_PER_PROGRAM = 1024
_WORDS_PER_PROGRAM = 2048
_MAX_ROWS_PER_PROGRAM = 16


@jit(
    do_not_specialize=["num_rows", "page_stride", "layer_stride", "first_layer"],
    do_not_specialize_on_alignment=["table", "slots"],
)
def _move_kernel(  # noqa: PLR0917 - Triton binds constants by position
    staging,
    table,
    slots,
    num_rows,
    page_stride,
    layer_stride,
    row_stride,
    first_layer,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED_16: tl.constexpr,
):
    # Program (b, q, c): rows [b*ROWS, (b+1)*ROWS), layer q // BUFFERS of the group, words [c*COLS, (c+1)*COLS).
    layer = tl.program_id(1) // BUFFERS
    buffer = tl.program_id(1) % BUFFERS
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLS + tl.arange(0, COLS)
    inside = (r < num_rows)[:, None] & (column < ROW)[None, :]
    at = tl.load(slots + r * SPAN, mask=r < num_rows, other=0).to(tl.int64) // SPAN

    # Row 0 of the table: byte offsets within a layer of a page. Row 1 + l: addresses of layer l's buffers.
    address = tl.load(table + (1 + first_layer + layer) * BUFFERS + buffer)
    pool = address.to(tl.pointer_type(staging.dtype.element_ty))
    if ALIGNED_16:  # Tell the compiler the alignment of addresses and strides, which it cannot infer.
        pool = tl.multiple_of(pool, 16)
        page_stride, layer_stride = page_stride // 2 * 2, layer_stride // 2 * 2
    pool_row = pool + at[:, None] * row_stride + column[None, :]

    word_bytes = staging.dtype.element_ty.primitive_bitwidth // 8
    offset = tl.load(table + buffer)
    offset = offset // 16 * 2 if ALIGNED_16 else offset // word_bytes
    start = layer.to(tl.int64) * layer_stride + offset
    staged = staging + start + (r // PAGE * page_stride + r % PAGE * ROW)[:, None] + column[None, :]
    if GATHER:
        tl.store(staged, tl.load(pool_row, mask=inside), mask=inside)
    else:
        tl.store(pool_row, tl.load(staged, mask=inside), mask=inside)


def _word_of(staging: torch.Tensor) -> int:
    """Return the bytes of the widest word in which rows of `staging` can be read: 8, 4, 2 or 1."""
    return math.gcd(8, staging.stride(0), staging.data_ptr(), int(staging.storage_offset()))


class PageMover:
    """Gathers pages from, and scatters them into, the buffers of one pool.

    Owns the table of buffer addresses (`table`), and keeps the buffers alive. Layer l of a page has the page's bytes
    `[ends[l], ends[l + 1])`. A mover has no state between calls, so threads may share it. Kernels run on the current
    stream of the pool's device.
    """

    def __init__(
        self,
        layer_buffers: Sequence[Sequence[torch.Tensor]],
        page_tokens: int,
        kernels: Kernels,
        spans: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Build the tables of a pool's buffers. `layer_buffers`: for each layer by dense index, its buffers `[num_rows,
        ...row]` with contiguous rows. `page_tokens`: tokens of a host page.

        `spans`: for each buffer the number of tokens that share a row, which must divide `page_tokens`. None means 1
        for all buffers.
        """
        self.table = PageTable(layer_buffers, page_tokens, kernels, spans)
        self.page_tokens = page_tokens
        self.num_layers = len(self.table.segments)
        self.uniform = self.table.uniform
        self.ends = self.table.ends

    def group_bytes(self, first_layer: int, num_layers: int) -> int:
        """Return the bytes of layers [first_layer, first_layer + num_layers) of one page. Raises ValueError if the pool
        has fewer layers."""
        end = first_layer + num_layers
        if first_layer < 0 or num_layers < 0 or end > self.num_layers:
            raise ValueError(f"layers [{first_layer}, {end}) are not within the pool's {self.num_layers}")
        return self.table.ends[end] - self.table.ends[first_layer]

    def compile(self) -> None:
        """Compile the kernels for any number of pages, with staging aligned to 16 bytes. If all layers have the same
        structure, the kernels serve groups of any layers, otherwise single layers. To compile, copies the rows of slot
        0 to staging and back."""
        slots = torch.zeros(self.page_tokens, dtype=torch.int64, device=self.table.device)
        for layer in range(1 if self.uniform else self.num_layers):
            staging = torch.empty(1, self.group_bytes(layer, 1), dtype=torch.uint8, device=self.table.device)
            self.gather(slots, staging, layer, 1)
            self.scatter(staging, slots, layer, 1)

    def gather(self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Fill staging `[pages, group_bytes]` uint8 from the rows at `slots`, int64 `[pages * page_tokens]`."""
        self._move(slots, staging, first_layer, num_layers, gather=True)

    def scatter(self, staging: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Write the rows at `slots` from staging, as the inverse of `gather`. A slot that occurs twice gets one of its
        rows."""
        self._move(slots, staging, first_layer, num_layers, gather=False)

    def _move(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, *, gather: bool
    ) -> None:
        self._check(slots, staging, self.group_bytes(first_layer, num_layers))
        if not slots.numel() or not num_layers:
            return
        ends, classes = self.table.ends, self.table.classes
        if self.table.kernels == "torch":
            self._move_naive(slots, staging, first_layer, num_layers, gather)
        else:
            with on_device(slots.device):
                if self.uniform:
                    self._launch(classes[0], slots, staging, first_layer, num_layers, gather)
                    return
                for layer in range(first_layer, first_layer + num_layers):
                    part = staging[:, ends[layer] - ends[first_layer] :]
                    self._launch(classes[layer], slots, part, 0, 1, gather)

    def _check(self, slots: torch.Tensor, staging: torch.Tensor, group_bytes: int) -> None:
        num_pages = self.table.num_pages_of(slots)
        if staging.dtype != torch.uint8 or tuple(staging.shape) != (num_pages, group_bytes):
            raise ValueError(
                f"staging {tuple(staging.shape)} of {staging.dtype}: need uint8 ({num_pages}, {group_bytes})"
            )
        if staging.numel() and staging.stride(1) != 1:
            raise ValueError("the bytes of a staging row must be contiguous")
        if staging.device != self.table.device:
            raise ValueError(f"staging on {staging.device}, the pool on {self.table.device}")

    def _move_naive(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, gather: bool
    ) -> None:
        """Copy pages in torch, with the result of the kernel."""
        num_pages, staging_width = staging.shape[0], _word_of(staging)
        for layer in range(first_layer, first_layer + num_layers):
            start = self.table.ends[layer] - self.table.ends[first_layer]
            for segment in self.table.segments[layer]:
                first = start + segment.offset
                part = staging[:, first : first + segment.page_bytes]
                width = math.gcd(staging_width, segment.width, first)
                rows, part = segment.rows.view(WORDS[width]), part.view(WORDS[width])
                at = slots if segment.span == 1 else slots[:: segment.span] // segment.span
                if gather:
                    part.copy_(rows[at].view(num_pages, -1))
                # numpy copies complete rows, six times faster than torch, which copies words
                elif rows.device.type == "cpu":
                    rows.numpy()[at.numpy()] = part.reshape(-1, segment.row_bytes // width).numpy()
                else:
                    rows.index_copy_(0, at, part.reshape(-1, segment.row_bytes // width))

    def _launch(
        self,
        classes: Sequence[RowClass],
        slots: torch.Tensor,
        staging: torch.Tensor,
        first_layer: int,
        num_layers: int,
        gather: bool,
    ) -> None:
        """Launch the kernel once for each row class, over the layers of the group, with rows of the address table from
        `first_layer` on."""
        page_stride, address, staging_width = staging.stride(0), staging.data_ptr(), _word_of(staging)
        layer_bytes = self.table.ends[1] if num_layers > 1 else 0
        for rows in classes:
            width = math.gcd(staging_width, rows.width)
            aligned_16 = rows.aligned_16 and width == 8 and page_stride % 16 == 0 and address % 16 == 0
            row_words = rows.row_bytes // width
            cols = min(power_of_two(row_words), _COLS_PER_PROGRAM)
            num_rows = slots.numel() // rows.span
            at_once = max(1, min(_MAX_ROWS_PER_PROGRAM, _WORDS_PER_PROGRAM // cols))
            grid = (cdiv(num_rows, at_once), num_layers * rows.num_buffers, cdiv(row_words, cols))
            _move_kernel[grid](
                staging[:1, :width].view(WORDS[width]),
                rows.table,
                slots,
                num_rows,
                page_stride // width,
                layer_bytes // width,
                rows.row_stride // width,
                first_layer,
                BUFFERS=rows.num_buffers,
                PAGE=self.page_tokens // rows.span,
                SPAN=rows.span,
                ROW=row_words,
                ROWS=at_once,
                COLS=cols,
                GATHER=gather,
                ALIGNED_16=aligned_16,
                num_warps=4,
            )
