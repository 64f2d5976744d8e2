"""The reference model runner: forward passes of a transformers model over the slots of the device pools.

A caller passes chunks, which are parts of prompts, and the last tokens of requests that decode. Before each pass the
runner gives the leases of its requests to the engine, so that layers wait for the loads of these requests. Depending on
the kind of attention, chunks are computed in passes over slots (`slot_passes`), or with transformers' own attention
over gathered keys (`padded_passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.engine import Lease
from hicache.errors import ShapeError, UnsupportedModel
from hicache.layout import ModelGeometry
from hicache.serving.attention import Attention, SlotAttention
from hicache.serving.latent import LatentSlotAttention
from hicache.serving.padded_passes import PaddedPasses
from hicache.serving.passes import Chunk, ForwardEngine, PassContext, Passes
from hicache.serving.recorded import hands_attention_over
from hicache.serving.slot_passes import SlotPasses

__all__ = ["Chunk", "ForwardEngine", "ModelRunner"]


class ModelRunner:
    """Runs forward passes of `model` over the pools of `engine`. `geometry`: describes its layers
    (`check_supported(model)`). Only the scheduler thread may call its methods. The runner owns no request.

    `attention`: "triton" reads the pool's slots in place, with Triton kernels, or their torch twins without a GPU.
    "torch" uses transformers' own attention over gathered keys. "auto" means "triton" on CUDA for models that call the
    registered attention function, else "torch". `use_graphs`: with "triton" on CUDA, replay decode passes from CUDA
    graphs. `compiled`: let torch.compile fuse the captured operations. `max_mask_entries`: with "torch", a chunk with a
    larger mask runs in several passes.

    Raises ShapeError if the engine was built for another model or device, and UnsupportedModel if the model does not
    support the attention.
    """

    def __init__(
        self,
        model: Any,
        engine: ForwardEngine,
        geometry: ModelGeometry,
        *,
        attention: Attention = "auto",
        use_graphs: bool = True,
        compiled: bool = False,
        max_mask_entries: int | None = None,
    ) -> None:
        context = PassContext(model.eval(), engine, geometry)
        _check_pools(context)
        if attention == "auto" and context.device.type != "cuda":
            attention = "torch"
        if attention != "torch":
            hands_over = hands_attention_over(model, geometry)
            if attention != "auto" and not hands_over:
                raise UnsupportedModel(f"{type(model).__name__} does not attend by slots; use attention='torch'")
            if attention == "auto":
                attention = "triton" if hands_over else "torch"
        self.attention = attention
        self._passes: Passes = (
            PaddedPasses(context, max_mask_entries)
            if attention == "torch"
            else SlotPasses(context, _slot_attention(context), use_graphs=use_graphs, compiled=compiled)
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute and store KV of one or more `chunks`, which belong to different requests. For each chunk, KV of
        tokens [0, start) must be stored or being loaded.

        Returns float32 logits [rows, vocab] of the last `num_logits` tokens of each chunk, in order: one row for each
        chunk by default. The recurrent state of a request covers tokens [0, start) before the pass and [0, end) after
        it; at start = 0 the pass does not read the state slot. Window layers read tokens [start - window + 1, end).

        Raises ShapeError without chunks, or for a chunk outside of its tokens or its lease. Raises TransferError if a
        load of a prefix failed. The pass that waited for this load has then changed no states, but earlier passes in
        the same call have.
        """
        if not chunks:
            raise ShapeError("a pass needs at least one chunk")
        for chunk in chunks:
            start, end, length = chunk.start, chunk.end, chunk.lease.length
            if not 0 <= start < end <= min(len(chunk.tokens), length):
                raise ShapeError(f"[{start}, {end}) of {len(chunk.tokens)} tokens in a lease of {length} slots")
            if not 1 <= chunk.num_logits <= end - start:
                raise ShapeError(f"num_logits={chunk.num_logits} of a chunk of {end - start} tokens")
        return self._passes.run(chunks)

    def prefill(self, lease: Lease, tokens: npt.NDArray[np.int64], start: int, end: int) -> torch.Tensor:
        """Compute tokens [start, end) of one request, as `forward` does, and return its logits [vocab]."""
        return self.forward([Chunk(lease, tokens, start, end)])[0]


def _slot_attention(context: PassContext) -> SlotAttention:
    kind = SlotAttention if context.geometry.latent is None else LatentSlotAttention
    return kind(context.pool, context.geometry)


def _check_pools(context: PassContext) -> None:
    """Raise ShapeError if the pools were built for another model or device."""
    pool, geometry, states = context.pool, context.geometry, context.states
    if context.device.type != pool.device.type:
        raise ShapeError(f"the model is on {context.device}, the pool on {pool.device}; set device to match")
    attention = sorted({*geometry.full_layers, *geometry.window_layers})
    if list(pool.layer_ids) != attention:
        raise ShapeError(
            f"the pool has layers {list(pool.layer_ids)}, the attention layers of the model are {attention}; build "
            "the engine with the geometry of this model"
        )
    if geometry.recurrent_layers and (states is None or states.mamba_pool.layers != geometry.recurrent_layers):
        raise ShapeError(
            f"the model has recurrent layers {list(geometry.recurrent_layers)} and the request table has no states "
            "for them; build the engine with the geometry of this model"
        )
