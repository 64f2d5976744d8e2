"""Which models the runner can serve: found out by asking the model, not by a list of names.

`check_supported` reads from the configuration what kind each layer is of, and what rules the model out. Then it serves
two sequences with the model by the runner's own passes and compares with the model's own plain forward, in float32
whatever the weights are kept in (decision 021). A model that passes keeps nothing but what the pools keep for it.

May import transformers, torch, layout, errors and its own package.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hicache.errors import OutOfMemory, UnsupportedModel
from hicache.layout import LayerKind, ModelGeometry, StateGeometry
from hicache.serving.masks import attention_kernel
from hicache.serving.states import StateCache, StateLayer
from hicache.serving.trial import (
    cut_window,
    lookahead_difference,
    numbering_difference,
    served_difference,
    trial_length,
)
from hicache.serving.widen import float32_weights

_SUPPORTED = (
    "supported are decoder-only models whose layers have full attention, a sliding window of one size, or, beside full "
    "attention, a recurrent state of one convolution and one temporal part, with keys and values of one head size, "
    "grouped heads included"
)
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "recurrent",
}
# What is read of a configuration is said of all layers at once; others of its settings may vary from one to the next.
_OF_ALL_LAYERS = {
    "alibi",
    "attention_chunk_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
}
_NUM_RECORDED = 6  # tokens of the pass that finds out what layers store: more than a convolution sees
# In the logits' spread. Rounding of float32 came to 4e-5 at the most over all families of the library.
_MAX_DIFFERENCE = 0.001


class _Recorder(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """Keeps keys and values like the library's own layer, and the shapes that it was given."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((tuple(key_states.shape), tuple(value_states.shape)))
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]


def check_supported(model: Any) -> ModelGeometry:
    """The layers of `model`, a transformers causal language model. Raises UnsupportedModel with the reason.

    The model must not be in use: its configuration and weights are changed for a moment.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    reason = _config_reason(config) or _interface_reason(model)
    if reason:
        raise UnsupportedModel(f"{name} has {reason}; {_SUPPORTED}")
    attention_kernel(model)
    kinds = tuple(_KINDS[layer_type] for layer_type in _layer_types(config))
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.callback(model.train, model.training)
            model.eval()
            stack.enter_context(cut_window(config))
            num_tokens = trial_length(config)
            tried = _recorded(model, kinds)
            if model.dtype != torch.float32:
                served_difference(model, tried, num_tokens)  # does it run in its own dtype?
            stack.enter_context(float32_weights(model))
            ahead, renumbered = lookahead_difference(model, num_tokens), numbering_difference(model)
            difference = served_difference(model, _recorded(model, kinds), num_tokens)
    except (UnsupportedModel, OutOfMemory, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UnsupportedModel(
            f"{name} fails when it is tried over a key-value cache ({text}); {_SUPPORTED}"
        ) from error
    if ahead > _MAX_DIFFERENCE:
        raise UnsupportedModel(
            f"{name} is not causal: a token's logits change when others follow it (by {ahead:.2g} of the logits' "
            f"spread); {_SUPPORTED}"
        )
    if renumbered > _MAX_DIFFERENCE:
        raise UnsupportedModel(
            f"{name} does not number positions from 0: told to, it gives other logits (by {renumbered:.2g} of their "
            f"spread); {_SUPPORTED}"
        )
    if difference > _MAX_DIFFERENCE:
        raise UnsupportedModel(
            f"{name} gives other results over a cached prefix than without one (by {difference:.2g} of the logits' "
            "spread): these do not follow from positions, a mask and the keys, values and states that its "
            f"configuration speaks of; {_SUPPORTED}"
        )
    return replace(tried, window=_window(config) if tried.window else 0)


def _interface_reason(model: Any) -> str:
    """What the arguments of the model's forward rule out, or nothing."""
    takes = inspect.signature(model.forward).parameters
    if "past_key_values" not in takes:
        return "no key-value cache (its forward takes no past_key_values)"
    if "position_ids" not in takes:
        return "no way to be told positions (its forward takes no position_ids)"
    return ""


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


def _several_windows(config: Any) -> str:
    """The setting that gives layers windows of their own, with its value, or nothing."""
    for name, value in config.to_dict().items():
        sizes = list(value.values()) if isinstance(value, Mapping) else value
        if "window" in name and isinstance(sizes, list | tuple) and len({str(size) for size in sizes}) > 1:
            return f"{name}={value}"
    return ""


def _config_reason(config: Any) -> str:
    """What the configuration says that rules the model out, or nothing."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    varying = sorted({*(config.per_layer_attributes or ())} & _OF_ALL_LAYERS)
    if varying:
        return f"settings that vary from layer to layer ({', '.join(varying)})"
    several = _several_windows(config)
    if several:
        return f"windows of several sizes ({several})"
    if not getattr(config, "num_hidden_layers", 0):
        return f"no num_hidden_layers in its configuration (model_type={config.model_type})"
    types = set(_layer_types(config))
    other = sorted(types - set(_KINDS))
    per_type = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope for rope in (per_type, *per_type.values()) if isinstance(rope, Mapping)]
    stretching = {str(rope.get("rope_type")) for rope in ropes} & {"dynamic", "longrope"}
    latent = getattr(config, "kv_lora_rank", None)
    best, positions = getattr(config, "keep_window_size", None) or 0, getattr(config, "max_position_embeddings", 0)
    reasons = {
        "attention biases (alibi) that it builds from a padding mask": getattr(config, "alibi", False),
        f"layers that attend to the best keys alone, a choice that rounding makes (keep_window_size={best})": (
            0 < best < positions
        ),
        f"layers of type {', '.join(other)}": other,
        "layers of type sliding_attention without a sliding_window": (
            "sliding_attention" in types and not _window(config)
        ),
        "layers of type sliding_attention beside linear_attention": {"sliding_attention", "linear_attention"} <= types,
        f"layers of type latent attention (kv_lora_rank={latent})": latent,
        f"keys that depend on the length of the whole prompt (rope_type={', '.join(stretching)})": stretching,
        "recurrent layers alone": types == {"linear_attention"},
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _recorded(model: Any, kinds: tuple[LayerKind, ...]) -> ModelGeometry:
    """What one short pass stored: every attention layer alike, once, [1, kv_heads, tokens, head_dim], and every
    recurrent one a state of the same shapes."""
    name, window = type(model).__name__, _window(model.config.get_text_config()) if "window" in kinds else 0
    layers = [StateLayer(None) if kind == "recurrent" else _Recorder(kind == "window") for kind in kinds]
    ids = torch.arange(_NUM_RECORDED, device=model.device)[None]
    model(input_ids=ids, position_ids=ids, past_key_values=StateCache(layers=layers), use_cache=True)
    attention = [layer for layer in layers if isinstance(layer, _Recorder)]
    storing = sum(len(layer.shapes) == 1 for layer in attention)
    if storing != len(attention):
        raise UnsupportedModel(
            f"{name} has {len(attention)} attention layers of which {storing} store keys and values once a pass, and "
            f"the others keep none of their own; {_SUPPORTED}"
        )
    shapes = sorted({shape for layer in attention for pair in layer.shapes for shape in pair})
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][::2] != (1, _NUM_RECORDED):
        raise UnsupportedModel(f"{name} stores keys and values of shapes {shapes}; {_SUPPORTED}")
    head_num, head_dim = shapes[0][1::2]
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
