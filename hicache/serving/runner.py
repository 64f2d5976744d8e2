"""The reference model runner: one forward pass of a transformers model over the engine's slots.

Two shapes of work: a chunk of one request's prompt behind its cached prefix, and one more token for a batch of requests
of different lengths. Before each pass it tells the layer counter which loads the pass depends on.

Owns the model. May import transformers, torch, the engine and what stands below it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.engine import CacheEngine, Lease
from hicache.errors import ShapeError
from hicache.layout import ModelGeometry
from hicache.serving.cache import BatchSlots, PoolCache
from hicache.serving.support import attention_kernel, attention_mask, check_supported

# A mask of 64 Mi entries is 256 MiB once the CPU's attention has turned it into float32; a GPU has more room.
_MASK_ENTRIES = {"cpu": 1 << 26, "cuda": 1 << 28}


class ModelRunner:
    """Runs `model` over the pool of `engine`. Scheduler thread only.

    `geometry`: what `check_supported(model)` found, where the caller has asked already. Model and pool share a device.
    """

    def __init__(self, model: Any, engine: CacheEngine, geometry: ModelGeometry | None = None) -> None:
        self._model = model.eval()
        self._engine = engine
        self._geometry = geometry or check_supported(model)
        self._kernel = attention_kernel(model)
        self._device = torch.device(model.device)
        if self._device.type != engine.pool.device.type:
            raise ShapeError(f"the model is on {self._device}, the pool on {engine.pool.device}; set device to match")
        self._mask_entries = _MASK_ENTRIES.get(self._device.type, _MASK_ENTRIES["cpu"])
        self._last_only: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._last_only["logits_to_keep"] = 1

    @torch.inference_mode()
    def prefill(self, lease: Lease, tokens: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Compute and store KV of tokens [start, end); [0, start) is stored or being loaded.

        `tokens`: int64 [at least end], the request's sequence. Returns float32 logits [vocab] of token end - 1.
        Raises TransferError where a load that the prefix waits for failed.
        """
        if not 0 <= start < end <= min(len(tokens), lease.length):
            raise ShapeError(f"prefill of [{start}, {end}) of {len(tokens)} tokens in a lease of {lease.length} slots")
        slots = lease.slots
        self._engine.counter.set_consumer(lease.load_ids)
        logits = torch.empty(0)
        while start < end:
            # The mask has (stop - start) * stop entries; without a prefix attention is causal by itself.
            stop = end if not start else min(end, start + max(1, self._mask_entries // end))
            input_ids = torch.from_numpy(tokens[start:stop]).to(self._device)[None]
            positions = torch.arange(start, stop, device=self._device)[None]
            mask = attention_mask(positions, stop, self._kernel, self._model.dtype) if start else None
            batch = BatchSlots(slots[start:stop], slots[None, :stop], start)
            logits = self._forward(input_ids, positions, mask, batch)
            start = stop
        return logits[0]

    @torch.inference_mode()
    def decode(self, leases: Sequence[Lease], tokens: Sequence[int]) -> torch.Tensor:
        """Compute and store KV of one token a request: `tokens[i]`, the last of the `leases[i].length` of its sequence.

        Returns float32 logits [requests, vocab]. Raises TransferError as `prefill` does.
        """
        lengths = [lease.length for lease in leases]
        kv_len = max(lengths)
        self._engine.counter.set_consumer(tuple({load_id for lease in leases for load_id in lease.load_ids}))
        rows = torch.tensor([lease.row for lease in leases], device=self._device)
        positions = torch.tensor(lengths, device=self._device)[:, None] - 1
        # Columns [length, kv_len) of a row hold whatever an earlier request left there: slot 0 instead.
        table = self._engine.req_to_token.req_to_token[rows, :kv_len].long()
        table.masked_fill_(torch.arange(kv_len, device=self._device) > positions, 0)
        mask = None
        if min(lengths) < kv_len:
            mask = attention_mask(positions, kv_len, self._kernel, self._model.dtype)
        batch = BatchSlots(table.gather(1, positions)[:, 0], table, kv_len - 1)
        return self._forward(torch.tensor(tokens, device=self._device)[:, None], positions, mask, batch)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, batch: BatchSlots
    ) -> torch.Tensor:
        """float32 logits [B, vocab] of the last token of each sequence."""
        cache = PoolCache(self._engine.pool, range(self._geometry.layer_num), batch)
        output = self._model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()
