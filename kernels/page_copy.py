"""Pages between a device pool's scattered rows and a staging buffer in the order of host pages.

A host page is `[layer][buffer][row]` bytes. For a group of layers, staging row p is that part of page p:

    layer g of the group   [g*S, (g+1)*S)             S: bytes of one layer of a page (where layers are alike)
    buffer b of it         [off_b, off_b + page_tokens/span_b * row_b)
    row i of it            row_b bytes: row slots[p*page_tokens + i*span_b] // span_b of the buffer

`span_b` is the number of tokens that share a row: 1 where each slot has one, the device page where each page has one. A
slot a token, so where all spans are 1 the pool's own page size does not matter; else the tokens of a page come as whole
device pages, in slot order. Rows move as the widest word that divides their sizes, strides and addresses. Buffers of
one row size and span share a launch; layers that differ in structure are launched alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

_COLS_PER_PROGRAM = 1024
_WORDS_PER_PROGRAM = 2048
_MAX_ROWS_PER_PROGRAM = 16


@jit(do_not_specialize=["num_rows", "first_layer"], do_not_specialize_on_alignment=["table", "slots"])
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
    PAIRS: tl.constexpr,
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
    if PAIRS:  # what the compiler cannot see in a table: words come in pairs of 16 bytes
        pool = tl.multiple_of(pool, 16)
    pool_row = pool + at[:, None] * row_stride + column[None, :]

    word_bytes = staging.dtype.element_ty.primitive_bitwidth // 8
    offset = tl.load(table + buffer)
    offset = offset // 16 * 2 if PAIRS else offset // word_bytes
    start = layer.to(tl.int64) * layer_stride + offset
    staged = staging + start + (r // PAGE * page_stride + r % PAGE * ROW)[:, None] + column[None, :]
    if GATHER:
        tl.store(staged, tl.load(pool_row, mask=inside), mask=inside)
    else:
        tl.store(pool_row, tl.load(staged, mask=inside), mask=inside)


@dataclass(frozen=True)
class _RowClass:
    """Buffers of equal row, row stride and span within layers of one structure: what one launch moves.

    `paired`: all their addresses, offsets and sizes are multiples of 16 bytes.
    """

    row_bytes: int
    row_stride: int
    span: int
    width: int
    num_buffers: int
    table: torch.Tensor
    paired: bool


@dataclass(frozen=True)
class _Segment:
    """One buffer of one layer: where its rows are, and where they go within the layer of a page."""

    rows: torch.Tensor
    offset: int
    row_bytes: int
    num_rows: int
    span: int
    width: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """What buffers of one launch have in common."""
        return self.row_bytes, self.rows.stride(0), self.span

    @property
    def page_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class PageMover:
    """Gathers pages from, and scatters them into, the buffers of one pool.

    Owns the table of buffer addresses; borrows the buffers and keeps them alive. Called by one transfer backend; it
    holds no state between calls, so threads may share it. Work goes to the current stream of the pool's device.
    """

    def __init__(
        self,
        layer_buffers: Sequence[Sequence[torch.Tensor]],
        page_tokens: int,
        kernels: Kernels,
        spans: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`layer_buffers`: for each layer, by dense index, its buffers `[num_rows, ...row]`, rows contiguous.

        `spans`: for each of them the number of tokens that share a row, a divisor of `page_tokens`; None: a row a slot.
        """
        check_kernels(kernels)
        if page_tokens < 1 or not layer_buffers or not all(layer_buffers):
            raise ValueError(f"page_tokens={page_tokens} over {len(layer_buffers)} layers: each must hold something")
        self.page_tokens = page_tokens
        self.num_layers = len(layer_buffers)
        self._kernels = kernels
        self._buffers = tuple(tuple(buffers) for buffers in layer_buffers)
        self._device = self._buffers[0][0].device
        if spans is None:
            spans = [[1] * len(buffers) for buffers in self._buffers]
        self._segments = [_segments(b, s, page_tokens) for b, s in zip(self._buffers, spans, strict=True)]
        self._ends = [0]
        for segments in self._segments:
            self._ends.append(self._ends[-1] + sum(s.page_bytes for s in segments))
        structures = [[s.kind for s in segments] for segments in self._segments]
        self.uniform = all(structure == structures[0] for structure in structures)
        self._classes = self._build_classes() if kernels == "triton" else []

    def group_bytes(self, first_layer: int, num_layers: int) -> int:
        """Bytes that layers [first_layer, first_layer + num_layers) take of one page."""
        if first_layer < 0 or num_layers < 0 or first_layer + num_layers > self.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the pool's {self.num_layers}"
            )
        return self._ends[first_layer + num_layers] - self._ends[first_layer]

    def gather(self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Fill staging `[pages, group_bytes]` uint8 from the rows at `slots`, int64 `[pages * page_tokens]`."""
        self._move(slots, staging, first_layer, num_layers, gather=True)

    def scatter(self, staging: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Write the rows at `slots` from staging: the inverse of `gather`. A slot named twice keeps one of its rows."""
        self._move(slots, staging, first_layer, num_layers, gather=False)

    def _move(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, *, gather: bool
    ) -> None:
        self._check(slots, staging, self.group_bytes(first_layer, num_layers))
        if not slots.numel() or not num_layers:
            return
        if self._kernels == "torch":
            self._move_naive(slots, staging, first_layer, num_layers, gather)
        elif self.uniform:
            with torch.cuda.device_of(slots):
                self._launch(self._classes[0], slots, staging, first_layer, num_layers, gather)
        else:
            with torch.cuda.device_of(slots):
                for layer in range(first_layer, first_layer + num_layers):
                    part = staging[:, self._ends[layer] - self._ends[first_layer] :]
                    self._launch(self._classes[layer], slots, part, 0, 1, gather)

    def _check(self, slots: torch.Tensor, staging: torch.Tensor, group_bytes: int) -> None:
        num_pages = slots.numel() // self.page_tokens
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.numel() % self.page_tokens:
            raise ValueError(
                f"slots {tuple(slots.shape)} of {slots.dtype}: need int64, one dimension, {self.page_tokens} a page"
            )
        if staging.dtype != torch.uint8 or tuple(staging.shape) != (num_pages, group_bytes):
            raise ValueError(
                f"staging {tuple(staging.shape)} of {staging.dtype}: need uint8 ({num_pages}, {group_bytes})"
            )
        if (staging.numel() and staging.stride(1) != 1) or (slots.numel() and slots.stride(0) != 1):
            raise ValueError("the bytes of a staging row, and slots, must be adjacent")
        if slots.device != self._device or staging.device != self._device:
            raise ValueError(f"slots on {slots.device}, staging on {staging.device}, the pool on {self._device}")

    def _move_naive(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, gather: bool
    ) -> None:
        """The torch twin of the kernel."""
        num_pages = staging.shape[0]
        for layer in range(first_layer, first_layer + num_layers):
            start = self._ends[layer] - self._ends[first_layer]
            for segment in self._segments[layer]:
                first = start + segment.offset
                part = staging[:, first : first + segment.page_bytes]
                width = _width_within(part, segment.width)
                rows, part = segment.rows.view(WORDS[width]), part.view(WORDS[width])
                at = slots if segment.span == 1 else slots[:: segment.span] // segment.span
                if gather:
                    part.copy_(rows[at].view(num_pages, -1))
                elif rows.device.type == "cpu":  # numpy copies whole rows here, torch word by word: six times slower
                    rows.numpy()[at.numpy()] = part.reshape(-1, segment.row_bytes // width).numpy()
                else:
                    rows.index_copy_(0, at, part.reshape(-1, segment.row_bytes // width))

    def _build_classes(self) -> list[list[_RowClass]]:
        """Launch plans: one over all layers where they are alike, else one a layer."""
        if self.uniform:
            return [self._classes_of(self._segments)]
        return [self._classes_of([segments]) for segments in self._segments]

    def _classes_of(self, layers: Sequence[Sequence[_Segment]]) -> list[_RowClass]:
        """Split the buffers of layers of one structure by row size, row stride and span."""
        members: dict[tuple[int, int, int], list[int]] = {}
        for index, segment in enumerate(layers[0]):
            members.setdefault(segment.kind, []).append(index)
        layer_bytes = sum(s.page_bytes for s in layers[0])
        classes = []
        for (row_bytes, row_stride, span), indices in members.items():
            offsets = [layers[0][i].offset for i in indices]
            table = [offsets] + [[segments[i].rows.data_ptr() for i in indices] for segments in layers]
            # A group of several layers steps by layer_bytes; a single layer does not.
            steps = [layer_bytes] if len(layers) > 1 else []
            entries = [n for row in table for n in row]
            classes.append(
                _RowClass(
                    row_bytes,
                    row_stride,
                    span,
                    widest_word(*(layers[0][i].width for i in indices), *steps, *entries),
                    len(indices),
                    torch.tensor(table, dtype=torch.int64, device=self._device),
                    all(n % 16 == 0 for n in (row_bytes, row_stride, *steps, *entries)),
                )
            )
        return classes

    def _launch(
        self,
        classes: Sequence[_RowClass],
        slots: torch.Tensor,
        staging: torch.Tensor,
        first_layer: int,
        num_layers: int,
        gather: bool,
    ) -> None:
        """One launch a row class over the group's layers, which are rows of the address table from `first_layer`."""
        page_stride = staging.stride(0)
        layer_bytes = self._ends[1] if num_layers > 1 else 0
        for rows in classes:
            width = _width_within(staging, rows.width)
            paired = rows.paired and width == 8 and page_stride % 16 == 0 and staging.data_ptr() % 16 == 0
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
                PAIRS=paired,
                num_warps=4,
            )


def _width_within(staging: torch.Tensor, width: int) -> int:
    """The widest word, `width` bytes at most, that staging rows of bytes can be read in."""
    return widest_word(width, staging.stride(0), staging.data_ptr(), int(staging.storage_offset()))


def _segments(buffers: Sequence[torch.Tensor], spans: Sequence[int], page_tokens: int) -> list[_Segment]:
    """The buffers of one layer as `[num_rows, row_bytes]` bytes, with their offsets within a layer of a page."""
    segments, offset = [], 0
    for index, (buffer, span) in enumerate(zip(buffers, spans, strict=True)):
        if buffer.dim() < 2 or not buffer[:1].is_contiguous():
            raise ValueError(f"buffer {index} of shape {tuple(buffer.shape)}: need [rows, ...row], rows contiguous")
        if span < 1 or page_tokens % span:
            raise ValueError(
                f"buffer {index} has a row for {span} tokens, which are no whole part of a page of {page_tokens}"
            )
        rows = buffer.flatten(1).view(torch.uint8)
        if rows.data_ptr() != buffer.data_ptr():
            raise ValueError(f"buffer {index} of strides {buffer.stride()} cannot be viewed as rows of bytes")
        width = widest_word(rows.shape[1], rows.stride(0), rows.data_ptr(), int(rows.storage_offset()))
        segments.append(_Segment(rows, offset, rows.shape[1], page_tokens // span, span, width))
        offset += segments[-1].page_bytes
    return segments
