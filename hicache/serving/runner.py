"""The reference model runner: forward passes of a transformers model over the slots of the device pools.

A pass computes either one chunk of one request's prompt behind its cached prefix, or one token for each request of a
batch whose requests have different lengths. Before each pass the runner tells the engine which requests it is for, so
that the layers wait for the loads of these requests.

    position p of a request is read by      layers with full attention    in passes over tokens >= p
                                            window layers                 in passes over tokens [p, p + window)
    the state slot of a request holds       the state after all tokens that passes were made over, in order
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.engine import Lease
from hicache.errors import ShapeError, UnsupportedModel
from hicache.layout import ModelGeometry
from hicache.serving.cache import BatchSlots, BatchStates, KeySlots, PoolCache

_ATTENTION_KERNELS = ("sdpa", "eager")
# A mask of 64 Mi entries takes 256 MiB once the CPU's attention has converted it to float32; a GPU has more memory.
_MAX_MASK_ENTRIES = {"cpu": 1 << 26, "cuda": 1 << 28}


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of one request, to compute in the next pass: a part of its prompt, or the one token that it
    generated last. `tokens`: int64 [at least end], the request's sequence; `lease` has slots for [0, end)."""

    lease: Lease
    tokens: npt.NDArray[np.int64]
    start: int
    end: int

    @property
    def is_decode(self) -> bool:
        """Whether it may be batched with others of one token at the end of their sequences."""
        return self.end == self.start + 1 == self.lease.length


class ForwardEngine(Protocol):
    """What the runner needs of an engine."""

    @property
    def pool(self) -> KVCache: ...

    @property
    def req_to_token(self) -> ReqToTokenPool: ...

    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """The next pass is for `leases`: its layers wait for their loads."""
        ...


