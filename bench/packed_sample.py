"""Keys and values for the benchmark of packed pages, repeated to fill the geometry that the benchmark measures.

How well a page packs depends only on the exponents of its values. The distances of exponents to the largest exponent of
their channel were measured on keys and values of SmolLM2-135M-Instruct for the text of this repository's docs, in
bfloat16 as in servers. The sample draws exponents from the distribution of these distances; all other bits are random.
A row of the measured geometry concatenates heads of the sample, from several layers. The 64 tokens of a tile are
consecutive in the sample, and no page contains the same tokens of one head twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hicache.device import KVCache
from hicache.kernels.pack import FOUR_BITS, THREE_BITS, PackFormat

TILE_TOKENS, TILE_CHANNELS = 64, 128
FORMATS = {"3": THREE_BITS, "4": FOUR_BITS}
_LAYERS, _HEADS, _HEAD_DIM = 30, 3, 64  # geometry of SmolLM2-135M
# First for keys, then for values: the shares of elements whose exponent is 0, 1, 2, … below the largest exponent of
# their channel within 64 tokens. The last entry is for a distance of 15 or more. Keys in the last entry are zeros,
# because rotary positions in bfloat16 add two products that cancel.
DISTANCES = (
    (0.152, 0.348, 0.238, 0.129, 6.63e-2, 3.38e-2, 1.7e-2, 8.52e-3, 4.26e-3, 2e-3, 8.86e-4, 3.41e-4, 1.29e-4, 5.12e-5,
     1.9e-5, 4.12e-4),
    (8.31e-2, 0.251, 0.274, 0.184, 0.102, 5.32e-2, 2.69e-2, 1.35e-2, 6.75e-3, 3.39e-3, 1.66e-3, 8.48e-4, 4.22e-4,
     2.1e-4, 9.65e-5, 1.02e-4),
)  # fmt: skip
_TOP = 128  # the typical largest exponent of a channel


@dataclass(frozen=True)
class KvSample:
    """Keys and values of heads of all layers. `heads`: int16 [heads, 2, blocks, 64, head_dim], bits of bfloat16."""

    heads: torch.Tensor

    @property
    def num_rows(self) -> int:
        """The number of tokens after which rows repeat."""
        return self.heads.shape[2] * TILE_TOKENS

    def to(self, device: torch.device) -> KvSample:
        return KvSample(self.heads.to(device))

    def rows(self, layer: int, which: int, channels: int) -> torch.Tensor:
        """Return the keys (`which` 0) or values (1) of a layer: int16 [num_rows, channels]."""
        count, dim = self.heads.shape[0], self.heads.shape[-1]
        across, found = -(-channels // dim), []
        for column in range(layer * across, (layer + 1) * across):
            turn, head = divmod(column, count)
            found.append(self.heads[head, which].roll(-turn, 0).reshape(-1, dim))
        return torch.cat(found, 1)[:, :channels]

    def fill(self, pool: KVCache, slots: torch.Tensor) -> None:
        """Write the rows of all layers to `slots`, the slots of consecutive tokens, int64 on the pool's device."""
        for buffer, rows, at in self._of(pool, len(slots)):
            buffer[slots] = rows[at].view(-1, *buffer.shape[1:])

    def escapes(self, format: PackFormat, num_layers: int, channels: int) -> tuple[list[float], float]:
        """Return the mean shares of escapes among keys and among values, and the share of pages that do not fit the
        size of a packed page."""
        limit = (1 << format.bits) - 1
        means, misfits = list[float](), torch.zeros(self.num_rows // TILE_TOKENS)
        for which in range(2):
            shares = []
            for layer in range(num_layers):
                rows = self.rows(layer, which, channels)
                for part in rows.split(TILE_CHANNELS, 1):
                    exponents = ((part >> 7) & 0xFF).view(-1, TILE_TOKENS, part.shape[1])
                    escaped = (exponents.amax(1, keepdim=True) - exponents >= limit).sum((1, 2)).cpu()
                    misfits += escaped > format.max_escapes(which, TILE_TOKENS, part.shape[1])
                    shares.append(escaped / (TILE_TOKENS * part.shape[1]))
            means.append(float(torch.stack(shares).mean()))
        return means, float((misfits > 0).float().mean())

    def _of(self, pool: KVCache, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield, for each buffer of a pool of keys and values, the buffer, the rows of the sample for it, and the index
        of the row for each token."""
        at = torch.arange(num_tokens, device=pool.device) % self.num_rows
        for index, layer in enumerate(pool.layout.layers):
            for which, buffer in enumerate(pool.layer_buffers(layer)):
                rows = self.rows(index, which, buffer[0].numel()).contiguous()
                yield buffer, rows.view(torch.bfloat16), at


def drawn_sample() -> KvSample:
    rng, shape = np.random.default_rng(0), (_LAYERS, TILE_TOKENS * 16, _HEADS, _HEAD_DIM)
    kinds = []
    for shares in DISTANCES:
        distance = rng.choice(len(shares), shape, p=np.array(shares) / sum(shares))
        exponent = np.where(distance == len(shares) - 1, 0, _TOP - distance)
        kinds.append((rng.integers(0, 1 << 16, shape) & 0x807F) | (exponent << 7))
    kv = np.stack(kinds, 1).astype(np.uint16)
    return KvSample(_by_head(kv))


def _by_head(kv: npt.NDArray[np.uint16]) -> torch.Tensor:
    layers, _, tokens, heads, dim = kv.shape
    blocks = torch.from_numpy(kv.view(np.int16)).view(layers, 2, tokens // TILE_TOKENS, TILE_TOKENS, heads, dim)
    return blocks.permute(0, 4, 1, 2, 3, 5).reshape(layers * heads, 2, -1, TILE_TOKENS, dim)
