"""What the kernels that move pages know about a pool: where its rows lie, and where they go within a host page.

A host page is `[layer][buffer][row]` bytes:

    layer l of a page      [ends[l], ends[l + 1])
    buffer b of it         [off_b, off_b + page_tokens/span_b * row_b)
    row i of it            row_b bytes: row slots[p*page_tokens + i*span_b] // span_b of the buffer

`span_b` is the number of tokens that share a row: 1 where each slot has one, the device page where each page has one. A
slot a token, so where all spans are 1 the pool's own page size does not matter; else the tokens of a page come as whole
device pages, in slot order. May import torch and kernels._triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.kernels._triton import Kernels, check_kernels, widest_word


@dataclass(frozen=True)
class RowClass:
    """Buffers of equal row, row stride and span within layers of one structure: what one launch moves.

    `table`, int64 on the device: row 0 the byte offsets of the buffers within a layer of a page, row 1 + l the
    addresses of layer l's buffers. `width`: bytes of the widest word that divides all of them, and the sizes and
    strides. `paired`: they are multiples of 16 bytes, too.
    """

    row_bytes: int
    row_stride: int
    span: int
    width: int
    num_buffers: int
    table: torch.Tensor
    paired: bool


@dataclass(frozen=True)
class Segment:
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


class PageTable:
    """The buffers of one pool, cut into segments of host pages, and tables of their addresses for kernels.

    Owns the tables; borrows the buffers and keeps them alive. Nothing changes after construction, so threads may share
    it. `uniform`: all layers are alike; then `classes` holds one list, for all of them, else one a layer.
    """

    def __init__(
        self,
        layer_buffers: Sequence[Sequence[torch.Tensor]],
        page_tokens: int,
        kernels: Kernels,
        spans: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `PageMover`."""
        check_kernels(kernels)
        if page_tokens < 1 or not layer_buffers or not all(layer_buffers):
            raise ValueError(f"page_tokens={page_tokens} over {len(layer_buffers)} layers: each must hold something")
        self.page_tokens = page_tokens
        self.kernels = kernels
        self._buffers = tuple(tuple(buffers) for buffers in layer_buffers)
        self.device = self._buffers[0][0].device
        if spans is None:
            spans = [[1] * len(buffers) for buffers in self._buffers]
        self.segments = [_segments(b, s, page_tokens) for b, s in zip(self._buffers, spans, strict=True)]
        self.ends = [0]
        for segments in self.segments:
            self.ends.append(self.ends[-1] + sum(s.page_bytes for s in segments))
        structures = [[s.kind for s in segments] for segments in self.segments]
        self.uniform = all(structure == structures[0] for structure in structures)
        self.classes = self._build_classes() if kernels == "triton" else []

    def group_bytes(self, first_layer: int, num_layers: int) -> int:
        """Bytes that layers [first_layer, first_layer + num_layers) take of one page; ValueError where there are none
        such."""
        layers = len(self.segments)
        if first_layer < 0 or num_layers < 0 or first_layer + num_layers > layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers}) are not within the pool's {layers}")
        return self.ends[first_layer + num_layers] - self.ends[first_layer]

    def num_pages_of(self, slots: torch.Tensor) -> int:
        """Pages that `slots` make up; ValueError unless they are int64, adjacent, and whole pages of this device."""
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.numel() % self.page_tokens:
            raise ValueError(
                f"slots {tuple(slots.shape)} of {slots.dtype}: need int64, one dimension, {self.page_tokens} a page"
            )
        self.check_ids(slots, "slots")
        return slots.numel() // self.page_tokens

    def check_ids(self, ids: torch.Tensor, name: str) -> None:
        """ValueError unless a kernel can read `ids`: adjacent, and on the pool's device."""
        if ids.numel() and ids.stride(0) != 1:
            raise ValueError(f"{name} must be adjacent, not {ids.stride(0)} apart")
        if ids.device != self.device:
            raise ValueError(f"{name} on {ids.device}, the pool on {self.device}")

    def _build_classes(self) -> list[list[RowClass]]:
        """Launch plans: one over all layers where they are alike, else one a layer."""
        if self.uniform:
            return [self._classes_of(self.segments)]
        return [self._classes_of([segments]) for segments in self.segments]

    def _classes_of(self, layers: Sequence[Sequence[Segment]]) -> list[RowClass]:
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
                RowClass(
                    row_bytes,
                    row_stride,
                    span,
                    widest_word(*(layers[0][i].width for i in indices), *steps, *entries),
                    len(indices),
                    torch.tensor(table, dtype=torch.int64, device=self.device),
                    all(n % 16 == 0 for n in (row_bytes, row_stride, *steps, *entries)),
                )
            )
        return classes


def width_within(pages: torch.Tensor, width: int) -> int:
    """The widest word, `width` bytes at most, that rows of bytes can be read in."""
    return widest_word(width, pages.stride(0), pages.data_ptr(), int(pages.storage_offset()))


def _segments(buffers: Sequence[torch.Tensor], spans: Sequence[int], page_tokens: int) -> list[Segment]:
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
        segments.append(Segment(rows, offset, rows.shape[1], page_tokens // span, span, width))
        offset += segments[-1].page_bytes
    return segments
