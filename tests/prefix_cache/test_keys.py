"""Keys: ids packed once, in memory that keys, slices and nodes share, and what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache import CacheInitParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from hicache.errors import InvalidTokens
from prefix_case import key, matched
from radix_case import insert

LONG = 10_000


def test_keys_keep_their_extra_key() -> None:
    """Length and iteration are those of the ids; an index and a slice are keys of the same tenant and kind."""
    tokens = RadixKey([1, 2, 3, 4], "tenant")
    assert len(tokens) == 4 and list(tokens) == [1, 2, 3, 4]
    assert tokens[1:3] == RadixKey([2, 3], "tenant") and tokens[-1] == RadixKey([4], "tenant")
    pairs = tokens.as_bigrams()
    assert pairs[:2] == RadixKey([(1, 2), (2, 3)], "tenant", True) != RadixKey([(1, 2), (2, 3)], None, True)


@pytest.mark.parametrize("tokens", [[3, -1, 2], [1, (2 << 32) + 5, 7], [1, 2, 1 << 31], [1 << 31, 2, 1]])
def test_bigrams_take_no_ids_that_collide(tokens: list[int]) -> None:
    """Ids outside [0, 2^31), whose pairs would read as other pairs, are refused wherever pairs are made of them, and
    the largest id that is taken hits itself alone."""
    cache = RadixCache(CacheInitParams(False, None, None, 1, is_eagle=True))
    with pytest.raises(InvalidTokens, match="from 0 to 2147483647"):
        insert(cache, tokens)
    with pytest.raises(InvalidTokens, match="from 0 to 2147483647"):
        cache.match_prefix(key(tokens))
    with pytest.raises(InvalidTokens, match="from 0 to 2147483647"):
        RadixKey(tokens).as_bigrams().packed()
    assert cache.total_size() == 0
    top = (1 << 31) - 1
    insert(cache, [0, top, top], value=torch.tensor([5, 6]))
    assert [matched(cache, asked) for asked in ([0, top, top], [0, top, 0], [1, top, top])] == [2, 1, 0]


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5, 2.0],
        [[1, 2], [3, 4]],
        np.array([1 << 63], np.uint64),
        [1 << 70],
        [*range(70), 1 << 63],
        ["a"],
        [True, False],
        [1, [2, 3]],
    ],
)
def test_keys_hold_integers(tokens: Any) -> None:
    """What packing would change, so that another prompt could hit it, is refused by name."""
    with pytest.raises(InvalidTokens, match="token id"):
        RadixKey(tokens).packed()
    assert RadixKey([]).packed().tolist() == [] and RadixKey(np.array([7], np.uint64)).packed().tolist() == [7]
    with pytest.raises(InvalidTokens, match=r"shape \[3\]"):
        RadixKey([1, 2, 3], is_bigram=True).packed()


def test_keys_may_be_packed() -> None:
    """Token ids as a numpy array match what lists inserted, and the other way round."""
    cache = RadixCache.create_simulated(page_size=4)
    insert(cache, list(range(12)))
    packed = np.arange(12)
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey(packed))).device_indices) == 12  # type: ignore[arg-type]
    cache.insert(InsertParams(RadixKey(packed + 50)))  # type: ignore[arg-type]
    assert matched(cache, list(range(50, 62))) == 12


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200))
def test_packing_keeps_every_id(tokens: list[int]) -> None:
    """Ids of any sign and number come back as they were, from lists, tuples, arrays and slices."""
    for ids in (tokens, tuple(tokens), array("q", tokens), np.array(tokens, np.int64)):
        packed = RadixKey(ids)
        assert packed.packed().tolist() == tokens == list(packed)
        assert list(packed[1:-1]) == tokens[1:-1] and packed[:3] == RadixKey(tokens[:3])


def test_ids_are_packed_once() -> None:
    """A key packs its list, and the pairs of its neighbours, when it is first asked, and never again."""
    ids = list(range(100))
    tokens = RadixKey(ids)
    packed, pairs = tokens.packed(), tokens.as_bigrams()
    ids.clear()
    assert tokens.packed() is packed and packed.tolist() == list(range(100)) and len(tokens) == 100
    assert tokens.as_bigrams() is pairs and pairs.packed() is pairs.packed() and len(pairs) == 99
    with pytest.raises(IndexError):
        tokens[100]


def test_packed_memory_is_shared() -> None:
    """Arrays of int64 are not copied, and neither are the slices of any key."""
    for ids in (np.arange(100), array("q", range(100))):
        assert np.shares_memory(RadixKey(ids).packed(), np.asarray(ids))
    for tokens in (RadixKey(list(range(100))), RadixKey(np.arange(100)), RadixKey(list(range(101))).as_bigrams()):
        assert np.shares_memory(tokens[10:50].packed(), tokens.packed())
        assert np.shares_memory(tokens[10:50][3:9].packed(), tokens.packed())


def test_a_long_run_of_a_key_is_not_copied() -> None:
    """A node of most of a key's tokens shares their memory, its halves do after a split, and nobody can write to it."""
    cache, tokens = RadixCache.create_simulated(), RadixKey(list(range(LONG)))
    cache.insert(InsertParams(tokens))
    node = cache.match_prefix(MatchPrefixParams(tokens)).last_device_node
    assert node.key is not None and np.shares_memory(node.key.packed(), tokens.packed())
    upper = cache.match_prefix(MatchPrefixParams(tokens[: LONG // 2])).last_device_node
    for half in (upper, node):
        assert half.key is not None and np.shares_memory(half.key.packed(), tokens.packed())
        with pytest.raises(ValueError, match="read-only"):
            half.key.packed()[0] = 7
    cache.sanity_check()


def test_a_node_keeps_little_more_than_its_tokens() -> None:
    """A node of a few of a key's tokens copies them: it does not keep the memory of the whole key."""
    cache, tokens = RadixCache.create_simulated(), list(range(2 * LONG))
    insert(cache, tokens[: LONG + LONG // 2])
    longer = RadixKey(tokens)
    cache.insert(InsertParams(longer))
    node = cache.match_prefix(MatchPrefixParams(longer)).last_device_node
    assert node.num_tokens == LONG // 2 and node.key is not None
    assert not np.shares_memory(node.key.packed(), longer.packed())


@pytest.mark.parametrize("num_tokens", [12, LONG])
def test_what_is_written_later_does_not_reach_the_tree(num_tokens: int) -> None:
    """Ids that a caller can still write to are copied: a node keeps those of its insertion."""
    cache, ids = RadixCache.create_simulated(), np.arange(num_tokens)
    cache.insert(InsertParams(RadixKey(ids), torch.arange(num_tokens)))
    ids[:] = 7
    assert matched(cache, list(range(num_tokens))) == num_tokens and matched(cache, [7] * num_tokens) == 0
    cache.sanity_check()
