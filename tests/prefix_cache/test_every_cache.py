"""Properties of every prefix cache: full attention, sliding windows, and recurrent states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hicache import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    SWARadixCache,
    TokenToKVPoolAllocator,
    TreeNode,
    release_kv_cache,
)
from hicache.errors import ConfigError, InvariantError
from hicache.pages.device import DevicePages
from hicache.tiers import FULL, MAMBA, Component
from prefix_case import (
    Cache,
    FakeRunner,
    Request,
    free,
    full_cache,
    insert,
    key,
    mamba_cache,
    matched,
    node_of,
    swa_cache,
)

Make = Callable[..., Cache]
KINDS: list[Make] = [full_cache, swa_cache, mamba_cache]
TREE = (
    "match_prefix insert evict inc_lock_ref dec_lock_ref cache_unfinished_req cache_finished_req evictable_size "
    "protected_size total_size all_values_flatten pretty_print reset take_events sanity_check root_node "
    "available_and_evictable_str is_chunk_cache is_tree_cache supports_swa supports_mamba"
)
NODE = (
    "key value children parent lock_ref hit_count priority last_access_time hash_value evicted backuped host_value "
    "host_ref_counter"
)


@pytest.mark.parametrize("make", KINDS)
def test_trees_and_nodes_answer_to_the_names(make: Make) -> None:
    """Every tree reports its kind, every node has SGLang's attributes, and following parents ends at the root."""
    cache = make()
    for name in TREE.split():
        getattr(cache, name)
    assert cache.is_tree_cache() and not cache.is_chunk_cache()
    assert (cache.supports_swa(), cache.supports_mamba()) == (make is swa_cache, make is mamba_cache)
    for name in NODE.split():
        getattr(cache.root_node, name)
    assert not cache.root_node.evicted and TreeNode().evicted


@pytest.mark.parametrize("make", KINDS)
def test_a_disabled_cache_keeps_nothing(make: Make) -> None:
    """A disabled cache matches, keeps, locks and evicts nothing. A request continues from its own slots, chunk by
    chunk, and all its slots are freed with it."""
    cache = make(32, page_size=4, disable=True)
    before = free(cache), cache.req_to_token_pool.available_size()
    assert FakeRunner(cache).serve(list(range(10)), chunk=3, new=2) == 0 == matched(cache, list(range(10)))
    assert cache.insert(InsertParams(RadixKey([1, 2]), mamba_value=torch.tensor([1]))).prefix_len == 0
    assert (free(cache), cache.req_to_token_pool.available_size()) == before and cache.total_size() in (0, (0, 0))
    assert cache.inc_lock_ref(cache.root_node) in (0, None) and cache.dec_lock_ref(cache.root_node) == 0
    assert cache.evict(EvictParams(1, 1, 1)) == EvictResult()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("make", KINDS)
def test_a_request_that_adds_no_page_raises_its_prefix(make: Make, ends: bool) -> None:
    """If the own tokens of a request fill no page, the request still raises the priority of the prefix that it used,
    when it grows or ends. Then prefixes of a lower priority are evicted first. If the request inserts nothing, the
    priority does not change."""
    cache = make(page_size=4, eviction_policy="priority")
    runner = FakeRunner(cache)
    runner.serve(list(range(8)), priority=1)
    runner.serve(list(range(50, 58)), priority=2)
    for priority, leaves in ((9, False), (5, True)):
        req = Request([*range(8), 99, 98], priority=priority)
        assert runner.admit(req) == 8
        runner.extend(req, 10)
        if leaves and not ends:
            cache.cache_unfinished_req(req)
        release_kv_cache(req, cache, is_insert=leaves and ends)
        assert node_of(cache, list(range(8))).priority == (5 if leaves else 1)
    cache.evict(EvictParams(1))
    assert [matched(cache, tokens) for tokens in (list(range(8)), list(range(50, 58)))] == [8, 0]
    cache.sanity_check()


def test_bigrams_keep_the_last_token() -> None:
    """With bigrams the last cached token and its window belong to the request through all chunks, and are freed with
    it."""
    for cache in (full_cache(64, 1, is_eagle=True), full_cache(64, 4, is_eagle=True), swa_cache(64, is_eagle=True)):
        runner, req = FakeRunner(cache), Request(list(range(13)))
        runner.admit(req)
        for end in (8, 9, 13):
            runner.extend(req, end)
            cache.cache_unfinished_req(req, chunked=end < 13)
            assert req.cache_protected_len == (end - 1) // cache.page_size * cache.page_size
            assert req.prefix_indices.tolist() == runner.row(req, 0, end).tolist()
            cache.sanity_check()
        release_kv_cache(req, cache)
        assert cache.total_size() in (12, (12, 12)) and free(cache)[0] + 12 == 64
        assert matched(cache, list(range(13))) == 12 and matched(cache, [*range(9), 99]) == 8


