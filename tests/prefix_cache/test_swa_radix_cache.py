"""The prefix cache of sliding windows: what a match needs behind it, what locks cover, and what tombstones get back."""

from __future__ import annotations

import pytest
import torch

from hicache import EvictParams, EvictResult, InsertParams, InsertResult, RadixKey, SWARadixCache
from prefix_case import key, matched, swa_cache


def put(cache: SWARadixCache, tokens: list[int], **more: int) -> InsertResult:
    """Insert with fresh slots."""
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    assert slots is not None
    lost = more.get("swa_evicted_seqlen", 0)
    cache.token_to_kv_pool_allocator.free_swa(slots[:lost])
    result = cache.insert(InsertParams(RadixKey(tokens), slots, **more))
    cache.sanity_check()
    return result


def sizes(cache: SWARadixCache) -> tuple[int, int, int, int]:
    """Full slots free and held, and window slots free and held."""
    allocator, held = cache.token_to_kv_pool_allocator, cache.total_size()
    assert held == (
        cache.full_evictable_size() + cache.full_protected_size(),
        cache.swa_evictable_size() + cache.swa_protected_size(),
    )
    return allocator.full_available_size(), held[0], allocator.swa_available_size(), held[1]


def pages(*blocks: int, page: int) -> list[int]:
    return [block for block in blocks for _ in range(page)]


@pytest.mark.parametrize("page", [1, 4])
def test_locks_cover_the_window_only(page: int) -> None:
    """A lock keeps the full slots of the path and the window slots of the nodes that the window lies in."""
    cache = swa_cache(64, 64, window=2 * page, page_size=page)
    for end in (2, 3, 6, 7):
        put(cache, pages(*range(end), page=page))
    node = cache.match_prefix(key(pages(*range(7), page=page))).last_device_node
    given = cache.inc_lock_ref(node)
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (7 * page, 4 * page)
    assert (node.full_lock_ref, node.swa_lock_ref) == (1, 1)
    assert cache.inc_lock_ref(node) == given
    # A split of what the lock covers does not change what it covers.
    matched(cache, pages(*range(4), page=page))
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (7 * page, 4 * page)
    assert cache.evict(EvictParams(99, 99)) == EvictResult(0, 3 * page)
    assert matched(cache, pages(*range(7), page=page)) == 7 * page
    cache.dec_lock_ref(node, given)
    assert cache.swa_protected_size() == 4 * page
    cache.dec_lock_ref(node)
    assert cache.full_protected_size() == 0 == cache.swa_protected_size()
    assert cache.inc_lock_ref(cache.root_node) is None and cache.dec_lock_ref(cache.root_node, None) == 0
    cache.sanity_check()
    assert cache.evict(EvictParams(99)) == EvictResult(7 * page, 4 * page)
    assert sizes(cache) == (64, 0, 64, 0)


def test_slots_of_a_match_are_not_freed() -> None:
    """Tokens before prev_prefix_len are offered as the tree's own slots: they stay, tombstones among them too, as far
    as the tree has them."""
    empty = swa_cache(64, 64)
    assert put(empty, [1, 2, 3, 4], prev_prefix_len=4) == InsertResult(0) and sizes(empty) == (60, 4, 60, 4)
    cache = swa_cache(64, 64, window=2, page_size=1)
    put(cache, [1, 2, 3, 4], swa_evicted_seqlen=2)
    match = cache.match_prefix(key([1, 2, 3, 4]))
    fresh = cache.token_to_kv_pool_allocator.alloc(2)
    slots = torch.cat((match.device_indices, fresh))
    assert cache.insert(InsertParams(RadixKey([1, 2, 3, 4, 5, 6]), slots, prev_prefix_len=4)) == InsertResult(4)
    cache.sanity_check()
    assert sizes(cache) == (58, 6, 60, 4)
    # Said with no more than half of it: the other half would be freed, were it not another's slots.
    again = torch.cat((match.device_indices[:2], cache.token_to_kv_pool_allocator.alloc(4)))
    assert cache.insert(InsertParams(RadixKey([1, 2, 3, 4, 5, 6]), again, prev_prefix_len=2)) == InsertResult(6)
    cache.sanity_check()
    assert sizes(cache) == (58, 6, 60, 4)
