"""Random histories of the public prefix caches over real pools, compared with plain oracles.

After every step the tree and the pools have no violation. Every slot and state is free or has one owner. The contents
of the tree equal values computed without a cache, and every match is the longest that the contents allow.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache import (
    EvictParams,
    InsertParams,
    MambaRadixCache,
    RadixKey,
    SWARadixCache,
    TreeNode,
    checkpoint_len,
    release_kv_cache,
)
from hicache.errors import OutOfRows, OutOfSlots, OutOfStates
from prefix_case import Cache, FakeRunner, Request, free, full_cache, key, mamba_cache, prefixes, recurrence, swa_cache

PAGES = [1, 4, 16]
NUM_PAGES, NUM_WINDOW_PAGES, NUM_STATES, WINDOW_PAGES = 20, 14, 9, 2
POLICIES = ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
SPACES = st.sampled_from([None, "tenant"])
BLOCKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
SHORT = (OutOfSlots, OutOfRows, OutOfStates)


Name = tuple[int, int]


def names_of(tokens: list[int], extra_key: str | None, page: int) -> list[Name]:
    """A name for each token of the complete pages of a prompt: the prefix of its page, and its position in the page.

    A tree of pages may hold the same tokens twice, in pages that differ in later tokens.
    """
    values = prefixes(tokens, extra_key)
    return [(values[start + page - 1], i) for start in range(0, len(tokens) - page + 1, page) for i in range(page)]


class Held:
    """The contents of a tree by name, from a walk over its nodes."""

    def __init__(self, cache: Cache) -> None:
        self.slots: dict[Name, int] = {}
        self.window_of: dict[Name, bool] = {}
        self.states: set[Name] = set()
        self.contents: dict[int, int] = {}  # by slot: the prefix whose attention state should be there
        self.consumed: list[tuple[torch.Tensor, list[int]]] = []  # states, and the tokens that each must have consumed
        self._page, self._cache = cache.page_size, cache
        stack: list[tuple[TreeNode, list[int]]] = [(child, []) for child in cache.root_node.children.values()]
        while stack:
            node, above = stack.pop()
            assert node.key is not None and node.value is not None
            extra_key, slots = node.key.extra_key, node.value.tolist()
            tokens = above + list(node.key)
            names = names_of(tokens, extra_key, self._page)[len(above) :]
            assert not self.slots.keys() & names, "one page in two nodes"
            self.slots.update(zip(names, slots, strict=True))
            self.contents.update(zip(slots, prefixes(tokens, extra_key)[len(above) :], strict=True))
            self.window_of.update((name, not node.swa_tombstone) for name in names)
            if node.mamba_value is not None:
                self.states.add(names[-1])
                self.consumed.append((node.mamba_value, tokens))
            stack.extend((child, tokens) for child in node.children.values())

    def usable_len(self, tokens: list[int], extra_key: str | None) -> int:
        """The length of the longest prefix that a match may return."""
        names = names_of(tokens, extra_key, self._page)
        return max(end for end in range(0, len(names) + 1, self._page) if self._usable(names[:end]))

    def _usable(self, names: list[Name]) -> bool:
        if not all(name in self.slots for name in names):
            return False
        if isinstance(self._cache, SWARadixCache):
            return all(self.window_of[name] for name in names[-self._cache.sliding_window_size :])
        return not isinstance(self._cache, MambaRadixCache) or not names or names[-1] in self.states


class CacheMachine(RuleBasedStateMachine):
    """One cache, its pools, and requests that arrive, grow, end and are aborted."""

    kind = "full"

    @initialize(
        page=st.sampled_from(PAGES),
        policy=st.sampled_from(POLICIES),
        extra_buffer=st.booleans(),
        chunk=st.sampled_from([1, 2, 6]),
    )
    def build(self, page: int, policy: str, extra_buffer: bool, chunk: int) -> None:
        self.page, self.chunk = page, chunk
        sizes = {"num_tokens": NUM_PAGES * self.page, "page_size": self.page, "columns": 16 * self.page}
        more = {"eviction_policy": policy}
        if self.kind == "full":
            self.cache: Cache = full_cache(rows=4, **sizes, **more)
        elif self.kind == "swa":
            window = WINDOW_PAGES * self.page - self.page // 2
            self.cache = swa_cache(num_swa=NUM_WINDOW_PAGES * self.page, window=window, **sizes, **more)
        else:
            self.cache = mamba_cache(num_states=NUM_STATES, extra_buffer=extra_buffer, chunk=chunk, **sizes, **more)
        self.runner = FakeRunner(self.cache)
        self.running: list[Request] = []
        self.locked: list[tuple[TreeNode, list[int], str | None]] = []

    def tokens(self, blocks: list[int], tail: int = 0) -> list[int]:
        """A prompt of one page for each block. The last page may be incomplete."""
        return [block for block in blocks for _ in range(self.page)] + [7] * (tail % self.page)

    @rule(
        blocks=BLOCKS,
        tail=st.integers(0, 63),
        space=SPACES,
        priority=st.sampled_from([None, 0, 3]),
        to=st.integers(1, 6),
    )
    def start(self, blocks: list[int], tail: int, space: str | None, priority: int | None, to: int) -> None:
        req = Request(self.tokens(blocks, tail), space, priority)
        held = Held(self.cache)
        try:
            hit_len = self.runner.admit(req)
        except OutOfStates:
            return
        assert hit_len == held.usable_len(req.tokens[:-1], space)
        try:
            self.prefill(req, to)
        except SHORT:
            if req.req_pool_idx is None:
                self.runner.refuse(req)
                release_kv_cache(req, self.cache)
                assert req.mamba_pool_idx is None is req.mamba_checkpoint_idx
            else:
                self.running.append(req)
            return
        self.running.append(req)

    def prefill(self, req: Request, num_pages: int) -> None:
        """Compute the next chunk, with a stop at the length where the same prompt would hit."""
        start, end = req.kv_committed_len, len(req.origin_input_ids)
        chunk_end = min(end, start - start % self.page + num_pages * self.page)
        stop = 0
        if isinstance(self.cache, MambaRadixCache) and chunk_end == end:
            stop = checkpoint_len(end, self.chunk, self.page)
        if isinstance(self.cache, MambaRadixCache) and stop > start:
            self.runner.extend(req, stop)
            if self.cache.enable_mamba_extra_buffer:
                self.runner.checkpoint(req)
            else:
                self.cache.cache_unfinished_req(req, chunked=True)
        if chunk_end > req.kv_committed_len:
            self.runner.extend(req, chunk_end)
        self.cache.cache_unfinished_req(req, chunked=chunk_end < end)
        assert req.prefix_indices.tolist() == self.runner.row(req, 0, chunk_end).tolist()
        assert req.cache_protected_len == req.last_node.depth_tokens

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), num_pages=st.integers(1, 4), new=st.integers(1, 5), keep=st.booleans())
    def go_on(self, which: int, num_pages: int, new: int, keep: bool) -> None:
        """Compute the next chunk of a prompt, or a few decoded tokens. The computed tokens are inserted into the tree
        at once or later."""
        req = self.running[which % len(self.running)]
        try:
            if req.kv_committed_len < len(req.origin_input_ids):
                self.prefill(req, num_pages)
                return
            for token in range(min(new, 15 * self.page - len(req.tokens))):
                self.runner.decode(req, token % 2)
                if isinstance(self.cache, SWARadixCache):
                    self.runner.leave_window(req)
                if self.kind == "mamba" and self.cache.enable_mamba_extra_buffer and req.kv_committed_len % 3 == 0:  # type: ignore[union-attr]
                    self.cache.req_to_token_pool.checkpoint([req])
                    req.mamba_last_track_seqlen = req.kv_committed_len
        except SHORT:
            return
        if keep:
            self.cache.cache_unfinished_req(req)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), is_insert=st.booleans(), called_off=st.integers(0, 2))
    def end(self, which: int, is_insert: bool, called_off: int) -> None:
        """End or abort a request, sometimes with slots of a step that was cancelled."""
        req = self.running.pop(which % len(self.running))
        if self.kind != "mamba":
            req.kv_committed_len = max(req.cache_protected_len, req.kv_committed_len - called_off)
        tokens = req.tokens[: req.kv_committed_len]
        release_kv_cache(req, self.cache, is_insert)
        assert req.req_pool_idx is None is req.mamba_pool_idx is req.mamba_checkpoint_idx
        held, names = Held(self.cache), names_of(tokens, req.extra_key, self.page)
        if is_insert and self.kind != "mamba":
            assert all(name in held.slots for name in names)
        elif is_insert and len(tokens) % self.page == 0:
            assert names[-1] in held.states

    @rule(blocks=BLOCKS, tail=st.integers(0, 63), space=SPACES, lock=st.booleans())
    def look(self, blocks: list[int], tail: int, space: str | None, lock: bool) -> None:
        """Match tokens. The match is the longest possible one, and may be locked."""
        tokens = self.tokens(blocks, tail)
        held = Held(self.cache)
        result = self.cache.match_prefix(key(tokens, space))
        length = len(result.device_indices)
        assert length == held.usable_len(tokens, space) == result.last_device_node.depth_tokens
        assert result.device_indices.tolist() == [
            held.slots[name] for name in names_of(tokens[:length], space, self.page)
        ]
        if lock and len(self.locked) < 2:
            self.cache.inc_lock_ref(result.last_device_node)
            self.locked.append((result.last_device_node, tokens[:length], space))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 1))
    def unlock(self, which: int) -> None:
        self.cache.dec_lock_ref(self.locked.pop(which % len(self.locked))[0])

    @rule(pages=st.integers(0, 6), windows=st.integers(0, 4), states=st.integers(0, 3))
    def evict(self, pages: int, windows: int, states: int) -> None:
        """Evict. The requested number is freed, or all unlocked slots. Locked prefixes stay usable."""
        page = self.page
        asked = EvictParams(pages * page, windows * page, states)
        before = free(self.cache), self.evictable()
        removed = self.cache.evict(asked)
        second = "mamba_num" if self.kind == "mamba" else "swa_num_tokens"
        counts = removed.num_tokens_evicted, getattr(removed, f"{second}_evicted")
        requested = asked.num_tokens, getattr(asked, second)
        assert tuple(b + c for b, c in zip(before[0], counts, strict=False)) == free(self.cache)
        for count, want, had in zip(counts, requested, before[1], strict=False):
            assert count >= min(want, had)
        held = Held(self.cache)
        for _, tokens, space in self.locked:
            assert held.usable_len(tokens, space) == len(tokens)

    def evictable(self) -> list[int]:
        cache = self.cache
        if isinstance(cache, SWARadixCache):
            return [cache.full_evictable_size(), cache.swa_evictable_size()]
        if isinstance(cache, MambaRadixCache):
            return [cache.full_evictable_size(), cache.mamba_evictable_size()]
        return [cache.evictable_size()]

    @rule(blocks=BLOCKS, space=SPACES, known=st.integers(0, 6), evicted=st.integers(0, 95))
    def insert(self, blocks: list[int], space: str | None, known: int, evicted: int) -> None:
        """Insert slots that belong to no request, as a caller with its own match would."""
        tokens, cache = self.tokens(blocks), self.cache
        names = prefixes(tokens, space)
        match = cache.match_prefix(key(tokens[: known * self.page], space))
        known_len = len(match.device_indices) if self.kind == "swa" else 0
        fresh = cache.token_to_kv_pool_allocator.alloc(len(tokens) - known_len)
        state = cache.req_to_token_pool.mamba_pool.alloc(1) if self.kind == "mamba" and fresh is not None else None
        if fresh is None or (self.kind == "mamba" and state is None):
            if fresh is not None:
                cache.token_to_kv_pool_allocator.free(fresh)
            return
        self.runner.full.update(zip(fresh.tolist(), names[known_len:], strict=True))
        slots = torch.cat((match.device_indices[:known_len], fresh))
        space_key = RadixKey(tokens, space)
        if isinstance(cache, SWARadixCache):
            window_slots = cache.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(fresh)
            self.runner.window.update(zip(window_slots.tolist(), names[known_len:], strict=True))
            lost = min(max(known_len, evicted % (6 * self.page)), len(tokens) - self.page)
            cache.token_to_kv_pool_allocator.free_swa(slots[known_len : max(lost, known_len)])
            cache.insert(InsertParams(space_key, slots, prev_prefix_len=known_len, swa_evicted_seqlen=lost))
            offered = names_of(tokens, space, self.page)[max(-(-lost // self.page) * self.page, known_len) :]
            window_of = Held(cache).window_of
            assert all(window_of[name] for name in offered), "a tombstone did not take the window that was offered"
            return
        if state is not None:
            value = torch.tensor(recurrence(tokens), dtype=torch.float32)
            states = cache.req_to_token_pool.mamba_pool.mamba_cache
            states.temporal[:, int(state)] = value.view(1, 1, 2)
            states.conv[0][:, int(state)] = value.remainder(128).view(2, 1).to(torch.bfloat16)
        held = Held(cache)
        result = cache.insert(InsertParams(space_key, slots, state))
        assert result.prefix_len == sum(name in held.slots for name in names_of(tokens, space, self.page))
        cache.token_to_kv_pool_allocator.free(slots[: result.prefix_len])
        if result.mamba_exist:
            cache.req_to_token_pool.mamba_pool.free(state)
        assert Held(cache).usable_len(tokens, space) == len(tokens)

    @invariant()
    def sound(self) -> None:
        self.cache.sanity_check()
        held, runner = Held(self.cache), self.runner
        assert {slot: runner.full[slot] for slot in held.contents} == held.contents
        for state, tokens in held.consumed:
            assert runner.state(state) == recurrence(tokens)
        if isinstance(self.cache, SWARadixCache):
            slots = [held.slots[name] for name, has_window in held.window_of.items() if has_window]
            window_slots = runner.allocator.translate_loc_from_full_to_swa(
                torch.tensor(slots, dtype=torch.int64)
            ).tolist()
            assert [runner.window[slot] for slot in window_slots] == [held.contents[slot] for slot in slots]
        for req in self.running:
            runner.check_readable(req, req.kv_committed_len)

    @invariant()
    def conserved(self) -> None:
        """available + evictable + protected + owned = total, in every pool."""
        cache, page = self.cache, self.page
        owned = [self.runner.row(req, req.cache_protected_len, req.kv_allocated_len) for req in self.running]
        own_pages = sum(-(-len(slots) // page) for slots in owned)
        held = cache.evictable_size() + cache.protected_size()
        assert free(cache)[0] + held + own_pages * page == NUM_PAGES * page
        if isinstance(cache, SWARadixCache):
            translate = cache.token_to_kv_pool_allocator.translate_loc_from_full_to_swa
            windows = sum(len((translate(slots) // page).unique()) - int(0 in translate(slots)) for slots in owned)
            held = cache.swa_evictable_size() + cache.swa_protected_size()
            assert free(self.cache)[1] + held + windows * page == NUM_WINDOW_PAGES * page
        elif isinstance(cache, MambaRadixCache):
            own = [s for req in self.running for s in (req.mamba_pool_idx, req.mamba_checkpoint_idx) if s is not None]
            held = cache.mamba_evictable_size() + cache.mamba_protected_size()
            assert free(self.cache)[1] + held + len(own) == NUM_STATES

    def teardown(self) -> None:
        for node, _, _ in self.locked:
            self.cache.dec_lock_ref(node)
        for req in self.running:
            release_kv_cache(req, self.cache)
        assert self.cache.protected_size() == 0
        self.cache.evict(EvictParams(NUM_PAGES * self.page))
        assert self.cache.root_node.children == {} and self.cache.req_to_token_pool.available_size() >= 4
        second = {"full": (), "swa": (NUM_WINDOW_PAGES * self.page,), "mamba": (NUM_STATES,)}[self.kind]
        assert free(self.cache) == (NUM_PAGES * self.page, *second)
        self.cache.sanity_check()


@pytest.mark.parametrize("kind", ["full", "swa", "mamba"])
def test_random_histories(kind: str) -> None:
    """After any history of requests, locks and evictions, everything has one owner, and hits are right and as long as
    possible. A state that continues from a hit equals the recurrence over the complete prefix."""
    machine = type(kind, (CacheMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=25))
