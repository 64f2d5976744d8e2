"""Passes over slots, in which attention reads the pool in place. Tokens of many requests share a pass.

One pass computes all chunks of a step; chunks of one token are first. For models with recurrent layers, whose layers
compute sequence by sequence, a pass computes one chunk of one prompt, or one token of each sequence of a batch. Passes
over one token of each sequence are replayed from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DummyLayer

from hicache.kernels.pool_attention import num_splits
from hicache.layout import LayerKind
from hicache.serving.attention import SlotAttention, SlotPass, attending_by_slots, spans_of
from hicache.serving.cache import BatchStates, StateCache, new_state_layer, store_states
from hicache.serving.graphs import DecodeBatch, DecodeGraphs
from hicache.serving.passes import Chunk, PassContext

_MAX_COMPILED = 1 << 16  # maximum compiled variants of a model in a process, more than there are batch sizes


class SlotPasses:
    """Passes over slots, which implement `Passes`. `attention`: the attention of the layers. `use_graphs`: replay
    decode passes on CUDA. `compiled`: let torch.compile fuse the model's own kernels in the captured passes."""

    def __init__(
        self, context: PassContext, attention: SlotAttention, *, use_graphs: bool = True, compiled: bool = False
    ) -> None:
        self._context = context
        self._attention = attention
        self._kv_heads = context.geometry.head_num
        self._graphs: DecodeGraphs | None = None
        self._decode_model = context.model
        if compiled:
            self._decode_model = _compiled(context.model.forward)
        if use_graphs and context.device.type == "cuda" and context.states is None:
            self._graphs = DecodeGraphs(context, self.decode_batch)

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        context = self._context
        if context.states is None:
            # Chunks of one token are first, because one launch then computes the attention of all of them.
            order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start > 1)
            logits = self._run_batch([chunks[i] for i in order])
            if order == sorted(order):
                return logits
            ends = np.cumsum([chunks[i].num_logits for i in order])
            return logits[
                np.concatenate([np.arange(ends[i] - chunks[order[i]].num_logits, ends[i]) for i in np.argsort(order)])
            ]
        rows: dict[int, torch.Tensor] = {}
        decoded = [chunk for chunk in chunks if chunk.is_decode]
        for batch in [decoded, *([chunk] for chunk in chunks if not chunk.is_decode)]:
            if batch:
                logits = self._run_batch(batch)
                rows.update(zip(map(id, batch), logits.split([chunk.num_logits for chunk in batch]), strict=True))
        return torch.cat([rows[id(chunk)] for chunk in chunks])

    def _run_batch(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run one pass over `chunks`, in which chunks of one token come first."""
        self._context.engine.begin_forward([chunk.lease for chunk in chunks])
        if self._graphs is not None and chunks[-1].end == chunks[-1].start + 1:
            logits = self._graphs.run(chunks)
            if logits is not None:
                return logits
        return self._eager(chunks)

    def _eager(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        context, counts = self._context, [chunk.end - chunk.start for chunk in chunks]
        rows_of, starts = [chunk.lease.row for chunk in chunks], np.concatenate([[0], np.cumsum(counts)])
        logit_rows = [np.arange(end - chunk.num_logits, end) for chunk, end in zip(chunks, starts[1:], strict=True)]
        words = np.concatenate([rows_of, [chunk.end for chunk in chunks], starts, *logit_rows])
        tokens = np.stack(
            [
                np.concatenate([chunk.tokens[chunk.start : chunk.end] for chunk in chunks]),
                np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
                np.repeat(rows_of, counts),
            ]
        )
        small, large = self._upload(words), self._upload(tokens)
        n = len(chunks)
        rows, lengths, query_starts, last = small[:n], small[n : 2 * n], small[2 * n : 3 * n + 1], small[3 * n + 1 :]
        input_ids, positions, token_rows = large
        num_tiles = sum(-(-count * self._group // 128) for count in counts if count > 1)
        decode_splits = num_splits(self._kv_heads * n, context.device, decoding=True)
        splits = (decode_splits, num_splits(self._kv_heads * num_tiles, context.device, decoding=False))
        ends = [chunk.end for chunk in chunks]
        spans = spans_of(context.table, rows.int(), query_starts.int(), lengths.int(), counts, splits, ends)
        self._attention.begin(SlotPass(context.table[token_rows, positions].long(), spans))
        batch = n if context.states is not None else 1
        states = None
        if context.states is not None:
            starting = positions[query_starts[:-1]] == 0 if any(chunk.start == 0 for chunk in chunks) else None
            states = BatchStates(context.states, context.states.get_mamba_indices(rows), starting)
        logits = self._call(
            context.model, input_ids.view(batch, -1), positions.view(batch, -1), last if batch == 1 else None, states,
            is_start=all(chunk.start == 0 for chunk in chunks),
        )  # fmt: skip
        return logits.float()

    def decode_batch(self, batch: DecodeBatch) -> torch.Tensor:
        """Run the pass that a CUDA graph captures: one token of each request of `batch`. Returns float32 logits [B,
        vocab]."""
        table, num = self._context.table, len(batch.rows)
        rows, lengths = batch.rows.int(), (batch.positions + 1).int()
        counts = [1] * num
        splits = num_splits(self._kv_heads * num, self._context.device, decoding=True)
        spans = spans_of(table, rows, batch.query_starts, lengths, counts, (splits, 1))
        self._attention.begin(SlotPass(table[batch.rows, batch.positions].long(), spans))
        return self._call(self._decode_model, batch.input_ids[None], batch.positions[None], batch.last, None).float()

    def _call(
        self,
        model: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | None,
        states: BatchStates | None,
        is_start: bool = False,
    ) -> torch.Tensor:
        """Return logits [requests, vocab] of one pass over `input_ids` [B, n]. `last`: indices of the tokens whose
        logits are computed, if `input_ids` has one row; None: the last token of each row."""
        context = self._context
        layers = [self._layer(layer, kind, states, is_start) for layer, kind in enumerate(context.geometry.kinds)]
        cache = StateCache(layers=layers)
        keep: dict[str, Any] = {}
        if context.takes_logits_to_keep:
            keep["logits_to_keep"] = 1 if last is None else last
        with attending_by_slots(context.model, self._attention.name):
            output = model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=None,
                use_cache=True,
                hicache=self._attention,
                **{context.cache_keyword: cache},
                **keep,
            )
        if states is not None:
            store_states(cache, context.geometry, states)
        logits: torch.Tensor = output.logits
        if last is None:
            return logits[:, -1]
        return logits[0] if keep else logits[0, last]

    def _layer(self, layer: int, kind: LayerKind, states: BatchStates | None, is_start: bool) -> Any:
        """Create the object for a layer in the transformers `Cache` of a pass."""
        if kind == "stateless":
            return DummyLayer()
        attention = None if kind == "recurrent" else self._attention.layer(is_sliding=kind == "window")
        if kind not in ("recurrent", "hybrid"):
            return attention
        shapes = self._context.geometry.state
        assert states is not None and shapes is not None, "a pass without states for recurrent layers"
        return new_state_layer(states, layer, shapes, is_start, attention)

    @property
    def _group(self) -> int:
        """The number of query heads per key head."""
        config = self._context.model.config.get_text_config()
        return max(1, int(config.num_attention_heads) // self._kv_heads)

    def _upload(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Copy int64 `values` to the device, after all work queued on the current stream. The host does not wait."""
        ids = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        if self._context.device.type == "cpu":
            return ids
        return ids.pin_memory().to(self._context.device, non_blocking=True)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, compiled for each shape of its inputs. The limit of compiled shapes is raised, because torch
    stops compiling after eight shapes by default."""
    unlimited = torch._dynamo.config.patch(recompile_limit=_MAX_COMPILED, accumulated_recompile_limit=_MAX_COMPILED)
    return unlimited(torch.compile(forward, dynamic=False))  # type: ignore[no-any-return]
