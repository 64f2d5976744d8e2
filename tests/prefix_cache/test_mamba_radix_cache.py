"""The prefix cache of recurrent states: each is used for exactly the tokens that it has consumed, by one owner."""

from __future__ import annotations

import pytest
import torch

from hicache import (
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MambaRadixCache,
    MatchPrefixParams,
    RadixKey,
    checkpoint_len,
    release_kv_cache,
)
from hicache.errors import OutOfStates, ShapeError
from prefix_case import Request, Toy, free, key, mamba_cache, matched, node_of, recurrence


def put(cache: MambaRadixCache, tokens: list[int]) -> InsertResult:
    """Insert with fresh slots and a fresh state, and free what stays ours."""
    pool, allocator = cache.req_to_token_pool.mamba_pool, cache.token_to_kv_pool_allocator
    slots, state = allocator.alloc(len(tokens)), pool.alloc(1)
    assert slots is not None and state is not None
    result = cache.insert(InsertParams(RadixKey(tokens), slots, state))
    allocator.free(slots[: result.prefix_len])
    if result.mamba_exist:
        pool.free(state)
    cache.sanity_check()
    return result


def test_checkpoints_stand_strictly_below_the_end() -> None:
    """The last multiple of chunk and page that the same prompt, less its last token, still reaches; 0 for none."""
    lens = {0: 0, 1: 0, 64: 0, 65: 64, 128: 64, 129: 128, 1000: 960, 10_000: 9984}
    assert {n: checkpoint_len(n, 64) for n in lens} == lens
    assert [checkpoint_len(n, 64, 16) for n in (64, 65, 200)] == [0, 64, 192]
    assert [checkpoint_len(n, 6, 4) for n in (12, 13, 25)] == [0, 12, 24]
    assert [checkpoint_len(n, 64, 256) for n in (256, 257, 1000)] == [0, 256, 768]


def test_a_match_ends_at_the_deepest_state() -> None:
    """Full attention may reach further than a state: the match ends at the state, and says where one is missing."""
    cache = mamba_cache(chunk=4)
    put(cache, list(range(5)))
    put(cache, list(range(5)) + list(range(50, 60)))
    result = cache.match_prefix(key([*range(5), *range(50, 59)]))
    assert result.device_indices.numel() == 5 and result.last_device_node.mamba_value is not None
    assert result.mamba_branching_seqlen == 12
    assert cache.match_prefix(key([*range(5), *range(50, 52)])).mamba_branching_seqlen is None  # 4 is not beyond 5
    deepest = cache.match_prefix(key([*range(5), *range(50, 70)]))
    assert deepest.device_indices.numel() == 15 and deepest.mamba_branching_seqlen is None
    assert cache.match_prefix(key([*range(4), 99])).device_indices.numel() == 0
    assert cache.match_prefix(key([*range(4), 99])).mamba_branching_seqlen == 4
    put(cache, [70, 71, 72, 73])
    assert cache.match_prefix(key([70, 71, 72, 73, 99])).mamba_branching_seqlen is None  # the state at 4 is there
    cache.sanity_check()


@pytest.mark.parametrize("page", [4, 16])
def test_a_branching_length_is_whole_pages(page: int) -> None:
    """Where a state would have helped is a multiple of chunk and page."""
    cache = mamba_cache(16 * page, page_size=page, chunk=6)
    put(cache, list(range(8 * page)))
    unit = {4: 12, 16: 48}[page]
    assert cache.match_prefix(key(list(range(8 * page - 1)))).mamba_branching_seqlen == (8 * page - 1) // unit * unit


def test_a_deeper_state_is_never_used() -> None:
    """A node of 1008 tokens asked for 1007 gives nothing, split or not: its state has consumed the last token. Told
    where a state would have helped, a request leaves one there, and the next hits."""
    cache = mamba_cache(4096, columns=1100, chunk=64)
    toy, tokens = Toy(cache), [i % 7 for i in range(1008)]
    toy.serve(tokens)
    assert matched(cache, tokens) == 1008 and matched(cache, tokens[:1007]) == 0
    again = Request(tokens)
    assert toy.admit(again) == 0 and again.branching_len == checkpoint_len(1008, 64) == 960
    assert again.mamba_pool_idx is None
    toy.extend(again, 960)
    cache.cache_unfinished_req(again, chunked=True)
    toy.extend(again, 1008)
    release_kv_cache(again, cache)
    assert toy.serve(tokens) == 960


def test_copies_go_where_the_request_wants_them() -> None:
    """Without a state it gets one; one that it has is overwritten, or cleared where nothing matched, if asked to."""
    cache = mamba_cache()
    toy, pool = Toy(cache), cache.req_to_token_pool.mamba_pool
    toy.serve([1, 2, 3])
    asked = RadixKey([1, 2, 3, 4])
    new = Request([1, 2, 3, 4])
    cache.match_prefix(MatchPrefixParams(asked, req=new))
    cache.match_prefix(MatchPrefixParams(RadixKey([9]), cow_mamba=True, req=new))
    assert new.mamba_pool_idx is None
    cache.match_prefix(MatchPrefixParams(asked, True, new))
    own = new.mamba_pool_idx
    assert own is not None and own.dim() == 0 and toy.state(own) == recurrence([1, 2, 3])
    assert cache.all_mamba_values_flatten().tolist() != [int(own)]
    pool.mamba_cache.temporal[:, int(own)] = 9
    cache.match_prefix(MatchPrefixParams(asked, True, new))
    assert new.mamba_pool_idx is own and toy.state(own) == recurrence([1, 2, 3])
    cache.match_prefix(MatchPrefixParams(RadixKey([9]), cow_mamba=True, req=new))
    assert new.mamba_pool_idx is own and toy.state(own) == (0, 0)
    release_kv_cache(new, cache)
    assert free(cache) == (61, 11)


