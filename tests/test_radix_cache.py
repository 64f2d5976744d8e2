"""The prefix cache of full attention: by value objects, and through requests that grow over real pools."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prefix_case import Batch, Request, Toy, full_cache, key, matched

import hicache
from hicache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
    TreeNode,
    alloc_for_extend,
    release_kv_cache,
)
from hicache.errors import ConfigError, InvariantError, OutOfSlots, ShapeError


class Freed:
    """An allocator that only takes back, as a simulation has it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.slots: list[int] = []

    def free(self, free_index: torch.Tensor) -> None:
        self.slots += free_index.tolist()


def insert(cache: RadixCache, tokens: list[int], extra_key: str | None = None, **more: Any) -> int:
    return cache.insert(InsertParams(RadixKey(tokens, extra_key), **more)).prefix_len


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


SURFACE = """
    RadixKey MatchPrefixParams MatchResult InsertParams InsertResult EvictParams EvictResult CacheInitParams RadixCache
    SWARadixCache MambaRadixCache TreeNode BlockStored BlockRemoved AllBlocksCleared LRUStrategy LFUStrategy
    FIFOStrategy MRUStrategy FILOStrategy PriorityStrategy SLRUStrategy get_eviction_strategy checkpoint_len
"""


def test_every_name_is_at_the_front_door() -> None:
    """What the caches are built and called with comes from `hicache`, and says what it is."""
    assert [name for name in SURFACE.split() if name not in hicache.__all__ or not vars(hicache)[name].__doc__] == []


def test_value_objects_take_positions_and_defaults() -> None:
    """Fields are in the order of the field's own, with its defaults, and cannot be changed."""
    tokens = RadixKey([1, 2, 3], "tenant")
    assert MatchPrefixParams(tokens) == MatchPrefixParams(tokens, False, None)
    assert InsertParams(tokens) == InsertParams(tokens, None, None, 0, 0, False, 0)
    assert (InsertResult(3), EvictParams(2), EvictResult(1, 2, 3)) == (
        InsertResult(prefix_len=3, mamba_exist=False),
        EvictParams(num_tokens=2, swa_num_tokens=0, mamba_num=0),
        EvictResult(num_tokens_evicted=1, swa_num_tokens_evicted=2, mamba_num_evicted=3),
    )
    params = CacheInitParams(True, None, None, 16)
    assert (params.is_eagle, params.eviction_policy, params.sliding_window_size) == (False, "lru", None)
    assert (params.enable_mamba_extra_buffer, params.mamba_cache_chunk_size) == (False, 64)
    node = TreeNode()
    result = MatchResult(torch.empty(0), node, node)
    assert result.host_hit_length == 0 and result.mamba_branching_seqlen is None
    for value, name in ((params, "page_size"), (result, "host_hit_length"), (InsertParams(tokens), "priority")):
        with pytest.raises(AttributeError):
            setattr(value, name, 1)


def test_keys_keep_their_extra_key() -> None:
    """Length and iteration are those of the ids; an index and a slice are keys of the same tenant and kind."""
    tokens = RadixKey([1, 2, 3, 4], "tenant")
    assert len(tokens) == 4 and list(tokens) == [1, 2, 3, 4]
    assert tokens[1:3] == RadixKey([2, 3], "tenant") and tokens[-1] == RadixKey([4], "tenant")
    pairs = tokens.as_bigrams()
    assert pairs[:2] == RadixKey([(1, 2), (2, 3)], "tenant", True) != RadixKey([(1, 2), (2, 3)], None, True)


