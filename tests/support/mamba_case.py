"""What the tests of MambaRadixCache share."""

from __future__ import annotations

from hicache import (
    MambaRadixCache,
    TreeNode,
)
from prefix_case import Request, Toy, key


def free(cache: MambaRadixCache) -> tuple[int, int]:
    """Slots and states that nobody has."""
    return cache.token_to_kv_pool_allocator.available_size(), cache.req_to_token_pool.mamba_pool.available_size()


def node_of(cache: MambaRadixCache, tokens: list[int]) -> TreeNode:
    return cache.match_prefix(key(tokens)).last_device_node


def prefill(toy: Toy, req: Request, chunk: int = 1 << 20, stops: tuple[int, ...] = ()) -> int:
    """Compute the prompt by chunks and up to each stop, keeping all; returns how long the hit was."""
    hit_len, end = toy.admit(req), len(req.tokens)
    while req.kv_committed_len < end:
        here = min(stop for stop in (*stops, req.kv_committed_len + chunk, end) if stop > req.kv_committed_len)
        toy.extend(req, here)
        toy.cache.cache_unfinished_req(req, chunked=here < end)
        toy.check_readable(req, here)
        toy.cache.sanity_check()
    return hit_len


def checkpoint(toy: Toy, req: Request) -> None:
    """What a runner with the extra buffer does where a forward of it ends."""
    toy.cache.req_to_token_pool.checkpoint([req])
    req.mamba_last_track_seqlen = req.kv_committed_len
    req.prefix_indices = toy.row(req, 0, req.kv_committed_len)
