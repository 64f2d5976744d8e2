"""Which models the runner can serve: found out by asking the model, not by a list of names.

`check_supported` first reads from the configuration what kind each layer is of, and what rules the model out. Then it
runs seven tokens through the model in three pieces with a recording cache and explicit masks, the way the runner does,
and compares with the model's own plain forward. A model that passes both keeps nothing but what the runner keeps for
it. For that run a sliding window is cut down to three tokens, so that seven reach far beyond it.

May import transformers, torch, layout, errors and the device tier's records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hicache.device.mamba import MambaState
from hicache.errors import UnsupportedModel
from hicache.layout import LayerKind, ModelGeometry, StateGeometry
from hicache.serving.states import StateCache, StateLayer

_SUPPORTED = (
    "supported are decoder-only models whose layers have full attention, a sliding window of one size, or, beside full "
    "attention, a recurrent state of one convolution and one temporal part, with keys and values of one head size, "
    "grouped heads included"
)
_ATTENTION_KERNELS = ("sdpa", "eager")
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "recurrent",
}
# A first piece within the window, a longer one that leaves it, one token: the three ways in which the runner calls.
_PIECES = ((0, 2), (2, 6), (6, 7))
_PROBE_WINDOW = 3


class _ProbeLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """Keeps keys and values like the library's own layer, and the shapes that it was given.

    `window` > 0: hands out those that the window of one of the new tokens reaches, as the runner does.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self.is_sliding = window > 0
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((tuple(key_states.shape), tuple(value_states.shape)))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self._window:
            seen = self._window - 1 + key_states.shape[-2]
            keys, values = keys[:, :, -seen:], values[:, :, -seen:]
        return keys, values


def attention_mask(
    query_positions: torch.Tensor, key_positions: torch.Tensor, kernel: str, dtype: torch.dtype, window: int = 0
) -> torch.Tensor:
    """The causal mask of queries at `query_positions` [B, n] over keys at `key_positions` [B or 1, keys]:
    [B, 1, n, keys].

    A query at p sees keys at [0, p], of which a `window` > 0 leaves (p - window, p]; so padding, which stands outside,
    is hidden too. True means seen for sdpa; eager wants 0 and the lowest value of `dtype`.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
    seen = (keys <= queries) & (keys >= 0)
    if window:
        seen &= keys > queries - window
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def mask_argument(masks: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
    """What to pass as a model's `attention_mask`, of the masks of its layer types by the library's names.

    Models of one type of attention take a tensor, those of several a dict. None of them given: the model makes them.
    """
    if len(masks) == 1 or all(mask is None for mask in masks.values()):
        return next(iter(masks.values()))
    return dict(masks)


def attention_kernel(model: Any) -> str:
    """'sdpa' or 'eager': how the model computes attention. Raises UnsupportedModel for others, with the remedy."""
    kernel = str(model.config._attn_implementation)
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModel(f"attn_implementation={kernel!r}: load the model with 'sdpa' or 'eager'")
    return kernel


def check_supported(model: Any) -> ModelGeometry:
    """The layers of `model`, a transformers causal language model. Raises UnsupportedModel naming the layer type.

    The model must not be in use: its configuration is changed for a moment.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    reason = _config_reason(config)
    if reason:
        raise UnsupportedModel(f"{name} has {reason}; {_SUPPORTED}")
    kernel, kinds = attention_kernel(model), tuple(_KINDS[layer_type] for layer_type in _layer_types(config))
    window = _window(config) if "window" in kinds else 0
    try:
        with torch.inference_mode(), _cut_window(config, window):
            layers, difference = _probe(model, kernel, kinds, min(window, _PROBE_WINDOW))
    except Exception as error:
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"{name} does not run over a key-value cache ({text}); {_SUPPORTED}") from error
    geometry = _geometry(name, kinds, window, layers)
    # Rounding stays far below this, a bias, a window or a position that the cache does not carry far above.
    if difference > 0.05:
        raise UnsupportedModel(
            f"{name} gives other results over a cached prefix than without one (by {difference:.2g} of the logits' "
            f"spread): its layers depend on more than what is cached and a mask; {_SUPPORTED}"
        )
    return geometry