class ModelRunner:
    """Runs `model`, whose layers are described by `geometry` (`check_supported(model)`), over the pools of `engine`.
    Called on the scheduler thread only. It owns no request.

    `max_mask_entries`: a chunk whose attention mask would have more entries runs in several passes; None: as many as
    fit the kind of device. Raises ShapeError if the engine was built for another model or device.
    """

    def __init__(
        self, model: Any, engine: ForwardEngine, geometry: ModelGeometry, *, max_mask_entries: int | None = None
    ) -> None:
        self._model, self._engine, self._geometry = model.eval(), engine, geometry
        self._pool, self._table = engine.pool, engine.req_to_token
        self._states = self._table if isinstance(self._table, HybridReqToTokenPool) else None
        self._device, self._kernel = torch.device(model.device), attention_kernel(model)
        self._check_pools()
        self._max_mask_entries = max_mask_entries or _MAX_MASK_ENTRIES.get(self._device.type, _MAX_MASK_ENTRIES["cpu"])
        self._last_only: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._last_only["logits_to_keep"] = 1

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute and store KV of all `chunks`, of different requests.

        Returns float32 logits [chunks, vocab], those of the last token of each. Raises as `prefill` and `decode` do.
        """
        decoded = [chunk for chunk in chunks if chunk.is_decode]
        rows: dict[str, torch.Tensor] = {}
        if decoded:
            logits = self.decode(
                [chunk.lease for chunk in decoded], [int(chunk.tokens[chunk.start]) for chunk in decoded]
            )
            rows.update({chunk.lease.request_id: row for chunk, row in zip(decoded, logits, strict=True)})
        for chunk in chunks:
            if not chunk.is_decode:
                rows[chunk.lease.request_id] = self.prefill(chunk.lease, chunk.tokens, chunk.start, chunk.end)
        return torch.stack([rows[chunk.lease.request_id] for chunk in chunks])

    @torch.inference_mode()
    def prefill(self, lease: Lease, tokens: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Compute and store KV of tokens [start, end); [0, start) is stored or being loaded.

        `tokens`: int64 [at least end], the request's sequence. Returns float32 logits [vocab] of token end - 1.
        The request's state covers [0, start) before and [0, end) after; at start = 0 its state slot is not read.
        Window layers read [start - window + 1, end). Raises TransferError if a load of the prefix failed; the state
        slot is then unchanged.
        """
        if not 0 <= start < end <= min(len(tokens), lease.length):
            raise ShapeError(f"prefill of [{start}, {end}) of {len(tokens)} tokens in a lease of {lease.length} slots")
        self._engine.begin_forward([lease])
        rows = torch.tensor([lease.row], device=self._device)
        logits = torch.empty(0)
        while start < end:
            # Without a prefix, attention is causal and needs no mask up to the window's length.
            unmasked = end if not self._geometry.window else self._geometry.window
            stop = min(end, start + max(unmasked if start == 0 else 1, self._max_mask_entries // end))
            input_ids = torch.from_numpy(tokens[start:stop]).to(self._device)[None]
            positions = torch.arange(start, stop, device=self._device)[None]
            logits = self._forward(rows, input_ids, positions, stop, masked=start > 0 or stop > unmasked)
            start = stop
        return logits[0]

    @torch.inference_mode()
    def decode(self, leases: Sequence[Lease], tokens: Sequence[int]) -> torch.Tensor:
        """Compute and store KV of one token per request: `tokens[i]`, the last of the `leases[i].length` of its
        sequence.

        Returns float32 logits [requests, vocab]. Each state covers all tokens but the last before, and all of them
        after; window layers read the last `window` tokens. Raises TransferError as `prefill` does.
        """
        self._engine.begin_forward(leases)
        lengths = [lease.length for lease in leases]
        kv_len, min_len = max(lengths), min(lengths)
        positions = torch.tensor(lengths, device=self._device)[:, None] - 1
        input_ids = torch.tensor(tokens, device=self._device)[:, None]
        # Shorter sequences are padded: in full attention, and in windows that they do not fill.
        max_keys = kv_len if self._geometry.full_layers else min(kv_len, self._geometry.window)
        rows = torch.tensor([lease.row for lease in leases], device=self._device)
        return self._forward(rows, input_ids, positions, kv_len, masked=min_len < max_keys, starting=min_len == 1)

    def _forward(
        self,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_len: int,
        masked: bool,
        starting: bool = False,
    ) -> torch.Tensor:
        """One pass over `input_ids` at `positions`, both [B, n], of the requests in `rows`, the longest of `kv_len`.

        `masked`: whether attention needs a mask beyond causality. `starting`: whether some sequence of a batch starts
        with this pass. Returns float32 logits [B, vocab] of the last tokens.
        """
        geometry, num_new = self._geometry, positions.shape[1]
        last = positions[:, -1:]
        masks: dict[str, torch.Tensor | None] = {}
        full = window = states = None
        if geometry.full_layers:
            full = self._key_slots(rows, last, torch.arange(kv_len, device=self._device)[None])
            masks["full_attention"] = self._mask(positions, full) if masked else None
        if geometry.window_layers:
            num_keys = min(kv_len, geometry.window + num_new - 1)
            window = self._key_slots(rows, last, last - num_keys + 1 + torch.arange(num_keys, device=self._device))
            masks["sliding_attention"] = self._mask(positions, window, geometry.window) if masked else None
        if self._states is not None:
            is_first = positions[:, 0] == 0 if starting else None
            states = BatchStates(self._states, self._states.get_mamba_indices(rows), is_first)
        new_slots = self._table.req_to_token[rows[:, None], positions].flatten().long()
        cache = PoolCache(self._pool, geometry, BatchSlots(new_slots, kv_len - num_new, full, window, states))
        output = self._model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=_mask_argument(masks),
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        cache.store_states()
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _key_slots(self, rows: torch.Tensor, last: torch.Tensor, positions: torch.Tensor) -> KeySlots:
        """The slots of the keys at `positions` [B or 1, keys]; positions outside of [0, last] are padding.

        Columns behind a row's last token hold stale slots of an earlier request.
        """
        outside = (positions < 0) | (positions > last)
        slots = self._table.req_to_token[rows[:, None], positions.clamp(min=0)]
        return KeySlots(positions, slots.long().masked_fill_(outside, 0))

    def _mask(self, positions: torch.Tensor, keys: KeySlots, window: int = 0) -> torch.Tensor:
        return attention_mask(positions, keys.positions, self._kernel, self._model.dtype, window)

    def _check_pools(self) -> None:
        """Raise ShapeError if the pools were built for another model or device."""
        pool, geometry = self._pool, self._geometry
        if self._device.type != pool.device.type:
            raise ShapeError(f"the model is on {self._device}, the pool on {pool.device}; set device to match")
        attention = sorted({*geometry.full_layers, *geometry.window_layers})
        if list(pool.layer_ids) != attention:
            raise ShapeError(
                f"the pool has layers {list(pool.layer_ids)}, the attention layers of the model are {attention}; build "
                "the engine with the geometry of this model"
            )
        states = self._states
        if geometry.recurrent_layers and (states is None or states.mamba_pool.layers != geometry.recurrent_layers):
            raise ShapeError(
                f"the model has recurrent layers {list(geometry.recurrent_layers)} and the request table has no states "
                "for them; build the engine with the geometry of this model"
            )


def attention_kernel(model: Any) -> str:
    """The attention implementation of `model`, "sdpa" or "eager". Raises UnsupportedModel for any other."""
    kernel = str(model.config._attn_implementation)
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModel(f"attn_implementation={kernel!r}: load the model with 'sdpa' or 'eager'")
    return kernel


def attention_mask(
    query_positions: torch.Tensor, key_positions: torch.Tensor, kernel: str, dtype: torch.dtype, window: int = 0
) -> torch.Tensor:
    """The causal mask [B, 1, n, keys] of queries at `query_positions` [B, n] over keys at `key_positions`
    [B or 1, keys].

    A query at p sees keys at [0, p], or at (p - window, p] of them if `window` > 0; keys outside are padding. For
    "sdpa" the mask is True where a key is seen; for "eager" it is 0 there and the lowest value of `dtype` elsewhere.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
    seen = (keys <= queries) & (keys >= 0)
    if window:
        seen &= keys > queries - window
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _mask_argument(masks: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
    """The model's `attention_mask` argument from the masks of its layer types, by transformers' names of these types.

    A model with one type of attention takes a tensor, a model with several a dict. None: the model makes the mask
    itself.
    """
    if len(masks) == 1 or all(mask is None for mask in masks.values()):
        return next(iter(masks.values()))
    return dict(masks)
