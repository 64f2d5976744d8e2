"""Finds out whether a model's layers hand their attention over to `attend_by_slots`, by one short pass of the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers.cache_utils import DummyLayer

from hicache.errors import UnsupportedModel
from hicache.kernels.pool_attention import AttentionRule
from hicache.layout import LayerKind, ModelGeometry
from hicache.serving.attention import SlotLayer, attending_by_slots
from hicache.serving.cache import HybridLayer, StateCache, StateLayer
from hicache.serving.latent import absorbs

_NUM_TOKENS = 6  # more than a convolution window


class _Recorder:
    """Stands in for a `SlotAttention`: counts the calls of each layer, and attends to nothing."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[int, tuple[int, ...], tuple[int, ...]]] = Counter()

    def rule(self, layer: int, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionRule:
        return AttentionRule(scale)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        self.calls[layer, tuple(key.shape), tuple(value.shape)] += 1
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.inference_mode()
def hands_attention_over(model: Any, geometry: ModelGeometry) -> bool:
    """Whether each attention layer calls the registered function once a pass, with the keys and values it stores, or
    expands latent rows in a way that can be absorbed."""
    if geometry.latent is not None and not absorbs(model, geometry):
        return False
    recorder = _Recorder()
    layers = [_layer(kind) for kind in geometry.kinds]
    ids = torch.arange(_NUM_TOKENS, device=model.device)[None]
    try:
        with attending_by_slots(model):
            model(
                input_ids=ids,
                position_ids=ids,
                attention_mask=None,
                past_key_values=StateCache(layers=layers),
                use_cache=True,
                hicache=recorder,
            )
    except (UnsupportedModel, TypeError):
        return False  # a layer has biases of its own, or a forward does not take the argument
    kinds = {layer: kind for layer, kind in enumerate(geometry.kinds) if kind not in ("recurrent", "stateless")}
    if geometry.latent is not None:
        return Counter(layer for layer, *_ in recorder.calls.elements()) == Counter([*kinds])
    full, window = (
        tuple((1, of.head_num, _NUM_TOKENS, dim) for dim in (of.head_dim, of.v_head_dim))
        for of in (geometry.full_heads, geometry.window_heads)
    )
    expected = {(layer, *(window if kind == "window" else full)): 1 for layer, kind in kinds.items()}
    return dict(recorder.calls) == expected


def _layer(kind: LayerKind) -> Any:
    if kind == "stateless":
        return DummyLayer()
    if kind == "hybrid":
        return HybridLayer(None, SlotLayer())
    return StateLayer(None) if kind == "recurrent" else SlotLayer(kind == "window")
