"""Attention over the slots of the device pool by the kernels of flashinfer, an optional package.

flashinfer plans on the host which part of the device computes what, from the lengths of the sequences, and runs any
number of layers by one plan. The pool is to it a cache with pages of one token. A layer has at most two launches a
pass:

    sequences with one query   kernels that split the keys of a sequence over the device ("fa2")
    sequences with several     the fastest that the device has: "fa3" on Hopper, else "fa2"

Layers with the same rule share a plan, which the first of them makes in each pass. A pass that a CUDA graph captures
reads its plan from buffers of its own, and is planned anew before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Any

import torch

from hicache.device.base import KVCache
from hicache.errors import ConfigError, UnsupportedModel
from hicache.kernels.pool_attention import AttentionRule, PoolQueries
from hicache.layout import ModelGeometry
from hicache.serving.attention import QuerySpan, SlotAttention, SlotPass, token_rows
from hicache.serving.graphs import DecodeBatch

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 256 << 20  # partial results of split keys; launches follow one another, so all plans share it
_INSTEAD = "use attention triton or torch"


def require_flashinfer(device: torch.device) -> Any:
    """The package. Raises ConfigError if it is not installed, or `device` is not one that it computes on."""
    if device.type != "cuda":
        raise ConfigError(f"attention flashinfer needs a CUDA device, and the model is on {device}; {_INSTEAD}")
    try:
        import flashinfer  # here, for it takes seconds
    except ImportError as error:
        raise ConfigError(
            f"attention flashinfer needs the package flashinfer-python ({error}): pip install 'hicache[flashinfer]', "
            f"or {_INSTEAD}"
        ) from error
    return flashinfer


@dataclass(frozen=True)
class _Shape:
    """What layers that share a plan have in common. `is_swa`: whether they store in window slots."""

    scale: float
    window: int
    softcap: float
    is_swa: bool
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class FlashInferAttention(SlotAttention):
    """The attention of one runner's passes, by flashinfer; see `SlotAttention`.

    Raises ConfigError without flashinfer or a CUDA device, UnsupportedModel for what it does not compute.
    """

    long_queries = maxsize

    def __init__(self, pool: KVCache, geometry: ModelGeometry) -> None:
        super().__init__(pool, geometry)
        self._package = require_flashinfer(pool.device)
        check_computes(pool, geometry)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._plans: dict[tuple[bool, _Shape], _Plan] = {}
        self._current: set[tuple[bool, _Shape]] = set()  # keys of the plans made for this pass
        self._captured: dict[int, dict[_Shape, _Plan]] = {}  # by batch size
        self._table = torch.empty(0)  # of captured passes, as in `PoolQueries`

    def begin(self, slot_pass: SlotPass) -> None:
        super().begin(slot_pass)
        self._current.clear()

    def begin_replay(self, batch: DecodeBatch, lengths: Sequence[int]) -> None:
        span = self._decoding(batch.rows, batch.query_starts, batch.positions + 1, lengths)
        for shape, plan in self._captured[len(lengths)].items():
            plan.make(span, self._map_of(shape))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        source = self._sources[layer]
        keys, values = self._store(layer, key, value)
        rows = token_rows(query).to(keys.dtype)
        out, pages = torch.empty_like(rows, memory_format=torch.contiguous_format), (keys[:, None], values[:, None])
        is_swa, heads, (kv_heads, head_dim) = source in self._swa_layers, rows.shape[1], keys.shape[1:]
        shape = _Shape(rule.scale, rule.window, rule.softcap, is_swa, heads, kv_heads, head_dim, keys.dtype)
        for span in self.slot_pass.spans:
            plan = self._plan(span, shape) if span.lengths else self._captured_plan(span, shape)
            plan.wrapper.run(rows[span.start : span.end], pages, out=out[span.start : span.end])
        return out.to(query.dtype).view(query.shape[0], query.shape[2], *out.shape[1:])

    def rule(self, layer: int, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionRule:
        if sinks is not None:
            raise UnsupportedModel(f"attention flashinfer computes no sinks, and the model has some; {_INSTEAD}")
        return super().rule(layer, scale, softcap, sinks)

    def _plan(self, span: QuerySpan, shape: _Shape) -> _Plan:
        """The plan of a span of an eager pass, which has at most one span of each kind."""
        is_decode = span.queries.max_queries == 1
        key = is_decode, shape
        if key not in self._plans:
            backend = "fa2" if is_decode else "auto"
            wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)
            self._plans[key] = _Plan(wrapper, shape)
        if key not in self._current:
            self._plans[key].make(span, self._map_of(shape))
            self._current.add(key)
        return self._plans[key]

    def _captured_plan(self, span: QuerySpan, shape: _Shape) -> _Plan:
        """The plan of a pass that is captured. It is made by the warm-up, whose sequences have one token each."""
        queries = span.queries
        size, self._table = len(queries.rows), queries.table
        plans = self._captured.setdefault(size, {})
        if shape not in plans:
            max_len = min(queries.table.shape[1], self._pool.size, shape.window or maxsize)
            starts, indices, last = (
                torch.zeros(num, dtype=torch.int32, device=queries.rows.device)
                for num in (2 * (size + 1), size * max_len, size)
            )
            wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=starts[: size + 1],
                paged_kv_indptr_buf=starts[size + 1 :],
                paged_kv_indices_buf=indices,
                paged_kv_last_page_len_buf=last,
                backend="fa2",
            )
            plans[shape] = _Plan(wrapper, shape)
            warm_up = self._decoding(queries.rows, queries.query_starts, queries.lengths, (1,) * size)
            plans[shape].make(warm_up, self._map_of(shape))
        return plans[shape]

    def _decoding(
        self, rows: torch.Tensor, query_starts: torch.Tensor, lengths: torch.Tensor, host_lengths: Sequence[int]
    ) -> QuerySpan:
        queries, size = PoolQueries(self._table, rows.int(), query_starts, lengths.int(), 1), len(host_lengths)
        return QuerySpan(0, size, queries, (1,) * size, tuple(host_lengths))

    def _map_of(self, shape: _Shape) -> torch.Tensor | None:
        return self._slot_map(next(iter(self._swa_layers))) if shape.is_swa else None


class _Plan:
    """A wrapper of flashinfer's with the plan that it was given last."""

    def __init__(self, wrapper: Any, shape: _Shape) -> None:
        self.wrapper, self._shape = wrapper, shape
        self._copied = torch.cuda.Event()

    def make(self, span: QuerySpan, slot_map: torch.Tensor | None) -> None:
        """Plan for the sequences of `span`, whose lengths the host knows."""
        shape, kept, indices = self._shape, *seen_slots(span, self._shape.window, slot_map)
        # One query sees all keys that are kept.
        window_left = shape.window - 1 if span.queries.max_queries > 1 else -1
        # The last plan is copied from pinned memory that this one overwrites.
        self._copied.synchronize()
        self.wrapper.plan(
            _starts(span.counts),
            _starts(kept),
            indices,
            torch.ones(len(kept), dtype=torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            1,
            causal=True,
            sm_scale=shape.scale,
            window_left=window_left,
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._copied.record()


def seen_slots(span: QuerySpan, window: int, slot_map: torch.Tensor | None) -> tuple[list[int], torch.Tensor]:
    """What the queries of each sequence see together: how many of its last tokens, and the slots of these, int32
    [their sum], one sequence after another. `window`, `slot_map`: as in `pool_attention`. Does not wait for the
    device."""
    queries = span.queries
    kept, lengths = list(span.lengths), queries.lengths.long()
    num_kept = lengths
    if window:
        kept = [min(length, count + window - 1) for length, count in zip(kept, span.counts, strict=True)]
        num_kept = torch.minimum(lengths, queries.query_starts.diff() + (window - 1))
    total, device = sum(kept), lengths.device
    sequence = torch.repeat_interleave(torch.arange(len(kept), device=device), num_kept, output_size=total)
    # Slot j of the result is of the token at lengths[s] - (end of s in the result - j).
    position = torch.arange(total, device=device) + (lengths - num_kept.cumsum(0))[sequence]
    slots = queries.table[queries.rows.long()[sequence], position]
    return kept, (slots if slot_map is None else slot_map[slots.long()]).int()


def _starts(counts: Sequence[int]) -> torch.Tensor:
    """int32 [len(counts) + 1] on the host."""
    return torch.tensor((0, *counts)).cumsum(0).int()


def check_computes(pool: KVCache, geometry: ModelGeometry) -> None:
    """Raise UnsupportedModel if flashinfer does not attend over such a pool."""
    missing = "latent attention" if geometry.latent else "attention within chunks" if geometry.chunk else ""
    if missing:
        raise UnsupportedModel(f"attention flashinfer computes no {missing}, which the model has; {_INSTEAD}")
    kinds = ((geometry.full_layers, geometry.full_heads), (geometry.window_layers, geometry.window_heads))
    for shape in (heads for layers, heads in kinds if layers):
        if shape.head_dim not in _HEAD_DIMS or shape.v_head_dim != shape.head_dim:
            raise UnsupportedModel(
                f"attention flashinfer computes heads of {_HEAD_DIMS}, keys and values alike, and the model has keys "
                f"of {shape.head_dim} and values of {shape.v_head_dim}; {_INSTEAD}"
            )
    if pool.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"attention flashinfer reads a pool in float16 or bfloat16, and this one is in {pool.dtype}; set dtype, or "
            f"{_INSTEAD}"
        )
