"""The prefix cache of sliding windows: the pages that a lock covers."""

from __future__ import annotations

import pytest

from hicache import EvictParams, EvictResult, InsertParams, InsertResult, RadixKey, SWARadixCache
from prefix_case import key, matched, swa_cache


def put(cache: SWARadixCache, tokens: list[int], **more: int) -> InsertResult:
    """Insert with new slots."""
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    assert slots is not None
    lost = more.get("swa_evicted_seqlen", 0)
    cache.token_to_kv_pool_allocator.free_swa(slots[:lost])
    result = cache.insert(InsertParams(RadixKey(tokens), slots, **more))
    cache.sanity_check()
    return result


def sizes(cache: SWARadixCache) -> tuple[int, int, int, int]:
    """Full slots that are free and that are held, and window slots that are free and that are held."""
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
    """A lock keeps the full slots of the path, and the window slots of the nodes that contain the window."""
    cache = swa_cache(64, 64, window=2 * page, page_size=page)
    for end in (2, 3, 6, 7):
        put(cache, pages(*range(end), page=page))
    node = cache.match_prefix(key(pages(*range(7), page=page))).last_device_node
    given = cache.inc_lock_ref(node)
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (7 * page, 4 * page)
    assert (node.full_lock_ref, node.swa_lock_ref) == (1, 1)
    assert cache.inc_lock_ref(node) == given
    # A split of a locked node does not change the locked pages.
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
