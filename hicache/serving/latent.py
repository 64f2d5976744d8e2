"""Latent attention over the slots of the device pool. The pool stores latent rows. Attention reads latent rows
directly, and expands them to keys and values of all heads only for prefill chunks.

`kv_b_proj` expands the latent `c` of a token to the keys `W_UK c` and values `W_UV c` of all heads. If each sequence
has one new token, rows are not expanded. Instead the query is projected to latent space, attention is computed in
latent space, and the result is projected back (absorbed form):

    score    q_nope . (W_UK c) + q_rope . rope = (q_nope W_UK) . c + q_rope . rope
    result   sum of weight * (W_UV c) = W_UV (sum of weight * c)

    kv_b_proj.weight   [heads * (nope + v), rank]   of each head, rows [0, nope) are W_UK and [nope, nope + v) W_UV

For the many queries of a prefill chunk, expanding the rows is faster: attention in latent space needs three times the
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hicache.device.base import KVCache
from hicache.device.hybrid import HybridLinearKVPool
from hicache.device.mla import MLATokenToKVPool
from hicache.errors import UnsupportedModel
from hicache.kernels.latent_attention import latent_attention
from hicache.kernels.pool_attention import AttentionRule, PoolQueries, pool_attention
from hicache.layout import ModelGeometry
from hicache.serving.attention import QuerySpan, SlotAttention, SlotPass, attention_of
from hicache.serving.cache import SlotLayer, token_rows

NAME = "hicache_latent"
MAX_EXPANDED_BYTES = 1 << 30


@dataclass(frozen=True)
class _Expansion:
    """Describes the expanded rows of a span. `slots`: slots of all tokens of the span's sequences, one sequence after
    another, int64 [K]. `queries`: the queries of the span, with keys numbered by their index in the K expanded rows."""

    slots: torch.Tensor
    queries: PoolQueries


class LatentSlotAttention(SlotAttention):
    """Computes the attention of one runner's passes over a pool of latent rows; see `SlotAttention`."""

    name = NAME

    def __init__(self, pool: KVCache, geometry: ModelGeometry) -> None:
        super().__init__(pool, geometry)
        assert isinstance(pool, MLATokenToKVPool | HybridLinearKVPool), "a pool without latent rows"
        self._latent_pool = pool
        self._expansions: dict[int, _Expansion] = {}
        self.new_rows = (torch.empty(0), torch.empty(0))

    def begin(self, slot_pass: SlotPass) -> None:
        super().begin(slot_pass)
        spans = {i: span for i, span in enumerate(slot_pass.spans) if span.queries.max_queries > 1}
        self._expansions = {i: _expansion(span) for i, span in spans.items()}

    def layer(self, is_sliding: bool) -> SlotLayer:
        return LatentSlotLayer(self)

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_b_proj: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store the new rows of a layer, `latent` [B, 1, n, rank] and `rope` [B, 1, n, rope], and compute its
        attention. `query` [B, heads, n, nope + rope], `kv_b_proj` [heads * (nope + v), rank]. Returns [B, n, heads,
        v]."""
        pool, slot_pass, queries = self._latent_pool, self.slot_pass, token_rows(query)
        pool.set_mla_kv_buffer(layer, slot_pass.new_slots, token_rows(latent), token_rows(rope))
        outs = []
        for i, span in enumerate(slot_pass.spans):
            part = queries[span.start : span.end]
            if i in self._expansions:
                outs.append(self._expanded(layer, part, self._expansions[i], kv_b_proj, scale))
            else:
                outs.append(self._absorbed(layer, part, span.queries, kv_b_proj, scale))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:])

    def _absorbed(
        self, layer: int, query: torch.Tensor, queries: PoolQueries, kv_b_proj: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute attention in absorbed form, for one token of each sequence: `query` [N, heads, nope + rope]. Returns
        [N, heads, v]."""
        stored, rank = self._latent_pool.get_key_buffer(layer), kv_b_proj.shape[1]
        nope, up = query.shape[2] - (stored.shape[2] - rank), kv_b_proj.view(query.shape[1], -1, rank)
        q_latent = torch.einsum("nhd,hdr->nhr", query[..., :nope], up[:, :nope])
        attended = latent_attention(
            q_latent, query[..., nope:], stored, queries.table, queries.rows, queries.lengths, scale, self._kernels
        )
        return torch.einsum("nhr,hvr->nhv", attended, up[:, nope:])

    def _expanded(
        self, layer: int, query: torch.Tensor, expansion: _Expansion, kv_b_proj: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute attention in expanded form, for several tokens of some sequences: `query` [N, heads, nope + rope].
        Returns [N, heads, v]. Heads are expanded in groups of at most `MAX_EXPANDED_BYTES`, but at least one head at a
        time."""
        latent, rope = self._latent_pool.get_mla_kv_buffer(layer, expansion.slots, query.dtype)
        heads, nope = query.shape[1], query.shape[2] - rope.shape[2]
        up, outs = kv_b_proj.view(heads, -1, kv_b_proj.shape[1]), []
        head_bytes = len(latent) * (2 * up.shape[1] + rope.shape[2]) * query.element_size()
        step = max(1, MAX_EXPANDED_BYTES // head_bytes)
        for weights, part in zip(up.split(step), query.split(step, dim=1), strict=True):
            expanded = nn.functional.linear(latent[:, 0], weights.flatten(0, 1)).unflatten(1, weights.shape[:2])
            keys = torch.cat([expanded[..., :nope], rope.expand(-1, len(weights), -1)], dim=-1)
            values, rule = expanded[..., nope:], AttentionRule(scale)
            outs.append(pool_attention(part, keys, values, expansion.queries, rule, self._kernels))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


class LatentSlotLayer(SlotLayer):
    """The entry of a latent layer in the `Cache` of a pass over slots. `attend_latent` stores the rows passed to
    `update`."""

    def __init__(self, attention: LatentSlotAttention) -> None:
        super().__init__()
        self._attention = attention

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new rows for `attend_latent`. Return only the row of the first token. The model expands the returned
        row, but nothing reads the result, so one row is enough."""
        self._attention.new_rows = key_states, value_states
        return key_states[:, :, :1], value_states[:, :, :1]


def absorbs(model: Any, geometry: ModelGeometry) -> bool:
    """Return whether each latent layer of `model` expands rows by a plain linear module. Only the weight of a plain
    linear module can be split into W_UK and W_UV."""
    expanding = [module for name, module in model.named_modules() if name.endswith(".kv_b_proj")]
    plain = [module for module in expanding if type(module) is nn.Linear and module.bias is None]
    wide = [module for module in plain if module.weight.dtype.is_floating_point and module.weight.element_size() > 1]
    return len(wide) == len(expanding) == len(geometry.full_layers)


@torch.library.custom_op("hicache::attend_latent", mutates_args=())
def _attend_latent(
    number: int,
    layer: int,
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_b_proj: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    attention = attention_of(number)
    assert isinstance(attention, LatentSlotAttention)
    return attention.attend_latent(layer, query, latent, rope, kv_b_proj, scale)


@_attend_latent.register_fake
def _(number: int, layer: int, query: torch.Tensor, latent: torch.Tensor, *more: Any) -> torch.Tensor:
    batch, heads, n, dim = query.shape
    rope, kv_b_proj, _scale = more
    return query.new_empty(batch, n, heads, len(kv_b_proj) // heads - (dim - rope.shape[3]))


def attend_to_latents(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    hicache: LatentSlotAttention | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the latent attention of a layer. transformers calls this function (`transformers.AttentionInterface`).
    `key` and `value` are ignored, because `hicache.new_rows` has the new rows."""
    if hicache is None or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} cannot attend by slots; use --attention torch")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer, (latent, rope), weight = int(module.layer_idx), hicache.new_rows, module.kv_b_proj.weight
    if torch.compiler.is_compiling():
        return _attend_latent(hicache.number, layer, query, latent, rope, weight, scale), None
    return hicache.attend_latent(layer, query, latent, rope, weight, scale), None


AttentionInterface.register(NAME, attend_to_latents)


def _expansion(span: QuerySpan) -> _Expansion:
    """Return the expansion of a span. Does not wait for the device."""
    queries, num_keys = span.queries, sum(span.lengths)
    device, lengths = queries.table.device, queries.lengths.long()
    sequences = torch.arange(len(lengths), device=device)
    starts = lengths.cumsum(0) - lengths
    of_key = torch.repeat_interleave(sequences, lengths, output_size=num_keys)
    position = torch.arange(num_keys, device=device) - starts[of_key]
    slots = queries.table[queries.rows.long()[of_key], position].long()
    table = (starts[:, None] + torch.arange(max(span.lengths), device=device)).int()
    over = PoolQueries(
        table, sequences.int(), queries.query_starts, queries.lengths, queries.max_queries, queries.num_splits
    )
    return _Expansion(slots, over)
