"""Which models the runner can serve: found out by asking the model, not by a list of names.

`check_supported` first reads the configuration for layers known to need more than keys and values of every token, then
runs four tokens through the model in two pieces with a recording cache and an explicit mask, the way the runner does,
and compares with the model's own plain forward. A model that passes both has plain attention in every layer.

May import transformers, torch, layout and errors.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hicache.errors import UnsupportedModel
from hicache.layout import ModelGeometry

_SUPPORTED = (
    "supported are decoder-only models with full attention in every layer and keys and values of one head size, "
    "grouped heads included"
)
_ATTENTION_KERNELS = ("sdpa", "eager")


class _ProbeLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """Keeps keys and values like the library's own layer, and the shapes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((tuple(key_states.shape), tuple(value_states.shape)))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values


def attention_mask(query_positions: torch.Tensor, kv_len: int, kernel: str, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask of queries at `query_positions` [B, n] over `kv_len` keys: [B, 1, n, kv_len].

    Key j is seen where j <= position, which also hides the padding behind a shorter sequence. True means seen for sdpa;
    eager wants 0 and the lowest value of `dtype`.
    """
    keys = torch.arange(kv_len, device=query_positions.device)
    seen = keys <= query_positions[:, None, :, None]
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def attention_kernel(model: Any) -> str:
    """'sdpa' or 'eager': how the model computes attention. Raises UnsupportedModel for others, with the remedy."""
    kernel = str(model.config._attn_implementation)
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModel(f"attn_implementation={kernel!r}: load the model with 'sdpa' or 'eager'")
    return kernel


def check_supported(model: Any) -> ModelGeometry:
    """The attention of `model`, a transformers causal language model. Raises UnsupportedModel naming the layer type."""
    name = type(model).__name__
    reason = _config_reason(model.config.get_text_config())
    if reason:
        raise UnsupportedModel(f"{name} has {reason}; {_SUPPORTED}")
    kernel = attention_kernel(model)
    try:
        with torch.inference_mode():
            layers, difference = _probe(model, kernel)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"{name} does not run over a key-value cache ({text}); {_SUPPORTED}") from error
    geometry = _geometry(name, model.config.get_text_config().num_hidden_layers, layers)
    # Rounding stays far below this, a bias, a window or a position that the cache does not carry far above.
    if difference > 0.05:
        raise UnsupportedModel(
            f"{name} gives other results over a cached prefix than without one (by {difference:.2g} of the logits' "
            f"spread): its attention depends on more than keys, values and a causal mask; {_SUPPORTED}"
        )
    return geometry


def _config_reason(config: Any) -> str:
    """What the configuration says that rules the model out, or nothing."""
    layer_types = getattr(config, "layer_types", None)
    other = sorted({str(kind) for kind in layer_types or () if kind != "full_attention"})
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    latent = getattr(config, "kv_lora_rank", None)
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
    reasons = {
        "an encoder": getattr(config, "is_encoder_decoder", False),
        f"layers of type {', '.join(other)}": other,
        f"layers of type sliding_attention (sliding_window={window})": layer_types is None and window,
        "layers of type chunked_attention": layer_types is None and getattr(config, "attention_chunk_size", None),
        f"layers of type latent attention (kv_lora_rank={latent})": latent,
        f"keys that depend on the length of the whole prompt (rope_type={rope.get('rope_type')})": (
            rope.get("rope_type") in ("dynamic", "longrope")
        ),
        f"recurrent layers, or none with attention heads (model_type={config.model_type})": not (heads and layers),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _probe(model: Any, kernel: str) -> tuple[list[_ProbeLayer], float]:
    """Run [0, 2) and then [2, 4) of four tokens; returns the layers and the largest difference to the plain forward."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    tokens = torch.tensor([[1, 2, 3, 4]], device=model.device).remainder(vocab_size)
    positions = torch.arange(4, device=model.device)[None]
    cache = Cache(layer_class_to_replicate=_ProbeLayer)
    model(input_ids=tokens[:, :2], position_ids=positions[:, :2], past_key_values=cache, use_cache=True)
    layers: list[_ProbeLayer] = list(cache.layers)
    if not layers:
        return layers, 0.0
    seen = [list(layer.shapes) for layer in layers]
    if any(len(shapes) != 1 for shapes in seen):
        return layers, 0.0
    mask = attention_mask(positions[:, 2:], 4, kernel, model.dtype)
    pieces = model(
        input_ids=tokens[:, 2:],
        position_ids=positions[:, 2:],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    ).logits[0, -1]
    whole = model(input_ids=tokens, use_cache=False).logits[0, -1]
    spread = whole.float().std().clamp_min(1e-6)
    for layer, shapes in zip(layers, seen, strict=True):
        layer.shapes = shapes
    return layers, float(((pieces.float() - whole.float()).abs().max() / spread).nan_to_num(nan=float("inf")))


def _geometry(name: str, num_layers: int, layers: list[_ProbeLayer]) -> ModelGeometry:
    """What the two-token probe recorded, where every layer stored once, alike, [1, kv_heads, 2, head_dim]."""
    storing = sum(len(layer.shapes) == 1 for layer in layers)
    if storing != num_layers or len(layers) != num_layers:
        raise UnsupportedModel(
            f"{name} has {num_layers} layers of which {storing} store keys and values: the others are recurrent or "
            f"share a cache; {_SUPPORTED}"
        )
    shapes = {shape for layer in layers for pair in layer.shapes for shape in pair}
    if len(shapes) != 1 or len(next(iter(shapes))) != 4 or next(iter(shapes))[::2] != (1, 2):
        raise UnsupportedModel(f"{name} stores keys and values of shapes {sorted(shapes)} for two tokens; {_SUPPORTED}")
    _, head_num, _, head_dim = shapes.pop()
    return ModelGeometry(layer_num=num_layers, head_num=head_num, head_dim=head_dim)
