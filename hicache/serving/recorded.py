"""Runs one short pass of a model to determine what the layers store, and whether they call the registered attention
function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, DynamicLayer

from hicache.errors import UnsupportedModel
from hicache.kernels.pool_attention import AttentionRule
from hicache.layout import HeadShape, LatentGeometry, LayerKind, ModelGeometry, StateGeometry
from hicache.serving.attention import attending_by_slots
from hicache.serving.cache import HybridLayer, SlotLayer, StateCache, StateLayer, cache_argument
from hicache.serving.latent import absorbs

SUPPORTED = (
    "supported are decoder-only models whose layers have full or chunked attention, a sliding window of one size, or, "
    "in addition to full attention, a recurrent state of one convolution and one temporal part, with keys and values "
    "of one shape for each kind, grouped heads included, or latent rows of one size"
)
NUM_TOKENS = 6  # more tokens than a convolution window


class _Recorder(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of transformers' own cache that also records the shapes of its keys and values."""

    def __init__(self, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.is_sliding = kind == "window"
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((tuple(key_states.shape), tuple(value_states.shape)))
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]


def recorded_geometry(model: Any, kinds: tuple[LayerKind, ...], window: int, chunk: int) -> ModelGeometry:
    """Return the geometry that one pass of `model` shows, given the kinds of its layers.

    Layers of a kind must store keys and values of one shape, [1, kv_heads, tokens, head_dim], or latents and rotary
    parts of keys, [1, 1, tokens, rank] and [1, 1, tokens, rope]. A layer that stores nothing is assumed to read the
    keys and values of the nearest earlier layer of its kind that stores them. Recurrent layers must have states of
    equal shapes. Raises UnsupportedModel.
    """
    name = type(model).__name__
    recorders = [None if kind in ("recurrent", "stateless") else _Recorder(kind) for kind in kinds]
    layers = [
        HybridLayer(None, recorder) if kind == "hybrid" else recorder or _without_attention(kind)
        for kind, recorder in zip(kinds, recorders, strict=True)
    ]
    ids = torch.arange(NUM_TOKENS, device=model.device)[None]
    model(input_ids=ids, position_ids=ids, use_cache=True, **cache_argument(model, StateCache(layers=layers)))
    sources = _sources(name, recorders)
    attention = [recorder for recorder in recorders if recorder is not None and recorder.shapes]
    latent = _latent(model.config.get_text_config(), attention)
    windows = None
    if latent is not None:
        heads = HeadShape(1, latent.row_dim, latent.row_dim)
    else:
        windows = _heads(name, attention, "window")
        found = _heads(name, attention, "full", "chunked", "hybrid") or windows
        assert found is not None, "some attention layer stores keys and values"
        heads = found
    swa = windows if windows != heads else None
    return ModelGeometry(
        len(kinds),
        heads.head_num,
        heads.head_dim,
        v_head_dim=None if heads.v_head_dim == heads.head_dim else heads.v_head_dim,
        layer_kinds=() if set(kinds) == {"full"} else kinds,
        window=window,
        chunk=chunk,
        state=_state_geometry(name, [layer for layer in layers if isinstance(layer, StateLayer)]),
        dtype=attention[0].keys.dtype,
        latent=latent,
        swa_head_num=swa.head_num if swa else None,
        swa_head_dim=swa.head_dim if swa else None,
        swa_v_head_dim=swa.v_head_dim if swa else None,
        kv_sources=sources,
    )


def _without_attention(kind: LayerKind) -> StateLayer | DummyLayer:
    return DummyLayer() if kind == "stateless" else StateLayer(None)


def _sources(name: str, layers: Sequence[_Recorder | None]) -> tuple[int, ...]:
    """Return, for each layer, the layer whose keys and values it reads; () if every layer stores its own."""
    last: dict[LayerKind, int] = {}
    sources = []
    for layer_id, layer in enumerate(layers):
        if layer is None:
            sources.append(layer_id)
            continue
        if layer.shapes:
            last[layer.kind] = layer_id
        if len(layer.shapes) > 1 or layer.kind not in last:
            raise UnsupportedModel(
                f"{name} stores keys and values {len(layer.shapes)} times per pass in layer {layer_id}; a layer must "
                f"store them once, or read the keys and values of an earlier layer of its kind; {SUPPORTED}"
            )
        sources.append(last[layer.kind])
    return () if sources == list(range(len(layers))) else tuple(sources)