def test_prefixes_are_found_and_shared() -> None:
    """What was inserted is matched up to where prompts part, with the slots of whoever came first."""
    cache = RadixCache.create_simulated()
    assert insert(cache, [1, 2, 3], value=torch.tensor([10, 11, 12])) == 0
    assert insert(cache, [1, 2, 3], value=torch.tensor([20, 21, 22])) == 3
    assert insert(cache, [1, 2, 4, 5], value=torch.tensor([30, 31, 32, 33], dtype=torch.int32)) == 2
    result = cache.match_prefix(key([1, 2, 4, 9]))
    assert result.device_indices.tolist() == [10, 11, 32] and result.device_indices.dtype == torch.int64
    assert result.last_device_node is result.last_host_node and result.host_hit_length == 0
    assert list(result.last_device_node.key or []) == [4]
    assert cache.total_size() == 5 and sorted(cache.all_values_flatten().tolist()) == [10, 11, 12, 32, 33]
    assert matched(cache, [2, 3]) == 0 and matched(cache, [1, 2, 3, 4]) == 3
    # Without slots the token ids stand for them.
    insert(cache, [7, 8, 9])
    assert cache.match_prefix(key([7, 8])).device_indices.tolist() == [7, 8]
    cache.sanity_check()


def test_a_match_gives_slots_of_its_own() -> None:
    """Neither what was inserted nor what a match returned shares memory with the tree."""
    cache = RadixCache.create_simulated()
    mine = torch.tensor([10, 11, 12])
    insert(cache, [1, 2, 3], value=mine)
    mine.zero_()
    cache.match_prefix(key([1, 2, 3])).device_indices.zero_()
    assert cache.match_prefix(key([1, 2, 3])).device_indices.tolist() == [10, 11, 12]


@pytest.mark.parametrize("page_size", [4, 16])
def test_only_whole_pages_count(page_size: int) -> None:
    """Keys are cut to whole pages; prompts that part within a page share nothing of it; less than a page is nothing."""
    cache = RadixCache.create_simulated(page_size=page_size)
    tokens = list(range(3 * page_size + 1))
    assert insert(cache, tokens) == 0 and cache.total_size() == 3 * page_size
    parted = tokens[: page_size + 1] + [99] * page_size
    assert matched(cache, parted) == page_size and insert(cache, parted) == page_size
    assert matched(cache, parted) == 2 * page_size
    for short in ([], tokens[: page_size - 1]):
        result = cache.match_prefix(key(short))
        assert result.last_device_node is cache.root_node and result.device_indices.tolist() == []
    assert insert(cache, tokens[: page_size - 1]) == 0
    cache.sanity_check()


def test_a_disabled_cache_keeps_nothing() -> None:
    """Nothing matches, nothing is kept, nothing is locked or evicted."""
    cache = RadixCache.create_simulated(disable=True)
    assert insert(cache, [1, 2, 3]) == 0 and matched(cache, [1, 2, 3]) == 0 and cache.total_size() == 0
    assert cache.evict(EvictParams(3)) == EvictResult()
    assert cache.inc_lock_ref(cache.root_node) == 0 == cache.dec_lock_ref(cache.root_node)
    cache.sanity_check()


def test_tenants_never_meet() -> None:
    """The same tokens under another extra key, or as pairs, are another prefix; so are those under no key."""
    cache = RadixCache.create_simulated()
    for space, first in (("a", 10), ("b", 20), (None, 30)):
        assert insert(cache, [1, 2, 3], space, value=torch.arange(3) + first) == 0
    for space, first in (("a", 10), ("b", 20), (None, 30)):
        assert cache.match_prefix(key([1, 2, 3], space)).device_indices.tolist() == [first, first + 1, first + 2]
    assert matched(cache, [1, 2, 3], "c") == 0
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey([(1, 2), (2, 3)], "a", True))).device_indices) == 0
    node = cache.match_prefix(key([1, 2], "a")).last_device_node
    assert node.key == RadixKey([1, 2], "a")
    cache.sanity_check()


