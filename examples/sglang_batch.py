"""Serves a batch with the calls of an SGLang scheduler, and compares every generated token with plain attention.

python examples/sglang_batch.py

    prefill      match_prefix, inc_lock_ref; for each chunk alloc_for_extend, a forward pass, cache_unfinished_req
    decode       alloc_for_decode, a forward pass over one token of each request
    retraction   out of slots: move_kv_cache gathers 8192 tokens of all layers, which are copied to pinned memory;
                 release_kv_cache(is_insert=False). Later alloc_for_extend, and the reverse copy
    end          release_kv_cache

The model has random weights and attention layers only. A pass writes keys and values to the slots that the allocator
returned, and `pool_attention` reads them through the request table. The example does not use hicache's engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from hicache import (
    CacheInitParams,
    MatchPrefixParams,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    TreeNode,
    alloc_for_decode,
    alloc_for_extend,
    release_kv_cache,
)
from hicache.config.environment import kernel_choice
from hicache.device.base import COPY_CHUNK_TOKENS
from hicache.kernels.paged_attention import paged_attention_forward
from hicache.kernels.pool_attention import AttentionRule, PoolQueries, num_splits, pool_attention

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [n, heads, dim], k and v [n, kv_heads, dim]) -> [n, heads, dim]."""


@dataclass(frozen=True)
class Geometry:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


TINY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=16, vocab=97)
LLAMA_8B = Geometry(layers=32, heads=32, kv_heads=8, head_dim=128, vocab=32000)


class Model:
    """A model of random weights: embeddings of tokens and positions, attention layers with residuals, and a head."""

    def __init__(self, geometry: Geometry, max_len: int, device: str | torch.device, dtype: torch.dtype) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self.dtype = dtype
        hidden, kv = geometry.hidden, geometry.kv_heads * geometry.head_dim
        self.widths = [hidden, kv, kv]
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

        self.embedding = random(geometry.vocab, hidden)
        self.positions = random(max_len, hidden)
        self.head = random(hidden, geometry.vocab)
        self.qkv = [random(hidden, sum(self.widths)) / hidden**0.5 for _ in range(geometry.layers)]
        self.out = [random(hidden, hidden) / hidden**0.5 for _ in range(geometry.layers)]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens [n] at `positions` [n]."""
        x = self.embedding[tokens] + self.positions[positions]
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (F.rms_norm(x, x.shape[1:]) @ qkv).split(self.widths, dim=1)
            q, k, v = (part.reshape(len(x), -1, self.geometry.head_dim) for part in (q, k, v))
            x = x + attend(layer, q, k, v).reshape(len(x), -1) @ out
        return x

    def next_tokens(self, hidden: torch.Tensor) -> list[int]:
        """Return the most likely token after each row of hidden states. Waits for the device."""
        return (F.rms_norm(hidden, hidden.shape[1:]) @ self.head).argmax(-1).tolist()


@dataclass(eq=False)
class Request:
    """A request with the attributes that SGLang's caches and allocators read and write."""

    origin_input_ids: list[int]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: TreeNode = field(default_factory=TreeNode)
    extra_key: str | None = None
    cache_protected_len: int = 0
    req_pool_idx: int | None = None
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    host_kv: torch.Tensor | None = None  # keys and values of a retracted request, [2 * layers, tokens, ...row]

    def tokens(self, start: int, end: int) -> list[int]:
        num = len(self.origin_input_ids)
        return self.origin_input_ids[start:end] + self.output_ids[max(0, start - num) : max(0, end - num)]


@dataclass
class Batch:
    """The argument of `alloc_for_extend` and `alloc_for_decode`. Only `alloc_for_extend` reads `prefix_lens`."""

    reqs: list[Request]
    tree_cache: RadixCache
    seq_lens_cpu: torch.Tensor
    prefix_lens: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.req_to_token_pool: ReqToTokenPool = self.tree_cache.req_to_token_pool
        self.seq_lens = to_device(self.seq_lens_cpu, self.req_to_token_pool.device)
        ends = self.seq_lens_cpu.tolist()
        self.extend_lens = [end - start for start, end in zip(self.prefix_lens, ends, strict=False)]
        self.extend_num_tokens = sum(self.extend_lens)

    @property
    def req_pool_indices(self) -> torch.Tensor:
        rows = torch.tensor([req.req_pool_idx for req in self.reqs])
        return to_device(rows, self.req_to_token_pool.device)


