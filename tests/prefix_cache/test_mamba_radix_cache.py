"""The prefix cache of recurrent states: each state is used only for exactly the tokens that it has consumed, by one
owner."""

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
from prefix_case import FakeRunner, Request, free, key, mamba_cache, matched, recurrence


def put(cache: MambaRadixCache, tokens: list[int]) -> InsertResult:
    """Insert with new slots and a new state, and free the slots that the tree did not take."""
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
    """The checkpoint is the last multiple of chunk and page that the same prompt without its last token still reaches,
    or 0."""
    lens = {0: 0, 1: 0, 64: 0, 65: 64, 128: 64, 129: 128, 1000: 960, 10_000: 9984}
    assert {n: checkpoint_len(n, 64) for n in lens} == lens
    assert [checkpoint_len(n, 64, 16) for n in (64, 65, 200)] == [0, 64, 192]
    assert [checkpoint_len(n, 6, 4) for n in (12, 13, 25)] == [0, 12, 24]
    assert [checkpoint_len(n, 64, 256) for n in (256, 257, 1000)] == [0, 256, 768]


def test_a_match_ends_at_the_deepest_state() -> None:
    """Full attention may match further than the deepest state. The match ends at the state, and reports the length at
    which a state is missing."""
    cache = mamba_cache(chunk=4)
    put(cache, list(range(5)))
    put(cache, list(range(5)) + list(range(50, 60)))
    result = cache.match_prefix(key([*range(5), *range(50, 59)]))
    assert result.device_indices.numel() == 5 and result.last_device_node.mamba_value is not None
    assert result.mamba_branching_seqlen == 12
    assert cache.match_prefix(key([*range(5), *range(50, 52)])).mamba_branching_seqlen is None  # 4 < 5
    deepest = cache.match_prefix(key([*range(5), *range(50, 70)]))
    assert deepest.device_indices.numel() == 15 and deepest.mamba_branching_seqlen is None
    assert cache.match_prefix(key([*range(4), 99])).device_indices.numel() == 0
    assert cache.match_prefix(key([*range(4), 99])).mamba_branching_seqlen == 4
    put(cache, [70, 71, 72, 73])
    assert cache.match_prefix(key([70, 71, 72, 73, 99])).mamba_branching_seqlen is None  # length 4 has a state
    cache.sanity_check()


def test_copies_go_where_the_request_wants_them() -> None:
    """With `cow_mamba` a request without a state gets a copy. The state that a request has is overwritten, or cleared
    if nothing matched."""
    cache = mamba_cache()
    runner, pool = FakeRunner(cache), cache.req_to_token_pool.mamba_pool
    runner.serve([1, 2, 3])
    asked = RadixKey([1, 2, 3, 4])
    new = Request([1, 2, 3, 4])
    cache.match_prefix(MatchPrefixParams(asked, req=new))
    cache.match_prefix(MatchPrefixParams(RadixKey([9]), cow_mamba=True, req=new))
    assert new.mamba_pool_idx is None
    cache.match_prefix(MatchPrefixParams(asked, True, new))
    own = new.mamba_pool_idx
    assert own is not None and own.dim() == 0 and runner.state(own) == recurrence([1, 2, 3])
    assert cache.all_mamba_values_flatten().tolist() != [int(own)]
    pool.mamba_cache.temporal[:, int(own)] = 9
    cache.match_prefix(MatchPrefixParams(asked, True, new))
    assert new.mamba_pool_idx is own and runner.state(own) == recurrence([1, 2, 3])
    cache.match_prefix(MatchPrefixParams(RadixKey([9]), cow_mamba=True, req=new))
    assert new.mamba_pool_idx is own and runner.state(own) == (0, 0)
    release_kv_cache(new, cache)
    assert free(cache) == (61, 11)


def test_a_backup_does_not_evict_its_own_pages() -> None:
    """If no state is free, a state of another prefix is evicted. If only the matched state could be evicted, the match
    is refused."""
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
        FakeRunner(small).admit(refused)
    assert refused.mamba_pool_idx is None and matched(small, [1, 2]) == 2 and small.mamba_protected_size() == 0
    small.sanity_check()


def test_no_state_is_stored_under_another_length() -> None:
    """A key with an incomplete page, or without a state at its end, is refused, and nothing changes."""
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


def test_states_are_evicted_by_their_own_recency() -> None:
    """The least recently used state is evicted; an inner node loses only its state. A match refreshes only the state
    that it uses. `evict_mamba` does the same and returns how many states it evicted. A locked state stays."""
    cache = mamba_cache()
    put(cache, [1, 2])
    put(cache, [1, 2, 3, 4])
    put(cache, [7, 8])
    matched(cache, [1, 2, 3, 4])
    assert cache.evict_mamba(0) == 0 and cache.evict_mamba(1) == 1
    assert matched(cache, [1, 2]) == 0 and matched(cache, [1, 2, 3, 4]) == 4
    assert cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(2, 0, 1)
    assert matched(cache, [7, 8]) == 0
    locked = cache.match_prefix(key([1, 2, 3, 4])).last_device_node
    cache.inc_lock_ref(locked)
    assert cache.evict_mamba(5) == 0
    cache.dec_lock_ref(locked)
    assert cache.evict_mamba(5) == 1
    assert free(cache) == (64, 12)
    cache.sanity_check()