def test_bigram_keys_drop_the_last_slot() -> None:
    """A cache of bigrams holds a slot for each pair, so one fewer than tokens, and matches what shares all pairs."""
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
    """A lock keeps its node and all above; each says by how much the evictable size grew; the root is not counted."""
    cache = RadixCache.create_simulated(mock_allocator=Freed())
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5])
    node = cache.match_prefix(key([1, 2, 5])).last_device_node
    assert cache.inc_lock_ref(node) == -3 and cache.inc_lock_ref(node) == 0
    assert (cache.evictable_size(), cache.protected_size()) == (2, 3)
    assert node.lock_ref == 2 and node.parent is not None and node.parent.lock_ref == 2
    assert cache.root_node.lock_ref >= 1
    # A split of what is locked keeps both halves locked.
    upper = cache.match_prefix(key([1])).last_device_node
    assert upper.lock_ref == 2 and cache.protected_size() == 3
    assert cache.evict(EvictParams(100)) == EvictResult(2)
    assert cache.dec_lock_ref(node) == 0 and cache.dec_lock_ref(node) == 3
    assert cache.inc_lock_ref(cache.root_node) == 0 == cache.dec_lock_ref(cache.root_node)
    assert (cache.evictable_size(), cache.protected_size()) == (3, 0)
    cache.sanity_check()


def test_locks_of_another_tree_are_refused() -> None:
    """A node of a tree that was reset can neither be locked nor unlocked."""
    cache = RadixCache.create_simulated()
    insert(cache, [1, 2, 3])
    node = cache.match_prefix(key([1, 2, 3])).last_device_node
    cache.inc_lock_ref(node)
    cache.reset()
    for call in (cache.inc_lock_ref, cache.dec_lock_ref):
        with pytest.raises(InvariantError, match="was reset"):
            call(node)
    assert cache.total_size() == 0 == cache.protected_size()


def test_eviction_takes_whole_leaves() -> None:
    """The least recently used leaves go, whole, until at least as much is free as was asked, or all that may."""
    allocator = Freed()
    cache = RadixCache.create_simulated(mock_allocator=allocator)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 9], [20, 21]):
        insert(cache, tokens)
    matched(cache, [1, 2, 3, 4, 5])
    assert cache.evict(EvictParams(0)) == EvictResult() and allocator.slots == []
    assert cache.evict(EvictParams(1)) == EvictResult(1) and allocator.slots == [9]
    assert cache.evict(EvictParams(3)) == EvictResult(5) and allocator.slots == [9, 20, 21, 3, 4, 5]
    assert matched(cache, [1, 2, 3]) == 2
    assert cache.evict(EvictParams(100)) == EvictResult(2) and cache.total_size() == 0
    assert cache.root_node.children == {}
    cache.sanity_check()


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("LRU", [2, 3, 1]),
        ("lfu", [2, 3, 1]),
        ("fifo", [1, 2, 3]),
        ("MRU", [1, 3, 2]),
        ("filo", [3, 2, 1]),
        ("priority", [3, 2, 1]),
        ("slru", [2, 3, 1]),
    ],
)
def test_policies_choose_the_victims(policy: str, order: list[int]) -> None:
    """Each policy's order over prompts that differ in age, uses and priority."""
    allocator = Freed()
    cache = RadixCache(CacheInitParams(False, None, allocator, 1, eviction_policy=policy))
    for first, priority in ((1, 5), (2, 3), (3, 0)):
        insert(cache, [first], priority=priority)
    matched(cache, [1])
    for _ in order:
        cache.evict(EvictParams(1))
    assert allocator.slots == order
    with pytest.raises(ConfigError, match="eviction_policy='best' is unknown"):
        RadixCache(CacheInitParams(False, None, None, 1, eviction_policy="best"))


def test_uses_are_counted_and_priorities_kept() -> None:
    """A node counts its maker, later inserts over it but of chunks, and matches; it keeps the largest priority."""
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
    below = cache.match_prefix(key([1, 2, 3, 4])).last_device_node
    assert (node.hit_count, node.priority, below.hit_count, below.priority) == (5, 7, 4, 7)
    # Half of a node is as dear as the whole was; what is new beside it is not.
    insert(cache, [1, 2, 9], priority=-1)
    upper = cache.match_prefix(key([1, 2])).last_device_node
    assert upper.priority == node.priority == 7
    assert cache.match_prefix(key([1, 2, 9])).last_device_node.priority == -1


