"""Passes with transformers' own attention, for which keys are gathered and sequences are padded.

A pass computes one chunk of one prompt, or one token of each sequence of a batch. Each layer gathers the keys and
values of its complete context. These passes are used on CPUs, and for models that do not call the registered attention
function.

    position p of a request is read by      layers with full attention    in passes over tokens >= p
                                            window layers                 in passes over tokens [p, p + window)
    the state slot of a request holds       the state after all tokens that earlier passes computed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hicache.errors import UnsupportedModel
from hicache.serving.cache import BatchSlots, BatchStates, KeySlots, PoolCache
from hicache.serving.passes import Chunk, PassContext

_ATTENTION_KERNELS = ("sdpa", "eager")
# On CPUs, attention converts masks to float32, so a mask of 64 Mi entries takes 256 MiB. A GPU has more memory.
_MAX_MASK_ENTRIES = {"cpu": 1 << 26, "cuda": 1 << 28}


class PaddedPasses:
    """Passes with padding, which implement `Passes`. A chunk whose mask has more than `max_mask_entries` runs in
    several passes; for None, the kind of device determines this limit."""

    def __init__(self, context: PassContext, max_mask_entries: int | None = None) -> None:
        self._context = context
        self._kernel = attention_kernel(context.model)
        self._max_mask_entries = max_mask_entries or _MAX_MASK_ENTRIES.get(
            context.device.type, _MAX_MASK_ENTRIES["cpu"]
        )

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        decoded = [chunk for chunk in chunks if chunk.is_decode]
        rows: dict[int, torch.Tensor] = {}
        if decoded:
            rows.update(zip(map(id, decoded), self._decode(decoded).split(1), strict=True))
        for chunk in chunks:
            if not chunk.is_decode:
                rows[id(chunk)] = self._prefill(chunk)
        return torch.cat([rows[id(chunk)] for chunk in chunks])

    def _prefill(self, chunk: Chunk) -> torch.Tensor:
        """Compute a prefill chunk. Returns logits [num_logits, vocab]."""
        context, start, end = self._context, chunk.start, chunk.end
        context.engine.begin_forward([chunk.lease])
        rows = torch.tensor([chunk.lease.row], device=context.device)
        found: list[torch.Tensor] = []
        while start < end:
            # Without a prefix, attention is causal and needs no mask for chunks up to the length of the window.
            unmasked = min(context.geometry.window or end, context.geometry.chunk or end)
            stop = min(end, start + max(unmasked if start == 0 else 1, self._max_mask_entries // end))
            input_ids = torch.from_numpy(chunk.tokens[start:stop]).to(context.device)[None]
            positions = torch.arange(start, stop, device=context.device)[None]
            # Every pass runs to store KV, also without requested logits. A pass without requested logits computes one
            # row, which is dropped.
            keep = min(max(1, chunk.num_logits - end + stop), stop - start)
            found.append(self._forward(rows, input_ids, positions, stop, start > 0 or stop > unmasked, keep=keep)[0])
            start = stop
        return torch.cat(found)[-chunk.num_logits :]

    def _decode(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute one token of each request, the last of its sequence. Returns logits [requests, vocab]."""
        context, leases = self._context, [chunk.lease for chunk in chunks]
        context.engine.begin_forward(leases)
        lengths = [lease.length for lease in leases]
        kv_len, min_len = max(lengths), min(lengths)
        positions = torch.tensor(lengths, device=context.device)[:, None] - 1
        input_ids = torch.tensor([int(chunk.tokens[chunk.start]) for chunk in chunks], device=context.device)[:, None]
        # Attention needs a mask if the batch has padding: keys of sequences that are shorter than the longest one, or
        # than the window.
        max_keys = kv_len if context.geometry.full_layers else min(kv_len, context.geometry.window)
        masked = min_len < max_keys or context.geometry.chunk > 0
        rows = torch.tensor([lease.row for lease in leases], device=context.device)
        return self._forward(rows, input_ids, positions, kv_len, masked, starting=min_len == 1)[:, 0]

    def _forward(
        self,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_len: int,
        masked: bool,
        starting: bool = False,
        keep: int = 1,
    ) -> torch.Tensor:
        """Run one pass over `input_ids` at `positions`, both [B, n], of the requests in `rows`. `kv_len`: number of
        tokens of the longest sequence.

        `masked`: whether attention needs a mask in addition to causality. `starting`: whether a sequence of the batch
        starts with this pass. Returns float32 logits [B, keep, vocab] of the last tokens.
        """
        context, geometry, num_new = self._context, self._context.geometry, positions.shape[1]
        last = positions[:, -1:]
        masks: dict[str, torch.Tensor | None] = {}
        full = window = states = None
        if geometry.full_layers:
            full = self._key_slots(rows, last, torch.arange(kv_len, device=context.device)[None])
            if {"full", "hybrid"} & {*geometry.kinds}:
                masks["full_attention"] = self._mask(positions, full) if masked else None
            if geometry.chunk:
                masks["chunked_attention"] = self._mask(positions, full, chunk=geometry.chunk) if masked else None
        if geometry.window_layers:
            num_keys = min(kv_len, geometry.window + num_new - 1)
            window = self._key_slots(rows, last, last - num_keys + 1 + torch.arange(num_keys, device=context.device))
            masks["sliding_attention"] = self._mask(positions, window, geometry.window) if masked else None
        if context.states is not None:
            is_first = positions[:, 0] == 0 if starting else None
            states = BatchStates(context.states, context.states.get_mamba_indices(rows), is_first)
        new_slots = context.table[rows[:, None], positions].flatten().long()
        cache = PoolCache(context.pool, geometry, BatchSlots(new_slots, kv_len - num_new, full, window, states))
        output = context.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=_mask_argument(masks),
            use_cache=True,
            **{context.cache_keyword: cache},
            **({"logits_to_keep": keep} if context.takes_logits_to_keep else {}),
        )
        cache.store_states()
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits.float()

    def _key_slots(self, rows: torch.Tensor, last: torch.Tensor, positions: torch.Tensor) -> KeySlots:
        """Return the slots of the keys at `positions` [B or 1, keys]. Positions outside of [0, last] are padding.

        Padding is needed because the columns after a row's last token contain slots of an earlier request.
        """
        outside = (positions < 0) | (positions > last)
        slots = self._context.table[rows[:, None], positions.clamp(min=0)]
        return KeySlots(positions, slots.long().masked_fill_(outside, 0))

    def _mask(self, positions: torch.Tensor, keys: KeySlots, window: int = 0, chunk: int = 0) -> torch.Tensor:
        return attention_mask(positions, keys.positions, self._kernel, self._context.model.dtype, window, chunk)