def _latent(config: Any, layers: Sequence[_Recorder]) -> LatentGeometry | None:
    """Return the parts of a latent row if all layers store latent rows, otherwise None."""
    rank, rope = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if rank and rope:
        row = (1, 1, NUM_TOKENS, rank), (1, 1, NUM_TOKENS, rope)
        if all(layer.shapes == [row] for layer in layers):
            return LatentGeometry(rank, rope)
    return None


def _heads(name: str, layers: Sequence[_Recorder], *kinds: LayerKind) -> HeadShape | None:
    """Return the number and sizes of the heads in layers of these kinds; None without such layers."""
    stored = sorted({pair for layer in layers if layer.kind in kinds for pair in layer.shapes})
    if not stored:
        return None
    keys, values = stored[0]
    is_regular = len(keys) == len(values) == 4 and keys[:3] == values[:3] and keys[::2] == (1, NUM_TOKENS)
    if len(stored) > 1 or not is_regular:
        shapes = sorted({shape for pair in stored for shape in pair})
        raise UnsupportedModel(f"{name} stores keys and values of shapes {shapes} in {kinds[0]} layers; {SUPPORTED}")
    return HeadShape(keys[1], keys[3], values[3])


def _state_geometry(name: str, layers: list[StateLayer]) -> StateGeometry | None:
    """Return the shapes and dtypes of the recurrent states, which must be equal in all `layers`; None without
    layers."""
    states = [layer.state for layer in layers]
    found = {
        StateGeometry(
            conv=tuple(tuple(x.shape[1:]) for x in state.conv),
            temporal=tuple(state.temporal.shape[1:]),
            conv_dtype=state.conv[0].dtype,
            temporal_dtype=state.temporal.dtype,
        )
        for state in states
        if state is not None and all(len(x) == 1 for x in (*state.conv, state.temporal))
    }
    if None in states or len(found) > 1 or bool(states) != bool(found):
        raise UnsupportedModel(f"{name} has recurrent layers that keep other states: {found or 'none'}; {SUPPORTED}")
    return found.pop() if found else None


class _Calls:
    """Replaces a `SlotAttention`: counts the calls of each layer and computes no attention."""

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
    """Return whether each attention layer calls the registered function once per pass with the keys and values that it
    stores, or expands latent rows by a module that can be absorbed."""
    if geometry.latent is not None and not absorbs(model, geometry):
        return False
    recorder = _Calls()
    layers = [_probed(kind) for kind in geometry.kinds]
    ids = torch.arange(NUM_TOKENS, device=model.device)[None]
    try:
        with attending_by_slots(model):
            model(
                input_ids=ids,
                position_ids=ids,
                attention_mask=None,
                use_cache=True,
                hicache=recorder,
                **cache_argument(model, StateCache(layers=layers)),
            )
    except (UnsupportedModel, TypeError):
        return False  # a layer has biases, or the forward does not accept `hicache`
    kinds = {layer: kind for layer, kind in enumerate(geometry.kinds) if kind not in ("recurrent", "stateless")}
    if geometry.latent is not None:
        return Counter(layer for layer, *_ in recorder.calls.elements()) == Counter([*kinds])
    full, window = (
        tuple((1, of.head_num, NUM_TOKENS, dim) for dim in (of.head_dim, of.v_head_dim))
        for of in (geometry.full_heads, geometry.window_heads)
    )
    expected = {(layer, *(window if kind == "window" else full)): 1 for layer, kind in kinds.items()}
    return dict(recorder.calls) == expected


def _probed(kind: LayerKind) -> Any:
    if kind == "stateless":
        return DummyLayer()
    if kind == "hybrid":
        return HybridLayer(None, SlotLayer())
    return StateLayer(None) if kind == "recurrent" else SlotLayer(kind == "window")
