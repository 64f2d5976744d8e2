"""Decides whether the runner can serve a model. It examines the model, and uses no list of model names.

`check_supported` reads the kind of each layer from the configuration, and refuses configurations with known obstacles.
Then it serves two sequences with `ModelRunner`, and compares their logits with logits of forwards without a cache. This
comparison is in float32 for any dtype of the weights (decision 021). It shows that the model has no state other than
the keys, values and recurrent states in the pools.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from hicache.errors import OutOfMemory, UnsupportedModel
from hicache.layout import LayerKind, ModelGeometry
from hicache.serving.attention import Attention
from hicache.serving.cache import cache_keyword
from hicache.serving.padded_passes import attention_kernel
from hicache.serving.positions import stretched_beyond
from hicache.serving.recorded import SUPPORTED, recorded_geometry
from hicache.serving.trial import Trial, short_window, trial_length
from hicache.serving.widen import float32_weights

_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "hybrid": "hybrid",
    "mlp": "stateless",
    "moe": "stateless",
}
# Settings that must be equal in all layers. Settings that are not listed here may differ between layers.
_OF_ALL_LAYERS = {
    "alibi",
    "attention_chunk_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
}
# Maximum difference from the logits of transformers, as a share of the logits' standard deviation. In all model
# families, rounding in float32 caused at most 4e-5.
_MAX_DIFFERENCE = 0.001


def check_supported(model: Any, attention: Attention = "auto") -> ModelGeometry:
    """Return the geometry of `model`, a transformers causal language model, served with `attention` (see
    `ModelRunner`). Raises UnsupportedModel with the reason.

    No other code may use the model during this call, because it changes the model's configuration and weights, and
    restores them at the end.
    """
    name, config, kinds = type(model).__name__, model.config.get_text_config(), _examined(model)
    attention_kernel(model)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.callback(model.train, model.training)
            model.eval()
            stack.enter_context(short_window(config))
            num_tokens, bounds = trial_length(config), _bounds(config, kinds)
            recorded = recorded_geometry(model, kinds, **bounds)
            is_wide = model.dtype == torch.float32
            if not is_wide:  # check first that the model runs in its own dtype
                Trial(model, num_tokens).served_difference(recorded, attention)
            stack.enter_context(float32_weights(model))
            geometry = recorded if is_wide else recorded_geometry(model, kinds, **bounds)
            reason = _difference_reason(Trial(model, num_tokens), geometry, attention)
    except (UnsupportedModel, OutOfMemory, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"{name} fails when it is tried with a key-value cache ({text}); {SUPPORTED}") from error
    if reason:
        raise UnsupportedModel(f"{name} {reason}; {SUPPORTED}")
    bounds, limit = _bounds(config, kinds), stretched_beyond(config)
    return replace(recorded, window=bounds["window"], chunk=bounds["chunk"], max_context_len=limit)


def untried_geometry(model: Any) -> ModelGeometry:
    """Return the geometry of `model` from its configuration and one recorded pass. No results are compared, so the
    weights may be on the device "meta". Raises UnsupportedModel for the reasons that `check_supported` finds without
    its trial."""
    config, kinds = model.config.get_text_config(), _examined(model)
    with torch.inference_mode():
        recorded = recorded_geometry(model, kinds, **_bounds(config, kinds))
    return replace(recorded, max_context_len=stretched_beyond(config))


def _examined(model: Any) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers. Raises UnsupportedModel if the configuration, or the signature of the model's
    forward, shows that the model cannot be served."""
    config = model.config.get_text_config()
    reason = _config_reason(config) or _interface_reason(model)
    if reason:
        raise UnsupportedModel(f"{type(model).__name__} has {reason}; {SUPPORTED}")
    return tuple(_KINDS[layer_type] for layer_type in _layer_types(config))


def _difference_reason(trial: Trial, geometry: ModelGeometry, attention: Attention) -> str:
    """Return the reason why the results of a trial show that the model cannot be served; empty if it can."""
    difference = trial.served_difference(geometry, attention)
    if difference <= _MAX_DIFFERENCE:
        return ""
    ahead = trial.lookahead_difference()
    if ahead > _MAX_DIFFERENCE:
        return (
            f"is not causal: the logits of a token change if other tokens follow it (by {ahead:.2g} of the logits' "
            "standard deviation)"
        )
    renumbered = trial.numbering_difference()
    if renumbered > _MAX_DIFFERENCE:
        return (
            f"does not number positions from 0: with positions from 0, its logits differ (by {renumbered:.2g} of their "
            "standard deviation)"
        )
    return (
        f"gives different results with a cached prefix than without one (by {difference:.2g} of the logits' standard "
        "deviation): its results depend on more than positions, a mask, and the keys, values and states of its "
        "configuration"
    )


def _interface_reason(model: Any) -> str:
    """Return the reason why the signature of the model's forward shows that the model cannot be served; empty if it
    can."""
    takes = inspect.signature(model.forward).parameters
    if cache_keyword(model) is None:
        return "no key-value cache (its forward method has neither cache nor past_key_values)"
    if "position_ids" not in takes:
        return "a forward method without position_ids, so it cannot continue a cached prefix"
    return ""


def _layer_types(config: Any) -> list[str]:
    """Return transformers' name of each layer's type. Without `layer_types` in the configuration, all layers have the
    same type."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [str(layer_type) for layer_type in types]
    common = "sliding_attention" if _window(config) else "full_attention"
    if getattr(config, "attention_chunk_size", None):
        common = "chunked_attention"
    return [common] * config.num_hidden_layers


def _window(config: Any) -> int:
    """Return the number of tokens in the sliding window, including the current one; 0: no window is configured."""
    return int((getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)) or 0)


def _bounds(config: Any, kinds: tuple[LayerKind, ...]) -> dict[str, int]:
    """Return the fields `window` and `chunk` of the geometry."""
    return {
        "window": _window(config) if "window" in kinds else 0,
        "chunk": int(config.attention_chunk_size) if "chunked" in kinds else 0,
    }


def _several_windows(config: Any) -> str:
    """Return a setting that gives layers windows of different sizes, with its value; empty if the configuration has no
    such setting."""
    for name, value in config.to_dict().items():
        sizes = list(value.values()) if isinstance(value, Mapping) else value
        if "window" in name and isinstance(sizes, list | tuple) and len({str(size) for size in sizes}) > 1:
            return f"{name}={value}"
    return ""


def _config_reason(config: Any) -> str:
    """Return the reason why the configuration shows that the model cannot be served; empty if it can."""
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
    top_keys, positions = getattr(config, "keep_window_size", None) or 0, getattr(config, "max_position_embeddings", 0)
    reasons = {
        "attention biases (alibi) that it builds from a padding mask": getattr(config, "alibi", False),
        f"layers that attend only to the best keys, which depend on rounding (keep_window_size={top_keys})": (
            0 < top_keys < positions
        ),
        f"layers of type {', '.join(other)}": other,
        "layers that attend to another input (cross_attention_layers)": getattr(config, "cross_attention_layers", None),
        "layers of type sliding_attention without a sliding_window": (
            "sliding_attention" in types and not _window(config)
        ),
        "layers of both types sliding_attention and linear_attention": {"sliding_attention", "linear_attention"}
        <= types,
        "layers of type chunked_attention without an attention_chunk_size": (
            "chunked_attention" in types and not getattr(config, "attention_chunk_size", None)
        ),
        "only recurrent layers": types == {"linear_attention"},
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
