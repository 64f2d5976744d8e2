"""Replays a trace through prefix caches as a scheduler drives them, and measures the processor time of each request.

A request is matched, locked, given slots after an eviction of what is short, cached as its prompt is computed, and
cached again and released as it ends; the next ones are admitted meanwhile. The same steps run on hicache's classes and
on a peer's of the same names.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

import hicache
from hicache.bench.common import BenchUnavailable, Case, Report
from hicache.tree.key import Tokens

RUNNING = 8  # requests at a time
ROUNDS = 3
_PER_WINDOW = 20  # requests
_WINDOW_PAGES = 128
_STATES = 256
_VOCABULARY = 150_000

Prompt = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


@dataclass(frozen=True)
class Setup:
    """One replay: which cache ("full", "swa" or "mamba"), its page, and how many tokens a block of the trace has."""

    kind: str
    page_size: int
    block_tokens: int
    max_requests: int
    pool_blocks: int  # capacity

    @property
    def name(self) -> str:
        return f"replay.{self.kind}.page{self.page_size}.block{self.block_tokens}"


# Blocks of 512 tokens are those of the trace. Those of one token make nodes of a few: their bookkeeping is measured.
SETUPS = (
    Setup("full", 64, 512, 200, 1200),
    Setup("full", 1, 512, 200, 1200),
    Setup("full", 1, 1, 1500, 2000),
    Setup("swa", 64, 512, 200, 1200),
    Setup("swa", 1, 512, 200, 1200),
    Setup("swa", 1, 1, 1500, 2000),
    Setup("mamba", 1, 512, 200, 1200),
    Setup("mamba", 1, 1, 1500, 2000),
)


def prompts_of(blocks: Sequence[Tokens], setup: Setup) -> list[Prompt]:
    """Prompts and answers of the first requests whose prompts leave space for others in the pool.

    The last block of a prompt is left out: it is partial in a trace, and so never the same again.
    """
    dice, offsets = np.random.default_rng(5), np.arange(setup.block_tokens)
    prompts = []
    for ids in blocks[: setup.max_requests]:
        held = ids[: max(1, len(ids) - 1)]
        if 2 * len(held) * RUNNING >= setup.pool_blocks:
            continue
        tokens = (held[:, None] * 7919 + offsets * (1 + held[:, None] % 97)).reshape(-1) % _VOCABULARY
        answer = dice.integers(1 << 20, 1 << 30, int(dice.integers(1, setup.block_tokens + 1)))
        prompts.append((held.tolist() if setup.block_tokens == 1 else tokens.tolist(), answer.tolist()))
    return prompts


def add_replays(report: Report, blocks: Sequence[Tokens], peer: Any | None, source: str) -> None:
    """A case for each of `SETUPS`: microseconds of processor time per request, over the peer's in the same process."""
    for setup in SETUPS:
        prompts = prompts_of(blocks, setup)
        sides = [hicache] if peer is None else [hicache, peer]
        rounds = [_replay([_Steps(names, setup, prompts) for names in sides], prompts) for _ in range(ROUNDS)]
        ours, *others = np.median(rounds, axis=0) * 1e6
        windows = [float(part.mean()) for part in np.array_split(ours, max(1, len(ours) // _PER_WINDOW))]
        note = (
            f"{len(prompts)} requests of the {source}, median of {ROUNDS} rounds; percentiles: {_PER_WINDOW} requests"
        )
        case = Case.of(setup.name, windows, "us", better="lower", note=note)
        case = dataclasses.replace(case, value=float(ours.mean()))
        if others:
            ceiling = float(others[0].mean())
            case = dataclasses.replace(case, ceiling=ceiling, ratio=case.value / ceiling, target=1.0)
        report.add(case)


def _replay(sides: Sequence[_Steps], prompts: Sequence[Prompt]) -> list[list[float]]:
    """Processor seconds of every request on each side, in turns: of its admission, and of the end of an earlier one."""
    running: list[collections.deque[_Request]] = [collections.deque() for _ in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    for at, prompt in enumerate(prompts):
        for side in range(len(sides)) if at % 2 else reversed(range(len(sides))):
            start = time.process_time()
            if len(running[side]) == RUNNING:
                sides[side].finish(running[side].popleft())
            running[side].append(sides[side].admit(*prompt))
            seconds[side].append(time.process_time() - start)
    for steps, requests in zip(sides, running, strict=True):
        for request in requests:
            steps.finish(request)
    sides[0].cache.sanity_check()
    if len({steps.hit_tokens for steps in sides}) > 1:
        raise AssertionError(f"hits differ: {[steps.hit_tokens for steps in sides]} tokens")
    return seconds


@dataclass(eq=False)
class _Request:
    """A request with the attributes that both sides ask for; `fill_ids` is its prompt."""

    origin_input_ids: list[int]
    output_ids: list[int]
    fill_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    priority: int = 0
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: Any = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    swa_evicted_seqlen: int = 0
    swa_uuid_for_lock: Any = None
    mamba_pool_idx: Any = None
    mamba_checkpoint_idx: Any = None
    mamba_last_track_seqlen: int | None = None
    is_chunked: int = 0

    def pop_committed_kv_cache(self) -> int:
        return self.kv_committed_len

    def is_dllm(self) -> bool:
        return False


class _Steps:
    """One cache over pools of its own, and what a scheduler does with it. `names`: hicache, or the peer."""

    def __init__(self, names: Any, setup: Setup, prompts: Sequence[Prompt]) -> None:
        self._names, self._kind, self._page, self._is_peer = names, setup.kind, setup.page_size, names is not hicache
        self.hit_tokens = 0
        num_tokens = setup.pool_blocks * setup.block_tokens // self._page * self._page
        self._allocator = self._new_allocator(num_tokens)
        self._table = self._new_table(max(len(prompt) + len(answer) for prompt, answer in prompts) + self._page)
        window = {"sliding_window_size": _WINDOW_PAGES * self._page} if self._kind == "swa" else {}
        cache = {"full": "RadixCache", "swa": "SWARadixCache", "mamba": "MambaRadixCache"}[self._kind]
        self.cache: Any = getattr(names, cache)(
            names.CacheInitParams(
                disable=False,
                req_to_token_pool=self._table,
                token_to_kv_pool_allocator=self._allocator,
                page_size=self._page,
                **window,
            )
        )

    def admit(self, prompt: list[int], answer: list[int]) -> _Request:
        """Match all but the last token, lock, allocate, compute the prompt and cache it."""
        names, req = self._names, _Request(prompt, answer)
        key = names.RadixKey(prompt[: len(prompt) - 1])
        match = self.cache.match_prefix(names.MatchPrefixParams(key=key, cow_mamba=self._kind == "mamba", req=req))
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.swa_uuid_for_lock = self.cache.inc_lock_ref(req.last_node)
        start = req.cache_protected_len = req.prefix_indices.numel()
        self.hit_tokens += start
        # Slots for prompt and answer at once, in whole pages.
        end = -(-(len(prompt) + len(answer)) // self._page) * self._page
        slots = self._alloc(end - start)
        if self._kind == "mamba" and self._table.mamba_pool.available_size() < 2:
            self.cache.evict(names.EvictParams(num_tokens=0, mamba_num=2))
        (row,) = self._table.alloc([req])
        self._table.write((row, slice(0, start)), req.prefix_indices)
        self._table.write((row, slice(start, end)), slots)
        req.fill_ids, req.kv_committed_len, req.kv_allocated_len = prompt, len(prompt), end
        self.cache.cache_unfinished_req(req)
        return req

    def finish(self, req: _Request) -> None:
        """Compute the answer, cache it and release everything."""
        req.kv_committed_len = len(req.origin_input_ids) + len(req.output_ids)
        self.cache.cache_finished_req(req)
        self._table.free(req)

    def _alloc(self, num_tokens: int) -> torch.Tensor:
        allocator, window = self._allocator, 0
        if self._kind == "swa":
            full = max(0, num_tokens - allocator.full_available_size())
            window = max(0, num_tokens - allocator.swa_available_size())
        else:
            full = max(0, num_tokens - allocator.available_size())
        if full or window:
            self.cache.evict(self._names.EvictParams(num_tokens=full, swa_num_tokens=window))
        if self._is_peer and self._kind == "swa" and self._page > 1:
            # SGLang's own `alloc` pairs single slots only.
            pools = allocator.full_attn_allocator, allocator.swa_attn_allocator
            slots, window_slots = (pool.alloc(num_tokens) for pool in pools)
            allocator.full_to_swa_index_mapping[slots] = window_slots
        else:
            slots = allocator.alloc(num_tokens)
        if slots is None:
            raise BenchUnavailable(f"{num_tokens} tokens do not fit beside {RUNNING} requests; raise pool_blocks")
        return cast(torch.Tensor, slots)

    def _new_allocator(self, num_tokens: int) -> Any:
        names, common = self._names, {"dtype": torch.bfloat16, "device": "cpu", "need_sort": False}
        if self._kind == "swa":
            pool = object.__new__(names.SWAKVPool) if self._is_peer else None
            if pool is not None:
                pool.full_kv_pool = pool.swa_kv_pool = None
            window_tokens = num_tokens // 2 // self._page * self._page
            return names.SWATokenToKVPoolAllocator(num_tokens, window_tokens, self._page, kvcache=pool, **common)
        if self._page == 1:
            return names.TokenToKVPoolAllocator(num_tokens, kvcache=None, **common)
        return names.PagedTokenToKVPoolAllocator(num_tokens, self._page, kvcache=None, **common)

    def _new_table(self, columns: int) -> Any:
        names = self._names
        common: dict[str, Any] = {"max_context_len": columns, "device": "cpu", "enable_memory_saver": False}
        if self._kind != "mamba":
            return names.ReqToTokenPool(size=2 * RUNNING, **common)
        # One layer of the smallest states: what is measured is their bookkeeping.
        conv, temporal, dtype = ((2, 1),), (1, 1, 2), torch.float32
        if self._is_peer:
            shape, dtypes = SimpleNamespace(conv=conv, temporal=temporal), SimpleNamespace(conv=dtype, temporal=dtype)
            params: Any = SimpleNamespace(shape=shape, layers=[0], dtype=dtypes)
        else:
            params = names.Mamba2CacheParams(names.Mamba2StateShape(conv=conv, temporal=temporal), [0], dtype, dtype)
        return names.HybridReqToTokenPool(
            size=2 * RUNNING, mamba_size=_STATES, mamba_spec_state_size=0, cache_params=params,
            enable_mamba_extra_buffer=False, speculative_num_draft_tokens=None, **common,
        )  # fmt: skip
