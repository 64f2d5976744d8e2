"""MambaRadixCache and requests: the lengths at which states are stored, and the owners of states when a request
ends."""

from __future__ import annotations

import pytest

from hicache import MambaRadixCache, checkpoint_len, release_kv_cache
from prefix_case import FakeRunner, Request, free, mamba_cache, matched, nodes_of, recurrence


def states_of(cache: MambaRadixCache, tokens: list[int]) -> list[int]:
    """The lengths of a prompt at which the tree has states."""
    held = [(node.depth_tokens, path) for node, path in nodes_of(cache) if node.mamba_value is not None]
    return [depth for depth, path in held if path == tokens[: len(path)]]


@pytest.mark.parametrize(("extra_buffer", "page", "prompt_len"), [(False, 1, 1003), (True, 4, 1000), (True, 4, 1003)])
def test_the_same_prompt_hits(extra_buffer: bool, page: int, prompt_len: int) -> None:
    """For a repeated prompt, all tokens except at most a chunk and one token come from the cache, with either kind of
    stop."""
    cache = mamba_cache(4096, page_size=page, extra_buffer=extra_buffer, columns=1100, chunk=64)
    runner, tokens = FakeRunner(cache), [i % 11 for i in range(prompt_len)]
    stop = checkpoint_len(prompt_len, 64, page)
    for turn in range(3):
        req = Request(tokens)
        hit_len = runner.admit(req)
        assert hit_len == (0 if turn == 0 else 960) and stop == 960
        if hit_len < stop:
            runner.extend(req, stop)
            if extra_buffer:
                runner.checkpoint(req)
            else:
                cache.cache_unfinished_req(req, chunked=True)
        runner.extend(req, prompt_len)
        cache.cache_unfinished_req(req)
        for token in range(5):
            runner.decode(req, token)
        release_kv_cache(req, cache)
        cache.sanity_check()
    states = [960] if prompt_len % page else [960, prompt_len]
    assert states_of(cache, tokens) == states


def serve_as_sglang_does(runner: FakeRunner, tokens: list[int], chunk: int, stop: int = 0) -> int:
    """Serve one request with the calls of SGLang in their order, without an extra buffer. The prefill of the request
    also ends at `stop`. Returns the length of its hit."""
    cache, req = runner.cache, Request(tokens)
    hit_len = runner.admit(req)  # match_prefix(cow_mamba=True), inc_lock_ref
    while (start := req.kv_committed_len) < len(tokens):
        end = min(start + chunk, len(tokens))
        runner.extend(req, stop if start < stop < end else end)  # alloc_for_extend, forward pass
        is_last = req.kv_committed_len == len(tokens)
        if is_last:
            req.output_ids.append(7)
        cache.cache_unfinished_req(req, chunked=not is_last)
    for token in (8, 9):
        runner.decode(req, token)  # alloc_for_decode, forward pass
    release_kv_cache(req, cache)
    cache.sanity_check()
    return hit_len


@pytest.mark.parametrize(("prompt_len", "hit_len", "hit_with_stop"), [(1000, 0, 960), (9000, 8192, 8960)])
def test_a_repeated_prompt_without_a_buffer(prompt_len: int, hit_len: int, hit_with_stop: int) -> None:
    """Two equal requests run in chunks of 8192 tokens. The second request hits up to a length at which a pass of the
    first one ended, so a short prompt hits only if a pass ends at `checkpoint_len`. No state is stored for a length
    that it has not consumed: a prompt of 1000 tokens has no state for 960 unless a pass ended there."""
    tokens = [i % 11 for i in range(prompt_len)]
    for stop, expected in ((0, hit_len), (checkpoint_len(prompt_len, 64), hit_with_stop)):
        cache = mamba_cache(2 * prompt_len, columns=prompt_len + 8, chunk=64)
        runner = FakeRunner(cache)
        assert [serve_as_sglang_does(runner, tokens, 8192, stop) for _ in range(2)] == [0, expected]
        held = {len(path): (node.mamba_value, path) for node, path in nodes_of(cache) if node.mamba_value is not None}
        ends = {8192} if prompt_len > 8192 else set()
        assert set(held) - {prompt_len, prompt_len + 2} == ends | ({stop} if stop else set())
        assert all(runner.state(state) == recurrence(path) for state, path in held.values())


def test_decoding_is_cached_by_two_states_in_turns() -> None:
    """At every interval the running state becomes the checkpoint, and decoding continues in the older state. The last
    checkpoint is stored when the request ends."""
    cache = mamba_cache(256, num_states=4, page_size=4, extra_buffer=True, chunk=4)
    runner, interval = FakeRunner(cache), 8
    req = Request(list(range(10)))
    runner.admit(req)
    runner.extend(req, 10)
    used = set()
    for token in range(20):
        runner.decode(req, token)
        if req.kv_committed_len % interval == 0:
            runner.checkpoint(req)
        assert req.mamba_pool_idx is not None and req.mamba_checkpoint_idx is not None
        used.add(frozenset((int(req.mamba_pool_idx), int(req.mamba_checkpoint_idx))))
        assert runner.state(req.mamba_pool_idx) == recurrence(req.tokens[: req.kv_committed_len])
    assert len(used) == 1 and req.mamba_last_track_seqlen == 24 and req.kv_committed_len == 30
    release_kv_cache(req, cache)
    assert states_of(cache, req.tokens) == [24] and matched(cache, req.tokens) == 24 and free(cache) == (232, 3)
    cache.sanity_check()


def test_a_checkpoint_ahead_of_its_tokens_waits() -> None:
    """A checkpoint that has consumed more tokens than are in the tree is stored only when the other tokens are in the
    tree."""
    cache = mamba_cache(page_size=4, extra_buffer=True)
    runner = FakeRunner(cache)
    req = Request(list(range(10)))
    runner.admit(req)
    runner.extend(req, 8)
    runner.checkpoint(req)
    req.fill_ids = req.fill_ids[:7]
    cache.cache_unfinished_req(req, chunked=True)
    assert cache.total_size() == (0, 0) and req.mamba_last_track_seqlen == 8
    req.fill_ids = req.tokens[:8]
    cache.cache_unfinished_req(req, chunked=True)
    assert states_of(cache, req.tokens) == [8] and req.mamba_last_track_seqlen is None
    release_kv_cache(req, cache)
    cache.sanity_check()


def test_states_after_unknown_tokens_are_not_stored() -> None:
    """If a request has computed more tokens than it knows, the prefix of its state is unknown, and the state is
    freed."""
    cache = mamba_cache()
    runner = FakeRunner(cache)
    req = Request(list(range(6)))
    runner.admit(req)
    runner.extend(req, 6)
    req.origin_input_ids = req.origin_input_ids[:4]
    release_kv_cache(req, cache)
    assert cache.total_size() == (0, 0) and free(cache) == (64, 12)
