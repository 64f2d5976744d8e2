"""The prefix cache of full attention, called directly with value objects, and by requests that grow over real pools."""

from __future__ import annotations

import pytest
import torch

from hicache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheInitParams,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from hicache.errors import InvariantError
from prefix_case import insert, key, matched, node_of


class Freed:
    """An allocator that can only free, as in a simulation."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.slots: list[int] = []

    def free(self, free_index: torch.Tensor) -> None:
        self.slots += free_index.tolist()


def test_a_match_gives_slots_of_its_own() -> None:
    """Neither the inserted slots nor the slots of a match share memory with the tree."""
    cache = RadixCache.create_simulated()
    mine = torch.tensor([10, 11, 12])
    insert(cache, [1, 2, 3], value=mine)
    mine.zero_()
    cache.match_prefix(key([1, 2, 3])).device_indices.zero_()
    assert cache.match_prefix(key([1, 2, 3])).device_indices.tolist() == [10, 11, 12]


def test_bigram_keys_drop_the_last_slot() -> None:
    """A cache of bigrams holds a slot for each pair, one fewer than tokens. The cache matches the pairs that two
    prompts share."""
    cache = RadixCache(CacheInitParams(False, None, None, 1, is_eagle=True))
    assert insert(cache, [1, 2, 3, 4], value=torch.tensor([10, 11, 12, 13])) == 0
    assert cache.total_size() == 3
    assert cache.match_prefix(key([1, 2, 3, 9])).device_indices.tolist() == [10, 11]
    assert insert(cache, [1, 2, 3, 4]) == 3 and matched(cache, [1]) == 0
    pairs = MatchPrefixParams(RadixKey([(1, 2), (2, 3), (3, 4)], None, True))
    assert cache.match_prefix(pairs).device_indices.tolist() == [10, 11, 12]
    insert(cache, [7, 8, 9])
    assert cache.match_prefix(key([7, 8, 9])).device_indices.tolist() == [7, 8]
    cache.sanity_check()


def test_locks_cover_the_path_to_the_root() -> None:
    """A lock keeps its node and all nodes above. Each call returns by how much the evictable size grew. The root does
    not count."""
    cache = RadixCache.create_simulated(mock_allocator=Freed())
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5])
    node = node_of(cache, [1, 2, 5])
    assert cache.inc_lock_ref(node) == -3 and cache.inc_lock_ref(node) == 0
    assert (cache.evictable_size(), cache.protected_size()) == (2, 3)
    assert node.lock_ref == 2 and node.parent is not None and node.parent.lock_ref == 2
    assert cache.root_node.lock_ref >= 1
    # A split of a locked node keeps both halves locked.
    upper = node_of(cache, [1])
    assert upper.lock_ref == 2 and cache.protected_size() == 3
    assert cache.evict(EvictParams(100)) == EvictResult(2)
    assert cache.dec_lock_ref(node) == 0 and cache.dec_lock_ref(node) == 3
    assert cache.inc_lock_ref(cache.root_node) == 0 == cache.dec_lock_ref(cache.root_node)
    assert (cache.evictable_size(), cache.protected_size()) == (3, 0)
    cache.sanity_check()


def test_locks_of_another_tree_are_refused() -> None:
    """After a reset, a node of the old tree can neither be locked nor unlocked."""
    cache = RadixCache.create_simulated()
    insert(cache, [1, 2, 3])
    node = node_of(cache, [1, 2, 3])
    cache.inc_lock_ref(node)
    cache.reset()
    for call in (cache.inc_lock_ref, cache.dec_lock_ref):
        with pytest.raises(InvariantError):
            call(node)
    assert cache.total_size() == 0 == cache.protected_size()


def test_uses_are_counted_and_priorities_kept() -> None:
    """The use count of a node includes its creation, later inserts over it except chunks, and matches. The node keeps
    the largest priority."""
    cache = RadixCache.create_simulated()
    insert(cache, [1, 2, 3], priority=2, chunked=True)
    node = next(iter(cache.root_node.children.values()))
    assert (node.hit_count, node.priority) == (1, 2)
    insert(cache, [1, 2, 3], priority=1, chunked=True)
    assert (node.hit_count, node.priority) == (1, 2)
    insert(cache, [1, 2, 3, 4], priority=1)
    assert (node.hit_count, node.priority) == (2, 2)
    matched(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 3, 4, 5], priority=7)
    below = node_of(cache, [1, 2, 3, 4])
    assert (node.hit_count, node.priority, below.hit_count, below.priority) == (5, 7, 4, 7)
    # Both halves of a split node have its priority; a new sibling has its own.
    insert(cache, [1, 2, 9], priority=-1)
    upper = node_of(cache, [1, 2])
    assert upper.priority == node.priority == 7
    assert node_of(cache, [1, 2, 9]).priority == -1


def test_events_name_every_page() -> None:
    """Each page is one block. The hash of a block depends on all tokens before it, and the event of its removal has the
    same hash. A reset clears all blocks."""
    cache = RadixCache.create_simulated(page_size=2, enable_kv_cache_events=True)
    assert cache.take_events() == []
    insert(cache, [1, 2, 3, 4, 5])
    insert(cache, [1, 2, 7, 8])
    insert(cache, [7, 8], "tenant")
    stored = cache.take_events()
    assert all(isinstance(event, BlockStored) for event in stored)
    blocks = [event for event in stored if isinstance(event, BlockStored)]
    assert [block.token_ids for block in blocks] == [[1, 2], [3, 4], [7, 8], [7, 8]]
    hashes = [block.block_hashes[0] for block in blocks]
    assert len(set(hashes)) == 4 and {len(block.block_hashes) for block in blocks} == {1}
    assert [block.parent_block_hash for block in blocks] == [None, hashes[0], hashes[0], None]
    assert {(block.block_size, block.medium) for block in blocks} == {(2, "GPU")}
    assert cache.take_events() == []
    cache.evict(EvictParams(100))
    removed = cache.take_events()
    assert sorted(event.block_hashes[0] for event in removed if isinstance(event, BlockRemoved)) == sorted(hashes)
    cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    silent = RadixCache.create_simulated(page_size=2)
    insert(silent, [1, 2])
    assert silent.take_events() == []
    pairs = RadixCache(CacheInitParams(False, None, None, 1, is_eagle=True, enable_kv_cache_events=True))
    insert(pairs, [1, 2, 3])
    assert [event.token_ids for event in pairs.take_events()] == [[(1, 2)], [(2, 3)]]