def test_events_name_every_page() -> None:
    """A block a page, chained by hashes that depend on all tokens before it; removed by the same; cleared by reset."""
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


def test_the_tree_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """The text, printed and returned, has a line a node, below its parent, with its tokens and locks, and the sum."""
    cache = RadixCache.create_simulated()
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4, 5], "tenant")
    cache.inc_lock_ref(cache.match_prefix(key([1, 2])).last_device_node)
    text = cache.pretty_print()
    assert capsys.readouterr().out == text + "\n"
    lines = [line.split("] ", 1) for line in text.splitlines()]
    assert [len(line[0]) - len(line[0].lstrip()) for line in lines[:-1]] == [0, 2, 4, 2]
    assert [line[1] for line in lines[1:-1]] == ["2 [1, 2] r=1", "1 [3] r=0", "4 [1, 2, 4, 5] extra_key='tenant' r=0"]
    assert lines[-1] == ["#tokens: 7"]


def test_wrong_shapes_are_named() -> None:
    """Fewer slots than tokens, and pages of no token, raise with what was given."""
    with pytest.raises(ShapeError, match="2 slots for a key of 3 tokens"):
        insert(RadixCache.create_simulated(), [1, 2, 3], value=torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="page_size=0"):
        RadixCache.create_simulated(page_size=0)


def test_sanity_check_finds_planted_faults() -> None:
    """Every fault is in one error: broken counts, slots held twice, slots that are free, slots that do not exist."""
    cache = full_cache(16)
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(8)
    insert(cache, [1, 2, 3, 4], value=slots[:4])
    cache.sanity_check()
    insert(cache, [5, 6], value=slots[2:4])
    insert(cache, [7, 8], value=torch.tensor([99, 0]))
    allocator.free(slots[:1])
    node = cache.match_prefix(key([5, 6])).last_device_node
    node.locks[0] = 1
    with pytest.raises(InvariantError) as caught:
        cache.sanity_check()
    text = str(caught.value)
    for what in ("account says", r"are held more than once", "[1] of the tree are free", "do not exist"):
        assert what in text, text
    assert "[3, 4]" in text and len(caught.value.violations) >= 4


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
    """Of two that computed one prefix beside each other, the later takes over the slots of the earlier and frees its
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
    """Not inserted: what was the tree's before stays, everything else is free, and nothing is locked."""
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
    """Without a tree a request goes on from its own slots, and all of them are freed with it."""
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
    """Where a row was given back without a word, its next request sees its own slots, not those of the last."""
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
    assert [node.priority for node in cache._tree.nodes() if node.num_tokens == 3] == [5, 2] and prefix.priority == 5
    cache.evict(EvictParams(1))
    assert [matched(cache, tokens) for tokens in ([1, 2, 3, 4, 5], [7, 8, 9])] == [5, 0]


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
    with caplog.at_level(logging.ERROR, "hicache.alloc"), pytest.raises(OutOfSlots, match="9 tokens asked, 8 avail"):
        toy.extend(late, 9)
    assert "8 [100, 101, 102, 103, 104, 105, 106, 107] r=1" in caplog.text and "#tokens: 8" in caplog.text
    toy.refuse(late)
    release_kv_cache(late, cache)
    release_kv_cache(req, cache)
    cache.sanity_check()


def test_keys_may_be_packed() -> None:
    """Token ids as a numpy array match what lists inserted, and the other way round."""
    cache = RadixCache.create_simulated(page_size=4)
    insert(cache, list(range(12)))
    packed = np.arange(12)
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey(packed))).device_indices) == 12  # type: ignore[arg-type]
    cache.insert(InsertParams(RadixKey(packed + 50)))  # type: ignore[arg-type]
    assert matched(cache, list(range(50, 62))) == 12


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
