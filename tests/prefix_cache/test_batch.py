"""Batches of extends and decodes over a table, an allocator and a tree that evicts what nobody uses."""

from __future__ import annotations

import itertools
import logging
import os
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from hicache.device import ReqToTokenPool
from hicache.errors import OutOfRows, OutOfSlots, ShapeError
from hicache.prefix_cache.batch import (
    alloc_for_decode,
    alloc_for_extend,
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_req_slots,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    get_last_loc,
    release_kv_cache,
)
from hicache.prefix_cache.params import EvictParams, EvictResult

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = [
    ("cpu", "torch"),
    pytest.param("cpu", "triton", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton runs on the GPU here")),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
]


@dataclass(eq=False)
class Request:
    """A request that has slots and a row for a while."""

    prefix_indices: torch.Tensor
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0


class FlatTree:
    """Whole finished sequences, the oldest evicted first: as much of a prefix cache as batches need."""

    def __init__(self, allocator: BaseTokenToKVPoolAllocator, table: ReqToTokenPool) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.req_to_token_pool = table
        self.page_size = allocator.page_size
        self.kept: list[torch.Tensor] = []
        self.asked: list[EvictParams] = []

    def evict(self, params: EvictParams) -> EvictResult:
        self.asked.append(params)
        evicted = 0
        while self.kept and evicted < max(params.num_tokens, params.swa_num_tokens):
            slots = self.kept.pop(0)
            self.token_to_kv_pool_allocator.free(slots)
            evicted += len(slots)
        return EvictResult(evicted)

    def evictable_size(self) -> int:
        return sum(len(slots) for slots in self.kept)

    def available_and_evictable_str(self) -> str:
        return f"{self.token_to_kv_pool_allocator.available_size()} available, {self.evictable_size()} evictable"

    def pretty_print(self) -> str:
        return "\n".join(f"sequence of {len(slots)}" for slots in self.kept)

    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        assert req.req_pool_idx is not None
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len].to(torch.int64)
        whole = len(slots) // self.page_size * self.page_size if is_insert else 0
        if whole:
            self.kept.append(slots[:whole].clone())
        self.token_to_kv_pool_allocator.free(slots[whole:])


@dataclass
class Batch:
    """A scheduler's batch: an extend of `reqs` from their prefixes, or a decode of their rows."""

    reqs: list[Request]
    tree_cache: FlatTree
    seq_lens_cpu: torch.Tensor
    prefix_lens: list[int] = field(default_factory=list)
    req_pool_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def req_to_token_pool(self) -> ReqToTokenPool:
        return self.tree_cache.req_to_token_pool

    @property
    def seq_lens(self) -> torch.Tensor:
        return self.seq_lens_cpu.to(self.req_to_token_pool.device)

    @property
    def extend_lens(self) -> list[int]:
        return [s - p for p, s in zip(self.prefix_lens, self.seq_lens_cpu.tolist(), strict=True)]

    @property
    def extend_num_tokens(self) -> int:
        return sum(self.extend_lens)


def rig(size: int, page_size: int, device: str = "cpu", rows: int = 8, columns: int = 64) -> FlatTree:
    single = page_size == 1
    allocator = (
        TokenToKVPoolAllocator(size, torch.bfloat16, device, None, True)
        if single
        else PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, device, None, True)
    )
    return FlatTree(allocator, ReqToTokenPool(rows, columns, device, False))


