"""Decides whether rows of vLLM's CPU tier contain packed chunks, computes their size, and defines their trailer.

The scheduler's process and each worker need the size of a row before a cache exists. So the size is computed only from
vLLM's configuration, which has neither the number of heads nor the head size. A row has the size that tiles of 64
channels need; wider tiles need fewer bytes. The workers determine the actual tiles (`block_shapes`). The layout of one
row:

    part of worker 0 | part of worker 1 | ... | padding to a multiple of 4096 bytes

    [0, part_bytes - 16)   a packed chunk, or the first part of a raw chunk, whose rest is in memory of the worker
    1 byte                 `RowKind`
    7 bytes                digest of the shape of the tiles
    8 bytes                for a raw chunk, a random number that is also stored with the rest; otherwise 0

This module imports nothing of vLLM, so it can be tested without an installed server.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache.kernels.pack import FOUR_BITS, PackFormat, PagePacker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

TRAILER_BYTES = 16  # bytes at the end of each worker's part
TILE_CHANNELS = 64
# The format with 3 bits uses the share of escapes for values, because a tile contains keys and values.
_FORMATS = {
    "3": PackFormat(3, (0.05,)),
    "4": FOUR_BITS,
}
_ATTENTION = ("attn", "mla_attn")  # suffixes of vLLM's names of attention layers
_ELEMENT_BYTES = 2
_ROW_STEP = 4096  # vLLM's rows are multiples of 4096 bytes


class RowKind(enum.IntEnum):
    """The content of a row. PACKED: a packed chunk. RAW: the first part of a chunk that did not fit the packed size."""

    PACKED = 0
    RAW = 1


@dataclass(frozen=True)
class RowPacking:
    """The packing of rows. `part_bytes`: bytes of one worker's part with its trailer. A row has `num_parts` parts."""

    format: PackFormat
    part_bytes: int
    num_parts: int

    @property
    def name(self) -> str:
        """The name of the packing in the identity of a store (`docs/disk_format.md`)."""
        return f"rows={self.format.bits}/{self.format.escapes[0]:g}"

    def are_packed(self, rows: npt.NDArray[np.uint8], ids: Sequence[int]) -> list[bool]:
        """Return for each row of `ids` whether all parts of the row are packed. If a part is raw, the row does not
        contain all bytes of its chunk. `rows`: uint8 `[rows, bytes]`."""
        ends = np.arange(1, self.num_parts + 1) * self.part_bytes - TRAILER_BYTES
        packed: list[bool] = (rows[np.asarray(ids, np.int64)[:, None], ends] == RowKind.PACKED).all(1).tolist()
        return packed


def format_of(kv_packing: str, *, is_cuda: bool) -> PackFormat | None:
    """Return the format that the setting requests; None without packing."""
    if kv_packing == "auto":
        return FOUR_BITS if is_cuda else None
    return _FORMATS.get(kv_packing)


def row_packing(format: PackFormat, config: OffloadingConfig, *, has_other_tiers: bool) -> RowPacking:
    """Return the packing of rows. Raises ValueError with the reason if the rows of this configuration cannot be
    packed."""
    [first, *others] = (group.tokens_per_block for group in config.groups)
    parallel, blocks = config.parallel, config.cache.blocks_per_chunk
    tokens, raw_bytes = first * blocks, config.worker_kv_bytes_per_block * blocks
    names = [name for group in config.groups for name in group.layer_names]
    unknown = [name for name in names if name.rpartition(".")[2] not in _ATTENTION]
    channels, rest = divmod(raw_bytes, tokens * _ELEMENT_BYTES)
    obstacles = {
        f"the cache has {config.model.dtype}, not bfloat16": config.model.dtype != "bfloat16",
        f"layer {unknown[0] if unknown else ''} is not an attention layer": bool(unknown),
        "secondary_tiers copy rows, and a chunk that does not fit has a part outside": has_other_tiers,
        "several workers read one part of a row": config.replicated_layout,
        "the tokens of a block lie on several workers": max(parallel.dcp_size, parallel.pcp_size) > 1,
        "blocks have several numbers of tokens": any(tokens_of != first for tokens_of in others),
        f"a chunk has {tokens} tokens, not a power of two from {PagePacker.LEAST_TOKENS} on; set block_size": (
            tokens < PagePacker.LEAST_TOKENS or bool(tokens & (tokens - 1))
        ),
        f"a token has {raw_bytes} / {tokens} bytes, not a multiple of 128": bool(rest or channels % TILE_CHANNELS),
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise ValueError(obstacle)
    part_bytes = part_bytes_of(format, channels, tokens, blocks)
    rows = [-(-size * parallel.world_size // _ROW_STEP) * _ROW_STEP for size in (part_bytes, raw_bytes)]
    if rows[0] >= rows[1]:
        raise ValueError(f"rows of {rows[1]} bytes would have {rows[0]} bytes packed; set block_size to more tokens")
    return RowPacking(format, part_bytes, parallel.world_size)


def part_bytes_of(format: PackFormat, channels: int, tokens: int, blocks_per_chunk: int) -> int:
    """Return the bytes of one worker's part of a row, for a chunk of `tokens` tokens. Each token has `channels`
    elements, which is a multiple of 64."""
    packed_bytes = channels // TILE_CHANNELS * format.tile_bytes(0, tokens, TILE_CHANNELS)
    step = 16 * blocks_per_chunk  # makes the part divisible into blocks, because vLLM counts in blocks
    return -(-(packed_bytes + TRAILER_BYTES) // step) * step
