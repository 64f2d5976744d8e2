"""How a copy is cut: groups of layers, chunks of pages, runs of contiguous host pages. Index arithmetic only.

Measured on PCIe 5 (see docs/performance.md): strided copies reach the link's speed from rows of 64 KiB on, so narrow
layers travel in groups; on the way down groups near 1 MiB hide the gather kernels.

May import numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

MIN_PIECE_BYTES = 64 << 10
DOWN_PIECE_BYTES = 1 << 20
DOWN_MAX_GROUP = 8


def up_group(layer_page_bytes: int, num_layers: int) -> int:
    """Layers that travel up together: one, unless the pieces would be too narrow for the copy engine."""
    return min(num_layers, max(1, -(-MIN_PIECE_BYTES // layer_page_bytes)))


def down_group(layer_page_bytes: int, num_layers: int) -> int:
    """Layers that travel down together: enough for pieces near 1 MiB, at most 8 unless those would be too narrow."""
    wide = min(DOWN_MAX_GROUP, DOWN_PIECE_BYTES // layer_page_bytes)
    return min(num_layers, max(1, wide, -(-MIN_PIECE_BYTES // layer_page_bytes)))


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """Half-open intervals of at most `step` that cover [0, total)."""
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def runs(pages: Ids, rows_per_chunk: int) -> tuple[Ids, Ids, Ids]:
    """Cut `pages` where the next id does not follow or lies in another pinned chunk.

    Returns (first page id, number of pages, position in `pages`) of each run.
    """
    if not len(pages):
        return pages, pages, pages
    breaks = (np.diff(pages) != 1) | (pages[1:] % rows_per_chunk == 0)
    position = np.concatenate([[0], np.flatnonzero(breaks) + 1]).astype(np.int64)
    count = np.diff(np.append(position, len(pages))).astype(np.int64)
    return pages[position], count, position
