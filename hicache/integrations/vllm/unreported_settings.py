"""Finds settings that decide the bytes of a chunk, but that vLLM does not pass to an `OffloadingSpec`.

    settings of the model   a server with another revision, other overrides of the configuration, another attention
                            backend or another draft model computes other keys and values for the same tokens
    files of the models     the revision and the folder of the snapshots whose weights vLLM has loaded, and the draft
                            model
    recurrent states        vLLM pads them to the size of an attention block, so chunks with states of different dtypes
                            have equal sizes

A store must not mix these chunks. The constructor of vLLM's `OffloadingConnectorScheduler` gets vLLM's configuration
before it asks the spec for the manager. This module replaces the constructor by a function that first passes the
settings to the spec.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

# The original constructor of vLLM.
INIT = OffloadingConnectorScheduler.__init__


# Fields of a model's configuration that do not affect keys and values: the path of the model, and a release of
# transformers.
_IRRELEVANT = {"_name_or_path", "name_or_path", "transformers_version"}


class ModelFiles(NamedTuple):
    """The files of a model: a folder or a file, or a snapshot of a hub model in the cache `download_dir`, the default
    cache if None."""

    model: str
    revision: str | None = None
    download_dir: str | None = None


def set_unreported_settings() -> None:
    """Replace vLLM's constructor in this process by one that sets `recurrent_states`, `model_settings` and
    `model_files` of the spec. Idempotent."""
    OffloadingConnectorScheduler.__init__ = _init


@functools.wraps(INIT)  # so that probes see the fields that vLLM's own constructor sets
def _init(
    scheduler: OffloadingConnectorScheduler, spec: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    spec.recurrent_states = recurrent_states(kv_cache_config)
    spec.model_settings = model_settings(vllm_config)
    spec.model_files = model_files(vllm_config)
    INIT(scheduler, spec, vllm_config, kv_cache_config)


def recurrent_states(kv_cache_config: KVCacheConfig) -> str:
    """Return kind, shapes and dtypes of the states in each group of recurrent layers, as JSON; "" without recurrent
    layers."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [
        [str(spec.mamba_type), [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for spec in specs
        if isinstance(spec, MambaSpec)
    ]
    return json.dumps(states) if states else ""


def model_settings(vllm_config: VllmConfig) -> str:
    """Return the settings of the model that affect keys and values, as JSON; "" without a model. The configuration of
    the model includes overrides and the scaling of positions."""
    if vllm_config.model_config is None:
        return ""
    attention, draft = vllm_config.attention_config, _draft_of(vllm_config)
    settings = {
        "model": _about(vllm_config.model_config),
        "draft": None if draft is None else [draft.model, _about(draft)],
        "attention": [attention.backend, attention.backend_per_kind, attention.flash_attn_version],
    }
    return json.dumps(settings, sort_keys=True, default=str)


def model_files(vllm_config: VllmConfig) -> tuple[ModelFiles, ...]:
    """Return the files of the model, and of the draft model if there is one; () without a model."""
    models = [model for model in (vllm_config.model_config, _draft_of(vllm_config)) if model is not None]
    folder = vllm_config.load_config.download_dir
    return tuple(ModelFiles(model.model, model.revision, folder) for model in models)


def _draft_of(vllm_config: VllmConfig) -> ModelConfig | None:
    speculative = vllm_config.speculative_config
    return None if speculative is None else speculative.draft_model_config


def _about(model: ModelConfig) -> list[Any]:
    fields = {key: value for key, value in model.hf_config.to_dict().items() if key not in _IRRELEVANT}
    return [model.revision, model.code_revision, model.quantization, fields]