def _layer_types(config: Any) -> list[str]:
    """The library's name of each layer's type; of a configuration that names none, the one that all have."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [str(layer_type) for layer_type in types]
    one = "sliding_attention" if _window(config) else "full_attention"
    return ["chunked_attention" if getattr(config, "attention_chunk_size", None) else one] * config.num_hidden_layers


def _window(config: Any) -> int:
    """Tokens that a layer with a sliding window looks back on, itself included; 0: no window is configured."""
    return int((getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)) or 0)


def _config_reason(config: Any) -> str:
    """What the configuration says that rules the model out, or nothing."""
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
    types = set(_layer_types(config)) if layers else set()
    other = sorted(types - set(_KINDS))
    per_type = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope for rope in (per_type, *per_type.values()) if isinstance(rope, Mapping)]
    stretching = {str(rope.get("rope_type")) for rope in ropes} & {"dynamic", "longrope"}
    latent = getattr(config, "kv_lora_rank", None)
    reasons = {
        "an encoder": getattr(config, "is_encoder_decoder", False),
        f"layers of type {', '.join(other)}": other,
        "layers of type sliding_attention without a sliding_window": (
            "sliding_attention" in types and not _window(config)
        ),
        "layers of type sliding_attention beside linear_attention": {"sliding_attention", "linear_attention"} <= types,
        f"layers of type latent attention (kv_lora_rank={latent})": latent,
        f"keys that depend on the length of the whole prompt (rope_type={', '.join(stretching)})": stretching,
        f"recurrent layers alone, or none with attention heads (model_type={config.model_type})": (
            types <= {"linear_attention"} or not heads
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@contextmanager
def _cut_window(config: Any, window: int) -> Iterator[None]:
    """Have the model look back on no more than the probe's window."""
    if window <= _PROBE_WINDOW:
        yield
        return
    config.sliding_window = _PROBE_WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def _probe(
    model: Any, kernel: str, kinds: tuple[LayerKind, ...], window: int
) -> tuple[list[_ProbeLayer | StateLayer], float]:
    """Run the pieces; returns the layers, and by how much the pieces' last logits differ from the plain forward's.

    Recurrent layers are new for each piece, as in the runner, and get what those of the piece before have left.
    """
    vocab_size, length = int(model.config.get_text_config().vocab_size), _PIECES[-1][1]
    positions = torch.arange(length, device=model.device)[None]
    tokens = (positions + 1).remainder(vocab_size)
    whole = model(input_ids=tokens, use_cache=False).logits[0].float()
    difference = 0.0
    layers: list[_ProbeLayer | StateLayer] = [
        StateLayer(None) if kind == "recurrent" else _ProbeLayer(window if kind == "window" else 0) for kind in kinds
    ]
    for start, end in _PIECES:
        masks: dict[str, torch.Tensor | None] = {}
        for name, kind in _KINDS.items():
            if kind in kinds and kind != "recurrent":
                reach = window if kind == "window" else 0
                seen = positions[:, max(0, start - reach + 1) if reach else 0 : end]
                mask = attention_mask(positions[:, start:end], seen, kernel, model.dtype, reach)
                masks[name] = mask if start else None
        layers = [_continued(layer) for layer in layers] if start else layers
        logits = model(
            input_ids=tokens[:, start:end],
            position_ids=positions[:, start:end],
            attention_mask=mask_argument(masks),
            past_key_values=StateCache(layers=layers),
            use_cache=True,
        ).logits[0, -1]
        apart = (logits.float() - whole[end - 1]).abs().max() / whole[end - 1].std().clamp_min(1e-6)
        difference = max(difference, float(apart.nan_to_num(nan=float("inf"))))
    return layers, difference


def _continued(layer: _ProbeLayer | StateLayer) -> _ProbeLayer | StateLayer:
    """The layer for the next piece; a recurrent one knows nothing but the state that the last one left."""
    if isinstance(layer, _ProbeLayer) or (state := layer.state) is None:
        return layer
    copy = MambaState([x.clone() for x in state.conv], state.temporal.clone())
    return StateLayer(lambda: copy)


def _geometry(
    name: str, kinds: tuple[LayerKind, ...], window: int, layers: list[_ProbeLayer | StateLayer]
) -> ModelGeometry:
    """What the probe recorded, where every attention layer stored each piece, alike, [1, kv_heads, tokens, head_dim],
    and every recurrent one left a state of the same shapes."""
    attention = [layer for layer in layers if isinstance(layer, _ProbeLayer)]
    storing = sum(len(layer.shapes) == len(_PIECES) for layer in attention)
    if storing != len(attention):
        raise UnsupportedModel(
            f"{name} has {len(attention)} attention layers of which {storing} store keys and values: the others are "
            f"recurrent or share a cache; {_SUPPORTED}"
        )
    stored = {
        (shape, end - start)
        for layer in attention
        for (start, end), pair in zip(_PIECES, layer.shapes, strict=True)
        for shape in pair
    }
    heads = {(shape[1], shape[-1]) for shape, num_tokens in stored if shape[::2] == (1, num_tokens) and len(shape) == 4}
    if len(heads) != 1 or len(stored) != len(_PIECES):
        shapes = sorted({shape for shape, _ in stored})
        raise UnsupportedModel(f"{name} stores keys and values of shapes {shapes}; {_SUPPORTED}")
    head_num, head_dim = heads.pop()
    state = _state_geometry(name, [layer for layer in layers if isinstance(layer, StateLayer)])
    layer_kinds = () if set(kinds) == {"full"} else kinds
    return ModelGeometry(len(kinds), head_num, head_dim, layer_kinds=layer_kinds, window=window, state=state)


def _state_geometry(name: str, layers: list[StateLayer]) -> StateGeometry | None:
    """What recurrent layers leave, where each leaves the same; None without such layers."""
    left = [layer.state for layer in layers]
    found = {
        StateGeometry(
            conv=tuple(tuple(x.shape[1:]) for x in state.conv),
            temporal=tuple(state.temporal.shape[1:]),
            conv_dtype=state.conv[0].dtype,
            temporal_dtype=state.temporal.dtype,
        )
        for state in left
        if state is not None and all(len(x) == 1 for x in (*state.conv, state.temporal))
    }
    if None in left or len(found) > 1 or bool(left) != bool(found):
        raise UnsupportedModel(f"{name} has recurrent layers that keep other states: {found or 'none'}; {_SUPPORTED}")
    return found.pop() if found else None
