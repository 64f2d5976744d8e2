"""Keys: ids are packed once, in memory that keys, slices and nodes share. Invalid ids are refused."""

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
from prefix_case import insert, key, matched, node_of

LONG = 10_000


def test_keys_keep_their_extra_key() -> None:
    """Length and iteration of a key are those of its ids. An index and a slice are keys of the same tenant and kind."""
    tokens = RadixKey([1, 2, 3, 4], "tenant")
    assert len(tokens) == 4 and list(tokens) == [1, 2, 3, 4]
    assert tokens[1:3] == RadixKey([2, 3], "tenant") and tokens[-1] == RadixKey([4], "tenant")
    pairs = tokens.as_bigrams()
    assert pairs[:2] == RadixKey([(1, 2), (2, 3)], "tenant", True) != RadixKey([(1, 2), (2, 3)], None, True)


def test_bigrams_take_no_ids_that_collide() -> None:
    """Ids outside [0, 2^31) are refused if pairs are made of them, because their pairs could equal other pairs. The
    largest valid id only hits itself."""
    cache = RadixCache(CacheInitParams(False, None, None, 1, is_eagle=True))
    for tokens in ([3, -1, 2], [1, (2 << 32) + 5, 7], [1, 2, 1 << 31], [1 << 31, 2, 1]):
        for call in (insert, matched, lambda _, ids: RadixKey(ids).as_bigrams().packed()):
            with pytest.raises(InvalidTokens):
                call(cache, tokens)
    assert cache.total_size() == 0
    top = (1 << 31) - 1
    insert(cache, [0, top, top], value=torch.tensor([5, 6]))
    assert [matched(cache, asked) for asked in ([0, top, top], [0, top, 0], [1, top, top])] == [2, 1, 0]


def test_keys_hold_integers() -> None:
    """Ids that packing would change are refused, because another prompt could hit their pages."""
    wrong: list[Any] = [
        [1.5, 2.0], [[1, 2], [3, 4]], np.array([1 << 63], np.uint64), [1 << 70], [*range(70), 1 << 63], ["a"],
        [True, False], [1, [2, 3]],
    ]  # fmt: skip
    for tokens in wrong:
        with pytest.raises(InvalidTokens, match="token id"):
            RadixKey(tokens).packed()
    with pytest.raises(InvalidTokens):
        RadixKey([1, 2, 3], is_bigram=True).packed()
    assert RadixKey([]).packed().tolist() == [] and RadixKey(np.array([7], np.uint64)).packed().tolist() == [7]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200))
def test_packing_keeps_every_id(tokens: list[int]) -> None:
    """Ids of any sign and number are preserved, from lists, tuples, arrays and slices."""
    for ids in (tokens, tuple(tokens), array("q", tokens), np.array(tokens, np.int64)):
        packed = RadixKey(ids)
        assert packed.packed().tolist() == tokens == list(packed)
        assert list(packed[1:-1]) == tokens[1:-1] and packed[:3] == RadixKey(tokens[:3])


def test_ids_are_packed_once() -> None:
    """A key packs its list, and the pairs of neighbours, at their first use, and never again. Arrays of int64 and
    slices of any key are not copied."""
    ids = list(range(100))
    tokens = RadixKey(ids)
    packed, pairs = tokens.packed(), tokens.as_bigrams()
    ids.clear()
    assert tokens.packed() is packed and packed.tolist() == list(range(100)) and len(tokens) == 100
    assert tokens.as_bigrams() is pairs and pairs.packed() is pairs.packed() and len(pairs) == 99
    with pytest.raises(IndexError):
        tokens[100]
    for memory in (np.arange(100), array("q", range(100))):
        assert np.shares_memory(RadixKey(memory).packed(), np.asarray(memory))
    for complete in (tokens, RadixKey(np.arange(100)), pairs):
        assert np.shares_memory(complete[10:50].packed(), complete.packed())
        assert np.shares_memory(complete[10:50][3:9].packed(), complete.packed())


def test_a_node_shares_a_long_key_and_copies_a_short_part() -> None:
    """A node with most of a key's tokens shares the memory of the key, and so do its halves after a split. The shared
    memory is read-only. A node with a few of a key's tokens does not keep the memory of the complete key."""
    cache, tokens = RadixCache.create_simulated(), RadixKey(list(range(LONG)))
    cache.insert(InsertParams(tokens))
    node = node_of(cache, list(tokens))
    assert node.key is not None and np.shares_memory(node.key.packed(), tokens.packed())
    upper = cache.match_prefix(MatchPrefixParams(tokens[: LONG // 2])).last_device_node
    for half in (upper, node):
        assert half.key is not None and np.shares_memory(half.key.packed(), tokens.packed())
        with pytest.raises(ValueError, match="read-only"):
            half.key.packed()[0] = 7
    longer = RadixKey(list(range(LONG + LONG // 2)))
    cache.insert(InsertParams(longer))
    end = cache.match_prefix(MatchPrefixParams(longer)).last_device_node
    assert end.num_tokens == LONG // 2 and end.key is not None
    assert not np.shares_memory(end.key.packed(), longer.packed())
    cache.sanity_check()


@pytest.mark.parametrize("num_tokens", [12, LONG])
def test_later_writes_to_an_array_do_not_reach_the_tree(num_tokens: int) -> None:
    """Ids in memory that a caller can still write are copied, so a node keeps the ids of its insertion. Arrays match
    lists."""
    cache, ids = RadixCache.create_simulated(), np.arange(num_tokens)
    cache.insert(InsertParams(RadixKey(ids), torch.arange(num_tokens)))
    ids[:] = 7
    assert matched(cache, list(range(num_tokens))) == num_tokens and matched(cache, [7] * num_tokens) == 0
    insert(cache, [7, 8, 9])
    assert len(cache.match_prefix(key(np.array([7, 8, 9]))).device_indices) == 3  # type: ignore[arg-type]
    cache.sanity_check()