def test_a_copy_evicts_but_not_what_it_copies() -> None:
    """With no state free another prefix gives one up; where only the matched one could, the match is refused."""
    cache = mamba_cache(num_states=3)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        put(cache, tokens)
    req = Request([1, 2, 9])
    result = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 9]), True, req))
    assert len(result.device_indices) == 2 and req.mamba_pool_idx is not None
    assert matched(cache, [3, 4]) == 0 and matched(cache, [5, 6]) == 2
    cache.sanity_check()
    release_kv_cache(req, cache)
    assert free(cache) == (60, 1)
    small = mamba_cache(num_states=1)
    put(small, [1, 2])
    refused = Request([1, 2, 9])
    with pytest.raises(OutOfStates):
        Toy(small).admit(refused)
    assert refused.mamba_pool_idx is None and matched(small, [1, 2]) == 2 and small.mamba_protected_size() == 0
    small.sanity_check()


def test_insert_says_whose_the_state_is() -> None:
    """A new prefix and a tombstone take the state; one that has a state says so; slots of old tokens stay ours."""
    cache = mamba_cache()
    assert put(cache, [1, 2, 3, 4]) == InsertResult(0, False)
    assert put(cache, [1, 2, 3, 4]) == InsertResult(4, True)
    assert put(cache, [1, 2]) == InsertResult(2, False)
    assert put(cache, [1, 2, 7]) == InsertResult(2, False)
    assert cache.total_size() == (5, 3) and cache.mamba_evictable_size() == 3 and free(cache) == (59, 9)


def test_no_state_is_stored_under_another_length() -> None:
    """A key that is no whole pages, or no state at all, is refused, and nothing changes."""
    cache = mamba_cache(page_size=4)
    state = torch.tensor([1])
    for tokens, value, message in (
        ([1, 2, 3, 4, 5], state, "has consumed 5 tokens cannot be stored"),
        ([], state, "has consumed 0 tokens"),
        ([1, 2, 3, 4], None, "without a state at its end"),
        ([1, 2, 3, 4], torch.tensor([1, 2]), "without a state at its end"),
    ):
        with pytest.raises(ShapeError, match=message):
            cache.insert(InsertParams(RadixKey(tokens), torch.arange(4, 4 + len(tokens)), value))
    assert cache.total_size() == (0, 0)


def test_locks_keep_the_path_and_one_state() -> None:
    """A lock holds all full slots above, and of the states the one at its node."""
    cache = mamba_cache()
    put(cache, [1, 2])
    put(cache, [1, 2, 3])
    put(cache, [9])
    node = node_of(cache, [1, 2, 3])
    cache.inc_lock_ref(node)
    assert (cache.full_protected_size(), cache.mamba_protected_size()) == (3, 1)
    assert (node.full_lock_ref, node.mamba_lock_ref, node.parent and node.parent.mamba_lock_ref) == (1, 1, 0)
    assert (cache.full_evictable_size(), cache.mamba_evictable_size()) == (1, 2)
    assert cache.evict(EvictParams(99, 0, 99)) == EvictResult(1, 0, 2)
    assert matched(cache, [1, 2, 3]) == 3 and matched(cache, [1, 2]) == 0
    # The lock's state stays with the lower half of a split.
    matched(cache, [1])
    cache.dec_lock_ref(node)
    assert (cache.full_protected_size(), cache.mamba_protected_size()) == (0, 0)
    cache.sanity_check()


def test_full_eviction_takes_tombstones_too() -> None:
    """A leaf is evicted with its state, and so are ancestors that have no state and no other child."""
    cache = mamba_cache()
    for tokens in ([1, 2, 3, 4], [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 9]):
        put(cache, tokens)
    # The oldest state is that of an inner node, which stays without it.
    assert cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 0, 1)
    assert matched(cache, [1, 2, 3, 4]) == 2 and cache.total_size() == (7, 3)
    matched(cache, [1, 2, 9])
    assert cache.evict(EvictParams(1)) == EvictResult(4, 0, 1)
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == 2 and cache.total_size() == (3, 2)
    cache.sanity_check()


def test_states_are_evicted_by_their_own_recency() -> None:
    """The least recently used state is evicted, alone from an inner node; a match refreshes only the state it uses."""
    cache = mamba_cache()
    put(cache, [1, 2])
    put(cache, [1, 2, 3, 4])
    put(cache, [7, 8])
    matched(cache, [1, 2, 3, 4])
    assert cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, 0, 1)
    assert matched(cache, [1, 2]) == 0 and matched(cache, [1, 2, 3, 4]) == 4
    assert cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(2, 0, 1)
    assert matched(cache, [7, 8]) == 0
    assert cache.evict(EvictParams(0, mamba_num=5)) == EvictResult(4, 0, 1)
    assert free(cache) == (64, 12)
    cache.sanity_check()