def extend(
    tree: FlatTree, requests: list[Request], seq_lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    prefixes = [len(r.prefix_indices) for r in requests]
    out = alloc_for_extend(Batch(requests, tree, torch.tensor(seq_lens, dtype=torch.int64), prefixes))
    for request, seq in zip(requests, seq_lens, strict=True):
        request.kv_committed_len = request.kv_allocated_len = seq
    return out


def fresh(tree: FlatTree) -> Request:
    return Request(torch.empty(0, dtype=torch.int64, device=tree.req_to_token_pool.device))


def row_of(tree: FlatTree, request: Request) -> list[int]:
    assert request.req_pool_idx is not None
    return tree.req_to_token_pool.req_to_token[request.req_pool_idx, : request.kv_allocated_len].tolist()


def in_pages(slots: list[int], page_size: int) -> bool:
    """Slots of one sequence from its start: each page in order, from its first slot on."""
    return all(
        s % page_size == i % page_size and (i % page_size == 0 or s == slots[i - 1] + 1) for i, s in enumerate(slots)
    )


@pytest.mark.parametrize(("device", "kernels"), PLACES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_extend_decode_release(device: str, kernels: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows hold prefix and new slots; decodes append; chunked prefill keeps its row; in the end all is free or kept."""
    monkeypatch.setenv("HICACHE_KERNELS", kernels)
    tree = rig(80, page_size, device)
    allocator, table = tree.token_to_kv_pool_allocator, tree.req_to_token_pool
    requests = [fresh(tree) for _ in range(3)]
    out, row_ids, rows = extend(tree, requests, [5, 8, 1])
    assert out.dtype == row_ids.dtype == torch.int64 and out.numel() == 14 and out.device == table.req_to_token.device
    assert rows == row_ids.tolist() == [r.req_pool_idx for r in requests] and len(set(rows)) == 3 and 0 not in rows
    assert list(itertools.chain(*(row_of(tree, r) for r in requests))) == out.tolist()

    # The second chunk of request 0 continues in its row and page; request 2 waits.
    before = row_of(tree, requests[0])
    requests[0].prefix_indices = torch.tensor(before, device=device)
    _, _, again = extend(tree, [requests[0]], [11])
    assert again == rows[:1] and row_of(tree, requests[0])[:5] == before

    batch = Batch(requests, tree, torch.tensor([11, 8, 1]), req_pool_indices=row_ids)
    for _ in range(5):
        slots = alloc_for_decode(batch)
        for request, slot in zip(requests, slots.tolist(), strict=True):
            request.kv_committed_len += 1
            request.kv_allocated_len += 1
            assert row_of(tree, request)[-1] == slot
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    held = [row_of(tree, r) for r in requests]
    assert all(in_pages(slots, page_size) for slots in held)
    flat = list(itertools.chain(*held))
    assert len(set(flat)) == len(flat) and min(flat) >= page_size

    for request in requests:
        release_kv_cache(request, tree)
        release_kv_cache(request, tree)  # the second finds nothing to do
        assert request.req_pool_idx is None
    assert tree.evictable_size() == sum(len(slots) // page_size * page_size for slots in held)
    assert allocator.available_size() + tree.evictable_size() == 80 and table.available_size() == 8
    evict_from_tree_cache(tree, 80)
    assert allocator.available_size() == 80
    allocator.check()
    table.check()


@pytest.mark.parametrize(("device", "kernels"), PLACES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_several_tokens_a_request(device: str, kernels: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of three tokens a request gives each its next three slots in order, as three single steps would."""
    monkeypatch.setenv("HICACHE_KERNELS", kernels)
    tree = rig(80, page_size, device)
    requests = [fresh(tree) for _ in range(3)]
    _, row_ids, _ = extend(tree, requests, [3, 8, 1])
    batch = Batch(requests, tree, torch.tensor([3, 8, 1]), req_pool_indices=row_ids)
    slots = alloc_for_decode(batch, token_per_req=3)
    for request, new in zip(requests, slots.view(3, 3).tolist(), strict=True):
        request.kv_allocated_len += 3
        assert row_of(tree, request)[-3:] == new and in_pages(row_of(tree, request), page_size)
    # Only some are committed: the other slots are freed with the request.
    requests[0].kv_committed_len += 1
    for request in requests:
        release_kv_cache(request, tree, is_insert=False)
    assert tree.evictable_size() == 0 and tree.token_to_kv_pool_allocator.available_size() == 80


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_more_is_evicted_than_is_missing(page_size: int) -> None:
    """The tree is asked to evict what is missing for an allocation, and not at all where nothing is."""
    tree = rig(40, page_size)
    old = [fresh(tree) for _ in range(3)]
    extend(tree, old, [8, 8, 12])
    for request in old:
        release_kv_cache(request, tree)
    extend(tree, [fresh(tree)], [12])
    assert tree.asked == []
    extend(tree, [fresh(tree)], [10])
    assert tree.asked == [EvictParams(num_tokens=10 if page_size == 1 else 12)]
    assert [len(slots) for slots in tree.kept] == [12]
    tree.token_to_kv_pool_allocator.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_refused_batch_takes_nothing(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Out of slots: an error with tokens requested, available and evictable, the tree in the log, and no row taken."""
    tree = rig(24, page_size)
    first = fresh(tree)
    extend(tree, [first], [17])
    rows = tree.req_to_token_pool.available_size()
    late = [first, fresh(tree), fresh(tree)]
    first.prefix_indices = torch.tensor(row_of(tree, first))
    free = tree.token_to_kv_pool_allocator.available_size()
    tree.kept, tree.evict = [], lambda params: EvictResult(0)  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "hicache"), pytest.raises(OutOfSlots) as caught:
        extend(tree, late, [18, 9, 9])
    tokens = 19 if page_size == 1 else 4 * 6
    assert (caught.value.asked, caught.value.available, caught.value.evictable) == (tokens, free, 0)
    assert "0 evictable" in caplog.text
    assert tree.req_to_token_pool.available_size() == rows and tree.token_to_kv_pool_allocator.available_size() == free
    assert first.req_pool_idx is not None and late[1].req_pool_idx is None is late[2].req_pool_idx
    with pytest.raises(OutOfRows, match="all 8 request rows"):
        alloc_req_slots(tree.req_to_token_pool, [fresh(tree) for _ in range(8)], tree)
    tree.token_to_kv_pool_allocator.check()
    tree.req_to_token_pool.check()


def test_the_tree_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The message before OutOfSlots names what the tree holds."""
    tree = rig(24, 1)
    request = fresh(tree)
    extend(tree, [request], [10])
    release_kv_cache(request, tree)
    assert available_and_evictable_str(tree) == "14 available, 10 evictable"
    tree.evict = lambda params: EvictResult(0)  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "hicache"), pytest.raises(OutOfSlots, match="20 tokens requested, 14 avail"):
        alloc_token_slots(tree, 20)
    assert "sequence of 10" in caplog.text


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_backup_undoes_the_allocation(page_size: int) -> None:
    """The state that comes with slots, restored, makes them free again."""
    tree = rig(40, page_size)
    allocator = tree.token_to_kv_pool_allocator
    if page_size == 1:
        slots, state = alloc_token_slots(tree, 7, backup_state=True)
    else:
        lens = [torch.tensor(x) for x in ([0, 0], [0, 0], [3, 4], [3, 4], [-1, -1])]
        slots, state = alloc_paged_token_slots_extend(tree, *lens, 7, backup_state=True)
    assert slots.numel() == 7 and allocator.available_size() < 40
    allocator.restore_state(state)
    assert allocator.available_size() == 40
    allocator.check()


def test_decode_slots_go_on_in_the_page() -> None:
    """The decode function alone: one slot a request, after its last or from a new page; none left raises."""
    tree = rig(8, 4)
    seq = torch.tensor([3, 5])
    held = alloc_paged_token_slots_extend(tree, *(torch.tensor(x) for x in ([0], [0], [2], [2], [-1])), 2)
    assert isinstance(held, torch.Tensor) and held.tolist() == [4, 5]
    assert alloc_paged_token_slots_decode(tree, seq, seq, torch.tensor([5, 23])).tolist() == [6, 8]
    with pytest.raises(OutOfSlots):
        alloc_paged_token_slots_decode(tree, seq[1:], seq[1:], torch.tensor([7]))
    with pytest.raises(NotImplementedError, match="no pages"):
        alloc_paged_token_slots_decode(rig(8, 1), seq, seq, seq)


def test_lengths_that_disagree_are_named() -> None:
    """Lengths that do not add up, prefixes without slots, and rows too short raise ShapeError and take nothing."""
    tree = rig(40, 4, columns=16)
    short = Request(torch.tensor([4, 5]))
    for prefix_lens, seq_lens, message in (
        ([3], [5], r"prefix_lens \[3\], but slots are \[2\]"),
        ([2], [17], "17 tokens does not fit rows of 16; raise max_context_len"),
    ):
        with pytest.raises(ShapeError, match=message):
            alloc_for_extend(Batch([short], tree, torch.tensor(seq_lens), prefix_lens))
    with pytest.raises(ShapeError, match="17 tokens does not fit rows"):
        alloc_for_decode(Batch([short], tree, torch.tensor([16]), req_pool_indices=torch.tensor([1])))
    assert tree.token_to_kv_pool_allocator.available_size() == 40 and tree.req_to_token_pool.available_size() == 8


def test_full_and_window_slots_are_evicted() -> None:
    """Over a window allocator the tree is asked for what is missing of full and of window slots."""
    allocator = SWATokenToKVPoolAllocator(32, 16, 4, torch.bfloat16, "cpu", None, True)
    tree = FlatTree(allocator, ReqToTokenPool(4, 64, "cpu", False))
    request = fresh(tree)
    extend(tree, [request], [12])
    release_kv_cache(request, tree)
    extend(tree, [fresh(tree)], [9])
    assert tree.asked == [EvictParams(num_tokens=0, swa_num_tokens=8)]
    allocator.check()


@pytest.mark.parametrize(("device", "kernels"), PLACES)
def test_last_loc_reads_the_table(device: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_last_loc` gives the table's last slot of each prefix and -1 for none, whichever kernel runs."""
    monkeypatch.setenv("HICACHE_KERNELS", kernels)
    table = torch.arange(24, dtype=torch.int32, device=device).view(4, 6)
    rows, lens = torch.tensor([2, 1, 3], device=device), torch.tensor([6, 0, 1], device=device)
    assert get_last_loc(table, rows, lens).tolist() == [17, -1, 18]


@given(page_size=st.sampled_from([1, 4]), seed=st.integers(0, 1 << 20))
def test_conservation(page_size: int, seed: int) -> None:
    """Random batches, decodes, aborts and ends: slots are free, in the tree, or in one row, and never in two."""
    rng = random.Random(seed)
    tree = rig(60, page_size, rows=4, columns=40)
    allocator, running = tree.token_to_kv_pool_allocator, []
    for _ in range(15):
        action = rng.choice(["extend", "decode", "end", "abort"])
        try:
            if action == "extend":
                new = [fresh(tree) for _ in range(rng.randint(1, 3))]
                extend(tree, new, [rng.randint(1, 20) for _ in new])
                running += new
            elif action == "decode" and running and max(r.kv_allocated_len for r in running) < 38:
                n = rng.randint(1, 2)
                lens = torch.tensor([r.kv_allocated_len for r in running])
                rows = torch.tensor([r.req_pool_idx for r in running])
                alloc_for_decode(Batch(running, tree, lens, req_pool_indices=rows), n)
                for request in running:
                    request.kv_allocated_len += n
            elif running:
                request = running.pop(rng.randrange(len(running)))
                # The last few tokens that have slots were not computed.
                request.kv_committed_len = max(0, request.kv_allocated_len - rng.choice([0, 1, 5]))
                release_kv_cache(request, tree, is_insert=action == "end")
        except (OutOfSlots, OutOfRows):
            pass
        rows_held = [row_of(tree, r) for r in running]
        held = list(itertools.chain(*rows_held))
        kept = torch.cat([torch.empty(0, dtype=torch.int64), *tree.kept]).tolist()
        assert len(set(held + kept)) == len(held) + len(kept) and all(in_pages(s, page_size) for s in rows_held)
        pages = sum(-(-len(slots) // page_size) for slots in rows_held) * page_size
        assert allocator.available_size() + len(kept) + pages == 60
        allocator.check()
        tree.req_to_token_pool.check()
