"""Attention of transformers models over the slots of the device pool.

A model's configuration has the name of an attention function, and transformers calls the function that is registered
under this name. hicache registers `attend_by_slots` under the name "hicache". The function stores the new keys and
values at their slots, and computes attention to all keys and values of the sequence in the pool, with
`hicache.kernels.pool_attention`. It gets the description of the pass as keyword argument `hicache`, which the runner
gives to the model's forward.

In a pass over slots, the tokens of all sequences are in one row, sequence after sequence. Sequences of different
lengths and with different numbers of new tokens therefore share a pass without padding. The pool's getters wait for
each layer, so a pass can read a prefix layer by layer while it is being loaded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import AttentionInterface

from hicache.config.environment import kernel_choice
from hicache.device.base import KVCache
from hicache.device.swa import SWAKVPool
from hicache.errors import UnsupportedModel
from hicache.kernels.pool_attention import AttentionRule, PoolQueries, pool_attention
from hicache.layout import ModelGeometry
from hicache.serving.cache import SlotLayer, token_rows
from hicache.serving.long_extend import MIN_QUERIES, long_extend, suits

Attention = Literal["auto", "triton", "torch"]
NAME = "hicache"


@dataclass(frozen=True)
class QuerySpan:
    """Tokens [start, end) of a pass, for which one launch computes the attention with `queries`. `counts`: number of
    queries of each sequence. `lengths`: a copy of `queries.lengths`, the number of tokens of each sequence, on the
    host. `lengths` may be empty if each sequence has one query, as in a captured pass."""

    start: int
    end: int
    queries: PoolQueries
    counts: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        """Return whether the span has only one sequence, with at least `MIN_QUERIES` queries, which is long enough for
        `long_extend`."""
        return len(self.queries.rows) == 1 and self.queries.max_queries >= MIN_QUERIES

    @cached_property
    def prefix_slots(self) -> torch.Tensor:
        """Return the slots of the tokens before the queries, int64 [prefix]. The span must have only one sequence."""
        queries = self.queries
        return queries.table.index_select(0, queries.rows)[0, : self.lengths[0] - queries.max_queries].long()


@dataclass(frozen=True)
class SlotPass:
    """A pass over N tokens. `new_slots`: slots of these tokens, int64 [N]. `spans`: together, they cover [0, N)."""

    new_slots: torch.Tensor
    spans: tuple[QuerySpan, ...]


class SlotAttention:
    """Computes the attention of one runner's passes. The model's forward calls its methods on the scheduler thread.

    The runner calls `begin` before each pass. `geometry` has the window and chunk of each layer. `name`: name under
    which the attention function that calls this object is registered.
    """

    name = NAME

    def __init__(self, pool: KVCache, geometry: ModelGeometry) -> None:
        self._pool = pool
        self._kernels = kernel_choice(pool.device)
        self._windows = {layer: geometry.window for layer, kind in enumerate(geometry.kinds) if kind == "window"}
        self._chunked = frozenset(layer for layer, kind in enumerate(geometry.kinds) if kind == "chunked")
        self._chunk = geometry.chunk
        self._sources = geometry.sources
        self._swa_layers = frozenset[int]()
        if isinstance(pool, SWAKVPool):
            # The pool may keep all tokens of a window layer. This layer's rows are then at full slots, not at window
            # slots.
            self._swa_layers = frozenset(layer for layer, (_, is_swa) in pool.layers_mapping.items() if is_swa)
        self.slot_pass = SlotPass(torch.empty(0, dtype=torch.int64), ())
        self.number = next(_numbers)
        _attentions[self.number] = self

    def begin(self, slot_pass: SlotPass) -> None:
        """Use `slot_pass` for the next forward pass."""
        self.slot_pass = slot_pass

    def layer(self, is_sliding: bool) -> SlotLayer:
        """Return the object for an attention layer in the transformers `Cache` of a pass."""
        return SlotLayer(is_sliding)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Store the new rows of a layer, unless the layer reads the rows of another layer, and compute its attention.
        `query`, `key`, `value`: [B, heads, n, dim], B * n tokens in the order of the pass. Returns [B, n, heads,
        v_dim]."""
        pool, source = self._pool, self._sources[layer]
        if source == layer:
            pool.set_kv_buffer(layer, self.slot_pass.new_slots, token_rows(key), token_rows(value))
        keys, values = pool.get_key_buffer(source), pool.get_value_buffer(source)
        rows, outs, slot_map = token_rows(query), [], self._slot_map(source)
        for span in self.slot_pass.spans:
            part = rows[span.start : span.end]
            if span.is_long and source == layer and slot_map is None and suits(part, rule):
                new_keys, new_values = (token_rows(x)[span.start : span.end] for x in (key, value))
                outs.append(long_extend(part, new_keys, new_values, keys, values, span.prefix_slots, rule.scale))
            else:
                outs.append(pool_attention(part, keys, values, span.queries, rule, self._kernels, slot_map))
        out = outs[0].contiguous() if len(outs) == 1 else torch.cat(outs)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:])

    def rule(self, layer: int, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionRule:
        chunk = self._chunk if layer in self._chunked else 0
        return AttentionRule(scale, self._windows.get(layer, 0), softcap or 0.0, sinks, chunk)

    def _slot_map(self, layer: int) -> torch.Tensor | None:
        if layer not in self._swa_layers:
            return None
        assert isinstance(self._pool, SWAKVPool)
        return self._pool.full_to_swa_index_mapping


# A compiled model finds its `SlotAttention` by number, because operators accept no Python objects.
_numbers = itertools.count()
_attentions: weakref.WeakValueDictionary[int, SlotAttention] = weakref.WeakValueDictionary()


def attention_of(number: int) -> SlotAttention:
    return _attentions[number]


@torch.library.custom_op("hicache::attend", mutates_args=())
def _attend(
    number: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    attention = attention_of(number)
    return attention.attend(layer, query, key, value, attention.rule(layer, scale, softcap, sinks))


@_attend.register_fake
def _(number: int, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, n, _dim = query.shape
    return query.new_empty(batch, n, heads, value.shape[3])


def attend_by_slots(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    hicache: SlotAttention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new rows of a layer and compute the layer's attention. transformers calls this function
    (`transformers.AttentionInterface`). Raises UnsupportedModel for features that the kernels lack."""
    if hicache is None or attention_mask is not None or position_bias is not None:
        missing = "its layers get no pass" if hicache is None else "it has a mask or biases of its own"
        raise UnsupportedModel(f"{type(module).__name__} cannot attend by slots: {missing}; use --attention torch")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = int(module.layer_idx)
    if torch.compiler.is_compiling():
        return _attend(hicache.number, layer, query, key, value, scale, softcap or 0.0, s_aux), None
    return hicache.attend(layer, query, key, value, hicache.rule(layer, scale, softcap, s_aux)), None


AttentionInterface.register(NAME, attend_by_slots)


@contextmanager
def attending_by_slots(model: Any, name: str = NAME) -> Iterator[None]:
    """Within the `with` block, make the model's layers call the attention function that is registered as `name`."""
    config = model.config.get_text_config()
    previous, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = previous


def spans_of(
    table: torch.Tensor,
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    counts: Sequence[int],
    num_splits: tuple[int, int],
    host_lengths: Sequence[int] = (),
) -> tuple[QuerySpan, ...]:
    """Divide the sequences of a pass into spans, one for each kernel launch. Sequence i has `counts[i]` queries.
    Sequences with one query must be first, and form one span. Each sequence with at least `MIN_QUERIES` queries is a
    span, and so is each run of sequences between two such long sequences.

    `rows`, `lengths` int32 [S], `query_starts` int32 [S + 1], on the pool's device. `num_splits`: number of splits of
    the keys, first for sequences with one query, then for sequences with several queries. `host_lengths`: a copy of
    `lengths` on the host, which may be empty if every sequence has one query.
    """
    kinds = [0 if count == 1 else 1 + (i + 1) * (count >= MIN_QUERIES) for i, count in enumerate(counts)]
    spans, end = [], 0
    for kind, group in itertools.groupby(kinds):
        first, end = end, end + len(list(group))
        start, stop = sum(counts[:first]), sum(counts[:end])
        starts, splits = query_starts[first : end + 1] - start, num_splits[min(kind, 1)]
        queries = PoolQueries(table, rows[first:end], starts, lengths[first:end], max(counts[first:end]), splits)
        spans.append(QuerySpan(start, stop, queries, tuple(counts[first:end]), tuple(host_lengths[first:end])))
    return tuple(spans)
