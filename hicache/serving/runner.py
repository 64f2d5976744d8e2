"""The reference model runner: forward passes of a transformers model over the engine's slots.

Before each pass it tells the engine which requests the pass is for, so that layers wait for what those are loading.

Owns the model. May import torch, the engine and what stands below it, and its own package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.req_to_token import ReqToTokenPool
from hicache.engine import Lease
from hicache.errors import ShapeError
from hicache.layout import ModelGeometry
from hicache.serving.forward import PoolForward
from hicache.serving.support import check_supported


class ForwardEngine(Protocol):
    """What the runner asks of an engine."""

    @property
    def pool(self) -> KVCache: ...

    @property
    def req_to_token(self) -> ReqToTokenPool: ...

    def begin_forward(self, leases: Sequence[Lease]) -> None:
        """The coming pass is for `leases`: its layers wait for their loads."""
        ...


class ModelRunner:
    """Runs `model` over the pools of `engine`. Scheduler thread only.

    `geometry`: what `check_supported(model)` found, where the caller has asked already. Model and pool share a device.
    Raises ShapeError where the engine was built for another model.
    """

    def __init__(self, model: Any, engine: ForwardEngine, geometry: ModelGeometry | None = None) -> None:
        model, device = model.eval(), torch.device(model.device)
        self._engine = engine
        self._geometry = geometry or check_supported(model)
        if device.type != engine.pool.device.type:
            raise ShapeError(f"the model is on {device}, the pool on {engine.pool.device}; set device to match")
        self._check_pools()
        self._forward = PoolForward(model, engine.pool, engine.req_to_token, self._geometry)

    def prefill(self, lease: Lease, tokens: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Compute and store KV of tokens [start, end); [0, start) is stored or being loaded.

        `tokens`: int64 [at least end], the request's sequence. Returns float32 logits [vocab] of token end - 1.
        The request's state has consumed [0, start) before and [0, end) after; at start = 0 its state slot is not read.
        Window layers read [start - window + 1, end). Raises TransferError where a load that the prefix waits for
        failed: then the state slot is as it was.
        """
        if not 0 <= start < end <= min(len(tokens), lease.length):
            raise ShapeError(f"prefill of [{start}, {end}) of {len(tokens)} tokens in a lease of {lease.length} slots")
        self._engine.begin_forward([lease])
        return self._forward.prefill(lease.row, tokens, start, end)

    def decode(self, leases: Sequence[Lease], tokens: Sequence[int]) -> torch.Tensor:
        """Compute and store KV of one token a request: `tokens[i]`, the last of the `leases[i].length` of its sequence.

        Returns float32 logits [requests, vocab]. Each state has consumed all tokens but the last before, and all
        after; window layers read the last `window` tokens. Raises TransferError as `prefill` does.
        """
        self._engine.begin_forward(leases)
        return self._forward.decode([lease.row for lease in leases], [lease.length for lease in leases], tokens)

    def _check_pools(self) -> None:
        """ShapeError where pools and model do not fit."""
        pool, table, geometry = self._engine.pool, self._engine.req_to_token, self._geometry
        attention = sorted({*geometry.full_layers, *geometry.window_layers})
        if list(pool.layer_ids) != attention:
            raise ShapeError(
                f"the pool keeps layers {list(pool.layer_ids)}, and the model attends in {attention}; build the engine "
                "with the geometry of this model"
            )
        if not geometry.recurrent_layers:
            return
        if not isinstance(table, HybridReqToTokenPool) or table.mamba_pool.layers != geometry.recurrent_layers:
            raise ShapeError(
                f"the model has recurrent layers {list(geometry.recurrent_layers)}, and the request table keeps no "
                "state for them; build the engine with the geometry of this model"
            )
