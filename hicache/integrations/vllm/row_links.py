"""Creates the links between the tensors of vLLM's cache and a worker's part of the CPU tier's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches

from hicache.errors import ConfigError
from hicache.integrations.vllm.block_shapes import HeadLayout, shapes_of
from hicache.integrations.vllm.offloading_copies import ChunkLink
from hicache.integrations.vllm.packed_rows import Misfits, PackedChunkLink
from hicache.integrations.vllm.row_packing import RowPacking

Link: TypeAlias = ChunkLink | PackedChunkLink


def raw_links(
    kv_caches: CanonicalKVCaches,
    host: torch.Tensor,
    blocks_per_chunk: int,
    *,
    rows_per_chunk: int,
    staging_bytes: int,
) -> list[list[Link]]:
    """Return the links of each group of layers, for rows in the layout of vLLM's own worker: one tensor after another.
    `host`: see `ChunkRows`. Raises ConfigError if hicache cannot copy the cache."""
    tensors = _tensors(kv_caches)
    offsets = np.cumsum([0, *(tensor.shape[1] * blocks_per_chunk for tensor in tensors)]).tolist()
    if offsets[-1] > host.shape[1]:
        raise ConfigError(
            f"a chunk of {blocks_per_chunk} blocks has {offsets[-1]} bytes, and vLLM gives rows of "
            f"{host.shape[1]}; use TieringOffloadingSpec for this model"
        )
    links: dict[tuple[int, int], ChunkLink] = {}
    groups: list[list[Link]] = []
    for refs in kv_caches.group_data_refs:
        spans = list(_runs({ref.tensor_idx for ref in refs}))
        for first, end in spans:
            if (first, end) not in links:
                links[first, end] = ChunkLink(
                    tensors[first:end],
                    host[:, offsets[first] : offsets[end]],
                    blocks_per_chunk,
                    rows_per_chunk=rows_per_chunk,
                    staging_bytes=staging_bytes,
                )
        groups.append([links[span] for span in spans])
    return groups


def packed_links(
    kv_caches: CanonicalKVCaches,
    host: torch.Tensor,
    blocks_per_chunk: int,
    packing: RowPacking,
    block_tokens: int,
    heads: Sequence[HeadLayout],
    *,
    rows_per_chunk: int,
    staging_bytes: int,
) -> list[list[Link]]:
    """Return the links of each group of layers, for packed rows. `heads[i]`: the head layout of tensor i. Raises
    ConfigError if the cache cannot be packed."""
    tensors, misfits = _tensors(kv_caches), Misfits()
    links: dict[tuple[int, ...], Link] = {}
    groups: list[list[Link]] = []
    for refs in kv_caches.group_data_refs:
        indices = tuple(sorted({ref.tensor_idx for ref in refs}))
        if indices and indices not in links:
            of_group = [tensors[i] for i in indices]
            links[indices] = PackedChunkLink(
                of_group,
                [
                    shapes_of(
                        tensor.shape[1], tensor.stride(0), block_tokens, heads[i], packing.format, blocks_per_chunk
                    )
                    for i, tensor in zip(indices, of_group, strict=True)
                ],
                host,
                blocks_per_chunk,
                packing,
                misfits,
                rows_per_chunk=rows_per_chunk,
                staging_bytes=staging_bytes,
            )
        groups.append([links[indices]] if indices else [])
    return groups


def _tensors(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    """Return the cache tensors as uint8 `[num_blocks, page_bytes]`; there may be gaps between blocks."""
    return [
        entry.tensor.view(torch.int8).view(-1, entry.page_size_bytes).view(torch.uint8)
        if entry.tensor.is_contiguous()
        else entry.tensor.view(torch.uint8)
        for entry in kv_caches.tensors
    ]


def _runs(indices: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the half-open intervals [first, end) of consecutive indices."""
    for _, run in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        yield members[0], members[-1] + 1
