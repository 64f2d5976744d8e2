"""Batches of extends and decodes over a request table, an allocator and a prefix cache that evicts unlocked pages."""

from __future__ import annotations

import itertools
import logging
import os

import pytest
import torch

from hicache import EvictParams, EvictResult, ReqToTokenPool, SWATokenToKVPoolAllocator
from hicache.errors import OutOfRows, OutOfSlots, ShapeError
from hicache.prefix_cache.batch import (
    alloc_for_decode,
    alloc_for_extend,
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_req_slots,
    alloc_token_slots,
    evict_from_tree_cache,
    release_kv_cache,
    write_cache_indices,
)
from prefix_case import Batch, Cache, FakeRunner, Request, full_cache, swa_cache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = [
    ("cpu", "torch"),
    pytest.param("cpu", "triton", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton runs on the GPU here")),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
]


def fresh(cache: Cache, first_token: int = 0) -> Request:
    """A request without a prefix, with more tokens than it computes."""
    none = torch.empty(0, dtype=torch.int64, device=cache.device)
    return Request(list(range(first_token, first_token + 40)), prefix_indices=none, last_node=cache.root_node)


def extend(cache: Cache, requests: list[Request], seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    prefixes = [len(r.prefix_indices) for r in requests]
    out = alloc_for_extend(Batch(requests, cache, prefixes, torch.tensor(seq_lens, dtype=torch.int64)))
    for request, seq in zip(requests, seq_lens, strict=True):
        request.kv_committed_len = request.kv_allocated_len = seq
    return out


def row_of(cache: Cache, request: Request) -> list[int]:
    slots: list[int] = cache.req_to_token_pool.req_to_token[request.req_pool_idx, : request.kv_allocated_len].tolist()
    return slots


def in_pages(slots: list[int], page_size: int) -> bool:
    """Whether slots of a sequence from its start are in pages, each filled in order from its first slot on."""
    return all(
        s % page_size == i % page_size and (i % page_size == 0 or s == slots[i - 1] + 1) for i, s in enumerate(slots)
    )


@pytest.mark.parametrize(("device", "kernels"), PLACES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_extend_decode_release(device: str, kernels: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows hold prefix and new slots. Decodes append one token or several, and chunked prefill keeps its row. In the
    end each slot is free or in the tree."""
    monkeypatch.setenv("HICACHE_KERNELS", kernels)
    cache = full_cache(80, page_size, device=device)
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    requests = [fresh(cache, first_token) for first_token in (0, 100, 200)]
    out, row_ids, rows = extend(cache, requests, [5, 8, 1])
    assert out.dtype == row_ids.dtype == torch.int64 and out.numel() == 14 and out.device == table.req_to_token.device
    assert rows == row_ids.tolist() == [r.req_pool_idx for r in requests] and len(set(rows)) == 3 and 0 not in rows
    assert list(itertools.chain(*(row_of(cache, r) for r in requests))) == out.tolist()

    # The second chunk of request 0 continues in its row and page; request 2 waits.
    before = row_of(cache, requests[0])
    requests[0].prefix_indices = torch.tensor(before, device=device)
    _, _, again = extend(cache, [requests[0]], [11])
    assert again == rows[:1] and row_of(cache, requests[0])[:5] == before

    for num_new in (1, 1, 3, 1):
        lens = torch.tensor([r.kv_allocated_len for r in requests])
        slots = alloc_for_decode(Batch(requests, cache, [], lens), num_new)
        for request, new in zip(requests, slots.view(3, num_new).tolist(), strict=True):
            request.kv_allocated_len += num_new
            assert row_of(cache, request)[-num_new:] == new
    held = [row_of(cache, r) for r in requests]
    assert all(in_pages(slots, page_size) for slots in held)
    flat = list(itertools.chain(*held))
    assert len(set(flat)) == len(flat) and min(flat) >= page_size

    # The last tokens of request 1 have slots, but were not computed.
    for request, uncommitted in zip(requests, (0, 5, 0), strict=True):
        request.kv_committed_len = request.kv_allocated_len - uncommitted
        release_kv_cache(request, cache)
        release_kv_cache(request, cache)  # the second release does nothing
        assert request.req_pool_idx is None
    assert cache.evictable_size() == sum(n // page_size * page_size for n in (17, 9, 7))
    assert allocator.available_size() + cache.evictable_size() == 80 and table.available_size() == 8
    evict_from_tree_cache(cache, 80)
    assert allocator.available_size() == 80
    evict_from_tree_cache(None, 4)  # without a tree it evicts nothing
    cache.sanity_check()
    table.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_more_is_evicted_than_is_missing(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree must evict only the slots that an allocation lacks, and none if the allocation lacks none."""
    cache = full_cache(40, page_size)
    runner = FakeRunner(cache)
    for first_token, length in ((0, 8), (100, 8), (200, 12)):
        runner.serve(list(range(first_token, first_token + length)))
    asked: list[EvictParams] = []
    evict = cache.evict
    monkeypatch.setattr(cache, "evict", lambda params: (asked.append(params), evict(params))[1])
    extend(cache, [fresh(cache)], [12])
    assert asked == []
    extend(cache, [fresh(cache)], [10])
    assert asked == [EvictParams(num_tokens=10 if page_size == 1 else 12)] and cache.evictable_size() == 12
    cache.token_to_kv_pool_allocator.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_refused_batch_takes_nothing(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """If slots are missing, unlocked pages are evicted first. The error has the requested, available and evictable
    tokens, the log has the tree, and no row is allocated."""
    cache = full_cache(24, page_size)
    runner, first = FakeRunner(cache), Request(list(range(100, 117)))
    runner.serve(list(range(4)))
    runner.prefill(first)
    rows = cache.req_to_token_pool.available_size()
    late = [first, fresh(cache), fresh(cache)]
    with caplog.at_level(logging.ERROR, "hicache"), pytest.raises(OutOfSlots) as caught:
        extend(cache, late, [18, 9, 9])
    free = 24 - (17 if page_size == 1 else 20)
    tokens = 19 if page_size == 1 else 4 * 6
    assert (caught.value.asked, caught.value.available, caught.value.evictable) == (tokens, free, 0)
    assert "[100, 101, 102" in caplog.text and f"#tokens: {first.cache_protected_len}" in caplog.text
    assert cache.req_to_token_pool.available_size() == rows
    assert cache.token_to_kv_pool_allocator.available_size() == free
    assert first.req_pool_idx is not None and late[1].req_pool_idx is None is late[2].req_pool_idx
    with pytest.raises(OutOfRows):
        alloc_req_slots(cache.req_to_token_pool, [fresh(cache) for _ in range(8)], cache)
    cache.sanity_check()
    cache.req_to_token_pool.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_backup_undoes_the_allocation(page_size: int) -> None:
    """Restoring the state of the allocator that an allocation returns frees its slots again."""
    cache = full_cache(40, page_size)
    allocator = cache.token_to_kv_pool_allocator
    if page_size == 1:
        slots, state = alloc_token_slots(cache, 7, backup_state=True)
    else:
        lens = [torch.tensor(x) for x in ([0, 0], [0, 0], [3, 4], [3, 4], [-1, -1])]
        slots, state = alloc_paged_token_slots_extend(cache, *lens, 7, backup_state=True)
    assert slots.numel() == 7 and allocator.available_size() < 40
    allocator.restore_state(state)
    assert allocator.available_size() == 40
    allocator.check()


def test_decode_slots_go_on_in_the_page() -> None:
    """Decoding allocates one slot for each request, after its last slot or in a new page. If no slot is left, it
    raises."""
    cache, seq = full_cache(8, 4), torch.tensor([3, 5])
    held = alloc_paged_token_slots_extend(cache, *(torch.tensor(x) for x in ([0], [0], [2], [2], [-1])), 2)
    assert isinstance(held, torch.Tensor) and held.tolist() == [4, 5]
    assert alloc_paged_token_slots_decode(cache, seq, seq, torch.tensor([5, 23])).tolist() == [6, 8]
    with pytest.raises(OutOfSlots):
        alloc_paged_token_slots_decode(cache, seq[1:], seq[1:], torch.tensor([7]))
    with pytest.raises(NotImplementedError):
        alloc_paged_token_slots_decode(full_cache(8, 1), seq, seq, seq)


def test_lengths_that_disagree_are_refused() -> None:
    """Lengths that do not add up, prefixes without slots, and rows that are too short raise ShapeError and allocate
    nothing. For rows that are too short, the error names the setting."""
    cache = full_cache(40, 4, columns=16)
    short = Request([1, 2, 3], prefix_indices=torch.tensor([4, 5]))
    for prefix_lens, seq_lens, setting in (([3], [5], None), ([2], [17], "max_context_len")):
        with pytest.raises(ShapeError, match=setting):
            alloc_for_extend(Batch([short], cache, prefix_lens, torch.tensor(seq_lens)))
    short.req_pool_idx = 1
    with pytest.raises(ShapeError, match="max_context_len"):
        alloc_for_decode(Batch([short], cache, [], torch.tensor([16])))
    assert cache.token_to_kv_pool_allocator.available_size() == 40 and cache.req_to_token_pool.available_size() == 8


def test_full_and_window_slots_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window allocator the tree evicts the missing numbers of full and of window slots."""
    cache, asked = swa_cache(32, 16, page_size=4), []
    assert isinstance(cache.token_to_kv_pool_allocator, SWATokenToKVPoolAllocator)
    cache.token_to_kv_pool_allocator.alloc(12)
    monkeypatch.setattr(cache, "evict", lambda params: (asked.append(params), EvictResult())[1])
    evict_from_tree_cache(cache, 12)
    assert asked == [EvictParams(num_tokens=0, swa_num_tokens=8)]
    evict_from_tree_cache(cache, 24)
    assert asked[1:] == [EvictParams(num_tokens=4, swa_num_tokens=20)]


def test_indices_of_a_batch_by_position() -> None:
    """`write_cache_indices` takes its eleven arguments by position, in SGLang's order. Lengths on the host may be CPU
    tensors. Lengths that disagree are refused."""
    table = ReqToTokenPool(4, 8, "cpu", False)
    rows, prefix, seq = torch.tensor([2, 1]), torch.tensor([2, 0]), torch.tensor([3, 2])
    tensors = [torch.tensor([7, 8]), torch.empty(0, dtype=torch.int64)]
    slots = torch.tensor([9, 10, 11])
    write_cache_indices(slots, rows, rows, prefix, prefix, seq, seq, seq - prefix, seq - prefix, tensors, table)
    assert table.req_to_token[1, :2].tolist() == [10, 11] and table.req_to_token[2, :3].tolist() == [7, 8, 9]
    with pytest.raises(ShapeError):
        write_cache_indices(slots, rows, [2, 1], prefix, [2, 0], seq, [3, 2], seq, [3, 2], tensors, table)
