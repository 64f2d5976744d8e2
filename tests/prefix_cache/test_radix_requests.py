"""RadixCache and requests: what they share as they grow, and free at every exit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hicache import (
    EvictParams,
    EvictResult,
    RadixCache,
    TokenToKVPoolAllocator,
    alloc_for_extend,
    release_kv_cache,
)
from hicache.errors import OutOfSlots
from prefix_case import Batch, Cache, Request, Toy, full_cache, key, mamba_cache, matched, nodes_of, swa_cache
from radix_case import insert


def run(toy: Toy, tokens: list[int], chunk: int = 100, new: int = 0, **more: Any) -> int:
    """A request from its start to its end; returns how long its hit was."""
    req = Request(tokens, **more)
    hit_len = toy.admit(req)
    while req.kv_committed_len < len(tokens):
        end = min(len(tokens), req.kv_committed_len + chunk)
        toy.extend(req, end)
        toy.cache.cache_unfinished_req(req, chunked=end < len(tokens))
        toy.check_readable(req, end)
    for token in range(new):
        toy.decode(req, token)
    release_kv_cache(req, toy.cache)
    toy.cache.sanity_check()
    return hit_len


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_go_through_the_tree(page_size: int) -> None:
    """A prompt by chunks, decoded, released: the same again hits all whole pages but the last token's, and in the end
    all slots are free or in the tree."""
    cache = full_cache(32 * page_size, page_size)
    toy = Toy(cache)
    tokens = list(range(6 * page_size + 1))
    assert run(toy, tokens, chunk=2 * page_size + 1, new=page_size) == 0
    assert cache.total_size() == (7 * page_size + 1) // page_size * page_size == cache.evictable_size()
    assert run(toy, tokens, chunk=3) == 6 * page_size
    assert run(toy, tokens[: 3 * page_size] + [99] * page_size) == 3 * page_size
    assert cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size() == 32 * page_size
    assert cache.protected_size() == 0 and cache.req_to_token_pool.available_size() == 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_two_requests_compute_the_same(page_size: int) -> None:
    """Of two that computed one prefix beside each other, the later uses the slots of the earlier and frees its
    own, in the row too."""
    cache = full_cache(32 * page_size, page_size)
    toy = Toy(cache)
    shared = list(range(3 * page_size))
    one, two = Request([*shared, 50, 51]), Request([*shared, *range(60, 60 + page_size)])
    for req in (one, two):
        assert toy.admit(req) == 0
        toy.extend(req, len(req.tokens))
    before = toy.row(two, 0, len(two.tokens)).tolist()
    cache.cache_unfinished_req(one)
    available = cache.token_to_kv_pool_allocator.available_size()
    cache.cache_unfinished_req(two)
    assert cache.token_to_kv_pool_allocator.available_size() == available + 3 * page_size
    ours = toy.row(one, 0, 3 * page_size).tolist()
    assert two.prefix_indices.tolist() == ours + before[3 * page_size :] == toy.row(two, 0, len(two.tokens)).tolist()
    assert two.cache_protected_len == 4 * page_size == two.last_node.depth_tokens and two.last_node.lock_ref == 1
    cache.sanity_check()
    for req in (one, two):
        toy.check_readable(req, len(req.tokens))
        release_kv_cache(req, cache)
        release_kv_cache(req, cache)  # there is nothing left to do
    assert cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size() == 32 * page_size
    cache.sanity_check()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("disable", [False, True])
def test_a_request_that_is_called_off_leaves_nothing(page_size: int, disable: bool) -> None:
    """Not inserted: the tree keeps what it held before, everything else is free, and nothing is locked."""
    cache = full_cache(32 * page_size, page_size, disable=disable)
    toy = Toy(cache)
    tokens = list(range(3 * page_size))
    run(toy, tokens)
    req = Request([*tokens, *range(50, 50 + 2 * page_size + 1)])
    hit_len = toy.admit(req)
    assert hit_len == (0 if disable else 3 * page_size)
    toy.extend(req, len(req.tokens))
    for _ in range(3):
        toy.decode(req, 1)
    # A step that got slots and was called off, and one that was not even begun.
    req.kv_committed_len -= 2
    release_kv_cache(req, cache, is_insert=False)
    assert cache.evictable_size() == hit_len and cache.protected_size() == 0
    assert cache.token_to_kv_pool_allocator.available_size() == 32 * page_size - hit_len
    late = Request(tokens + [9] * page_size)
    assert toy.admit(late) == hit_len
    alloc_for_extend(Batch([late], cache, [hit_len], torch.tensor([len(late.tokens)])))
    late.kv_committed_len, late.kv_allocated_len = 0, len(late.tokens)
    release_kv_cache(late, cache)
    assert cache.token_to_kv_pool_allocator.available_size() == 32 * page_size - hit_len
    cache.sanity_check()


def test_a_disabled_cache_serves_by_chunks() -> None:
    """Without a tree a request continues from its own slots, and all of them are freed with it."""
    cache = full_cache(32, 4, disable=True)
    assert run(Toy(cache), list(range(10)), chunk=3, new=2) == 0
    assert cache.token_to_kv_pool_allocator.available_size() == 32 and cache.total_size() == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_bigram_requests_keep_the_last_token(page_size: int) -> None:
    """With bigrams the last token of what is cached stays the request's own, through chunks, and is freed with it."""
    cache = full_cache(64, page_size, is_eagle=True)
    toy, tokens = Toy(cache), list(range(13))
    req = Request(tokens)
    toy.admit(req)
    for end in (8, 9, 13):
        toy.extend(req, end)
        cache.cache_unfinished_req(req, chunked=end < 13)
        assert req.cache_protected_len == (end - 1) // page_size * page_size
        assert req.prefix_indices.tolist() == toy.row(req, 0, end).tolist()
        cache.sanity_check()
    release_kv_cache(req, cache)
    assert cache.total_size() == 12 and matched(cache, tokens) == 12 and matched(cache, [*tokens[:9], 99]) == 8
    assert cache.token_to_kv_pool_allocator.available_size() + 12 == 64


