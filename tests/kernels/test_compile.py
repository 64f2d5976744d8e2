"""No request compiles a kernel, because all kernels are compiled before the first request."""

from __future__ import annotations

import itertools

import pytest
import torch

from compiled_keys import compiled_keys
from hicache.kernels import pack, page_copy, pool_attention, upload, zero_copy
from hicache.kernels.pack import FOUR_BITS, THREE_BITS, PagePacker
from hicache.kernels.pool_attention import AttentionRule, PoolQueries
from hicache.kernels.zero_copy import ZeroCopyMover
from page_case import BF16, POOLS, U8, Pool

COUNTS = (1, 2, 3, 16, 17, 31)  # numbers of pages: Triton compiles separate kernels for 1 and for multiples of 16


@pytest.fixture
def device(triton_device: str) -> str:
    return triton_device


@pytest.mark.parametrize("name", POOLS)
def test_pages_in_any_number(device: str, name: str) -> None:
    """Moving any number of pages, with staging or without it, and of any layers together, compiles no kernel."""
    pool = Pool.named(name, 6, device)
    with compiled_keys(page_copy, zero_copy) as keys:
        mover = pool.mover(pool.page, "triton")
        host = torch.zeros(4, mover.group_bytes(0, pool.num_layers), dtype=U8)
        direct = ZeroCopyMover(mover, host.pin_memory() if device == "cuda" else host)
        mover.compile()
        direct.compile()
        compiled = [*keys]
        assert compiled
        layers, most = range(pool.num_layers), pool.num_layers if mover.uniform else 1
        groups = [(first, num) for first in layers for num in range(1, min(most, pool.num_layers - first) + 1)]
        for count, (first, num) in itertools.product(COUNTS, groups):
            slots, pages = (torch.zeros(n, dtype=torch.int64, device=device) for n in (count * pool.page, count))
            staging = torch.empty(count, mover.group_bytes(first, num), dtype=U8, device=device)
            mover.gather(slots, staging, first, num)
            mover.scatter(staging, slots, first, num)
            direct.store(slots, pages, first, num)
            direct.load(pages, slots, first, num)
        assert keys == compiled


@pytest.mark.parametrize("channels", [4, 24, 128, 320])
def test_packed_pages_in_any_number(device: str, channels: int) -> None:
    """Packing and unpacking any number of pages, from any page of a longer list on, compiles no kernel. Rows that are
    further apart need no other kernel."""
    with compiled_keys(pack) as keys:
        for format, apart in itertools.product((FOUR_BITS, THREE_BITS), (1, 2)):
            complete = torch.zeros(3, 2, 64, apart * channels, dtype=BF16, device=device)
            packer = PagePacker([[*layer[..., :channels]] for layer in complete], 16, "triton", format)
            packer.compile()
            compiled = [*keys]
            for count, num in itertools.product(COUNTS, (1, 2, 3)):
                slots = torch.zeros(count * 16, dtype=torch.int64, device=device)
                staging = torch.empty(count, packer.group_bytes(0, num), dtype=U8, device=device)
                misfits = torch.zeros(1 + count, dtype=torch.int32, device=device)[1:]
                packer.gather(slots, staging, 0, num, misfits)
                packer.scatter(staging, slots, 3 - num, num)
            assert keys == compiled
        assert len(keys) == 4


def test_lists_of_ids(device: str) -> None:
    """Lists of ids of any length compile no kernel."""
    with compiled_keys(upload) as keys:
        for count in COUNTS:
            ids = torch.zeros(count, dtype=torch.int64)
            upload.upload(ids.pin_memory() if device == "cuda" else ids, torch.zeros_like(ids, device=device), "triton")
        assert len(keys) == 1


def test_any_part_of_a_pass_is_attended_to_by_one_kernel(device: str) -> None:
    """The sequences of a launch may begin anywhere among those of the pass, and need no other kernel."""
    with compiled_keys(pool_attention) as keys:
        query, pool = torch.zeros(1, 4, 64, dtype=BF16, device=device), torch.zeros(8, 2, 64, dtype=BF16, device=device)
        table, ids = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((1, 8), 9))
        for first in range(4):
            queries = PoolQueries(table, ids[first : first + 1], ids[first : first + 2], ids[first : first + 1], 1)
            pool_attention.pool_attention(query, pool, pool, queries, AttentionRule(1.0), "triton")
        assert len(keys) == 1
