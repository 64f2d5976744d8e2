"""One forward pass of a transformers model over the slots of a device pool.

Two shapes of work: a chunk of one request's prompt behind its cached prefix, and one more token for a batch of requests
of different lengths. The runner serves requests with it, and `check_supported` tries a model with it.

    position p of a request is read by      layers with full attention    in passes over tokens >= p
                                            window layers                 in passes over tokens [p, p + window)
    the state slot of a request holds       the state after all tokens that passes were made over, in order

Owns no request. May import transformers, torch, layout and the device tier.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.layout import ModelGeometry
from hicache.serving.cache import BatchSlots, BatchStates, Keys, PoolCache
from hicache.serving.masks import attention_kernel, attention_mask, mask_argument

# A mask of 64 Mi entries is 256 MiB once the CPU's attention has turned it into float32; a GPU has more room.
_MASK_ENTRIES = {"cpu": 1 << 26, "cuda": 1 << 28}


class PoolForward:
    """`model` over the slots of `pool`, which the rows of `table` name. Called on the scheduler thread.

    Model and pool share a device, and both fit `geometry`.
    """

    def __init__(self, model: Any, pool: KVCache, table: ReqToTokenPool, geometry: ModelGeometry) -> None:
        self._model, self._pool, self._table, self._geometry = model, pool, table, geometry
        self._states = table if isinstance(table, HybridReqToTokenPool) else None
        self._kernel = attention_kernel(model)
        self._device = torch.device(model.device)
        self._mask_entries = _MASK_ENTRIES.get(self._device.type, _MASK_ENTRIES["cpu"])
        self._last_only: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._last_only["logits_to_keep"] = 1

    @torch.inference_mode()
    def prefill(self, row: int, tokens: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Compute and store KV of tokens [start, end) of the request in `row`; [0, start) is stored or being loaded.

        `tokens`: int64 [at least end], the request's sequence. Returns float32 logits [vocab] of token end - 1.
        """
        rows = torch.tensor([row], device=self._device)
        logits = torch.empty(0)
        while start < end:
            # Without a prefix attention is causal by itself, where no window cuts it off.
            unmasked = end if not self._geometry.window else self._geometry.window
            stop = min(end, start + max(unmasked if start == 0 else 1, self._mask_entries // end))
            input_ids = torch.from_numpy(tokens[start:stop]).to(self._device)[None]
            positions = torch.arange(start, stop, device=self._device)[None]
            logits = self._forward(rows, input_ids, positions, stop, masked=start > 0 or stop > unmasked)
            start = stop
        return logits[0]

    @torch.inference_mode()
    def decode(self, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Compute and store KV of one token a request: `tokens[i]`, the last of the `lengths[i]` of its sequence.

        Returns float32 logits [requests, vocab].
        """
        kv_len, least = max(lengths), min(lengths)
        positions = torch.tensor(lengths, device=self._device)[:, None] - 1
        input_ids = torch.tensor(tokens, device=self._device)[:, None]
        # Shorter sequences are padded, in windows that they do not fill and in full attention.
        most = kv_len if self._geometry.full_layers else min(kv_len, self._geometry.window)
        row_ids = torch.tensor(rows, device=self._device)
        return self._forward(row_ids, input_ids, positions, kv_len, masked=least < most, begins=least == 1)

    def _forward(
        self,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_len: int,
        masked: bool,
        begins: bool = False,
    ) -> torch.Tensor:
        """One pass over `input_ids` at `positions`, both [B, n], of the requests in `rows`, the longest of `kv_len`.

        `masked`: whether attention is more than causal. `begins`: whether a sequence of a batch may begin here.
        Returns float32 logits [B, vocab] of the last tokens.
        """
        geometry, num_new = self._geometry, positions.shape[1]
        last = positions[:, -1:]
        masks: dict[str, torch.Tensor | None] = {}
        full = window = states = None
        if geometry.full_layers:
            full = self._keys(rows, last, torch.arange(kv_len, device=self._device)[None])
            masks["full_attention"] = self._mask(positions, full) if masked else None
        if geometry.window_layers:
            num_keys = min(kv_len, geometry.window + num_new - 1)
            window = self._keys(rows, last, last - num_keys + 1 + torch.arange(num_keys, device=self._device))
            masks["sliding_attention"] = self._mask(positions, window, geometry.window) if masked else None
        if self._states is not None:
            fresh = positions[:, 0] == 0 if begins else None
            states = BatchStates(self._states, self._states.get_mamba_indices(rows), fresh)
        new_slots = self._table.req_to_token[rows[:, None], positions].flatten().long()
        cache = PoolCache(self._pool, geometry, BatchSlots(new_slots, kv_len - num_new, full, window, states))
        output = self._model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=mask_argument(masks),
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        cache.store_states()
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _keys(self, rows: torch.Tensor, last: torch.Tensor, positions: torch.Tensor) -> Keys:
        """Where the keys at `positions` [B or 1, keys] lie; what is outside of [0, last] is padding.

        Columns behind a row's last token hold whatever an earlier request left there.
        """
        outside = (positions < 0) | (positions > last)
        slots = self._table.req_to_token[rows[:, None], positions.clamp(min=0)]
        return Keys(positions, slots.long().masked_fill_(outside, 0))

    def _mask(self, positions: torch.Tensor, keys: Keys, window: int = 0) -> torch.Tensor:
        return attention_mask(positions, keys.positions, self._kernel, self._model.dtype, window)