class Counted(list[int]):
    """Token ids that count how many of them are read, and refuse to be read whole."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        assert isinstance(at, slice)
        ids = super().__getitem__(at)
        self.read += len(ids)
        return ids

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole prompt was read")


def test_a_chunk_costs_a_chunk() -> None:
    """Of a long prompt by chunks, each call reads, writes and locks its own tokens alone, wherever it stands."""
    chunk, num_chunks = 64, 64
    cache = full_cache(chunk * num_chunks, 16, columns=chunk * num_chunks)
    toy, prompt = Toy(cache), list(range(chunk * num_chunks))
    req = Request(prompt)
    toy.admit(req)
    storages = set()
    for end in range(chunk, len(prompt) + 1, chunk):
        start = len(req.prefix_indices)
        alloc_for_extend(Batch([req], cache, [start], torch.tensor([end])))
        req.kv_committed_len = req.kv_allocated_len = end
        counted = req.fill_ids = Counted(prompt[:end])
        cache.cache_unfinished_req(req, chunked=True)
        assert counted.read == chunk
        assert req.last_node.num_tokens == chunk and req.last_node.depth_tokens == end
        storages.add(req.prefix_indices.untyped_storage().data_ptr())
    # The tensor of the prefix moves as often as it doubles.
    assert len(storages) <= num_chunks.bit_length()
    assert req.prefix_indices.tolist() == toy.row(req, 0, len(prompt)).tolist()
    assert cache.protected_size() == len(prompt)
    release_kv_cache(req, cache, is_insert=False)
    assert cache.evictable_size() == len(prompt)
    cache.sanity_check()


def test_a_row_may_change_hands_unseen() -> None:
    """Where a row was freed without the cache's knowledge, its next request sees its own slots."""
    cache = full_cache(64)
    toy = Toy(cache)
    run(toy, [1, 2, 3])
    gone = Request([50, 51, 52, 53, 54])
    toy.admit(gone)
    toy.extend(gone, 4)
    cache.cache_unfinished_req(gone, chunked=True)
    cache.dec_lock_ref(gone.last_node)
    row = gone.req_pool_idx
    cache.req_to_token_pool.free(gone)
    req = Request([1, 2, 3, 4, 5, 6])
    assert toy.admit(req) == 3
    toy.extend(req, 5)
    assert req.req_pool_idx == row
    cache.cache_unfinished_req(req, chunked=True)
    assert req.prefix_indices.tolist() == toy.row(req, 0, 5).tolist()
    toy.extend(req, 6)
    release_kv_cache(req, cache)
    cache.sanity_check()


