"""Computes a model's geometry, bytes of weights and operations of a prefill from its configuration alone.

The model is built on the device "meta", where tensors have shapes and no values, and one forward pass is recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.quantizers_utils import should_convert_module

from hicache.errors import ConfigError, HiCacheError
from hicache.layout import ModelGeometry
from hicache.planning.presets import PRESETS, PlannedModel, PrefillWork
from hicache.serving.models import UNLIMITED
from hicache.serving.positions import position_limit
from hicache.serving.recorded import NUM_TOKENS
from hicache.serving.support import untried_geometry

_BITS = {"fp8": 8.0, "finegrained_fp8": 8.0, "mxfp4": 4.25}  # bits per quantised weight, with its share of a scale
_SCALE_BITS = 16  # bits of the scale of each group of GPTQ and AWQ weights; each group also has a zero point
_GROUP = 128
# operations per token for each element of a recurrent state: decay, update and read take a multiplication and an
# addition each
_STATE_FLOPS = 6


def read_model(given: str, weight_bytes: int | None = None) -> PlannedModel:
    """Return the model of a transformers `config.json`, or of a folder that contains one.

    `weight_bytes`: bytes of all weights. If it is None, they are the size of the folder's safetensors files, or without
    such files are computed from the configuration's quantisation and dtype. Raises ConfigError with a message of one
    line if the file describes no causal language model, and UnsupportedModel if hicache cannot serve the model.
    """
    logging.set_verbosity_error()
    values, path = _values(given)
    try:
        model = _without_weights(values)
    except Exception as error:  # transformers may raise any exception of the code that it calls
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model {given}: not the configuration of a causal language model: {text[:200]}") from error
    try:
        with FlopCounterMode(display=False) as counter:
            geometry = untried_geometry(model)
    except HiCacheError:
        raise
    except Exception as error:  # the model may read values of tensors, which "meta" lacks
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model {given}: {type(model).__name__} cannot run without weights, so it cannot be planned: {text}"
        ) from error
    config, num_active = model.config.get_text_config(), _token_flops(model, counter) // 2
    if weight_bytes is None:
        weight_bytes = _indexed_bytes(path) or _counted_bytes(model, values.get("quantization_config"), given)
    return PlannedModel(
        name=path.parent.resolve().name if path.name == "config.json" else path.stem,
        geometry=geometry,
        num_weights=sum(weight.numel() for weight in model.parameters()),
        num_active=num_active,
        weight_bytes=weight_bytes,
        max_context_len=position_limit(config) or UNLIMITED,
        work=_work(config, geometry, num_active, model.get_output_embeddings()),
    )


def _values(given: str) -> tuple[dict[str, Any], Path]:
    """Return the values of the configuration, and the path of its file."""
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            # `get_config_dict` also parses infinities
            values, _ = PretrainedConfig.get_config_dict(str(path), local_files_only=True)
    except OSError as error:
        raise ConfigError(
            f"model {given}: {error.strerror}: {path}; give a transformers config.json, a folder with one, or one of "
            f"{', '.join(PRESETS)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model {given}: {path} is not JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"model {given}: {path} has no model_type; give the config.json of a transformers model")
    return values, path


def _without_weights(values: Mapping[str, Any]) -> Any:
    """Return the model of a configuration on the device "meta". Raises any exception of transformers."""
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model_type {kind}")
    left_out = ("model_type", "quantization_config", "auto_map")  # auto_map names code in the folder, which never runs
    plain = {name: value for name, value in values.items() if name not in left_out}
    config = CONFIG_MAPPING[kind].from_dict(plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.get_text_config().dtype or torch.bfloat16)
    if model._can_set_experts_implementation():
        # the only implementation that selects experts without reading values
        model.set_experts_implementation("batched_mm")
    return model.eval()


def _token_flops(model: Any, counter: FlopCounterMode) -> int:
    """Return the number of operations per token that involve weights, counted in the recorded pass. Of experts, only
    the selected ones count. A layer that runs several times counts each time. The head, and modules that did not run,
    do not count."""
    counted = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    flops, config = 0, model.config.get_text_config()
    for name, module in _multiplied(model):
        ran = counted.get(f"{type(model).__name__}.{name}", 0)
        experts = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
        # Llama 4 multiplies each token with all experts, and multiplies the results of unselected experts with zero.
        if experts and ran == 2 * NUM_TOKENS * sum(weight.numel() for weight in experts):
            ran = ran * getattr(config, "num_experts_per_tok", len(experts[0])) // len(experts[0])
        flops += ran
    return flops // NUM_TOKENS


def _multiplied(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each module that multiplies tokens with its weights, except for the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        has_all = len(own) == len(list(module.parameters())) and not isinstance(module, nn.Embedding)
        if has_all and module is not head and any(weight.ndim > 1 for weight in own):
            yield name, module


def _work(config: Any, geometry: ModelGeometry, num_active: int, head: Any) -> PrefillWork:
    heads, kinds = int(config.num_attention_heads), geometry.kinds
    full, window = geometry.full_heads, geometry.window_heads
    pair = full.head_dim + full.v_head_dim
    if geometry.latent is not None:  # attention in a prefill uses expanded keys and values, not latent rows
        pair = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    state_flops = 0
    if geometry.state is not None:
        state_flops = _STATE_FLOPS * len(geometry.recurrent_layers) * torch.Size(geometry.state.temporal).numel()
    return PrefillWork(
        token_flops=2 * num_active + state_flops,
        head_flops=2 * head.weight.numel(),
        full_pair_flops=2 * heads * pair * (kinds.count("full") + kinds.count("hybrid")),
        window_pair_flops=2 * heads * (window.head_dim + window.v_head_dim) * kinds.count("window"),
        chunk_pair_flops=2 * heads * pair * kinds.count("chunked"),
        window=geometry.window,
        chunk=geometry.chunk,
    )


def _indexed_bytes(path: Path) -> int:
    """Return the bytes of the tensors in the safetensors files next to a configuration; 0 if there are none."""
    single, index = path.with_name("model.safetensors"), path.with_name("model.safetensors.index.json")
    try:
        if single.exists():
            return single.stat().st_size
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]) if index.exists() else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} does not say the bytes of the weights; give --weight-bytes") from error


def _counted_bytes(model: Any, quantization: Any, given: str) -> int:
    """Return the bytes of the weights in the model's dtype, with fewer bits for layers that the configuration
    quantises."""
    total: int = sum(weight.nbytes for weight in model.parameters())
    if quantization is None:
        return total
    settings = quantization if isinstance(quantization, dict) else {}
    method, bits, group = (settings.get(name) for name in ("quant_method", "bits", "group_size"))
    if method in ("gptq", "awq") and isinstance(bits, int):
        bits_each = bits + (_SCALE_BITS + bits) / (group if isinstance(group, int) and group > 0 else _GROUP)
    elif method in _BITS:
        bits_each = _BITS[method]
    else:
        raise ConfigError(
            f"model {given}: weights quantised by {method} take bytes that are not known here; give --weight-bytes"
        )
    try:
        quantised = [module for name, module in _multiplied(model) if _is_quantised(name, settings)]
    except (AttributeError, TypeError, re.error) as error:
        raise ConfigError(
            f"model {given}: quantization_config names modules in a form that is not known here; give --weight-bytes"
        ) from error
    for weight in (weight for module in quantised for weight in module.parameters() if weight.ndim > 1):
        total += int(weight.numel() * bits_each / 8) - weight.nbytes
    return total


def _is_quantised(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether the quantisation converts the module of that name.

    The configuration may list modules that stay unquantised; for GPTQ these are patterns in `dynamic` that begin with
    "-:". Or it lists the modules of each block that are quantised. If such a list names a single expert, its entry
    applies to the one module that contains all experts.
    """
    spared = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    excluded = [pattern[2:] for pattern in settings.get("dynamic") or {} if pattern.startswith("-:")]
    chosen = [part for block in settings.get("modules_in_block_to_quantize") or [[""]] for part in block]
    return (
        should_convert_module(name, spared)
        and not any(re.match(pattern, name) for pattern in excluded)
        and any(name.endswith("experts" if ".experts." in part else part) for part in chosen)
    )
