"""RadixCache and requests: the slots that requests share as they grow, and free however they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hicache import alloc_for_extend, release_kv_cache
from prefix_case import Batch, FakeRunner, Request, full_cache


class Counted(list[int]):
    """Token ids that count how many of them are read, and refuse to be read at once."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        assert isinstance(at, slice)
        ids = super().__getitem__(at)
        self.read += len(ids)
        return ids

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole prompt was read")


def test_a_chunk_costs_a_chunk() -> None:
    """In each call for a chunk of a long prompt, the cache reads, writes and locks only the tokens of this chunk, at
    any position."""
    chunk, num_chunks = 64, 64
    cache = full_cache(chunk * num_chunks, 16, columns=chunk * num_chunks)
    runner, prompt = FakeRunner(cache), list(range(chunk * num_chunks))
    req = Request(prompt)
    runner.admit(req)
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
    # The tensor of the prefix is reallocated only when it doubles.
    assert len(storages) <= num_chunks.bit_length()
    assert req.prefix_indices.tolist() == runner.row(req, 0, len(prompt)).tolist()
    assert cache.protected_size() == len(prompt)
    release_kv_cache(req, cache, is_insert=False)
    assert cache.evictable_size() == len(prompt)
    cache.sanity_check()


def test_a_row_may_change_hands_unseen() -> None:
    """If a row was freed without the cache's knowledge, the next request with this row sees its own slots."""
    cache = full_cache(64)
    runner = FakeRunner(cache)
    runner.serve([1, 2, 3])
    removed = Request([50, 51, 52, 53, 54])
    runner.admit(removed)
    runner.extend(removed, 4)
    cache.cache_unfinished_req(removed, chunked=True)
    cache.dec_lock_ref(removed.last_node)
    row = removed.req_pool_idx
    cache.req_to_token_pool.free(removed)
    req = Request([1, 2, 3, 4, 5, 6])
    assert runner.admit(req) == 3
    runner.extend(req, 5)
    assert req.req_pool_idx == row
    cache.cache_unfinished_req(req, chunked=True)
    assert req.prefix_indices.tolist() == runner.row(req, 0, 5).tolist()
    runner.extend(req, 6)
    release_kv_cache(req, cache)
    cache.sanity_check()