def test_priorities_of_requests_reach_the_prefix() -> None:
    """A request's priority is that of all it uses: its own chunks and the prefix of others that it matched."""
    cache = full_cache(eviction_policy="priority")
    toy = Toy(cache)
    run(toy, [1, 2, 3], priority=1)
    run(toy, [7, 8, 9], priority=2)
    run(toy, [1, 2, 3, 4, 5], chunk=1, priority=5)
    assert [matched(cache, tokens) for tokens in ([1, 2, 3, 4, 5], [7, 8, 9])] == [5, 3]
    prefix = cache.match_prefix(key([1, 2, 3])).last_device_node
    assert prefix.priority == 5 and cache.match_prefix(key([7, 8, 9])).last_device_node.priority == 2
    cache.evict(EvictParams(1))
    assert [matched(cache, tokens) for tokens in ([1, 2, 3, 4, 5], [7, 8, 9])] == [5, 0]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("make", [full_cache, swa_cache, mamba_cache])
def test_a_request_that_adds_no_page_raises_its_prefix(make: Callable[..., Cache], ends: bool) -> None:
    """A request whose own tokens fill no page lends its priority to the prefix it used, as it grows and as it ends, and
    prefixes of a lower priority are evicted first."""
    cache = make(page_size=4, eviction_policy="priority")
    toy = Toy(cache)
    run(toy, list(range(8)), priority=1)
    run(toy, list(range(50, 58)), priority=2)
    req = Request([*range(8), 99, 98], priority=5)
    assert toy.admit(req) == 8
    toy.extend(req, 10)
    if not ends:
        cache.cache_unfinished_req(req)
    release_kv_cache(req, cache, is_insert=ends)
    cache.evict(EvictParams(1))
    assert [matched(cache, tokens) for tokens in (list(range(8)), list(range(50, 58)))] == [8, 0]
    cache.sanity_check()


def test_what_is_not_inserted_raises_nothing() -> None:
    """A request that leaves nothing in the tree leaves priorities as they were."""
    cache = full_cache(page_size=4, eviction_policy="priority")
    toy = Toy(cache)
    run(toy, list(range(8)), priority=1)
    req = Request([*range(8), 99], priority=5)
    toy.admit(req)
    toy.extend(req, 9)
    release_kv_cache(req, cache, is_insert=False)
    assert [node.priority for node, _ in nodes_of(cache)] == [1]


def test_out_of_memory_shows_the_tree(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that does not fit evicts what nobody needs, then raises with numbers, and the tree is in the log."""
    cache = full_cache(16)
    toy = Toy(cache)
    run(toy, list(range(6)))
    req = Request(list(range(100, 108)))
    toy.admit(req)
    toy.extend(req, 8)
    cache.cache_unfinished_req(req)
    late = Request(list(range(200, 209)))
    toy.admit(late)
    with caplog.at_level(logging.ERROR, "hicache"), pytest.raises(OutOfSlots, match="9 tokens requested, 8 avail"):
        toy.extend(late, 9)
    assert "8 [100, 101, 102, 103, 104, 105, 106, 107] r=1" in caplog.text and "#tokens: 8" in caplog.text
    toy.refuse(late)
    release_kv_cache(late, cache)
    release_kv_cache(req, cache)
    cache.sanity_check()


def test_an_allocator_may_be_a_stand_in() -> None:
    """A real allocator without a table, and none at all, serve inserts and evictions."""
    allocator = TokenToKVPoolAllocator(8, torch.bfloat16, "cpu", None, True)
    cache = RadixCache.create_simulated(mock_allocator=allocator)
    insert(cache, [1, 2, 3], value=allocator.alloc(3))
    cache.sanity_check()
    assert cache.evict(EvictParams(2)) == EvictResult(3) and allocator.available_size() == 8
    bare = RadixCache.create_simulated()
    insert(bare, [1, 2, 3])
    assert bare.evict(EvictParams(2)) == EvictResult(3) and bare.device == torch.device("cpu")
