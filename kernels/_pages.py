"""Tables in which the page-copy kernels look up the addresses of a pool's rows, and the offsets of these rows within a
host page.

A host page is `[layer][buffer][row]` bytes:

    layer l of a page      [ends[l], ends[l + 1])
    buffer b of it         [off_b, off_b + page_tokens/span_b * row_b)
    row i of it            row_b bytes: row slots[p*page_tokens + i*span_b] // span_b of the buffer

`span_b` is the number of tokens that share a row: 1 for a row per slot, the device page size for a row per device page.
Callers give one slot per token, so the pool's page size does not matter if all spans are 1. Otherwise the slots of a
host page must form complete device pages, in the order of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.kernels._triton import Kernels, check_kernels, widest_word


@dataclass(frozen=True)
class RowClass:
    """Buffers with equal row size, row stride and span, in layers of equal structure. One launch copies all of them.

    `table`, int64 on the device: row 0 has the byte offsets of the buffers within a layer of a page, and row 1 + l has
    the addresses of layer l's buffers. `width`: bytes of the widest word that divides all these offsets and addresses,
    and the sizes and strides. `aligned_16`: whether all offsets, addresses, sizes and strides are multiples of 16
    bytes.
    """

    row_bytes: int
    row_stride: int
    span: int
    width: int
    num_buffers: int
    table: torch.Tensor
    aligned_16: bool


@dataclass(frozen=True)
class Segment:
    """One buffer of one layer: the rows of the buffer, the byte offset of its rows within this layer of a page, and the
    bytes of its rows in a page."""

    rows: torch.Tensor
    offset: int
    row_bytes: int
    page_bytes: int
    span: int
    width: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """Return the properties in which all buffers of one launch must agree."""
        return self.row_bytes, self.rows.stride(0), self.span


class PageTable:
    """The segments of host pages that a pool's buffers fill, and tables of the buffers' addresses for kernels.

    Owns the tables, and keeps the buffers alive. Immutable, so threads may share it. `uniform`: whether all layers have
    the same structure. If so, `classes` has one list for all layers, otherwise one list for each layer.
    """

    def __init__(
        self,
        layer_buffers: Sequence[Sequence[torch.Tensor]],
        page_tokens: int,
        kernels: Kernels,
        spans: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Build the tables of a pool's buffers. `PageMover` describes the arguments."""
        check_kernels(kernels)
        if page_tokens < 1 or not layer_buffers or not all(layer_buffers):
            raise ValueError(f"page_tokens={page_tokens} over {len(layer_buffers)} layers: each needs at least 1")
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

    def num_pages_of(self, slots: torch.Tensor) -> int:
        """Return the number of pages of `slots`. Raises ValueError unless `slots` is a contiguous int64 tensor on the
        pool's device with a multiple of `page_tokens` slots."""
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.numel() % self.page_tokens:
            raise ValueError(
                f"slots {tuple(slots.shape)} of {slots.dtype}: need int64, one dimension, {self.page_tokens} a page"
            )
        self.check_ids(slots, "slots")
        return slots.numel() // self.page_tokens

    def check_ids(self, ids: torch.Tensor, name: str) -> None:
        """Raise ValueError unless `ids` are contiguous and on the pool's device, as kernels require."""
        if ids.numel() and ids.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous, but their stride is {ids.stride(0)}")
        if ids.device != self.device:
            raise ValueError(f"{name} on {ids.device}, the pool on {self.device}")

    def _build_classes(self) -> list[list[RowClass]]:
        """Return the row classes: one list for all layers if they are uniform, otherwise one list per layer."""
        if self.uniform:
            return [self._classes_of(self.segments)]
        return [self._classes_of([segments]) for segments in self.segments]

    def _classes_of(self, layers: Sequence[Sequence[Segment]]) -> list[RowClass]:
        """Group the buffers of layers of equal structure by row size, row stride and span."""
        members: dict[tuple[int, int, int], list[int]] = {}
        for index, segment in enumerate(layers[0]):
            members.setdefault(segment.kind, []).append(index)
        layer_bytes = sum(s.page_bytes for s in layers[0])
        classes = []
        for (row_bytes, row_stride, span), indices in members.items():
            offsets = [layers[0][i].offset for i in indices]
            table = [offsets] + [[segments[i].rows.data_ptr() for i in indices] for segments in layers]
            # Several layers are layer_bytes apart in a page; a single layer has no stride.
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
    """Return the widest word, at most `width` bytes, in which the rows of `pages` can be read."""
    return widest_word(width, pages.stride(0), pages.data_ptr(), int(pages.storage_offset()))


def _segments(buffers: Sequence[torch.Tensor], spans: Sequence[int], page_tokens: int) -> list[Segment]:
    """Return the buffers of one layer as `[num_rows, row_bytes]` bytes, with their offsets within a layer of a page."""
    segments, offset = [], 0
    for index, (buffer, span) in enumerate(zip(buffers, spans, strict=True)):
        if buffer.dim() < 2 or not buffer[:1].is_contiguous():
            raise ValueError(f"buffer {index} of shape {tuple(buffer.shape)}: need [rows, ...row], rows contiguous")
        if span < 1 or page_tokens % span:
            raise ValueError(
                f"buffer {index} has a row for {span} tokens, which does not divide a page of {page_tokens}"
            )
        rows = buffer.flatten(1).view(torch.uint8)
        if rows.data_ptr() != buffer.data_ptr():
            raise ValueError(f"buffer {index} of strides {buffer.stride()} cannot be viewed as rows of bytes")
        width = widest_word(rows.shape[1], rows.stride(0), rows.data_ptr(), int(rows.storage_offset()))
        page_bytes = page_tokens // span * rows.shape[1]
        segments.append(Segment(rows, offset, rows.shape[1], page_bytes, span, width))
        offset += segments[-1].page_bytes
    return segments