class PlainAttention:
    """Stores the keys and values of each request contiguously, in memory outside of the pool, and computes torch's
    attention over them.

    `worst`: the largest relative difference that `compare` found so far, as a tensor on the device.
    """

    def __init__(self, geometry: Geometry, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = (geometry.layers, 2, geometry.kv_heads, max_len, geometry.head_dim)
        self._device = device
        self._dtype = dtype
        self._kept: dict[Request, torch.Tensor] = {}
        self.worst = torch.zeros((), device=device)

    def begin(self, req: Request, cached_len: int) -> None:
        """Copy the first `cached_len` tokens from an earlier request that begins with the same tokens."""
        kv, prefix = torch.empty(self._shape, dtype=self._dtype, device=self._device), req.tokens(0, cached_len)
        if cached_len:
            earlier = next(other for other in self._kept if other.tokens(0, cached_len) == prefix)
            kv[:, :, :, :cached_len] = self._kept[earlier][:, :, :, :cached_len]
        self._kept[req] = kv

    def attend(self, layer: int, req: Request, start: int, q: torch.Tensor, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Append keys and values of tokens [start, end). Return the attention [heads, dim] of the last token, whose
        query is `q`."""
        end, kept = start + len(kv[0]), self._kept[req][layer]
        for target, rows in zip(kept, kv, strict=True):
            target[:, start:end] = rows.transpose(0, 1)
        keys, values = kept[:, None, :, :end]
        return F.scaled_dot_product_attention(q[None, :, None], keys, values, enable_gqa=True)[0, :, 0]

    def compare(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        difference = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        self.worst = torch.maximum(self.worst, difference.max())


class Server:
    """Schedules like SGLang. Prefills run before decodes, one prompt at a time is chunked, and the last admitted
    request is retracted first.

    The pool has `num_tokens` slots for requests, and `copy_tokens` more slots, through which retracted requests are
    copied. With `plain`, every pass is compared with plain attention. Only one thread may call a server.
    """

    def __init__(
        self,
        model: Model,
        num_tokens: int,
        max_len: int,
        max_requests: int = 16,
        page_size: int = 64,
        chunk_tokens: int = 2048,
        copy_tokens: int = COPY_CHUNK_TOKENS,
        plain: PlainAttention | None = None,
    ) -> None:
        shape, device, size = model.geometry, model.device, num_tokens + copy_tokens
        self.model = model
        self.page_size = page_size
        self.chunk_tokens = chunk_tokens
        self.plain = plain
        self.pool = MHATokenToKVPool(
            size, page_size, model.dtype, shape.kv_heads, shape.head_dim, shape.layers, device, False,
            enable_kv_cache_copy=True,
        )  # fmt: skip
        self.allocator = PagedTokenToKVPoolAllocator(size, page_size, model.dtype, device, self.pool, need_sort=True)
        self.table = ReqToTokenPool(max_requests, max_len, device)
        self.tree = RadixCache(CacheInitParams(False, self.table, self.allocator, page_size))
        staging = self.allocator.alloc(copy_tokens)
        assert staging is not None, "a new pool has these slots, one after the other"
        self.staging = staging
        self._first_staged = int(staging[0])
        self.buffers = [buffer for layer in range(shape.layers) for buffer in self.pool.layer_buffers(layer)]
        self.kernels = kernel_choice(device)
        self.rule = AttentionRule(shape.head_dim**-0.5)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.retracted: deque[Request] = deque()
        self.chunked: Request | None = None  # request with a partly computed prompt
        self.counts = dict.fromkeys(("cached", "prefilled", "generated", "retracted", "restored"), 0)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests until all have ended."""
        self.waiting.extend(requests)
        while self.waiting or self.running or self.retracted or self.chunked:
            self.step()

    def step(self) -> None:
        """Run one pass, over prompts if any prompt fits, or otherwise over one token of each running request."""
        if self.retracted and self.chunked is None and self._admit(self.retracted[0]):
            self._restore(self.retracted.popleft())
        if batch := self._next_prefill():
            self._extend(batch)
        else:
            self._decode()

    def _next_prefill(self) -> list[Request]:
        """Return the requests whose prompts the next pass computes. It may compute only a part of the last prompt."""
        batch = [] if self.chunked is None else [self.chunked]
        budget = self.chunk_tokens - sum(self._num_left(req) for req in batch)
        while self.waiting and budget > 0 and not self.retracted and len(batch) < self.table.available_size():
            if not self._admit(self.waiting[0], batch):
                break
            batch.append(self.waiting.popleft())
            budget -= self._num_left(batch[-1])
        return batch

    def _num_left(self, req: Request) -> int:
        return len(req.origin_input_ids) - len(req.prefix_indices)

    def _admit(self, req: Request, batch: Sequence[Request] = ()) -> bool:
        """Match and lock the request's prefix if its other tokens fit. Slots are also needed for the tokens of `batch`,
        and for one more page of each request."""
        num_tokens = len(req.origin_input_ids) if req.host_kv is None else req.kv_committed_len
        asked = req.tokens(0, num_tokens - 1 if req.host_kv is None else num_tokens)
        match = self.tree.match_prefix(MatchPrefixParams(RadixKey(asked)))
        cached_len = len(match.device_indices)
        self.tree.inc_lock_ref(match.last_device_node)
        pages = self._pages(num_tokens) - self._pages(cached_len) + 1 + len(self.running) + len(batch)
        pages += sum(self._pages(len(at.origin_input_ids)) - self._pages(len(at.prefix_indices)) for at in batch)
        free = self.allocator.available_size() + self.tree.evictable_size()
        if (self.running or batch) and pages * self.page_size > free:
            self.tree.dec_lock_ref(match.last_device_node)
            return False
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = cached_len
        if req.host_kv is None:
            self.counts["cached"] += cached_len
            if self.plain is not None:
                self.plain.begin(req, cached_len)
        return True

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _extend(self, batch: list[Request]) -> None:
        budget, starts, ends = self.chunk_tokens, [len(req.prefix_indices) for req in batch], []
        for req, start in zip(batch, starts, strict=True):
            ends.append(min(len(req.origin_input_ids), start + budget))
            budget -= ends[-1] - start
        slots, rows, _ = alloc_for_extend(Batch(batch, self.tree, torch.tensor(ends), starts))
        tokens = self._forward(batch, starts, ends, slots, rows)
        self.counts["prefilled"] += sum(ends) - sum(starts)
        self.chunked = None
        for req, token in zip(batch, tokens, strict=True):
            req.fill_ids = req.tokens(0, req.kv_committed_len)
            is_whole = req.kv_committed_len == len(req.origin_input_ids)
            self.tree.cache_unfinished_req(req, chunked=not is_whole)
            if is_whole:
                self._generated(req, token)
            else:
                self.chunked = req

    def _decode(self) -> None:
        while len(self.running) > 1 and self._num_short():
            self._retract(self.running.pop())
        batch, self.running = self.running, []
        lens = [req.kv_committed_len for req in batch]
        what = Batch(batch, self.tree, torch.tensor(lens))
        slots = alloc_for_decode(what)
        tokens = self._forward(batch, lens, [n + 1 for n in lens], slots, what.req_pool_indices)
        for req, token in zip(batch, tokens, strict=True):
            self._generated(req, token)

    def _num_short(self) -> int:
        """Return the number of slots that the next decode step lacks."""
        pages = sum(req.kv_committed_len % self.page_size == 0 for req in self.running)
        return max(0, pages * self.page_size - self.allocator.available_size() - self.tree.evictable_size())

    def _generated(self, req: Request, token: int) -> None:
        req.output_ids.append(token)
        self.counts["generated"] += 1
        if len(req.output_ids) < req.max_new_tokens:
            self.running.append(req)
        else:
            release_kv_cache(req, self.tree)

    def _forward(
        self, batch: list[Request], starts: list[int], ends: list[int], slots: torch.Tensor, rows: torch.Tensor
    ) -> list[int]:
        """Run a pass over tokens [start, end) of each request, with new slots `slots`. Returns the next token of each
        request."""
        device, counts = self.model.device, [end - start for start, end in zip(starts, ends, strict=True)]
        query_starts = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
        tokens = [token for req, *span in zip(batch, starts, ends, strict=True) for token in req.tokens(*span)]
        positions = [position for span in zip(starts, ends, strict=True) for position in range(*span)]
        small = to_device(torch.stack((query_starts, torch.tensor([*ends, 0]))).int(), device)
        token_ids, at = to_device(torch.tensor([tokens, positions]), device)
        shape, is_decode = self.model.geometry, max(counts) == 1
        group = shape.heads // shape.kv_heads
        tiles = shape.kv_heads * (len(batch) if is_decode else sum(-(-n * group // 128) for n in counts))
        splits = num_splits(tiles, device, decoding=is_decode)
        queries = PoolQueries(self.table.req_to_token, rows.int(), small[0], small[1, :-1], max(counts), splits)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.pool.set_kv_buffer(layer, slots, k, v)
            out = pool_attention(q, *self.pool.get_kv_buffer(layer), queries, self.rule, self.kernels)
            if self.plain is not None:
                self._compare(layer, batch, starts, query_starts.tolist(), (q, k, v), queries, out)
            return out

        hidden = self.model.forward(token_ids, at, attend)
        for req, end in zip(batch, ends, strict=True):
            req.kv_committed_len = req.kv_allocated_len = end
        return self.model.next_tokens(hidden[small[0, 1:].long() - 1])

    def _compare(
        self,
        layer: int,
        batch: list[Request],
        starts: list[int],
        bounds: list[int],
        qkv: Sequence[torch.Tensor],
        queries: PoolQueries,
        out: torch.Tensor,
    ) -> None:
        """Compare the output for the last token of each request with plain attention, and with
        `paged_attention_forward` over the request's pages."""
        assert self.plain is not None
        last, lens = [end - 1 for end in bounds[1:]], []
        for req, start, *span in zip(batch, starts, bounds, bounds[1:], strict=False):
            q, k, v = (rows[slice(*span)] for rows in qkv)
            self.plain.compare(out[span[1] - 1], self.plain.attend(layer, req, start, q[-1], (k, v)))
            lens.append(start + len(k))
        pages = self.table.req_to_token[queries.rows.long(), : max(lens) : self.page_size] // self.page_size
        by_pages = paged_attention_forward(
            qkv[0][last][:, None], *self.pool.get_kv_buffer(layer), pages, queries.lengths, self.page_size
        )
        self.plain.compare(out[last], by_pages[:, 0])

    def _retract(self, req: Request) -> None:
        """Copy a request's keys and values to the CPU, and free the slots that the request owns. Slots of the tree
        stay."""
        req.host_kv = self.to_cpu(self.table.req_to_token[req.req_pool_idx, : req.kv_committed_len].long())
        release_kv_cache(req, self.tree, is_insert=False)
        self.retracted.append(req)
        self.counts["retracted"] += 1

    def _restore(self, req: Request) -> None:
        """Allocate a row and slots for an admitted request, and copy back the keys and values of tokens that the tree
        no longer has."""
        end, start = req.kv_committed_len, len(req.prefix_indices)
        assert req.host_kv is not None
        slots, _, _ = alloc_for_extend(Batch([req], self.tree, torch.tensor([end]), [start]))
        self.from_cpu(req.host_kv[:, start:], slots)
        req.host_kv, req.kv_allocated_len, req.fill_ids = None, end, req.tokens(0, end)
        self.tree.cache_unfinished_req(req)
        self.running.append(req)
        self.counts["restored"] += 1

    def to_cpu(self, slots: torch.Tensor) -> torch.Tensor:
        """Copy the rows of all layers at `slots` to CPU memory, [2 * layers, n, kv_heads, dim], pinned on CUDA. Waits
        for the device."""
        on_cuda = self.pool.device.type == "cuda"
        shape = (len(self.buffers), len(slots), *self.buffers[0].shape[1:])
        host = torch.empty(shape, dtype=self.buffers[0].dtype, pin_memory=on_cuda)
        for start in range(0, len(slots), len(self.staging)):
            part = slots[start : start + len(self.staging)]
            self.pool.move_kv_cache(self.staging[: len(part)], part)
            for rows, buffer in zip(host, self.buffers, strict=True):
                rows[start : start + len(part)].copy_(self._staged(buffer, len(part)), non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.current_stream(self.pool.device).synchronize()
        return host

    def from_cpu(self, host: torch.Tensor, slots: torch.Tensor) -> None:
        """Write row i of `host`, which `to_cpu` returned, to slot i of `slots`. Waits for the device."""
        for start in range(0, len(slots), len(self.staging)):
            part = slots[start : start + len(self.staging)]
            for rows, buffer in zip(host, self.buffers, strict=True):
                self._staged(buffer, len(part)).copy_(rows[start : start + len(part)], non_blocking=True)
            self.pool.move_kv_cache(part, self.staging[: len(part)])
        if self.pool.device.type == "cuda":
            torch.cuda.current_stream(self.pool.device).synchronize()

    def _staged(self, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return buffer[self._first_staged : self._first_staged + num_tokens]

    def check(self) -> None:
        """Raise AssertionError if a slot is neither free nor in the tree, or if a pass differed from plain
        attention."""
        self.tree.sanity_check()
        self.allocator.check()
        held = self.allocator.available_size() + self.tree.total_size() + len(self.staging)
        assert held == self.allocator.size, f"{held} of {self.allocator.size} slots are accounted for"
        if self.plain is not None:
            worst, bound = float(self.plain.worst), 1e-2 if self.model.dtype.itemsize == 2 else 1e-4
            assert worst <= bound, f"attention differs from plain attention by {worst:.2e}, more than {bound:.0e}"


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from CPU memory to the device. The copy goes through pinned memory, so that the host does not
    wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, plain = Model(TINY, 64, device, torch.float32), PlainAttention(TINY, 64, device, torch.float32)
    server = Server(model, num_tokens=84, max_len=64, page_size=4, chunk_tokens=16, copy_tokens=16, plain=plain)
    generator = torch.Generator().manual_seed(0)
    document, *questions = (torch.randint(0, 97, (n,), generator=generator).tolist() for n in (20, 13, 12, 7, 12))
    for turn in ("first", "second"):
        requests = [Request(document + question, max_new_tokens=8) for question in questions]
        server.serve(requests)
        server.check()
        counts = ", ".join(f"{number} {name}" for name, number in server.counts.items())
        print(f"{turn}: {counts}; request 0 generated {requests[0].output_ids}")
    print(f"every generated token agrees with plain attention, to {float(plain.worst):.0e}")


if __name__ == "__main__":
    main()