def attention_kernel(model: Any) -> str:
    """Return the attention implementation of `model`, "sdpa" or "eager". Raises UnsupportedModel for any other."""
    kernel = str(model.config._attn_implementation)
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModel(f"attn_implementation={kernel!r}: load the model with 'sdpa' or 'eager'")
    return kernel


def attention_mask(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    kernel: str,
    dtype: torch.dtype,
    window: int = 0,
    chunk: int = 0,
) -> torch.Tensor:
    """Return the causal mask [B, 1, n, keys] of queries at `query_positions` [B, n] over keys at `key_positions` [B or
    1, keys].

    A query at position p sees keys at positions [0, p]; with `window` > 0 only (p - window, p], with `chunk` > 0 only
    [p - p % chunk, p]. All other keys are hidden. For "sdpa" the mask is True for visible keys; for "eager" it is 0 for
    visible keys and the lowest value of `dtype` for hidden ones.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
    seen = (keys <= queries) & (keys >= 0)
    if window:
        seen &= keys > queries - window
    if chunk:
        seen &= keys >= queries - queries % chunk
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _mask_argument(masks: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
    """Return the model's argument `attention_mask`. `masks`: the mask of each type of layer, by transformers' name of
    the type.

    A model with one type of attention takes a tensor, and a model with several types takes a dict. If the argument is
    None, the model creates its mask itself.
    """
    if len(masks) == 1 or all(mask is None for mask in masks.values()):
        return next(iter(masks.values()))
    return dict(masks)