def test_arguments_that_a_cache_cannot_store_are_refused() -> None:
    """A cache without the objects that its kind needs, with an unknown policy, or with pages of no tokens raises. The
    error names the setting."""
    plain, hybrid = full_cache(), mamba_cache()
    allocator, table = plain.token_to_kv_pool_allocator, plain.req_to_token_pool
    states = hybrid.req_to_token_pool
    for build, setting in (
        (lambda: SWARadixCache(CacheInitParams(False, table, None, 1)), "sliding_window_size"),
        (lambda: SWARadixCache(CacheInitParams(False, table, allocator, 1, sliding_window_size=4)), "SWATokenToKV"),
        (lambda: MambaRadixCache(CacheInitParams(False, table, allocator, 1)), "HybridReqToTokenPool"),
        (
            lambda: MambaRadixCache(CacheInitParams(False, states, allocator, 1, enable_mamba_extra_buffer=True)),
            "enable_mamba_extra_buffer",
        ),
        (lambda: mamba_cache(is_eagle=True), "is_eagle"),
        (lambda: full_cache(eviction_policy="best"), "eviction_policy"),
        (lambda: RadixCache.create_simulated(page_size=0), "page_size"),
    ):
        with pytest.raises(ConfigError, match=setting):
            build()


def pages_of(cache: Cache, component: Component) -> DevicePages:
    tree = cache.root_node.tree
    assert tree is not None
    return tree.pages[component]


def test_sanity_check_finds_planted_faults() -> None:
    """One error lists every fault: broken counts; slots that are held twice, free, or do not exist; window slots that
    were freed without the tree; states that two nodes hold, or that are free."""
    plain = full_cache(16)
    allocator = plain.token_to_kv_pool_allocator
    slots = allocator.alloc(8)
    insert(plain, [1, 2, 3, 4], value=slots[:4])
    insert(plain, [5, 6], value=slots[2:4])
    insert(plain, [7, 8], value=torch.tensor([99, 0]))
    allocator.free(slots[:1])
    pages_of(plain, FULL).order.locks[node_of(plain, [5, 6]).rows] = 1
    windows = swa_cache(32, 32, window=2)
    pair = windows.token_to_kv_pool_allocator
    slots = pair.alloc(4)
    pair.free_swa(slots[:2])
    insert(windows, [1, 2, 3, 4], value=slots, swa_evicted_seqlen=2)
    pair.move_window(slots[2:3], slots[:1])
    states = mamba_cache()
    pool = states.req_to_token_pool.mamba_pool
    for tokens in ([1, 2], [3, 4], [5, 6]):
        insert(states, tokens, value=states.token_to_kv_pool_allocator.alloc(2), mamba_value=pool.alloc(1))
    end, state = node_of(states, [3, 4]).rows[-1:], node_of(states, [1, 2]).mamba_value
    pages_of(states, MAMBA).leave(end)
    pages_of(states, MAMBA).enter(end, state)
    pool.free(node_of(states, [5, 6]).mamba_value)
    for cache, faults in (
        (
            plain,
            [
                "pages were counted as evictable",
                "[3, 4] of the tree are held more than once",
                "[1] of the tree are free",
                "do not exist",
            ],
        ),
        (windows, ["1 of 2 tokens have windows, holds=array([False, False])", "holds=array([ True,  True])"]),
        (states, ["two nodes have the same state", "of the tree are free"]),
    ):
        with pytest.raises(InvariantError) as caught:
            cache.sanity_check()
        assert [fault for fault in faults if fault not in str(caught.value)] == []


def test_an_allocator_may_be_a_stand_in() -> None:
    """Inserts and evictions also work with an allocator without a table, and without an allocator."""
    allocator = TokenToKVPoolAllocator(8, torch.bfloat16, "cpu", None, True)
    for cache in (RadixCache.create_simulated(mock_allocator=allocator), RadixCache.create_simulated()):
        insert(cache, [1, 2, 3], value=allocator.alloc(3))
        cache.sanity_check()
        assert cache.match_prefix(key([1, 2, 3])).device_indices.device == cache.device == torch.device("cpu")
        assert cache.evict(EvictParams(2)) == EvictResult(3)
    assert allocator.available_size() == 5
